"""A worker's rows on their way up, a few pieces at a time: heartbeats take the same way, and a
worker whose heartbeats wait behind gigabytes would count as lost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from loadgen.web.control_messages import LoadPiece

WINDOW = 2
"""Pieces on their way that nobody has confirmed yet."""


class Upload:
    """Says what may be sent next; every confirmed piece lets another one go."""

    def __init__(self, parts: Sequence[LoadPiece]) -> None:
        self._waiting = iter(parts)
        self._on_their_way = set[int]()

    def begin(self) -> list[LoadPiece]:
        """The first ones."""
        return self._fill()

    def got(self, k: int) -> list[LoadPiece]:
        """Piece `k` has arrived; what goes next. A doubled confirmation changes nothing."""
        self._on_their_way.discard(k)
        return self._fill()

    def _fill(self) -> list[LoadPiece]:
        parts = list(islice(self._waiting, WINDOW - len(self._on_their_way)))
        self._on_their_way.update(part.k for part in parts)
        return parts
