"""Plays of recorded agents: the rows of a class whose arrivals each play a tree of a corpus.

A *play* is a tree with text of its own: its prompts share exactly what the recorded prompts shared,
and nothing with another play. Gaps between requests count from the end of the answers waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import ScenarioError
from loadgen.records import SCHEDULE, Times
from loadgen.workload.agents.corpus import AgentTree, Corpus
from loadgen.workload.layout import (
    MOST_SPEED,
    QUICKEST_S,
    QUICKEST_TOKENS_PER_S,
    ClassTraffic,
    Index,
    Layout,
    Purpose,
    RandomStreams,
)
from loadgen.workload.pieces import joined, shifted


class Play(NamedTuple):
    """A tree that is played from `start_s` on; `after` is the play that ends before it (None: it
    starts at `start_s`), `pause_s` the pause after that play's end."""

    tree: AgentTree
    source: int
    start_s: float
    after: int | None
    pause_s: float


class _Links(NamedTuple):
    """The edges of a tree as columns, and its requests without a parent and without a child."""

    child: Index
    parent: Index
    delay_s: NDArray[np.float32]
    firsts: Index
    lasts: Index


def lay_out_plays(part: ClassTraffic, horizon_s: float, max_rows: int) -> Layout:
    """The rows of a class of agents. In an open loop each source plays a tree, and requests that
    cannot be released before `horizon_s` are left out. In a closed loop each source plays tree
    after tree: the next begins when every request of the last has ended.

    Raises ScenarioError for more than `max_rows` rows.
    """
    assert part.own.agents is not None, "a class of agents"
    corpus = part.own.agents.corpus
    links = {id(tree): _links(tree) for tree in corpus.trees}
    plays = list(_plays(part, corpus, horizon_s))
    n_rows = sum(len(play.tree) for play in plays)
    if n_rows > max_rows:
        raise ScenarioError(f"{n_rows:.3g} requests of agents, at most {max_rows:.0e}")
    sizes = np.array([len(play.tree) for play in plays], np.int64)
    first = np.cumsum(sizes) - sizes
    edges = [_edges(play, k, plays, first, links) for k, play in enumerate(plays)]
    child, parent, delay_s = (
        np.concatenate([np.empty(0, kind), *(columns[at] for columns in edges)])
        for at, kind in enumerate((np.int32, np.int32, np.float32))
    )
    rows = _rows(part, plays, sizes)
    rows["n_parents"] = np.bincount(child, minlength=n_rows)
    starts_s = np.repeat([play.start_s for play in plays], sizes)
    offsets_s = _joined_column([play.tree.starts_s for play in plays], np.float64)
    rows["scheduled_s"] = np.where(rows["n_parents"] == 0, starts_s + offsets_s, np.nan)
    for play, base in zip(plays, first.tolist(), strict=True):
        if play.after is not None:
            places = links[id(play.tree)].firsts + base
            rows["think_s"][places], rows["after_failure"][places] = play.pause_s, True
    source = np.repeat(np.array([play.source for play in plays], np.int32), sizes)
    order = np.lexsort((parent, child))
    layout = Layout(
        rows=rows,
        source=source,
        starts_s=part.arrivals.scheduled_s[source] if n_rows else np.zeros(0),
        earliest_s=_earliest_s(rows, child[order], parent[order], delay_s[order], 1.0),
        child=child[order],
        parent=parent[order],
        delay_s=delay_s[order],
        pieces=joined([play.tree.pieces for play in plays]),
    )
    return _in_time(layout, horizon_s) if part.pause is None else layout


def _plays(part: ClassTraffic, corpus: Corpus, horizon_s: float) -> Iterator[Play]:
    """The plays of all sources, each source's in sequence. A source of a closed loop has as many as
    can begin before the horizon with the fastest planned answers, and another."""
    chosen = drawn_trees(corpus, part.streams)
    if part.pause is None:
        for source, start_s in enumerate(part.arrivals.scheduled_s.tolist()):
            yield Play(next(chosen), source, start_s, None, 0.0)
        return
    rng, number = part.streams.stream(Purpose.think, "again"), 0
    for source, start_s in enumerate(part.arrivals.scheduled_s.tolist()):
        after, begins_s, pause_s = None, start_s, 0.0
        while True:
            tree = next(chosen)
            yield Play(tree, source, start_s, after, pause_s)
            if begins_s >= horizon_s:
                break
            after, number = number, number + 1
            pause_s = float(part.pause.draw(rng, 1)[0])
            begins_s += shortest_s(tree) + pause_s
        number += 1


def drawn_trees(corpus: Corpus, streams: RandomStreams) -> Iterator[AgentTree]:
    """The trees of the plays of a class: each tree once, in random order, then again in another
    order, without end."""
    rng = streams.stream(Purpose.agents)
    while True:
        yield from (corpus.trees[k] for k in rng.permutation(len(corpus.trees)).tolist())


def shortest_s(tree: AgentTree) -> float:
    """The time from the start of a tree to its last answer with the fastest planned answers."""
    links = _links(tree)
    rows = np.zeros(len(tree), SCHEDULE)
    rows["output_tokens"] = tree.output_tokens
    rows["n_parents"] = np.bincount(links.child, minlength=len(tree))
    rows["scheduled_s"] = np.where(rows["n_parents"] == 0, tree.starts_s, np.nan)
    order = np.lexsort((links.parent, links.child))
    columns = links.child[order], links.parent[order], links.delay_s[order]
    begins_s = _earliest_s(rows, *columns, MOST_SPEED)
    return float((begins_s + _answers_s(rows, MOST_SPEED)).max())


