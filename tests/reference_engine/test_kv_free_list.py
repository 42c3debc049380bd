"""The free list takes blocks in the order that an ordered dict, moved about, would have."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.state.kv import FreeList

moves = st.lists(
    st.tuples(st.sampled_from(["take", "reuse", "give"]), st.integers(0, 7), st.booleans()),
    max_size=200,
)


def take(free, n=1):
    blank = free.take_blank(n)
    return blank + free.take_cached(n - len(blank))


def test_blank_blocks_go_before_those_with_content_and_the_latest_blank_one_first():
    free = FreeList(3)
    taken = [*take(free, 2), *take(free)]
    free.give(cached=[2], blank=[0, 1])
    assert taken == [0, 1, 2]
    assert list(free) == [1, 0, 2]


def test_an_empty_list_has_nothing_to_take():
    free = FreeList(1)
    take(free)
    with pytest.raises(IndexError):
        take(free)


@settings(deadline=None)
@given(moves=moves)
def test_any_order_of_moves_leaves_what_an_ordered_dict_holds(moves):
    n_blocks = 8
    free, oracle = FreeList(n_blocks), OrderedDict.fromkeys(range(n_blocks))
    owned: list[int] = []
    with_content: set[int] = set()
    for move, which, has_content in moves:
        if move == "take" and oracle:
            n = min(which + 1, len(oracle)) if has_content else 1
            expected = [oracle.popitem(last=False)[0] for _ in range(n)]
            assert take(free, n) == expected
            owned += expected
            with_content -= set(expected)
        elif move == "reuse" and (idle := [b for b in oracle if b in with_content]):
            block = idle[which % len(idle)]
            del oracle[block]
            free.reuse(block)
            owned.append(block)
        elif move == "give" and owned:
            block = owned.pop(which % len(owned))
            if has_content:
                with_content.add(block)
            else:
                with_content.discard(block)
            oracle[block] = None
            if not has_content:
                oracle.move_to_end(block, last=False)
            free.give([block] if has_content else [], [] if has_content else [block])
        assert len(free) == len(oracle)
        assert list(free) == list(oracle)


def test_a_prefix_that_is_asked_for_without_end_takes_no_more_memory():
    free = FreeList(4)
    (block,) = take(free)
    for _ in range(10_000):
        free.give([block], [])
        free.reuse(block)
    assert len(free._cached) < 100
    assert list(free) == [1, 2, 3]
