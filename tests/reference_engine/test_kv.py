"""The block pool: nobody shares what they should not, nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.state.kv import KvPool
from reference_engine.state.sequence import Request
from tests.reference_engine.engine_kit import request


def compute(pool: KvPool, req: Request, n_tokens: int) -> None:
    """Book tokens as the core does after a step."""
    req.n_computed += n_tokens
    pool.publish(req)


def resident(pool: KvPool, req: Request) -> Request:
    """Admit a request and compute all of it."""
    n_tokens = req.n_tokens - pool.cached_tokens(req)
    assert pool.admit(req, n_tokens)
    compute(pool, req, n_tokens)
    return req


def test_a_request_holds_exactly_the_blocks_its_tokens_need():
    pool = KvPool(10)
    assert pool.admit(a := request("a", range(33), 5), 33)
    assert len(a.blocks) == 3
    assert pool.n_free == 7


def test_a_full_pool_refuses_and_changes_nothing():
    pool = KvPool(4)
    a, b = request("a", range(40), 5), request("b", range(100, 140), 5)
    assert pool.admit(a, 40)
    assert not pool.admit(b, 40)
    assert (b.blocks, b.n_computed, pool.n_free) == ([], 0, 1)
    compute(pool, a, 40)
    assert not pool.grow(a, 30)
    assert len(a.blocks) == 3
    pool.check([a])


def test_the_missing_blocks_are_those_of_the_tokens_beyond_the_room():
    pool = KvPool(4)
    a = resident(pool, request("a", range(32), 5))
    assert [pool.missing(a, n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_equal_prefixes_share_their_full_blocks():
    pool = KvPool(20)
    a = resident(pool, request("a", [*range(48), 1, 2], 5))
    b = request("b", [*range(48), 7, 8, 9], 5)
    assert pool.cached_tokens(b) == 48
    assert pool.admit(b, 3)
    assert b.blocks[:3] == a.blocks[:3]
    assert b.n_computed == 48
    assert pool.n_free == 20 - 5
    pool.check([a, b])


def test_a_prefix_survives_its_owner_until_the_room_is_needed():
    pool = KvPool(4)
    pool.free(resident(pool, request("a", range(40), 5)))
    assert pool.cached_tokens(request("b", range(40), 5)) == 32
    resident(pool, request("c", range(1000, 1064), 5))
    assert pool.cached_tokens(request("b", range(40), 5)) == 0


def test_the_tail_of_a_freed_prefix_is_evicted_before_its_head():
    pool = KvPool(4)
    pool.free(resident(pool, request("a", range(64), 5)))
    resident(pool, request("c", range(1000, 1016), 5))
    assert pool.cached_tokens(request("b", [*range(64), 0], 5)) == 48


def test_at_least_one_token_is_left_to_compute():
    pool = KvPool(8)
    pool.free(resident(pool, request("a", range(32), 5)))
    assert pool.cached_tokens(request("b", range(32), 5)) == 16


def test_tenants_never_share_blocks():
    pool = KvPool(8)
    resident(pool, request("a", range(40), 5, tenant="red"))
    assert pool.cached_tokens(request("b", range(40), 5, tenant="blue")) == 0
    assert pool.cached_tokens(request("c", range(40), 5, tenant="red")) == 32


def test_without_a_prefix_cache_nothing_is_found():
    pool = KvPool(8, prefix_cache=False)
    resident(pool, request("a", range(40), 5))
    assert pool.cached_tokens(request("b", range(40), 5)) == 0


def test_check_reports_a_block_with_two_owners():
    pool = KvPool(8)
    a, b = request("a", range(5), 5), request("b", range(9, 14), 5)
    assert pool.admit(a, 5)
    assert pool.admit(b, 5)
    b.blocks = list(a.blocks)
    with pytest.raises(AssertionError, match="block"):
        pool.check([a, b])


operations = st.lists(
    st.tuples(st.sampled_from(["admit", "grow", "free"]), st.integers(0, 5), st.integers(1, 40)),
    max_size=60,
)


@settings(deadline=None)
@given(
    operations=operations,
    prompts=st.lists(st.integers(1, 70), min_size=6, max_size=6),
    n_blocks=st.integers(1, 12),
    alphabet=st.integers(1, 3),
)
def test_no_order_of_operations_leaks_or_shares_by_mistake(operations, prompts, n_blocks, alphabet):
    pool = KvPool(n_blocks)
    # Few distinct tokens make prefixes collide, which is where sharing could go wrong.
    requests = [
        request(f"r{i}", [t % alphabet for t in range(n)], 9) for i, n in enumerate(prompts)
    ]
    inside: list[Request] = []
    for name, which, n_tokens in operations:
        req = requests[which]
        if name == "admit" and req not in inside:
            n_tokens = min(n_tokens, req.n_tokens - pool.cached_tokens(req))
            needed = pool.missing_to_admit(req, n_tokens)
            had = pool.n_free
            fits = pool.admit(req, n_tokens)
            assert fits == (needed <= had)
            assert pool.n_free == (had - needed if fits else had)
            if fits:
                inside.append(req)
                compute(pool, req, n_tokens)
        elif name == "grow" and req in inside and req.n_remaining:
            n_tokens = min(n_tokens, req.n_remaining)
            if pool.grow(req, n_tokens):
                compute(pool, req, n_tokens)
        elif name == "free" and req in inside:
            pool.free(req)
            inside.remove(req)
        pool.check(inside)
        for a in inside:
            for b in inside:
                for i in set(range(len(a.blocks))) & set(range(len(b.blocks))):
                    if a is not b and a.blocks[i] == b.blocks[i]:
                        assert a.tokens[: 16 * (i + 1)] == b.tokens[: 16 * (i + 1)]
    for req in inside:
        pool.free(req)
    pool.check([])
    assert pool.n_free == n_blocks


def test_a_reset_forgets_every_prefix_and_takes_nothing_from_who_holds_it():
    pool = KvPool(20)
    a = resident(pool, request("a", range(48), 5))
    gone = resident(pool, request("gone", range(100, 148), 5))
    pool.free(gone)
    assert pool.cached_tokens(again := request("again", range(100, 150), 5)) == 48
    assert pool.clear_prefix_cache() == 6
    assert pool.cached_tokens(again) == 0
    assert pool.cached_tokens(request("b", range(50), 5)) == 0
    assert len(a.blocks) == 3
    pool.check([a])
    compute(pool, a, 0)
    pool.free(a)
    assert pool.n_free == 20
    pool.check([])
    assert pool.clear_prefix_cache() == 0


def test_where_there_is_plenty_an_answer_grows_by_blocks_that_lie_together():
    """A sixteenth of what is free, shared by all who grow, and never more than eight each."""
    pool = KvPool(4096)
    crowd = [request(f"r{i}", [i], 600) for i in range(64)]
    for req in crowd:
        assert pool.admit(req, 1)
    a, b = crowd[:2]
    assert pool.extend([a, b])
    for req in (a, b):
        grown = req.blocks[1:]
        assert len(grown) == 8
        assert grown == list(range(grown[0], grown[0] + 8))
    assert pool.extend(crowd)  # 4 016 are free: 251 for 64
    assert [len(req.blocks) for req in crowd] == [12, 12] + [4] * 62
    pool.check(crowd)


def test_where_memory_is_short_an_answer_grows_by_one_block():
    pool = KvPool(40)
    a, b = request("a", [1], 600), request("b", [2], 600)
    assert pool.admit(a, 1)
    assert pool.admit(b, 1)
    while pool.extend([a, b]):
        pool.check([a, b])
    assert (len(a.blocks), len(b.blocks), pool.n_free) == (20, 20, 0)


def test_an_answer_takes_no_block_that_it_can_never_fill():
    """A table of blocks on a GPU is as wide as the longest context, and not a block wider."""
    pool = KvPool(4096)
    a, b = request("a", range(16), 20), request("b", range(16), 200)
    for req in (a, b):
        resident(pool, req)
    assert pool.extend([a, b])
    assert (len(a.blocks), len(b.blocks)) == (3, 9)  # 35 tokens are the most of `a`
    assert (a.n_room, b.n_room) == (48, 144)
    pool.check([a, b])
    assert pool.n_free == 4084


def test_a_preemption_frees_only_blocks_without_another_owner_or_use():
    """`a` and `b` share 2 full blocks, and `a` has 2 of its own; `c` begins with the third block of
    `a`, which a preemption would free and `c` would take at once."""
    pool = KvPool(16)
    shared = list(range(32))
    a = request("a", [*shared, *range(100, 116), 7], 9)
    assert pool.admit(a, 49)
    a.n_computed = 49
    pool.publish(a)
    b = request("b", [*shared, 1, 2], 9)
    assert pool.admit(b, 2)
    other = request("other", [9] * 20, 9)
    assert pool.freed_by(a, other) == 2
    assert pool.freed_by(b, other) == 1
    c = request("c", [*shared, *range(100, 116), 8, 8], 9)
    assert pool.freed_by(a, c) == 1
    assert KvPool(16, prefix_cache=False).freed_by(a, c) == 4
