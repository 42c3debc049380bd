"""The pool, which handles runs of blocks, does to each block what handling it alone would do."""

from __future__ import annotations

from itertools import pairwise

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

    def pieces(self, req: Request, n_tokens: int) -> None:
        """Compute the rest of a prompt in pieces; the oracle computes one after the other."""
        pool, oracle = self.pool, self.oracle
        n_left, n_blocks = req.n_remaining, pool.missing(req, req.n_remaining)
        sizes = [min(n_tokens, n_left - at) for at in range(0, n_left, n_tokens)]
        if len(sizes) < 2 or n_blocks > pool.n_free:
            return
        assert pool.grow(req, sizes[0])
        oracle.grow(req, req.n_computed + sizes[0])
        n_computed, expected = req.n_computed, list[int]()
        for size, following in pairwise(sizes):
            n_computed += size
            oracle.publish(req, n_computed)
            oracle.grow(req, n_computed + following)
            expected.append(oracle.n_free)
        assert pool.compute_pieces(req, sizes[:-1], sizes[-1]) == expected
        self.compute(req, sizes[-1])

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
@settings(deadline=None, max_examples=100)
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


TEXT = [1] * 10 + [2] * 8
A, B, OTHER = TEXT[:11], TEXT[:17], [3] * 40


def two_at_once(n_blocks: int) -> tuple[Pair, Request, Request]:
    """`a` holds blocks 0–4 of the text, `b` blocks 5–7 behind them and others that equal those of
    `a`: both were admitted before either was computed."""
    pair = Pair(n_blocks)
    a, b = request("a", A, 9), request("b", B, 9)
    for req, n_tokens in ((a, 10), (b, 16)):
        assert pair.pool.admit(req, n_tokens)
        pair.oracle.admit(req, n_tokens)
        pair.inside.append(req)
    pair.compute(a, 10)
    pair.compute(b, 16)
    pair.check([a, b])
    return pair, a, b


def leave(pair: Pair, *requests: Request) -> None:
    for req in requests:
        pair.inside.remove(req)
        pair.free(req)


def take(pair: Pair, name: str, n_blocks: int) -> Request:
    """A request that holds blocks and computes none of them."""
    req = request(name, OTHER, 9)
    assert pair.pool.admit(req, SIZE * n_blocks)
    pair.oracle.admit(req, SIZE * n_blocks)
    pair.inside.append(req)
    return req


@pytest.mark.parametrize("n_evicted", range(6))
def test_a_run_with_others_behind_it_is_evicted_from_its_end(n_evicted):
    pair, a, b = two_at_once(14)
    leave(pair, a)
    take(pair, "x", 1 + n_evicted)
    pair.check([a, b, request("again", TEXT, 1)])
    leave(pair, b)
    pair.check([a, b, request("again", TEXT, 1)])


@pytest.mark.parametrize("n_evicted", range(6))
def test_an_idle_run_that_another_text_divides_keeps_its_order(n_evicted):
    pair = Pair(13)
    a, b = request("a", A, 9), request("b", [*TEXT[:6], 4, 4, 4, 4, 4], 9)
    for req in (a, b):
        assert pair.pool.admit(req, 10)
        pair.oracle.admit(req, 10)
        pair.inside.append(req)
    pair.compute(a, 10)
    leave(pair, a)
    pair.compute(b, 10)
    take(pair, "x", 3 + n_evicted)
    pair.check([a, b, request("again", TEXT, 1)])


def test_a_block_that_is_evicted_between_two_pieces_is_not_replaced_by_an_equal():
    pair, a, b = two_at_once(16)
    leave(pair, a, b)
    x = take(pair, "x", 13)  # evicts the blocks of `a`; those of `b` stay, and are not found
    leave(pair, x)
    take(pair, "y", 7)
    r = request("r", [*TEXT, 5], 9)
    assert pair.pool.cached_tokens(r) == 0
    assert pair.pool.admit(r, 4)
    pair.oracle.admit(r, 4)
    pair.inside.append(r)
    r.tokens.pop()
    assert pair.pool.n_free == 7
    pair.pieces(r, 4)
    pair.check([a, b, r])
    assert r.n_computed == 18
    assert pair.pool.cached_tokens(request("again", [*TEXT, 1], 1)) == 10


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