def _links(tree: AgentTree) -> _Links:
    edges = tree.tree.edges
    child = np.array([edge.child for edge in edges], np.int32)
    parent = np.array([edge.parent for edge in edges], np.int32)
    rows = np.arange(len(tree), dtype=np.int32)
    return _Links(
        child,
        parent,
        np.array([edge.delay_s for edge in edges], np.float32),
        rows[~np.isin(rows, child)],
        rows[~np.isin(rows, parent)],
    )


def _edges(
    play: Play,
    number: int,
    plays: list[Play],
    first: NDArray[np.int64],
    links: dict[int, _Links],
) -> tuple[Index, Index, NDArray[np.float32]]:
    """(child, parent, delay) of the edges within a play, and of those from every last request of
    the play before it to its first requests."""
    own, base = links[id(play.tree)], int(first[number])
    columns = (own.child + base).astype(np.int32), (own.parent + base).astype(np.int32), own.delay_s
    if play.after is None:
        return columns
    lasts = links[id(plays[play.after].tree)].lasts + int(first[play.after])
    n = len(lasts)
    later = (
        np.repeat(own.firsts + base, n).astype(np.int32),
        np.tile(lasts, len(own.firsts)).astype(np.int32),
        np.repeat(play.tree.starts_s[own.firsts], n).astype(np.float32),
    )
    child, parent, delay_s = (np.concatenate(pair) for pair in zip(columns, later, strict=True))
    return child, parent, delay_s


def _rows(part: ClassTraffic, plays: list[Play], sizes: NDArray[np.int64]) -> NDArray[np.void]:
    """The rows with lengths, prompts and shared text."""
    rows = np.zeros(int(sizes.sum()), SCHEDULE)
    rng = part.streams.stream(Purpose.prompt)
    rows["prompt_seed"] = rng.integers(0, 2**64, len(rows), np.uint64)
    n_pieces = np.array([len(play.tree.pieces) for play in plays], np.int64)
    before = np.repeat(np.cumsum(n_pieces) - n_pieces, sizes)
    for column in ("input_tokens", "output_tokens", "prefix_tokens"):
        rows[column] = _joined_column([getattr(play.tree, column) for play in plays], np.int64)
    ids = _joined_column([play.tree.prefix_ids for play in plays], np.uint32)
    rows["prefix_id"] = shifted(ids, before)
    rows["chain"] = _joined_column([_chains(play.tree) for play in plays], np.uint16)
    return rows


def _chains(tree: AgentTree) -> NDArray[np.uint16]:
    """The number of each request's chain, from 1; a tree with more chains than a column can number
    has the last number for all further ones."""
    numbers = np.minimum(np.array(tree.tree.chain_of, np.int64) + 1, np.iinfo(np.uint16).max)
    return numbers.astype(np.uint16)


def _joined_column(parts: list[Any], kind: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, kind), *parts])


def _answers_s(rows: NDArray[np.void], speed: float) -> Times:
    answers_s: Times = (QUICKEST_S + rows["output_tokens"] / QUICKEST_TOKENS_PER_S) / speed
    return answers_s


def _earliest_s(
    rows: NDArray[np.void],
    child: Index,
    parent: Index,
    delay_s: NDArray[np.float32],
    speed: float,
) -> Times:
    """The earliest release of each row; edges are sorted by child, and parents stand before their
    children."""
    begins_s, answers_s = rows["scheduled_s"].tolist(), _answers_s(rows, speed).tolist()
    think_s = rows["think_s"].tolist()
    ready_s = [0.0] * len(rows)
    at, edges = 0, [*zip(child.tolist(), parent.tolist(), delay_s.tolist(), strict=True)]
    for row in range(len(rows)):
        has_parent = False
        while at < len(edges) and edges[at][0] == row:
            _, before, gap_s = edges[at]
            ready_s[row] = max(ready_s[row], begins_s[before] + answers_s[before] + gap_s)
            has_parent, at = True, at + 1
        if has_parent:
            begins_s[row] = ready_s[row] + think_s[row]
    return np.array(begins_s)


def _in_time(layout: Layout, horizon_s: float) -> Layout:
    """The rows that can be released before the horizon, even if answers come MOST_SPEED times as
    fast as the fastest planned, and those that wait for such rows only: a tree that goes on behind
    the horizon has requests that are never released, so that it does not look complete."""
    columns = layout.rows, layout.child, layout.parent, layout.delay_s
    is_in_time = _earliest_s(*columns, MOST_SPEED) < horizon_s
    n_early = np.bincount(layout.child[is_in_time[layout.parent]], minlength=len(is_in_time))
    is_next = (layout.rows["n_parents"] > 0) & (n_early == layout.rows["n_parents"])
    is_kept = is_in_time | is_next
    number = np.cumsum(is_kept, dtype=np.int32) - np.int32(1)
    is_edge = is_kept[layout.child]  # its parents are earlier, so kept as well
    return Layout(
        rows=layout.rows[is_kept],
        source=layout.source[is_kept],
        starts_s=layout.starts_s[is_kept],
        earliest_s=layout.earliest_s[is_kept],
        child=number[layout.child[is_edge]],
        parent=number[layout.parent[is_edge]],
        delay_s=layout.delay_s[is_edge],
        pieces=layout.pieces,
    )
