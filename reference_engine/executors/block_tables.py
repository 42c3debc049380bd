"""The block tables of running requests as rows of one array, kept up to date by what changed.

A decode step adds a block to one request in sixteen; writing 256 rows anew each step would cost
more than planning it. A request keeps its row as long as its `blocks` is the same list, which the
core only appends to; after a preemption it is another list, and the row is written anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from reference_engine.state.sequence import Request

Rows = NDArray[np.int32]
OnSeat = Callable[[int, Request], None]
_NOWHERE, _NOTHING = np.empty(0, np.int64), np.empty(0, np.int32)


class BlockTables:
    """`n_rows` rows of `width` blocks for requests, one more that is all `scratch`, the block
    behind the others, and as many that are read for nobody: they are spread over all blocks.

        0 … n_rows − 1   requests
        scratch_row      scratch, scratch, …
        from there on    b, b + 1, … modulo the number of blocks, b = 0, 1/n_rows, … of them
    """

    def __init__(
        self, n_rows: int, width: int, scratch: int, on_seat: OnSeat = lambda row, request: None
    ) -> None:
        self._on_seat = on_seat
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
        self._last: list[Request] = []
        self._last_blocks: list[list[int]] = []
        self._last_n_blocks = 0
        self._last_rows = np.empty(0, np.int32)

    def rows(self, requests: Sequence[Request]) -> Rows:
        """The row of each, brought up to date. At most `n_rows` different requests at a time.

        Most steps are of the requests of the step before, whose rows are then known; their blocks
        are looked at once they have more than they had together.
        """
        requests = list(requests)
        blocks = [request.blocks for request in requests]
        is_known = requests == self._last and blocks == self._last_blocks
        n_blocks = sum(map(len, blocks))
        if is_known and n_blocks == self._last_n_blocks:
            return self._last_rows
        self._last, self._last_blocks, self._last_n_blocks = requests, blocks, n_blocks
        self._last_rows = np.array(self._updated(requests), np.int32)
        return self._last_rows

    def _updated(self, requests: list[Request]) -> list[int]:
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

    def blocks(self, rows: Rows, numbers: Rows) -> Rows:
        """Where each of `rows` [n] writes in its block of that number: for nobody, to scratch."""
        found: Rows = self._flat.take(rows * self.width + numbers)
        found[rows >= self.scratch_row] = self.scratch
        return found

    def filler_rows(self, n: int) -> Rows:
        """Rows of `n` that read for nobody: as far apart as `n` can be, so that up to half of all
        blocks none of them is read twice, which a cache would make cheap."""
        n_rows = self.scratch_row
        return (n_rows + 1 + np.arange(n) * n_rows // max(n, 1)).astype(np.int32)

    def changes(self) -> tuple[NDArray[np.int64], Rows]:
        """(flat indices into `array`, values there) that changed since the last call."""
        if not self._changed:
            return _NOWHERE, _NOTHING
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
        self._on_seat(row, request)
        return row

    def _make_room(self, present: set[Request]) -> None:
        """Take the rows of those that hold no memory any more; if there are none, of all that are
        not in this step."""
        absent = [request for request in self._held if request not in present]
        idle = [request for request in absent if not request.blocks] or absent
        assert idle, f"{len(present)} requests in one step, {len(self._held)} rows"
        for request in idle:
            self._free.append(self._held.pop(request))
