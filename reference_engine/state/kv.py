"""Paged KV memory as bookkeeping: which request holds which block. Integers only, no tensors.

A block is either owned (reference count ≥ 1) or on the free list. A free block may still hold the
KV of a full, hashed block; it is then a prefix-cache entry until it is taken for something else.

    free list, next taken first:  [blank, latest first …] [cached, least recently freed … most]

The hash of block i covers everything before it: h_i = blake2b(h_{i-1} ‖ tokens_i), h_{-1} =
blake2b(tenant), so equal hashes mean equal prefixes. Tenants never share blocks: a hit shows as a
shorter TTFT, from which a tenant could infer that another tenant sent the same prompt.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, KeysView, Sequence
from functools import cache
from hashlib import blake2b
from itertools import islice

from reference_engine.state.sequence import Request

BLOCK_TOKENS = 16
BLOCKS_PER_CHECK = 256  # between two `yield`s of a check: some 50 µs
_RUN = 8  # most blocks given to a growing answer at once; see decision 53
_PLENTY = 16  # free blocks for each block taken that way
_FIRST = 32  # blocks of a prompt that are looked up at first
_HASH_BYTES = 16
_NUMBER_BYTES = 4
_EMPTY = blake2b(digest_size=_HASH_BYTES)


class KvPool:
    """`n_blocks` blocks of `block_tokens` tokens. All changes are all-or-nothing."""

    def __init__(
        self, n_blocks: int, block_tokens: int = BLOCK_TOKENS, prefix_cache: bool = True
    ) -> None:
        assert n_blocks > 0, f"a pool needs at least 1 block, got {n_blocks}"
        assert block_tokens > 0, f"a block holds at least 1 token, got {block_tokens}"
        self.n_blocks, self.block_tokens, self.prefix_cache = n_blocks, block_tokens, prefix_cache
        self._references = [0] * n_blocks
        self._free = FreeList(n_blocks)
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._n_index_changes = 0

    @property
    def n_free(self) -> int:
        """Blocks that can be taken now, cached prefixes included."""
        return len(self._free)

    @property
    def pressure(self) -> float:
        """Share of the blocks that are owned, 0 to 1."""
        return 1.0 - len(self._free) / self.n_blocks

    def blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_tokens)

    def missing(self, request: Request, n_tokens: int) -> int:
        """Free blocks that `n_tokens` more computed tokens would take from the pool."""
        n_over = request.n_computed + n_tokens - request.n_room
        return self.blocks_for(n_over) if n_over > 0 else 0

    def missing_to_admit(self, request: Request, n_tokens: int, reserve_tokens: int = 0) -> int:
        """As `missing`, for a request that holds no blocks yet and reserves room for
        `reserve_tokens` in total. Cached blocks without an owner leave the free list, too.

        A preempted request comes back only with room for all tokens it had: admitted for the next
        piece only, it could be preempted again and again without ever getting a token.
        """
        hits = self._hits(request)
        reserve_tokens = max(reserve_tokens, self._least_room(request))
        idle = list(map(self._references.__getitem__, hits)).count(0)
        n_room = max(self._available(request, hits) + n_tokens, reserve_tokens)
        return self.blocks_for(n_room) - len(hits) + idle

    def freed_by(self, victim: Request, request: Request) -> int:
        """Blocks that preempting `victim` adds to those that an admission of `request` can take.
        Blocks of the victim that other requests hold as well, or that are a cached prefix of
        `request`, do not count."""
        if not self.prefix_cache:
            return len(victim.blocks)
        references, hits = self._references, self._hits(request)
        n_shared = sum(references[block] == 1 for block in set(hits).intersection(victim.blocks))
        return sum(references[block] == 1 for block in victim.blocks) - n_shared

    def cached_tokens(self, request: Request) -> int:
        """Tokens that a request without blocks need not compute, because they are in the prefix
        cache or in host memory. A token at least is always left to compute: without it there
        would be no logits to sample from."""
        return self._available(request, self._hits(request))

    def prefix_keys(self, request: Request) -> Sequence[bytes]:
        """The hashes of the full blocks of a prompt that could be in a cache; equal in all pools
        with blocks of this size. Empty without a prefix cache."""
        if not self.prefix_cache:
            return ()
        n_usable = (len(request.tokens) - 1) // self.block_tokens
        return self._chain(request, n_usable)[:n_usable]

    def cached_keys(self) -> KeysView[bytes]:
        """The hashes of the blocks in the prefix cache, as they change."""
        return self._block_of.keys()

    def admit(self, request: Request, n_tokens: int, reserve_tokens: int = 0) -> bool:
        """Give a request without blocks its cached prefix, room for its swapped-out tokens and
        `n_tokens` after them, and room for `reserve_tokens` in total. False, and nothing changed,
        when there is no room."""
        assert not request.blocks, f"{request.id} already holds {len(request.blocks)} blocks"
        if self.missing_to_admit(request, n_tokens, reserve_tokens) > self.n_free:
            return False
        hits = self._hits(request)
        request.blocks = list(hits)
        for block in hits:
            if self._references[block] == 0:
                self._free.reuse(block)
            self._references[block] += 1
        request.n_published = len(hits)
        request.n_room = len(hits) * self.block_tokens
        request.n_computed = self._available(request, hits)
        n_room = max(reserve_tokens, self._least_room(request))
        has_grown = self.grow(request, max(n_tokens, n_room - request.n_computed))
        assert has_grown, f"{request.id}: missing_to_admit found room for {n_tokens} tokens"
        return True

    def grow(self, request: Request, n_tokens: int) -> bool:
        """Give room for `n_tokens` more computed tokens. False, and nothing changed, when there is
        none."""
        n_over = request.n_computed + n_tokens - request.n_room
        if n_over <= 0:
            return True  # 15 decode steps of 16 end here
        n_missing = -(-n_over // self.block_tokens)
        if n_missing > len(self._free):
            return False
        request.n_room += n_missing * self.block_tokens
        request.blocks += self._take(n_missing)
        return True

    def extend(self, requests: Collection[Request]) -> bool:
        """Give each request another block, or several where there are plenty, but none that its
        answer can never fill. Blocks taken together lie together, and attention reads an answer
        faster that is not scattered over the memory. False, and nothing changed, when there are
        too few."""
        if len(requests) > len(self._free):
            return False
        n_most = min(_RUN, len(self._free) // (_PLENTY * max(1, len(requests))))
        for request in requests:
            n = max(1, min(n_most, self.blocks_for(request.n_most - request.n_room)))
            request.blocks += sorted(self._take(n))
            request.n_room += n * self.block_tokens
        return True

    def publish(self, request: Request) -> None:
        """Add the blocks that became full to the prefix cache. Of two equal blocks the
        first computed is the entry."""
        n_full = request.n_computed // self.block_tokens
        if n_full == request.n_published or not self.prefix_cache:
            return
        block_of, hash_of = self._block_of, self._hash_of
        new = slice(request.n_published, n_full)
        keys, blocks = self._chain(request, n_full)[new], request.blocks[new]
        assert len(keys) == len(blocks), f"{request.id}: {len(keys)} hashes of {len(blocks)} blocks"
        if not block_of.keys().isdisjoint(keys):
            pairs = [pair for pair in zip(keys, blocks, strict=True) if pair[0] not in block_of]
            keys, blocks = [key for key, _ in pairs], [block for _, block in pairs]
        block_of.update(zip(keys, blocks, strict=True))
        hash_of.update(zip(blocks, keys, strict=True))
        self._n_index_changes += 1
        request.n_published = n_full

    def free(self, request: Request) -> None:
        """Take all blocks of a request back and publish those that are not yet published. An
        answer's blocks are published here all at once: hashing them singly while decoding costs
        three times as much. The tail is freed first, so that it is evicted first: a prefix is
        worth more than the text after it."""
        self.give_back(self.detach(request))

    def detach(self, request: Request) -> list[int]:
        """Take the blocks of a request from it, published, and leave them owned."""
        self.publish(request)
        blocks, request.blocks = request.blocks, []
        request.n_computed = request.n_room = request.n_published = 0
        return blocks

    def hold(self, n: int) -> list[int]:
        """Take `n` blocks for a request that is to come. There must be as many."""
        assert n <= self.n_free, f"{n} blocks of {self.n_free} free"
        return self._take(n)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free blocks without a request, the last first."""
        references, hash_of = self._references, self._hash_of
        freed, full = list(reversed(blocks)), list[int]()
        if self.prefix_cache:
            if list(map(references.__getitem__, freed)).count(1) < len(freed):
                for block in freed:
                    references[block] -= 1
                freed = [block for block in freed if not references[block]]
            full = [block for block in freed if block in hash_of]
        for block in freed:  # without a prefix cache, no block has a second owner or a hash
            references[block] = 0
        if full:
            freed = [block for block in freed if block not in hash_of]
        self._free.give(full, freed)

    def clear_prefix_cache(self) -> int:
        """Empty the prefix cache: no block computed so far is a hit again, owned blocks included.
        Returns how many blocks were in it."""
        n_cached = len(self._hash_of)
        self._block_of.clear()
        self._hash_of.clear()
        self._n_index_changes += 1
        return n_cached

    def check(self, owners: Iterable[Request], detached: Iterable[Sequence[int]] = ()) -> None:
        """Assert that every block is either free or owned exactly as often as `owners` and
        `detached` list it, and that no request computed more tokens than it has room for."""
        for _ in self.checks(owners, detached):
            pass

    def checks(
        self, owners: Iterable[Request], detached: Iterable[Sequence[int]] = ()
    ) -> Iterator[None]:
        """As `check`, in pieces: a request or BLOCKS_PER_CHECK blocks between two `yield`s. The
        pool must not change in between; give the iteration up when it does."""
        n_owners: Counter[int] = Counter()
        for blocks in detached:
            n_owners.update(blocks)
        for request in owners:
            assert len(set(request.blocks)) == len(request.blocks), (
                f"{request.id} has a block twice"
            )
            room = len(request.blocks) * self.block_tokens
            assert request.n_room == room, f"{request.id}: {request.n_room} != {room}"
            assert request.n_computed <= room, f"{request.id}: {request.n_computed} in {room}"
            n_owners.update(request.blocks)
            yield
        is_free = bytearray(self.n_blocks)
        for at, block in enumerate(self._free):
            assert not is_free[block], f"block {block} was freed twice"
            is_free[block] = True
            if at % BLOCKS_PER_CHECK == 0:
                yield
        for block, references in enumerate(self._references):
            assert references == n_owners[block], (
                f"block {block}: {references} references, {n_owners[block]} owners"
            )
            assert is_free[block] == (references == 0), f"block {block} leaked or is free and owned"
            if block % BLOCKS_PER_CHECK == 0:
                yield
        assert is_free.count(1) == len(self._free), f"{len(self._free)} free by count"
        for at, (key, block) in enumerate(self._block_of.items()):
            assert self._hash_of.get(block) == key, "the prefix index and its inverse disagree"
            if at % BLOCKS_PER_CHECK == 0:
                yield
        assert len(self._block_of) == len(self._hash_of), "the inverse of the index has more"

    def _least_room(self, request: Request) -> int:
        return len(request.tokens) if request.n_preemptions else 0

    def _available(self, request: Request, hits: Sequence[int]) -> int:
        return max(len(hits) * self.block_tokens, request.n_swapped)

    def _take(self, n: int) -> list[int]:
        """Take `n` blocks from the head of the free list, out of the prefix cache, too."""
        references, hash_of = self._references, self._hash_of
        taken = self._free.take_blank(n)
        if len(taken) < n:
            cached = self._free.take_cached(n - len(taken))
            taken += cached
            # Blocks without a hash lost it when the prefix cache was emptied.
            evicted = [hash_of.pop(block) for block in cached if block in hash_of]
            for key in evicted:
                del self._block_of[key]
            self._n_index_changes += bool(evicted)
        for block in taken:
            references[block] = 1
        return taken

    def _hits(self, request: Request) -> list[int]:
        """Cached blocks of the longest prefix. Read several times per plan, so the request keeps
        them until the index changes."""
        if not self.prefix_cache:
            return []
        n_changes, hits = request._hits
        if n_changes == self._n_index_changes:
            return hits
        n_usable = (len(request.tokens) - 1) // self.block_tokens
        # Up to the first miss; long prompts make it worth running this loop in C. Most misses are
        # among the first.
        chain, find = self._chain(request, n_usable), self._block_of.get
        blocks = list(map(find, chain[: min(n_usable, _FIRST)]))
        if n_usable > _FIRST and None not in blocks:
            blocks += map(find, chain[_FIRST:n_usable])
        if None in blocks:
            del blocks[blocks.index(None) :]
        hits = [block for block in blocks if block is not None]
        request._hits = (self._n_index_changes, hits)
        return hits

    def _chain(self, request: Request, n: int) -> list[bytes]:
        """Hashes of the first `n` (or more) full blocks. They stay valid, because tokens are only
        ever appended."""
        chain, size = request.chain, self.block_tokens
        if len(chain) < n:
            before = chain[-1] if chain else _salt(request.tenant)
            data = array("I", request.tokens[len(chain) * size : n * size]).tobytes()
            step = len(data) // (n - len(chain))
            for at in range(0, len(data), step):
                hashed = _EMPTY.copy()  # a quarter cheaper than a new hash
                hashed.update(before + data[at : at + step])
                before = hashed.digest()
                chain.append(before)
        return chain


