"""Host memory for the KV of preempted requests and of evicted prefixes, as bookkeeping. Integers
only, no tensors.

    prefix cache ── evicted: copied out ──▶ host memory ── hit: copied in ──▶ prefix cache
    running ────── preempted: copied out ─▶ host memory ── admitted: copied in ──▶ running
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, takewhile

from reference_engine.state.batch import Copy
from reference_engine.state.kv import BLOCKS_PER_CHECK
from reference_engine.state.sequence import Request

_SAMPLE_TOKENS = 2048  # of a prompt, for the price of a token


class HostPool:
    """`n_blocks` blocks of the size of KV blocks; copying a block takes `copy_s` seconds each way,
    and all copies of a step in one direction `latency_s` in addition.

    With `keeps_prefixes`, blocks that leave the prefix cache are kept as well, in the memory that
    preempted requests leave, the least recently used last.
    """

    def __init__(
        self,
        n_blocks: int,
        copy_s: float = 0.0,
        latency_s: float = 0.0,
        keeps_prefixes: bool = False,
    ) -> None:
        self.n_blocks, self.copy_s, self.latency_s = n_blocks, copy_s, latency_s
        self.keeps_prefixes = keeps_prefixes and n_blocks > 0
        self._free = list(range(n_blocks - 1, -1, -1))
        self._prefixes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._copies: list[Copy] = []  # of prefixes, that the next step makes
        self._is_worth_keeping = True
        self._is_worth_copying: Callable[[int, int], bool] = lambda n_before, n_blocks: True

    @property
    def n_free(self) -> int:
        """Blocks that preempted requests can take now, kept prefixes included."""
        return len(self._free) + len(self._prefixes)

    @property
    def n_prefixes(self) -> int:
        return len(self._prefixes)

    def price_prefixes(self, recompute_s: Callable[[int, int], float], block_tokens: int) -> None:
        """Keep and copy prefixes only where that takes less time than `recompute_s` of the tokens
        before and the tokens to compute."""
        token_s = recompute_s(0, _SAMPLE_TOKENS) / _SAMPLE_TOKENS
        self._is_worth_keeping = 2 * self.copy_s < token_s * block_tokens

        def is_worth_copying(n_before: int, n_blocks: int) -> bool:
            copy_s = self.latency_s + n_blocks * self.copy_s
            return copy_s < recompute_s(n_before * block_tokens, n_blocks * block_tokens)

        self._is_worth_copying = is_worth_copying

    def drop_prefixes(self) -> None:
        """Forget all kept prefixes."""
        self._free += self._prefixes.values()
        self._prefixes.clear()

    def keep(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Keep blocks that leave the prefix cache, as far as there is memory."""
        if not self._is_worth_keeping:
            return
        prefixes = self._prefixes
        for key, block in zip(keys, blocks, strict=True):
            if key in prefixes:
                prefixes.move_to_end(key)
            elif self._free or prefixes:
                prefixes[key] = self._take()
                self._copies.append(Copy(block, prefixes[key], is_out=True))

    def find(self, keys: Iterable[bytes], n_before: int) -> list[bytes]:
        """The first of `keys` that are kept, up to the first that is not; none where computing
        their blocks, after `n_before` others, takes less time."""
        hits = list(takewhile(self._prefixes.__contains__, keys))
        return hits if hits and self._is_worth_copying(n_before, len(hits)) else []

    def pin(self, keys: Sequence[bytes]) -> list[int]:
        """Take kept prefixes out, so that none is replaced, until `copy_in`."""
        return [self._prefixes.pop(key) for key in keys]

    def copy_in(
        self, keys: Sequence[bytes], host_blocks: Sequence[int], blocks: Sequence[int]
    ) -> None:
        """Copy pinned prefixes into blocks and keep them, as used most recently."""
        for key, host_block, block in zip(keys, host_blocks, blocks, strict=True):
            self._copies.append(Copy(block, host_block, is_out=False))
            if key in self._prefixes:  # the same text was evicted meanwhile
                self._free.append(self._prefixes[key])
            self._prefixes[key] = host_block
            self._prefixes.move_to_end(key)

    def drain(self) -> list[Copy]:
        """Remove and return the copies of prefixes, in their order."""
        copies, self._copies = self._copies, []
        return copies

    def swap_out(self, request: Request, n_blocks: int) -> list[Copy]:
        """Take host blocks for the first `n_blocks` blocks of a request, which it still holds, and
        return the copies. There must be enough free host blocks."""
        assert n_blocks <= self.n_free, f"{n_blocks} host blocks of {self.n_free} free"
        assert not request.host_blocks, f"{request.id} is in host memory already"
        request.host_blocks = [self._take() for _ in range(n_blocks)]
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
        for at, block in enumerate(chain(owned, self._free, self._prefixes.values())):
            assert not is_counted[block], f"host block {block} is owned twice, or owned and free"
            is_counted[block] = True
            if at % BLOCKS_PER_CHECK == 0:
                yield
        assert all(is_counted), f"{is_counted.count(0)} of {self.n_blocks} host blocks leaked"

    def _take(self) -> int:
        """A free block, else that of the least recently used prefix."""
        return self._free.pop() if self._free else self._prefixes.popitem(last=False)[1]
