"""A corpus of recorded agents: trees of requests with their shared text, whatever their format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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


def tree_of(
    name: str,
    requests: Sequence[RecordedRequest],
    spawns: Sequence[int],
    tokens: NDArray[np.int64],
    block_tokens: int,
) -> AgentTree:
    """The tree of requests that are sorted by their start. `spawns[k]` is the request that spawned
    subagent k + 1, `tokens` [n, 2] are input and output tokens."""
    inputs, outputs = tokens.T
    n_ids = np.array([len(request.ids) for request in requests], np.int64)
    ids = np.concatenate([np.empty(0, np.int64), *(request.ids for request in requests)])
    sharing = share_blocks(ids, n_ids, np.arange(len(requests)))
    prefix_ids, prefix_tokens, pieces = shared_prefixes(sharing, inputs, block_tokens)
    first_s = requests[0].start_s
    return AgentTree(
        name=name,
        tree=grow_tree(requests, spawns),
        starts_s=np.array([request.start_s for request in requests]) - first_s,
        ends_s=np.array([request.end_s for request in requests]) - first_s,
        input_tokens=inputs,
        output_tokens=outputs,
        hit_tokens=np.minimum(sharing.hits * block_tokens, inputs),
        prefix_ids=prefix_ids,
        prefix_tokens=prefix_tokens,
        pieces=pieces,
        n_agents=len(spawns),
    )
