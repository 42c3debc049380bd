"""Percentiles of the live view: within 0.1 % or half a microsecond of the sorted values."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.live.live_histogram import LiveCounts

durations = st.lists(st.floats(1e-6, 600.0), min_size=1, max_size=60)


@given(st.lists(durations, min_size=1, max_size=5), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_the_nearest_rank_of_all_that_was_added(batches, q):
    counts = LiveCounts()
    for batch in batches:
        counts.add(batch)
    values = sorted(value for batch in batches for value in batch)
    at_least = next(v for k, v in enumerate(values, 1) if k >= q * len(values) - 1e-9)
    assert counts.n == len(values)
    assert counts.quantile(q) == pytest.approx(at_least, rel=1e-3, abs=0.51e-6)


def test_nothing_has_no_quantile_and_what_lies_outside_is_at_the_edge():
    counts = LiveCounts()
    assert math.isnan(counts.quantile(0.5))
    counts.add([])
    assert counts.n == 0
    counts.add([-0.002, 0.0])
    assert counts.quantile(1.0) == pytest.approx(1e-6)
    counts.add([1e9] * 3)
    assert counts.quantile(0.99) == pytest.approx(600.0, rel=1e-3)


@given(st.lists(st.floats(0.0, 900.0), min_size=8, max_size=200))
def test_many_durations_at_once_are_counted_as_one_after_the_other(seconds):
    at_once, in_turn = LiveCounts(), LiveCounts()
    at_once.add(seconds)
    for value_s in seconds:
        in_turn.add([value_s])
    assert at_once.encode() == in_turn.encode()
    assert at_once.quantile(1.0) == in_turn.quantile(1.0)
