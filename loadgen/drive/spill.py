"""Response bodies on disk, once memory has had enough of them."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from loadgen.drive.exchange import Exchange


class Spill:
    """Keeps the bodies of finished exchanges: in memory up to `memory_bytes`, then in one file
    that is only appended to. Writing 16 kB takes some ten microseconds; decoding it instead would
    take ten times as long, at a moment when other requests are being measured."""

    def __init__(self, path: Path, memory_bytes: int) -> None:
        self._path, self._left_bytes = path, memory_bytes
        self._file: BinaryIO | None = None
        self._places: dict[int, tuple[int, list[int]]] = {}  # row: offset, sizes of the parts
        self.n_bytes = 0

    def keep(self, exchange: Exchange) -> None:
        self._left_bytes -= exchange.n_bytes
        if self._left_bytes >= 0:
            return
        if self._file is None:
            self._file = self._path.open("w+b")
        self._places[exchange.row] = self.n_bytes, [len(part) for part in exchange.parts]
        body = b"".join(exchange.parts)
        self._file.write(body)
        self.n_bytes += len(body)
        exchange.parts = []

    def restore(self, exchange: Exchange) -> None:
        """Give an exchange its parts back, as they were."""
        place = self._places.pop(exchange.row, None)
        if place is None or self._file is None:
            return
        offset, sizes = place
        self._file.seek(offset)
        exchange.parts = [self._file.read(size) for size in sizes]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._path.unlink()
            self._file = None