def run_keys(before: bytes, token: int, n: int) -> list[bytes]:
    """Keys of `n` blocks of a token repeated, after the text of which `before` is a key; in place
    of their hashes, at a tenth of the price. Texts must be divided into such runs in only one way:
    then two blocks have equal keys where they and all before them are equal."""
    if n <= 0:
        return []
    run = blake2b(before + token.to_bytes(8, "big"), digest_size=_HASH_BYTES - _NUMBER_BYTES)
    return list(map(run.digest().__add__, islice(_numbers((n - 1).bit_length()), n)))


@cache
def _numbers(n_bits: int) -> tuple[bytes, ...]:
    return tuple(k.to_bytes(_NUMBER_BYTES, "big") for k in range(1 << n_bits))


def _salt(tenant: str) -> bytes:
    return blake2b(tenant.encode(), digest_size=_HASH_BYTES).digest()


class FreeList:
    """Blocks without an owner, each once, in the order in which they are taken.

    A cached block that is hit again leaves from the middle of its queue. Removing it there would
    cost a search, so its entry stays and is skipped later; skipped entries are cleared out before
    they outnumber the rest.
    """

    def __init__(self, n_blocks: int) -> None:
        self._blank = list(range(n_blocks - 1, -1, -1))  # the next is the last
        self._cached: deque[int] = deque()
        self._n_stale = [0] * n_blocks  # by block: entries of `_cached` to skip, the oldest first
        self._n_skipped = 0  # Σ of these

    def __len__(self) -> int:
        return len(self._blank) + len(self._cached) - self._n_skipped

    def give(self, cached: Iterable[int], blank: Iterable[int]) -> None:
        """Add blocks that have lost their last owner."""
        self._cached.extend(cached)
        self._blank.extend(blank)

    def take_blank(self, n: int) -> list[int]:
        """Remove and return the first `n` blocks, or fewer, none of them cached."""
        n = min(n, len(self._blank))
        if not n:
            return []
        taken = self._blank[-n:]
        del self._blank[-n:]
        taken.reverse()
        return taken

    def take_cached(self, n: int) -> list[int]:
        """Remove and return the first `n` cached blocks. Raises IndexError when there are fewer."""
        next_block, n_stale = self._cached.popleft, self._n_stale
        taken: list[int] = []
        while self._n_skipped and len(taken) < n:
            block = next_block()
            if n_stale[block]:
                n_stale[block] -= 1
                self._n_skipped -= 1
            else:
                taken.append(block)
        taken += [next_block() for _ in range(n - len(taken))]
        return taken

    def reuse(self, block: int) -> None:
        """Remove a cached block, which has an owner again."""
        self._n_stale[block] += 1
        self._n_skipped += 1
        if 2 * self._n_skipped > len(self._cached) + 64:
            self._cached = deque(list(self)[len(self._blank) :])
            self._n_stale = [0] * len(self._n_stale)
            self._n_skipped = 0

    def __iter__(self) -> Iterator[int]:
        stale = list(self._n_stale)
        yield from reversed(self._blank)
        for block in self._cached:
            if stale[block]:
                stale[block] -= 1
            else:
                yield block
