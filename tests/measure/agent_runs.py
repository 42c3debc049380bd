"""Runs of agents by hand: trees of three to six requests with all their times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from loadgen.records import (
    CHUNKS,
    EDGES,
    PIECES,
    Pieces,
    Run,
    Status,
    TokenSource,
    empty_requests,
)
from tests.runs import changed, measured_run, schedule_rows


class Asked(NamedTuple):
    """A request of a tree: its chain, release and end (None: never released), the requests of the
    tree that it waits for with the gaps after them, and its prompt's tokens."""

    chain: int
    at: float | None
    end: float | None
    after: Mapping[int, float] = MappingProxyType({})
    tokens: int = 100
    cached: int = 0
    prefix: tuple[int, int] = (0, 0)
    status: Status = Status.ok


def agent_run(
    *trees: Sequence[Asked],
    sessions: Sequence[int] | None = None,
    pieces: Pieces | None = None,
    window: tuple[float, float] = (0.0, 30.0),
    slo: Sequence[str] = (),
) -> Run:
    """A run of these trees, each a session of its own; several of the same session are played one
    after the other. The first token of each answer comes 0.1 s after its release."""
    sessions = range(len(trees)) if sessions is None else sessions
    asked = [request for tree in trees for request in tree]
    sizes = [len(tree) for tree in trees]
    base = np.repeat(np.cumsum(sizes) - sizes, sizes)
    is_later = [k > 0 and sessions[k] == sessions[k - 1] for k in range(len(trees))]
    is_first = [place == 0 for tree in trees for place in range(len(tree))]
    edges = [
        (row, int(base[row]) + before, gap)
        for row, request in enumerate(asked)
        for before, gap in request.after.items()
    ]
    again = [f and late for f, late in zip(is_first, np.repeat(is_later, sizes), strict=True)]
    edges += [(row, row - 1, 0.0) for row, is_next in enumerate(again) if is_next]
    n_parents = np.bincount([child for child, *_ in edges], minlength=len(asked))
    at_s = np.array([np.nan if r.at is None else r.at for r in asked])
    schedule = schedule_rows(np.where(n_parents > 0, np.nan, at_s))
    schedule["phase"], schedule["n_parents"] = ~(at_s < window[0]), n_parents
    schedule["session_id"] = np.repeat(list(sessions), sizes)
    schedule["after_failure"], schedule["chain"] = again, [r.chain for r in asked]
    schedule["input_tokens"] = [r.tokens for r in asked]
    schedule["prefix_id"], schedule["prefix_tokens"] = np.array([r.prefix for r in asked]).T
    rows = empty_requests(schedule)
    for k, request in enumerate(asked):
        if request.at is None or request.end is None:
            continue
        rows["released_s"][k] = rows["sent_s"][k] = request.at
        rows["done_s"][k], rows["status"][k] = request.end, request.status
        if request.status == Status.ok:
            rows["first_token_s"][k] = rows["first_chunk_s"][k] = request.at + 0.1
            rows["last_token_s"][k], rows["output_tokens"][k] = request.end, 20
            rows["token_source"][k], rows["first_chunk_tokens"][k] = TokenSource.usage, 1
            rows["input_tokens"][k], rows["cached_tokens"][k] = request.tokens, request.cached
    run = measured_run(slo=slo)
    section = changed(
        run.manifest,
        window={"warmup_s": window[0], "measure_s": window[1] - window[0]},
        n_requests=len(asked),
    )
    return replace(
        run,
        manifest=section,
        schedule_rows=schedule,
        request_rows=rows,
        chunk_rows=np.empty(0, CHUNKS),
        edge_rows=np.array(sorted(edges), EDGES),
        piece_rows=np.empty(0, PIECES) if pieces is None else pieces,
    )


FANNED_OUT = (
    Asked(1, 0.0, 2.0),
    Asked(2, 3.0, 5.0, {0: 1.0}),
    Asked(2, 5.5, 9.0, {1: 0.5}),
    Asked(1, 4.0, 5.0, {0: 2.0}),
    Asked(1, 9.5, 12.0, {2: 0.5, 3: 1.0}),
    Asked(3, 5.5, 7.0, {3: 0.5}),
)
"""The last request waits for a subagent of two requests; a third chain is in the background."""

LINEAR = (
    Asked(1, 10.0, 11.0),
    Asked(1, 12.0, 15.0, {0: 1.0}),
    Asked(1, 15.5, 16.0, {1: 0.5}),
)

UNFINISHED = (
    Asked(1, 20.0, 21.0),
    Asked(1, 25.0, 26.0, {0: 4.0}),
    Asked(1, None, None, {1: 20.0}),
)

BROKEN = (
    Asked(1, 2.0, 3.0),
    Asked(1, 4.0, 5.0, {0: 1.0}, status=Status.http_error),
    Asked(1, None, None, {1: 1.0}),
)
