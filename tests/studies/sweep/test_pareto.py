"""The front of noisy trade-offs, against brute force and by what it promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.measure.statistics.intervals import Interval
from loadgen.studies.sweep.pareto import (
    Quantity,
    Standing,
    TradeOff,
    beats,
    is_above,
    pareto_front,
)

NUMBERS = st.integers(0, 12).map(float)  # few, so that ties are common


@st.composite
def quantities(draw):
    """With an interval and without runs, or the other way round."""
    if draw(st.booleans()):
        low, value, high = sorted(draw(st.tuples(NUMBERS, NUMBERS, NUMBERS)))
        return Quantity(Interval(value, low, high))
    runs = draw(st.lists(NUMBERS, min_size=1, max_size=4))
    return Quantity(Interval(sum(runs) / len(runs)), dict(enumerate(runs, start=1)))


def surely(value, low=None, high=None):
    return Quantity(Interval(value, low, high))


def exact(benefit, cost):
    return TradeOff(surely(benefit), surely(cost))


EXACT = st.builds(exact, NUMBERS, NUMBERS | st.just(math.inf))
NOISY = st.builds(TradeOff, quantities(), quantities() | st.just(surely(math.inf)))


@given(st.lists(EXACT, max_size=12))
def test_without_noise_it_is_the_ordinary_front(points):
    def dominated(p):
        return any(
            q.benefit.value >= p.benefit.value
            and q.cost.value <= p.cost.value
            and (q.benefit.value, q.cost.value) != (p.benefit.value, p.cost.value)
            for q in points
        )

    assert [s.is_front for s in pareto_front(points, 0.95)] == [not dominated(p) for p in points]


@given(st.lists(NOISY, min_size=1, max_size=8))
def test_somebody_is_always_on_the_front_and_the_others_name_who_beats_them(points):
    found = pareto_front(points, 0.95)
    assert any(s.is_front for s in found)
    for standing, point in zip(found, points, strict=True):
        assert standing.is_front == (standing.beaten_by is None)
        if standing.beaten_by is not None:
            by = points[standing.beaten_by]
            # Its estimate may still be the lower one: of other runs than the shared ones.
            assert (
                by.benefit.value > point.benefit.value
                or by.cost.value < point.cost.value
                or beats(by, point, 0.95)
            )


@given(st.lists(NOISY, min_size=1, max_size=8))
def test_no_point_of_the_front_beats_another_unless_all_are_beaten(points):
    on_front = [p for p, s in zip(points, pareto_front(points, 0.95), strict=True) if s.is_front]
    if any(not any(beats(q, p, 0.95) for q in points) for p in points):
        assert not any(beats(q, p, 0.95) for p in on_front for q in on_front)


@given(NOISY, NOISY)
def test_two_points_never_beat_each_other(one, other):
    assert not (beats(one, other, 0.95) and beats(other, one, 0.95))
    assert not beats(one, one, 0.95)


def test_equal_throughput_and_surely_slower_is_beaten():
    # The same load was offered to both: the throughput differs by chance, the latency does not.
    a = TradeOff(surely(80.02, 79.5, 80.6), surely(0.100, 0.095, 0.105))
    b = TradeOff(surely(80.05, 79.4, 80.7), surely(0.300, 0.29, 0.31))
    assert pareto_front([a, b], 0.95) == [Standing(True), Standing(False, beaten_by=0)]


def test_what_may_be_as_good_stays():
    a = TradeOff(surely(80.0, 79.0, 81.0), surely(0.10, 0.05, 0.15))
    b = TradeOff(surely(79.5, 78.5, 80.5), surely(0.14, 0.09, 0.19))
    assert [s.is_front for s in pareto_front([a, b], 0.95)] == [True, True]


def test_runs_of_one_seed_are_compared_with_each_other():
    # The seeds differ threefold and the two by a tenth: by their intervals nobody could tell.
    one = Quantity(Interval(22.0, -2.0, 46.0), {1: 11.0, 2: 22.2, 3: 33.0})
    other = Quantity(Interval(20.0, -3.0, 43.0), {1: 10.0, 2: 20.0, 3: 30.0})
    assert is_above(one, other, 0.95)
    assert not is_above(other, one, 0.95)
    only = Quantity(Interval(20.0, -3.0, 43.0), {3: 30.0})
    assert not is_above(one, only, 0.95)


def test_a_ratio_counts_where_there_is_one():
    # Twice as much in each run, from 1 against 2 to 50 against 100: as differences, a wide spread.
    one = Quantity(Interval(40.0), {1: 2.01, 2: 20.0, 3: 100.0})
    half = Quantity(Interval(20.0), {1: 1.0, 2: 10.0, 3: 50.0})
    assert is_above(one, half, 0.95)
    nothing = Quantity(Interval(0.0), {1: 0.0, 2: 0.0, 3: 0.0})
    assert not is_above(one, nothing, 0.95)
    assert is_above(Quantity(Interval(2.0), {1: 1.9, 2: 2.0, 3: 2.1}), nothing, 0.95)


def test_the_confidence_decides_what_is_sure():
    # Differences 1, 2, 3: t = 2 / (1 / sqrt 3) = 3.46 with 2 degrees of freedom, p = 0.074.
    one = Quantity(Interval(2.0), {1: 1.0, 2: 2.0, 3: 3.0})
    zero = Quantity(Interval(0.0), {1: 0.0, 2: 0.0, 3: 0.0})
    assert is_above(one, zero, 0.92)
    assert not is_above(one, zero, 0.93)


def test_a_point_without_values_is_on_no_front_and_beats_nobody():
    found = pareto_front([exact(math.nan, 1.0), exact(1.0, 2.0), exact(1.0, math.nan)], 0.95)
    assert [s.is_front for s in found] == [False, True, False]
    assert [s.beaten_by for s in found] == [None, None, None]


def test_what_failed_is_beaten_by_what_did_not():
    assert not pareto_front([exact(4.0, math.inf), exact(4.0, 1.0)], 0.95)[0].is_front
    failed = Quantity(Interval(math.inf), {1: 0.1, 2: math.inf})
    fine = Quantity(Interval(0.2), {1: 0.2, 2: 0.2})
    assert is_above(failed, fine, 0.95)


def test_where_all_are_beaten_the_estimates_decide():
    # Overlaps are not transitive: a beats b beats c (cheaper), c beats d beats a (more).
    points = [
        TradeOff(surely(1, 1, 1), surely(1, 1, 1)),
        TradeOff(surely(3, 0, 6), surely(2, 2, 2)),
        TradeOff(surely(5, 5, 5), surely(3, 3, 3)),
        TradeOff(surely(2, 2, 2), surely(2.5, 0, 5)),
    ]
    for one, other in ((0, 1), (1, 2), (2, 3), (3, 0)):
        assert beats(points[one], points[other], 0.95), (one, other)
    assert [s.is_front for s in pareto_front(points, 0.95)] == [True, True, True, False]


@pytest.mark.parametrize("points", [[], [exact(math.nan, math.nan)]])
def test_nothing_has_no_front(points):
    assert not any(s.is_front for s in pareto_front(points, 0.95))


@pytest.mark.parametrize(("gap", "low", "high"), [(0.0, 0.03, 0.065), (0.1, 0.95, 1.0)])
def test_equal_cells_are_rarely_beaten_and_worse_ones_are_found(gap, low, high):
    # Seeds differ by 30 %, runs of one seed by 1 %; three runs. An equal cell is surely worse
    # in one of two numbers with 2.5 % each, so beaten in just under 5 % (sd of the share: 0.4 %).
    rng, n_beaten, n_trials = np.random.default_rng(3), 0, 3000
    for seeds in np.exp(rng.normal(0, 0.3, (n_trials, 3))):

        def measured(factor, seeds=seeds):
            noisy = seeds * np.exp(rng.normal(0, 0.01, 3))
            return Quantity(Interval(noisy.mean() * factor), dict(enumerate(noisy * factor)))

        one = TradeOff(measured(1), measured(1))
        other = TradeOff(measured(1), measured(1 + gap))
        n_beaten += beats(one, other, 0.95)
    assert low <= n_beaten / n_trials <= high
