"""The block tables of running requests as rows of one array, kept up to date by what changed.

A decode step adds a block to one request in sixteen; writing 256 rows anew each step would cost
more than planning it. A request keeps its row as long as its `blocks` is the same list, which the
core only appends to; after a preemption it is another list, and the row is written anew.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from reference_engine.sequence import Request

Rows = NDArray[np.int32]


class BlockTables:
    """`n_rows` rows of `width` blocks for requests, one more that is all `scratch`, the block
    behind the others, and as many that are read for nobody: they are spread over all blocks.

        0 … n_rows − 1   requests
        scratch_row      scratch, scratch, …
        from there on    b, b + 1, … modulo the number of blocks, b = 0, 1/n_rows, … of them
    """

    def __init__(self, n_rows: int, width: int, scratch: int) -> None:
        self.width, self.scratch, self.scratch_row = width, scratch, n_rows
        self.array = np.full((2 * n_rows + 1, width), scratch, np.int32)
        firsts = np.arange(n_rows).reshape(-1, 1) * scratch // n_rows
        self.array[n_rows + 1 :] = (firsts + np.arange(width)) % max(scratch, 1)
        self._flat = self.array.reshape(-1)
        self._free = list(range(n_rows - 1, -1, -1))
        self._held: dict[Request, int] = {}
        self._lists: list[list[int]] = [[] for _ in range(n_rows)]
        self._known = [0] * n_rows
        self._changed: list[int] = []

    def rows(self, requests: Iterable[Request]) -> list[int]:
        """The row of each, brought up to date. At most `n_rows` different requests at a time."""
        requests = list(requests)
        held, lists, known = self._held, self._lists, self._known
        out: list[int] = []
        for request in requests:
            row = held.get(request)
            if row is None:
                row = self._seat(request, requests)
            blocks = request.blocks
            if lists[row] is not blocks:
                lists[row], known[row] = blocks, 0
            if known[row] < len(blocks):
                self._append(row, blocks)
            out.append(row)
        return out

    def filler_rows(self, n: int) -> Rows:
        """Rows of `n` that read for nobody: as far apart as `n` can be, so that up to half of all
        blocks none of them is read twice, which a cache would make cheap."""
        n_rows = self.scratch_row
        return (n_rows + 1 + np.arange(n) * n_rows // max(n, 1)).astype(np.int32)

    def changes(self) -> tuple[NDArray[np.int64], Rows]:
        """(flat indices into `array`, values there) that changed since the last call."""
        at = np.array(self._changed, np.int64)
        self._changed.clear()
        return at, self._flat[at]

    def _append(self, row: int, blocks: list[int]) -> None:
        first, end = self._known[row], len(blocks)
        assert end <= self.width, f"{end} blocks in a table of {self.width}"
        base = row * self.width
        self._flat[base + first : base + end] = blocks[first:]
        self._changed += range(base + first, base + end)
        self._known[row] = end

    def _seat(self, request: Request, present: list[Request]) -> int:
        if not self._free:
            self._make_room(set(present))
        row = self._free.pop()
        self._held[request] = row
        self._lists[row], self._known[row] = [], 0
        return row

    def _make_room(self, present: set[Request]) -> None:
        """Take the rows of those that hold no memory any more; if there are none, of all that are
        not in this step."""
        absent = [request for request in self._held if request not in present]
        idle = [request for request in absent if not request.blocks] or absent
        assert idle, f"{len(present)} requests in one step, {len(self._held)} rows"
        for request in idle:
            self._free.append(self._held.pop(request))
