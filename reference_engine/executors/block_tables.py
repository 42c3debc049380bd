"""Block tables of running requests, as rows of an array that is updated by its changes.

A decode step adds a block to one request in sixteen; to write 256 whole rows in each step would
cost more than to plan it. A request keeps its row as long as its `blocks` is the same list object,
which the core only appends to. After a preemption it is another list, and the row is written again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from reference_engine.state.sequence import Request

Rows = NDArray[np.int32]
OnAssign = Callable[[int, Request], None]
_NO_INDICES, _NO_VALUES = np.empty(0, np.int64), np.empty(0, np.int32)


class BlockTables:
    """`n_rows` rows of `width` blocks for requests, a row of `scratch`, the block after the
    last block of the pool, and `n_rows` filler rows for padding, which are spread over all blocks.
    `on_assign` is called with a row and the request that gets it.

        0 … n_rows − 1   requests
        scratch_row      scratch, scratch, …
        from there on    b, b + 1, … modulo the number of blocks, b = 0, 1/n_rows, … of them
    """

    def __init__(
        self,
        n_rows: int,
        width: int,
        scratch: int,
        on_assign: OnAssign = lambda row, request: None,
    ) -> None:
        self._on_assign = on_assign
        self.width, self.scratch, self.scratch_row = width, scratch, n_rows
        self.array = np.full((2 * n_rows + 1, width), scratch, np.int32)
        firsts = np.arange(n_rows).reshape(-1, 1) * scratch // n_rows
        self.array[n_rows + 1 :] = (firsts + np.arange(width)) % max(scratch, 1)
        self._flat = self.array.reshape(-1)
        self._free = list(range(n_rows - 1, -1, -1))
        self._row_of: dict[Request, int] = {}
        self._lists: list[list[int]] = [[] for _ in range(n_rows)]  # the `blocks` in each row
        self._n_written = [0] * n_rows
        self._changed: list[int] = []
        self._last: list[Request] = []
        self._last_blocks: list[list[int]] = []
        self._last_n_blocks = 0
        self._last_rows = np.empty(0, np.int32)

    def rows(self, requests: Sequence[Request]) -> Rows:
        """The row of each request, brought up to date. At most `n_rows` different requests at a
        time.

        Most steps have the requests of the step before, whose rows are at hand; their block lists
        are searched for new blocks only if their total length has changed.
        """
        requests = list(requests)
        blocks = [request.blocks for request in requests]
        is_same = requests == self._last and blocks == self._last_blocks
        n_blocks = sum(map(len, blocks))
        if is_same and n_blocks == self._last_n_blocks:
            return self._last_rows
        self._last, self._last_blocks, self._last_n_blocks = requests, blocks, n_blocks
        self._last_rows = np.array(self._updated(requests), np.int32)
        return self._last_rows

    def _updated(self, requests: list[Request]) -> list[int]:
        row_of, lists, n_written = self._row_of, self._lists, self._n_written
        out: list[int] = []
        for request in requests:
            row = row_of.get(request)
            if row is None:
                row = self._assign(request, requests)
            blocks = request.blocks
            if lists[row] is not blocks:
                lists[row], n_written[row] = blocks, 0
            if n_written[row] < len(blocks):
                self._append(row, blocks)
            out.append(row)
        return out

    def blocks(self, rows: Rows, numbers: Rows) -> Rows:
        """The block to write to, for block number `numbers` [n] of each of `rows` [n]; scratch for
        the scratch row and filler rows."""
        blocks: Rows = self._flat.take(rows * self.width + numbers)
        blocks[rows >= self.scratch_row] = self.scratch
        return blocks

    def filler_rows(self, n: int) -> Rows:
        """`n` rows for padding to read, as far apart as `n` rows can be: while they read up to half
        of all blocks, no block is read twice. A block that is read twice comes from a cache and
        costs less than a block of a request."""
        n_rows = self.scratch_row
        return (n_rows + 1 + np.arange(n) * n_rows // max(n, 1)).astype(np.int32)

    def changes(self) -> tuple[NDArray[np.int64], Rows]:
        """(flat indices into `array`, values there) that changed since the last call."""
        if not self._changed:
            return _NO_INDICES, _NO_VALUES
        at = np.array(self._changed, np.int64)
        self._changed.clear()
        return at, self._flat[at]

    def _append(self, row: int, blocks: list[int]) -> None:
        first, end = self._n_written[row], len(blocks)
        assert end <= self.width, f"{end} blocks in a table of {self.width}"
        base = row * self.width
        self._flat[base + first : base + end] = blocks[first:]
        self._changed += range(base + first, base + end)
        self._n_written[row] = end

    def _assign(self, request: Request, present: list[Request]) -> int:
        if not self._free:
            self._release_rows(set(present))
        row = self._free.pop()
        self._row_of[request] = row
        self._lists[row], self._n_written[row] = [], 0
        self._on_assign(row, request)
        return row

    def _release_rows(self, present: set[Request]) -> None:
        """Free the rows of requests without blocks; if there are none, of all requests that are not
        in this step."""
        absent = [request for request in self._row_of if request not in present]
        idle = [request for request in absent if not request.blocks] or absent
        assert idle, f"{len(present)} requests in a step, {len(self._row_of)} rows"
        for request in idle:
            self._free.append(self._row_of.pop(request))
