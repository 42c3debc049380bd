"""Pieces: the tree of texts that prompts of a plan begin with.

A prompt is the texts of a path of the tree, cut to the row's `prefix_tokens`, then text of its own.
Prompts share exactly the pieces that their paths share. A prefix of the scenario (`shared_prefix`)
is a path of a single text, which needs no row in the table.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loadgen.records import FIRST_PIECE, NO_PIECES, Pieces

OTHER_TEXT = 1 << 30
"""The bit of a prefix_id that no plan uses: with it, an id names a text that no request has."""


class Span(NamedTuple):
    """The tokens `start` up to `end` of a prompt: the beginning of the text `prefix_id`."""

    prefix_id: int
    start: int
    end: int


class PieceTree:
    """The paths of a table of pieces."""

    def __init__(self, pieces: Pieces) -> None:
        self._after = array("I", pieces["after"].tobytes())  # read faster than NumPy's
        self._tokens = array("I", pieces["tokens"].tobytes())

    def __contains__(self, prefix_id: int) -> bool:
        return 0 <= prefix_id - FIRST_PIECE < len(self._after)

    def path(self, prefix_id: int, n_tokens: int) -> list[Span]:
        """The texts of the first `n_tokens` tokens of a prompt whose shared part ends with
        `prefix_id`, in order. A prefix that is no piece is a single text."""
        if n_tokens <= 0:
            return []
        if prefix_id not in self:
            return [Span(prefix_id, 0, n_tokens)]
        ids = [prefix_id]
        while after := self._after[ids[-1] - FIRST_PIECE]:
            ids.append(after)
        spans, start = list[Span](), 0
        for piece in reversed(ids):
            end = start + self._tokens[piece - FIRST_PIECE]
            spans.append(Span(piece, start, min(end, n_tokens)))
            if end >= n_tokens:
                return spans
            start = end
        raise AssertionError(f"{n_tokens} tokens of a prefix of {start}")


def shifted(ids: NDArray[np.uint32], by: ArrayLike) -> NDArray[np.uint32]:
    """The ids of pieces in a table that stands behind `by` other pieces; 0 remains 0."""
    moved = ids.astype(np.int64) + np.asarray(by, np.int64)
    return np.where(ids > 0, moved, 0).astype(np.uint32)


def joined(tables: Sequence[Pieces]) -> Pieces:
    """The tables in a single table, one behind the other."""
    whole = np.concatenate([NO_PIECES, *tables])
    sizes = [len(table) for table in tables]
    n_before = np.cumsum(sizes, dtype=np.int64) - sizes
    whole["after"] = shifted(whole["after"], np.repeat(n_before, sizes))
    return whole


def repeated(pieces: Pieces, n: int) -> Pieces:
    """`n` copies of a table, whose texts differ."""
    return joined([pieces] * n)
