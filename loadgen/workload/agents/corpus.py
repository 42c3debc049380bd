"""A corpus of recorded agents: trees of requests with their shared text, whatever their format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from loadgen.records import Pieces, Times
from loadgen.workload.agents.trees import RecordedRequest, RequestTree, grow_tree
from loadgen.workload.traces.blocks import share_blocks
from loadgen.workload.traces.hashed import shared_prefixes
from loadgen.workload.traces.trace import Ids


class Notes:
    """What was left out or estimated while reading, counted by its reason."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, reason: str) -> None:
        self._counts[reason] += 1

    def texts(self) -> tuple[str, ...]:
        return tuple(f"{n} {reason}" for reason, n in self._counts.items())


@dataclass(frozen=True, slots=True)
class RecordedTree:
    """A conversation as a reader of a format returns it: requests sorted by their start.
    `spawns[k]` is the request that spawned subagent k + 1, `tokens` [n, 2] are input and output
    tokens; hashes stand for blocks of `block_tokens`. `grow` finds which request waits for
    which."""

    name: str
    requests: Sequence[RecordedRequest]
    spawns: Sequence[int]
    tokens: NDArray[np.int64]
    block_tokens: int
    grow: Callable[[Sequence[RecordedRequest], Sequence[int]], RequestTree] = grow_tree


@dataclass(frozen=True, slots=True)
class AgentTree:
    """A conversation of n requests in order of their start. `starts_s` and `ends_s` count from its
    first request; `hit_tokens` are the leading tokens of each prompt that earlier prompts of the
    tree have in an unlimited prefix cache of whole blocks."""

    name: str
    tree: RequestTree
    starts_s: Times
    ends_s: Times
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    hit_tokens: NDArray[np.int64]
    prefix_ids: Ids
    prefix_tokens: NDArray[np.uint32]
    pieces: Pieces
    n_agents: int

    def __len__(self) -> int:
        return len(self.starts_s)

    @property
    def new_tokens(self) -> NDArray[np.int64]:
        """The tokens of each prompt that no earlier prompt begins with; their sum is the size of
        the tree in an unlimited prefix cache."""
        return self.input_tokens - self.hit_tokens


@dataclass(frozen=True, slots=True)
class Corpus:
    """The trees of one or more files, in order of the file names."""

    trees: tuple[AgentTree, ...]
    notes: tuple[str, ...]


def within_context(recorded: RecordedTree, max_context: int, notes: Notes) -> RecordedTree | None:
    """A conversation up to its first request with more than `max_context` tokens of prompt and
    answer; None if that is its first request."""
    is_over = recorded.tokens.sum(axis=1) > max_context
    if not is_over.any():
        return recorded
    n = int(is_over.argmax())
    if not n:
        notes.add("conversations left out: their first request is above max_context")
        return None
    notes.add("conversations end early, at a request above max_context")
    for _ in range(len(is_over) - n):
        notes.add("requests left out behind it")
    return replace(recorded, requests=recorded.requests[:n], tokens=recorded.tokens[:n])


def tree_of(recorded: RecordedTree) -> AgentTree:
    """The tree of a conversation, with the text that its prompts share."""
    requests, (inputs, outputs) = recorded.requests, recorded.tokens.T
    n_ids = np.array([len(request.ids) for request in requests], np.int64)
    ids = np.concatenate([np.empty(0, np.int64), *(request.ids for request in requests)])
    sharing = share_blocks(ids, n_ids, np.arange(len(requests)))
    size = recorded.block_tokens
    prefix_ids, prefix_tokens, pieces = shared_prefixes(sharing, inputs, size)
    first_s = requests[0].start_s
    return AgentTree(
        name=recorded.name,
        tree=recorded.grow(requests, recorded.spawns),
        starts_s=np.array([request.start_s for request in requests]) - first_s,
        ends_s=np.array([request.end_s for request in requests]) - first_s,
        input_tokens=inputs,
        output_tokens=outputs,
        hit_tokens=np.minimum(sharing.hits * size, inputs),
        prefix_ids=prefix_ids,
        prefix_tokens=prefix_tokens,
        pieces=pieces,
        n_agents=len({request.agent for request in requests} - {0}),
    )


def without_idle(tree: AgentTree, at_most_s: float) -> AgentTree:
    """A tree in which no time without a request in flight is longer than `at_most_s`: everything
    after a longer one begins so much earlier. What overlaps, overlaps as before."""
    begins_s, removed_s, busy_until_s = tree.starts_s.copy(), 0.0, 0.0
    for row, (start_s, end_s) in enumerate(
        zip(tree.starts_s.tolist(), tree.ends_s.tolist(), strict=True)
    ):
        removed_s += max(0.0, start_s - busy_until_s - at_most_s)
        begins_s[row] -= removed_s
        busy_until_s = max(busy_until_s, end_s)
    if not removed_s:
        return tree
    ends_s = begins_s + (tree.ends_s - tree.starts_s)
    edges = tuple(
        replace(edge, delay_s=max(0.0, float(begins_s[edge.child] - ends_s[edge.parent])))
        for edge in tree.tree.edges
    )
    return replace(tree, starts_s=begins_s, ends_s=ends_s, tree=replace(tree.tree, edges=edges))
