"""The pool, which handles runs of blocks, does to each block what handling it alone would do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.state.kv import KvPool
from reference_engine.state.sequence import Request
from tests.reference_engine.blockwise_pool import BlockwisePool
from tests.reference_engine.engine_kit import request

SIZE = 2

# Texts of a tree of few branches: each is a sequence of choices between two pieces. They share
# beginnings of any length, so that runs are divided everywhere.
PIECES = ((1, 1, 1, 1, 1, 1, 1), (1, 1, 2), (1, 1, 1, 1, 3, 3, 3, 3), (4,))
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map(
    lambda pieces: [token for piece in pieces for token in piece]
)
moves = st.lists(
    st.tuples(
        st.sampled_from(
            ["admit"] * 6
            + ["grow"] * 6
            + ["answer"] * 3
            + ["free"] * 4
            + ["detach", "give", "clear"]
        ),
        st.integers(0, 7),
        st.integers(1, 12),
    ),
    min_size=10,
    max_size=120,
)


class Pair:
    """A pool and the oracle, with the same requests in both."""

    def __init__(self, n_blocks: int) -> None:
        self.pool, self.oracle = KvPool(n_blocks, SIZE), BlockwisePool(n_blocks, SIZE)
        self.inside: list[Request] = []
        self.detached: list[tuple[list[int], list[int]]] = []

    def admit(self, req: Request, n_tokens: int) -> None:
        pool, oracle = self.pool, self.oracle
        n_tokens = max(1, min(n_tokens, req.n_tokens - pool.cached_tokens(req)))
        needed = oracle.missing_to_admit(req, n_tokens)
        assert pool.missing_to_admit(req, n_tokens) == needed
        assert pool.admit(req, n_tokens) == (needed <= oracle.n_free)
        if not req.blocks:
            return
        assert oracle.admit(req, n_tokens) == req.n_computed
        self.inside.append(req)
        self.compute(req, n_tokens)

    def compute(self, req: Request, n_tokens: int) -> None:
        """Book tokens as the core does after a step."""
        req.n_computed += n_tokens
        self.pool.publish(req)
        self.oracle.publish(req, req.n_computed)

    def grow(self, req: Request, n_tokens: int) -> None:
        n_tokens = min(n_tokens, req.n_remaining)
        if n_tokens and self.pool.grow(req, n_tokens):
            self.oracle.grow(req, req.n_computed + n_tokens)
            self.compute(req, n_tokens)

    def answer(self, req: Request, n_tokens: int) -> None:
        """Tokens of an answer, which are published only at its end."""
        for _ in range(n_tokens):
            if req.n_remaining > 1 or not self.pool.grow(req, 1):
                return
            self.oracle.grow(req, req.n_computed + 1)
            req.n_computed += 1
            req.tokens.append(5)

    def free(self, req: Request) -> None:
        n_computed = req.n_computed
        self.pool.free(req)
        self.oracle.publish(req, n_computed)
        self.oracle.free(self.oracle.blocks.pop(req.id))

    def detach(self, req: Request) -> None:
        n_computed = req.n_computed
        lent = self.pool.detach(req)
        self.oracle.publish(req, n_computed)
        self.detached.append((lent, self.oracle.blocks.pop(req.id)))

    def check(self, requests: list[Request]) -> None:
        pool, oracle = self.pool, self.oracle
        pool.check(self.inside, [lent for lent, _ in self.detached])
        assert pool.n_free == oracle.n_free
        free = [*reversed(pool._blank), *pool._tree.idle()]
        assert free == [*oracle.blank, *oracle.idle]
        assert sum(1 for _ in pool.cached_keys()) == len(oracle.block_of)
        for lent, theirs in self.detached:
            assert lent == theirs
        for req in requests:
            if req in self.inside:
                assert req.blocks == oracle.blocks[req.id]
                assert req.n_published == oracle.published[req.id]
                continue
            n_hits = len(oracle.hits(req))
            assert pool.cached_tokens(req) == n_hits * SIZE
            assert pool.n_leading(pool.prefix_keys(req)) == n_hits
            for victim in self.inside:
                assert pool.freed_by(victim, req) == oracle.freed_by(victim, req)


@pytest.mark.parametrize("n_blocks", [6, 24, 60])
@settings(deadline=None, max_examples=120)
@given(moves=moves, prompts=st.lists(texts, min_size=8, max_size=8))
def test_any_order_of_moves_does_to_each_block_what_the_blockwise_pool_does(
    n_blocks, moves, prompts
):
    pair = Pair(n_blocks)
    requests = [
        request(f"r{k}", prompt, 40, tenant="a" if k < 6 else "b")
        for k, prompt in enumerate(prompts)
    ]
    for move, which, n_tokens in moves:
        req = requests[which]
        if move == "admit":
            if req not in pair.inside:
                pair.admit(req, n_tokens)
        elif move == "give":
            if pair.detached:
                lent, theirs = pair.detached.pop(which % len(pair.detached))
                pair.pool.give_back(lent)
                pair.oracle.free(theirs)
        elif move == "clear":
            assert pair.pool.clear_prefix_cache() == pair.oracle.clear()
        elif req in pair.inside:
            if move in ("free", "detach"):
                pair.inside.remove(req)
                getattr(pair, move)(req)
            else:
                getattr(pair, move)(req, n_tokens)
        pair.check(requests)


def test_a_prefix_that_is_found_without_end_takes_no_more_memory():
    pool = KvPool(40, SIZE)
    first = request("r", [1] * 20, 1)
    assert pool.admit(first, 20)
    first.n_computed = 20
    pool.free(first)
    for k in range(10_000):
        again = request(f"r{k}", [1] * 20, 1)
        assert pool.admit(again, 2)
        again.n_computed = 20
        pool.free(again)
    assert len(pool._tree._idle) < 100
    assert sum(1 for _ in pool._tree.nodes()) <= 2
    pool.check([])
