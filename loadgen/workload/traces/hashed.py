"""What traces with `hash_ids` have in common: lists of block hashes to shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from loadgen.workload.traces.blocks import share_blocks
from loadgen.workload.traces.trace import Ids, Ticks

_64_BITS = 2**64 - 1


class BlockLists:
    """Collects the hash lists of a file, batch by batch, as one flat array."""

    def __init__(self) -> None:
        self._ids: list[NDArray[np.int64]] = []
        self._n_ids: list[NDArray[np.int64]] = []

    def add(self, lists: Sequence[Sequence[int]]) -> None:
        """Take the lists of one batch of records."""
        counts = np.fromiter(map(len, lists), np.int64, len(lists))
        n = int(counts.sum())
        try:
            ids = np.fromiter(chain.from_iterable(lists), np.int64, n)
        except OverflowError:  # hashes of 64 bits without a sign: the same bits with one
            bits = (i & _64_BITS for i in chain.from_iterable(lists))
            ids = np.fromiter(bits, np.uint64, n).view(np.int64)
        self._n_ids.append(counts)
        self._ids.append(ids)

    def prefixes(
        self, block_tokens: int, ticks: Ticks, input_tokens: NDArray[np.int64]
    ) -> tuple[tuple[Ids, NDArray[np.uint32]] | None, list[str]]:
        """((prefix ids, prefix tokens) or None, notes) of all rows collected.

        A prefix never takes a prompt's last token: something of its own must be left to compute.
        """
        n_ids = np.concatenate([np.empty(0, np.int64), *self._n_ids])
        if not n_ids.any():
            return None, ["no hash_ids: no shared prefixes"]
        ids = np.concatenate(self._ids)
        sharing = share_blocks(ids, n_ids, np.argsort(ticks, kind="stable"))
        tokens = np.clip(sharing.blocks * block_tokens, 0, np.maximum(input_tokens - 1, 0))
        note = (
            f"shared prefixes: an unlimited cache would hit {sharing.share_in_trace:.1%} of the"
            f" trace's blocks, and hits {sharing.share_kept:.1%} of them as replayed (one prefix"
            " per request)"
        )
        return (sharing.prefix_ids, tokens.astype(np.uint32)), [note]


class SessionNumbers:
    """Session names to 1, 2, … in order of first use; 0 for no name."""

    def __init__(self) -> None:
        self._numbers: dict[str | int | None, int] = {None: 0}
        self._ids: list[Ids] = [np.empty(0, np.uint32)]

    def add(self, names: Sequence[str | int | None]) -> None:
        """Take the names of one batch of records."""
        known = self._numbers
        ids = [known.setdefault(name, len(known)) for name in names]
        self._ids.append(np.array(ids, np.uint32))

    def ids(self) -> Ids:
        """The numbers of all rows collected."""
        return np.concatenate(self._ids)
