"""The search of the capacity for a draw of traffic, and paired ratios of capacities."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig.processes import lindley

from loadgen.studies.modes.seed_capacity import (
    FIRST_STEP,
    NEXT_STEP,
    TOLERANCE,
    ModeCapacities,
    Tried,
    capacity_of,
    compare_capacities,
    next_level,
)

TARGET = 0.9


def searched(attainment, start, step=FIRST_STEP, n_due=2000, target=TARGET):
    """All rates tried on a curve from rate to attainment."""
    tried: list[Tried] = []
    while (level := next_level(tried, target, start, step)) is not None:
        tried.append(Tried(level, n_due, round(n_due * attainment(level))))
    return tried


def logistic(capacity, slope):
    return lambda level: 1 / (1 + (level / capacity) ** slope / 9)


@given(
    st.floats(-3, 3),
    st.floats(2, 60),
    st.sampled_from([FIRST_STEP, NEXT_STEP]),
)
def test_a_search_finds_the_crossing_of_a_falling_curve(log_start, slope, step):
    tried = searched(logistic(7.0, slope), 7.0 * math.exp(log_start), step, n_due=100_000)
    found = capacity_of(tried, TARGET)
    assert found.outcome == "found"
    assert found.value == pytest.approx(7.0, rel=TOLERANCE)


def test_a_search_from_near_the_capacity_takes_few_runs():
    counts = [len(searched(logistic(7.0, 12.0), 7.0 * f, NEXT_STEP)) for f in (0.9, 0.97, 1.04)]
    assert max(counts) <= 6


def test_a_cliff_is_found_to_the_tolerance():
    found = capacity_of(searched(lambda level: float(level < 5.0), 1.0), TARGET)
    assert found.value == pytest.approx(5.0, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("share", "outcome", "end"), [(0.5, "misses", 2.0**-10), (1.0, "at_least", 2.0**10)]
)
def test_a_search_without_both_sides_ends_a_thousandfold_away(share, outcome, end):
    found = capacity_of(searched(lambda _: share, 1.0), TARGET)
    assert found.outcome == outcome
    assert found.value == pytest.approx(end)


def test_a_rate_at_which_nothing_was_due_is_no_success():
    assert capacity_of([Tried(1.0, 0, 0)], TARGET).outcome == "misses"


def test_the_lowest_rate_that_misses_bounds_the_capacity():
    tried = [Tried(1.0, 100, 95), Tried(2.0, 100, 80), Tried(4.0, 100, 95)]
    following = next_level(tried, TARGET, 1.0)
    assert following is not None
    assert 1.0 < following < 2.0
    found = capacity_of([*tried, Tried(1.99, 100, 95)], TARGET)
    assert (found.outcome, 1.99 < found.value < 2.0) == ("found", True)


def test_a_server_twice_as_fast_with_half_the_limit_has_twice_the_capacity():
    """In units of a service time both are the same queue, so each draw's capacity doubles."""
    by_mode: dict[str, dict[int, float]] = {"fast": {}, "slow": {}}
    for seed in range(6):
        rng = np.random.default_rng(seed)
        gaps, work_s = rng.standard_exponential(1500), rng.standard_exponential(1500)
        for mode, speed in (("fast", 2.0), ("slow", 1.0)):

            def attainment(level, speed=speed, gaps=gaps, work_s=work_s):
                return np.mean(lindley(work_s / speed, gaps[1:] / level) <= 3.0 / speed)

            tried = searched(attainment, 0.4, n_due=1500)
            by_mode[mode][seed] = capacity_of(tried, TARGET).value
    (row,) = compare_capacities(by_mode, 0.95).ratios
    assert (row.best, row.mode) == ("fast", "slow")
    assert row.value == pytest.approx(2.0, rel=TOLERANCE)
    assert row.low is not None
    assert row.high is not None
    assert row.low <= 2.0 * (1 + TOLERANCE)
    assert row.high >= 2.0 * (1 - TOLERANCE)
    assert row.high - row.low < 0.05  # own intervals are ten times as wide


def test_ratios_are_paired_by_seed():
    """Ratios 2, 2 and 2 · e^±0.1 have the mean log ln 2 and s = 0.1 / √(3 / 2); t(0.975, 3) =
    3.182446, so the bounds are factors e^(3.182446 · 0.0816497 / 2) = 1.138746 away."""
    slow = {1: 1.0, 2: 5.0, 3: 25.0, 4: 3.0}
    factors = (2.0, 2.0, 2.0 * math.exp(0.1), 2.0 * math.exp(-0.1))
    fast = {seed: factor * slow[seed] for seed, factor in zip(slow, factors, strict=True)}
    found = compare_capacities({"slow": slow, "fast": fast}, 0.95)
    assert [row.mode for row in found.modes] == ["fast", "slow"]
    (row,) = found.ratios
    assert row.n == 4
    assert row.value == pytest.approx(2.0)
    assert row.low == pytest.approx(2.0 / 1.138746, rel=1e-5)
    assert row.high == pytest.approx(2.0 * 1.138746, rel=1e-5)


def test_intervals_around_a_chosen_best_hold_together():
    """Three modes have three pairs: t(1 − 0.05 / 6, 3) = 4.856656 in place of 3.182446."""
    slow = {1: 1.0, 2: 5.0, 3: 25.0, 4: 3.0}
    factors = (2.0, 2.0, 2.0 * math.exp(0.1), 2.0 * math.exp(-0.1))
    fast = {seed: factor * slow[seed] for seed, factor in zip(slow, factors, strict=True)}
    slower = {seed: value / 2 for seed, value in slow.items()}
    found = compare_capacities({"slow": slow, "fast": fast, "slower": slower}, 0.95)
    row = found.ratios[0]
    assert row.mode == "slow"
    assert row.high is not None
    assert math.log(row.high / 2.0) == pytest.approx(4.856656 * 0.0816497 / 2, rel=1e-4)


def test_seeds_of_one_mode_alone_are_not_paired():
    found = compare_capacities({"a": {1: 4.0, 2: 4.0, 3: 9.0}, "b": {1: 2.0, 2: 2.0}}, 0.95)
    (row,) = found.ratios
    assert row.n == 2
    assert [row.value, row.low] == pytest.approx([2.0, 2.0])


def test_nothing_found_gives_no_ratio():
    assert compare_capacities({}, 0.95) == ModeCapacities(modes=[], ratios=[])
