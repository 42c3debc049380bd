"""Paged KV memory as bookkeeping: which request holds which block. Integers only, no tensors.

A block is either owned, by one request or by several, or free. A free block may still hold the KV
of a full, hashed block; it is then an entry of the prefix cache (`prefix_tree`) until it is taken
for something else.

    free blocks, next taken first:  [blank, latest first …] [cached, least recently freed … most]

The hash of block i covers everything before it: h_i = blake2b(h_{i-1} ‖ tokens_i), h_{-1} =
blake2b(tenant), so equal hashes mean equal prefixes. Tenants never share blocks: a hit shows as a
shorter TTFT, from which a tenant could infer that another tenant sent the same prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING

from reference_engine.state.prefix_tree import Keys, Node, PrefixTree, Run
from reference_engine.state.run_keys import RunKeys
from reference_engine.state.sequence import Request

if TYPE_CHECKING:
    from reference_engine.state.swap import HostPool

BLOCK_TOKENS = 16
BLOCKS_PER_CHECK = 256  # between two `yield`s of a check: some 50 µs
_RUN = 8  # most blocks given to a growing answer at once; see decision 53
_PLENTY = 16  # free blocks for each block taken that way
_HASH_BYTES = 16
_EMPTY = blake2b(digest_size=_HASH_BYTES)


class Detached(list[int]):
    """Blocks that were taken from a request, still owned; `runs` of them are in the prefix tree,
    by these `keys`."""

    def __init__(self, blocks: Iterable[int], runs: Sequence[Run], keys: Keys) -> None:
        super().__init__(blocks)
        self.runs, self.keys = runs, keys


class KvPool:
    """`n_blocks` blocks of `block_tokens` tokens. All changes are all-or-nothing."""

    def __init__(
        self, n_blocks: int, block_tokens: int = BLOCK_TOKENS, prefix_cache: bool = True
    ) -> None:
        assert n_blocks > 0, f"a pool needs at least 1 block, got {n_blocks}"
        assert block_tokens > 0, f"a block holds at least 1 token, got {block_tokens}"
        self.n_blocks, self.block_tokens, self.prefix_cache = n_blocks, block_tokens, prefix_cache
        self._blank = list(range(n_blocks - 1, -1, -1))  # the next is the last
        self._tree = PrefixTree()
        self.offload: HostPool | None = None  # keeps blocks that leave the prefix cache

    @property
    def n_idle(self) -> int:
        """Blocks that can be taken without a copy to host memory."""
        return self.n_free if self.offload is None else len(self._blank)

    @property
    def n_free(self) -> int:
        """Blocks that can be taken now, cached prefixes included."""
        return len(self._blank) + self._tree.n_idle

    @property
    def pressure(self) -> float:
        """Share of the blocks that are owned, 0 to 1."""
        return 1.0 - self.n_free / self.n_blocks

    def blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_tokens)

    def missing(self, request: Request, n_tokens: int) -> int:
        """Free blocks that `n_tokens` more computed tokens would take from the pool."""
        n_over = request.n_computed + n_tokens - request.n_room
        return self.blocks_for(n_over) if n_over > 0 else 0

    def missing_to_admit(self, request: Request, n_tokens: int, reserve_tokens: int = 0) -> int:
        """As `missing`, for a request that holds no blocks yet and reserves room for
        `reserve_tokens` in total. Cached blocks without an owner leave the free blocks, too.

        A preempted request comes back only with room for all tokens it had: admitted for the next
        piece only, it could be preempted again and again without ever getting a token.
        """
        nodes, n_hits = self._hits(request)
        n_kept = len(self._kept(request, n_hits))
        n_room = max(self._available(request, n_hits + n_kept) + n_tokens, reserve_tokens)
        n_missing = self.blocks_for(max(n_room, self._least_room(request))) - n_hits
        for node in nodes:
            if not node.n_owners:
                n_missing += min(node.end, n_hits) - node.start
        return n_missing

    def freed_by(self, victim: Request, request: Request) -> int:
        """Blocks that preempting `victim` adds to those that an admission of `request` can take.
        Blocks of the victim that other requests hold as well, or that are a cached prefix of
        `request`, do not count."""
        if not self.prefix_cache:
            return len(victim.blocks)
        nodes, n_hits = self._hits(request)
        n_freed, of_victim = len(victim.blocks), set[Node]()
        for run in victim._runs:
            for node in run.nodes(victim.chain):
                of_victim.add(node)
                if node.n_owners > 1:
                    n_freed -= node.end - node.start
        for node in of_victim.intersection(nodes):
            if node.n_owners == 1:
                n_freed -= min(node.end, n_hits) - node.start
        return n_freed

    def cached_tokens(self, request: Request) -> int:
        """Tokens that a request without blocks need not compute, because they are in the prefix
        cache or in host memory. A token at least is always left to compute: without it there
        would be no logits to sample from."""
        n_hits = self._hits(request)[1]
        return self._available(request, n_hits + len(self._kept(request, n_hits)))

    def prefix_keys(self, request: Request) -> Sequence[bytes]:
        """The hashes of the full blocks of a prompt that could be in a cache; equal in all pools
        with blocks of this size. Empty without a prefix cache."""
        if not self.prefix_cache:
            return ()
        n_usable = (len(request.tokens) - 1) // self.block_tokens
        return self._chain(request, n_usable)[:n_usable]

    def n_leading(self, keys: Keys) -> int:
        """How many of these hashes, from the first on, are in the prefix cache."""
        return self._tree.find(keys, len(keys))[1]

    def cached_keys(self) -> Iterator[bytes]:
        """The hashes of the blocks in the prefix cache."""
        for node in self._tree.nodes():
            if node.blocks:
                yield from map(node.keys.__getitem__, range(node.start, node.end))

    def admit(self, request: Request, n_tokens: int, reserve_tokens: int = 0) -> bool:
        """Give a request without blocks its cached prefix, room for its swapped-out tokens and
        `n_tokens` after them, and room for `reserve_tokens` in total. False, and nothing changed,
        when there is no room."""
        assert not request.blocks, f"{request.id} already holds {len(request.blocks)} blocks"
        if self.missing_to_admit(request, n_tokens, reserve_tokens) > self.n_free:
            return False
        nodes, n_hits = self._hits(request)
        kept = self._kept(request, n_hits)
        host_blocks = self.offload.pin(kept) if kept and self.offload is not None else []
        if nodes:
            request._runs = [self._tree.own(nodes, n_hits)]
            request.blocks = [block for node in nodes for block in node.blocks]
        request.n_published = n_hits
        request.n_room = n_hits * self.block_tokens
        request.n_computed = self._available(request, n_hits + len(kept))
        n_room = max(reserve_tokens, self._least_room(request))
        has_grown = self.grow(request, max(n_tokens, n_room - request.n_computed))
        assert has_grown, f"{request.id}: missing_to_admit found room for {n_tokens} tokens"
        if kept and self.offload is not None:
            self.offload.copy_in(kept, host_blocks, request.blocks[n_hits : n_hits + len(kept)])
            self.publish(request)
        return True

    def grow(self, request: Request, n_tokens: int) -> bool:
        """Give room for `n_tokens` more computed tokens. False, and nothing changed, when there is
        none."""
        n_over = request.n_computed + n_tokens - request.n_room
        if n_over <= 0:
            return True  # 15 decode steps of 16 end here
        n_missing = -(-n_over // self.block_tokens)
        if n_missing > self.n_free:
            return False
        request.n_room += n_missing * self.block_tokens
        request.blocks += self._take(n_missing)
        return True

    def extend(self, requests: Collection[Request]) -> bool:
        """Give each request another block, or several where there are plenty, but none that its
        answer can never fill. Blocks taken together lie together, and attention reads an answer
        faster that is not scattered over the memory. False, and nothing changed, when there are
        too few."""
        n_free = self.n_free
        if len(requests) > n_free:
            return False
        n_most, size = min(_RUN, n_free // (_PLENTY * max(1, len(requests)))), self.block_tokens
        blank = self._blank
        for request in requests:
            n = -(-(request.n_most - request.n_room) // size)
            if n > n_most:
                n = n_most
            if n < 1:
                n = 1
            if n <= len(blank):
                blocks = blank[-n:]
                del blank[-n:]
            else:
                blocks = self._take(n)
            blocks.sort()
            request.blocks += blocks
            request.n_room += n * size
        return True

    def compute_pieces(self, request: Request, sizes: Sequence[int], last: int) -> list[int]:
        """Count pieces of `sizes` tokens of a prompt, for which there is room, as computed: each is
        published, and then room is given for the next, the last for `last` tokens. There must be
        free blocks for all. Returns the free blocks after each."""
        n_free: list[int] = []
        for at, n_tokens in enumerate(sizes):
            if at and self._is_alone(request):
                return n_free + self._compute_at_once(request, [*sizes[at:], last])
            request.n_computed += n_tokens
            self.publish(request)
            has_room = self.grow(request, sizes[at + 1] if at + 1 < len(sizes) else last)
            assert has_room, f"{request.id}: no room for the next piece of its prompt"
            n_free.append(self.n_free)
        return n_free

    def publish(self, request: Request) -> None:
        """Add the blocks that became full to the prefix cache. Of two equal blocks the
        first computed is the entry."""
        n_full = request.n_computed // self.block_tokens
        start = request.n_published
        if n_full == start or not self.prefix_cache:
            return
        keys, blocks = self._chain(request, n_full), request.blocks[start:n_full]
        assert len(blocks) == n_full - start, f"{request.id}: {len(request.blocks)} of {n_full}"
        self._tree.add(keys, start, blocks, request._runs)
        request.n_published = n_full

    def free(self, request: Request) -> None:
        """Take all blocks of a request back and publish those that are not yet published. An
        answer's blocks are published here all at once: hashing them singly while decoding costs
        three times as much. The tail is freed first, so that it is evicted first: a prefix is
        worth more than the text after it."""
        self.publish(request)
        self._blank += self._tree.free(request.chain, request.blocks, request._runs)
        self._strip(request)

    def detach(self, request: Request) -> list[int]:
        """Take the blocks of a request from it, published, and leave them owned."""
        self.publish(request)
        blocks = Detached(request.blocks, request._runs, request.chain)
        self._strip(request)
        return blocks

    def attach(self, request: Request, blocks: list[int], n_tokens: int) -> None:
        """Undo `detach` of a request with `n_tokens` in KV."""
        request.blocks, request.n_room = list(blocks), len(blocks) * self.block_tokens
        request._runs = list(blocks.runs) if isinstance(blocks, Detached) else []
        request.n_computed = n_tokens
        request.n_published = n_tokens // self.block_tokens if self.prefix_cache else 0

    def hold(self, n: int) -> list[int]:
        """Take `n` blocks for a request that is to come. There must be as many."""
        assert n <= self.n_free, f"{n} blocks of {self.n_free} free"
        return self._take(n)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free blocks that were held or detached, the last first."""
        if isinstance(blocks, Detached):
            self._blank += self._tree.free(blocks.keys, blocks, blocks.runs)
        else:
            self._blank += reversed(blocks)

    def clear_prefix_cache(self) -> int:
        """Empty the prefix cache: no block computed so far is a hit again, owned blocks included.
        Returns how many blocks were in it."""
        n_cached = self._tree.n_cached
        self._tree.clear()
        if self.offload is not None:
            self.offload.drop_prefixes()
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
        is_counted = bytearray(self.n_blocks)  # by block: free, or owned
        n_owners: dict[Node, int] = {}

        def count(blocks: Iterable[int]) -> None:
            for block in blocks:
                assert not is_counted[block], f"block {block} is owned or freed twice"
                is_counted[block] = True

        def own(blocks: Sequence[int], runs: Iterable[Run], keys: Keys) -> None:
            end = 0
            for run in runs:
                count(blocks[end : run.start])
                end = run.end
                for node in run.nodes(keys):
                    assert node.blocks == blocks[node.start : node.end], "a run has other blocks"
                    if node not in n_owners:
                        count(node.blocks)
                    n_owners[node] = n_owners.get(node, 0) + 1
            count(blocks[end:])

        for blocks in detached:
            if isinstance(blocks, Detached):
                own(blocks, blocks.runs, blocks.keys)
            else:
                own(blocks, (), ())
            yield
        for request in owners:
            room = len(request.blocks) * self.block_tokens
            assert request.n_room == room, f"{request.id}: {request.n_room} != {room}"
            assert request.n_computed <= room, f"{request.id}: {request.n_computed} in {room}"
            own(request.blocks, request._runs, request.chain)
            yield
        for node, n in n_owners.items():
            assert node.n_owners == n, f"a run of {node.n_owners} owners has {n}"
        n_idle = 0
        for n_idle, block in enumerate(self._tree.idle(), 1):
            count((block,))
            if n_idle % BLOCKS_PER_CHECK == 0:
                yield
        assert n_idle == self._tree.n_idle, f"{n_idle} idle, {self._tree.n_idle} by count"
        for at in range(0, len(self._blank), BLOCKS_PER_CHECK):
            count(self._blank[at : at + BLOCKS_PER_CHECK])
            yield
        leaked = is_counted.find(0)
        assert leaked < 0, f"block {leaked} leaked"
        n_cached = 0
        for node in self._tree.nodes():
            n_cached += len(node.blocks)
            assert node.blocks or node.children, "a gap with nothing behind it"
            assert node.is_indexed, "a run is found that is not in the cache"
            assert not node.blocks or len(node.blocks) == node.end - node.start
            assert bool(node.n_owners) == (bool(node.blocks) and node.entry is None)
            yield
        assert n_cached == self._tree.n_cached, f"{n_cached} cached, {self._tree.n_cached} by count"

    def _is_alone(self, request: Request) -> bool:
        """Whether no text in the cache goes on as a request's, which is published so far: whatever
        is evicted, its next blocks will be the first of their keys."""
        runs = request._runs
        if not self.prefix_cache or not runs or runs[-1].end != request.n_published:
            return not self.prefix_cache
        return runs[-1].last_node(request.chain).is_growing(request.chain)

    def _compute_at_once(self, request: Request, sizes: Sequence[int]) -> list[int]:
        """`compute_pieces` of all but the last size, which gets room."""
        n_blocks, n_free, n_computed = len(request.blocks), self.n_free, request.n_computed
        left: list[int] = []
        for n_tokens, n_next in pairwise(sizes):
            n_computed += n_tokens
            n_needed = self.blocks_for(n_computed + n_next)
            left.append(n_free - max(0, n_needed - n_blocks))
        request.n_computed = n_computed
        has_room = self.grow(request, sizes[-1])
        assert has_room, f"{request.id}: no room for the next piece of its prompt"
        self.publish(request)
        return left

    def _strip(self, request: Request) -> None:
        request.blocks, request._runs = [], []
        request.n_computed = request.n_room = request.n_published = 0

    def _least_room(self, request: Request) -> int:
        return len(request.tokens) if request.n_preemptions else 0

    def _available(self, request: Request, n_hits: int) -> int:
        return max(n_hits * self.block_tokens, request.n_swapped)

    def _take(self, n: int) -> list[int]:
        """Take `n` free blocks, out of the prefix cache, too."""
        n_blank = min(n, len(self._blank))
        taken: list[int] = []
        if n_blank:
            taken = self._blank[-n_blank:]
            del self._blank[-n_blank:]
            taken.reverse()
        if n_blank < n:
            if self.offload is None:
                taken += self._tree.evict(n - n_blank)
            else:
                evicted: list[tuple[bytes, int]] = []
                taken += self._tree.evict(n - n_blank, evicted)
                self.offload.keep([key for key, _ in evicted], [block for _, block in evicted])
        return taken

    def _kept(self, request: Request, n_hits: int) -> Sequence[bytes]:
        """The keys of the blocks after the cached prefix that are in host memory."""
        if self.offload is None or request.n_swapped:
            return ()
        n_usable = (len(request.tokens) - 1) // self.block_tokens
        chain = self._chain(request, n_usable)
        return self.offload.find((chain[at] for at in range(n_hits, n_usable)), n_hits)

    def _hits(self, request: Request) -> tuple[Sequence[Node], int]:
        """The cached runs of the longest prefix, and how many blocks of them. Read several times
        per plan, so the request keeps them until the tree changes."""
        if not self.prefix_cache:
            return (), 0
        n_changes, nodes, n_hits = request._hits
        if n_changes != self._tree.n_changes:
            n_usable = (len(request.tokens) - 1) // self.block_tokens
            nodes, n_hits = self._tree.find(self._chain(request, n_usable), n_usable)
            request._hits = (self._tree.n_changes, nodes, n_hits)
        return nodes, n_hits

    def _chain(self, request: Request, n: int) -> list[bytes] | RunKeys:
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


def _salt(tenant: str) -> bytes:
    return blake2b(tenant.encode(), digest_size=_HASH_BYTES).digest()
