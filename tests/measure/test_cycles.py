"""Percentiles of a closed loop from independent cycles: coverage where the users of a cycle wait
alike, and no bound where neighbouring cycles are alike, too."""

import math

import numpy as np
import pytest
from scipy import stats as oracle

from loadgen.measure.statistics import cycles
from loadgen.measure.statistics.dependence import Load, Series
from loadgen.measure.statistics.population import of_requests

USERS, CYCLES = 8, 19


def alike(seed, n_cycles=CYCLES, own=0.2):
    """The waits of 8 users: a value of their cycle times a smaller one of their own."""
    rng = np.random.default_rng(seed)
    return np.exp(np.repeat(rng.normal(size=n_cycles), USERS) + own * rng.normal(size=n_cycles * 8))


def test_the_time_is_that_of_batch_means():
    """19 cycles of 8 are 9 batches of 16 or 17 requests; the autocorrelation time is n · Var(batch
    means) / k over p(1 − p), times (t/z)² with 8 degrees of freedom."""
    values = alike(2)
    hits = values <= np.sort(values)[75]
    batches = np.array_split(hits, 9)  # 17, 17, … 16: as close to equal
    found = cycles.bound_times(Series(values), 0.5, CYCLES, 0.95)
    assert found is not None
    spread = np.var([np.mean(batch) for batch in batches], ddof=1)
    t_over_z = oracle.t.ppf(0.975, 8) / oracle.norm.ppf(0.975)
    assert of_requests(values).percentile(0.5, 0.95, CYCLES).n_effective == 152 / found[0]
    assert found[0] == found[1] == pytest.approx(spread / 9 * 152 / 0.25 * t_over_z**2, rel=0.1)


def test_intervals_of_users_that_wait_alike_exist_and_cover():
    true = {0.5: 1.0, 0.9: math.exp(1.2816 * math.hypot(1, 0.2))}
    seen: dict[float, list[tuple[bool, bool]]] = {quantile: [] for quantile in true}
    n_plain = 0
    for seed in range(250):
        population = of_requests(alike(1000 + seed), Load(np.full(USERS * CYCLES, 7.0)))
        n_plain += population.percentile(0.5, 0.95).high is not None
        for quantile, value in true.items():
            found = population.percentile(quantile, 0.95, CYCLES)
            low = 0.0 if found.low is None else found.low
            high = math.inf if found.high is None else found.high
            is_open = found.low is None or found.high is None
            seen[quantile].append((low <= value <= high, is_open))
    assert n_plain < 30
    assert all(np.mean([covered for covered, _ in found]) >= 0.92 for found in seen.values())
    assert np.mean([is_open for _, is_open in seen[0.5]]) < 0.2


def test_a_memory_of_several_cycles_leaves_the_bounds_open():
    """The mean of a wave of four cycles is not known from 19 cycles."""
    n_open = 0
    for seed in range(100):
        rng, wave = np.random.default_rng(seed), np.empty(CYCLES * USERS)
        wave[0] = rng.normal()
        for k in range(1, len(wave)):
            wave[k] = 0.97 * wave[k - 1] + math.sqrt(1 - 0.97**2) * rng.normal()
        n_open += cycles.bound_times(Series(np.exp(wave)), 0.5, CYCLES, 0.95) is None
    assert n_open >= 93


def test_few_cycles_do_not_show_their_dependence():
    series = Series(alike(4, n_cycles=15))
    assert cycles.bound_times(series, 0.5, 15.0, 0.95) is not None
    assert cycles.bound_times(series, 0.5, 14.9, 0.95) is None


def test_equal_values_and_failures_have_no_time_of_their_own():
    assert cycles.bound_times(Series(np.full(152, 0.1)), 0.5, CYCLES, 0.95) is None
    assert cycles.bound_times(Series(np.full(152, math.inf)), 0.9, CYCLES, 0.95) is None
    assert cycles.bound_times(Series(np.empty(0)), 0.5, CYCLES, 0.95) is None


def test_bounds_that_exist_stay():
    """Independent waits of a long run need no cycles."""
    population = of_requests(np.random.default_rng(5).exponential(size=800))
    assert population.percentile(0.5, 0.95, 100) == population.percentile(0.5, 0.95)


def test_below_five_cycles_requests_do_not_count_as_independent():
    population = of_requests(np.random.default_rng(6).exponential(size=32))
    open_, closed = (population.percentile(0.5, 0.95, n) for n in (4.0, 5.0))
    assert (open_.low, open_.high) == (None, None)
    assert closed.low is not None
    assert closed.high is not None
    assert population.percentile(0.5, 0.95) == closed
