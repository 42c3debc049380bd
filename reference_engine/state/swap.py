"""Host memory for the KV of preempted requests, as bookkeeping. Integers only, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from reference_engine.state.batch import Copy
from reference_engine.state.kv import BLOCKS_PER_CHECK
from reference_engine.state.sequence import Request


class HostPool:
    """`n_blocks` blocks of the size of KV blocks; copying a block takes `copy_s` seconds each
    way."""

    def __init__(self, n_blocks: int, copy_s: float = 0.0) -> None:
        self.n_blocks, self.copy_s = n_blocks, copy_s
        self._free = list(range(n_blocks - 1, -1, -1))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def swap_out(self, request: Request, n_blocks: int) -> list[Copy]:
        """Take host blocks for the first `n_blocks` blocks of a request, which it still holds, and
        return the copies. There must be enough free host blocks."""
        assert n_blocks <= len(self._free), f"{n_blocks} host blocks of {len(self._free)} free"
        assert not request.host_blocks, f"{request.id} is in host memory already"
        request.host_blocks = [self._free.pop() for _ in range(n_blocks)]
        request.n_swapped = request.n_computed
        pairs = zip(request.blocks, request.host_blocks, strict=False)
        return [Copy(block, host_block, is_out=True) for block, host_block in pairs]

    def swap_in(self, request: Request, n_have: int) -> list[Copy]:
        """Free a request's host blocks and return the copies that bring its KV back into its
        blocks, except for the first `n_have`, which the prefix cache still had."""
        pairs = zip(request.blocks[n_have:], request.host_blocks[n_have:], strict=False)
        copies = [Copy(block, host_block, is_out=False) for block, host_block in pairs]
        self.drop(request)
        return copies

    def drop(self, request: Request) -> None:
        """Free a request's host blocks."""
        self._free += request.host_blocks
        request.host_blocks, request.n_swapped = [], 0

    def checks(self, owners: Iterable[Request]) -> Iterator[None]:
        """Assert that every block is either free or has one owner, in pieces as
        `KvPool.checks`."""
        is_counted = bytearray(self.n_blocks)
        owned = (block for request in owners for block in request.host_blocks)
        for at, block in enumerate(chain(owned, self._free)):
            assert not is_counted[block], f"host block {block} is owned twice, or owned and free"
            is_counted[block] = True
            if at % BLOCKS_PER_CHECK == 0:
                yield
        assert all(is_counted), f"{is_counted.count(0)} of {self.n_blocks} host blocks leaked"
