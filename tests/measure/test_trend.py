"""A queue's own ups and downs are no trend; overload and a warm-up without end are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import UsageError
from loadgen.measure.attainment import steady_from, with_window
from loadgen.measure.statistics.trend import has_trend, has_wave, reversion, slope_and_error
from tests.runs import measured_run


def response_times(load: float, n: int, seed: int) -> np.ndarray:
    """One M/M/1 queue, by Lindley's recursion; stationary from the start below load 1."""
    rng = np.random.default_rng(seed)
    busy = load < 1 and rng.random() < load
    wait = rng.exponential(1 / (1 - load)) if busy else 0.0
    times = np.empty(n)
    for k in range(n):
        times[k] = wait + rng.exponential()
        wait = max(0.0, times[k] - rng.exponential(1 / load))
    return times


@pytest.mark.parametrize(("load", "n"), [(0.5, 300), (0.7, 1000), (0.9, 300), (0.9, 1000)])
def test_a_stationary_queue_is_seldom_refused(load: float, n: int) -> None:
    """At most 4 % of runs at load 0.9: 15 or more of 200 in less than one case of 100."""
    refused = sum(steady_from(response_times(load, n, seed)) is None for seed in range(200))
    assert refused < 15


def test_a_queue_that_only_grows_is_refused() -> None:
    """99 % of runs of 1 000 requests at load 1.2, four of five of 300."""
    long = sum(steady_from(response_times(1.2, 1000, seed)) is None for seed in range(50))
    short = sum(steady_from(response_times(1.2, 300, seed)) is None for seed in range(50))
    assert long >= 47
    assert short >= 33


def test_a_warm_up_as_long_as_the_run_is_refused() -> None:
    falling = np.linspace(5.0, 0.0, 1000)
    refused = [
        steady_from(np.random.default_rng(seed).exponential(1.0, 1000) + falling) is None
        for seed in range(20)
    ]
    assert all(refused)


def test_a_short_warm_up_is_cut() -> None:
    times = np.random.default_rng(1).exponential(1.0, 1000)
    times[:100] += 20.0
    assert steady_from(times) == 100


@pytest.mark.parametrize(("load", "n"), [(0.7, 1000), (0.9, 300)])
def test_a_busy_stretch_at_the_start_of_a_steady_queue_is_kept(load: float, n: int) -> None:
    """Cut in 8 % of runs; MSER-5 alone cuts 30 to 40 %. 20 or more of 100 in one case of 1 000."""
    cut = sum((steady_from(response_times(load, n, 900 + seed)) or 0) > 0 for seed in range(100))
    assert cut < 20


@pytest.mark.parametrize("n", [0, 1, 19, 20, 1000])
def test_equal_values_have_no_trend(n: int) -> None:
    assert not has_trend(np.full(n, 0.1))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_straight_line_has_a_trend_and_19_values_of_it_have_none(sign: float) -> None:
    assert has_trend(sign * np.arange(20.0))
    assert not has_trend(sign * np.arange(19.0))


def test_a_slope_below_the_noise_of_each_value_is_found_in_many() -> None:
    """Independent noise of 1, a rise of 2 over 1 000 values: batches differ by more than they
    drift."""
    rising = np.random.default_rng(4).normal(0.0, 1.0, 1000) + np.linspace(0.0, 2.0, 1000)
    assert has_trend(rising)
    assert not has_trend(rising - np.linspace(0.0, 2.0, 1000))


@given(st.integers(0, 1000), st.floats(0.01, 100.0), st.floats(-100.0, 100.0))
def test_unit_zero_and_direction_do_not_matter(seed: int, factor: float, zero: float) -> None:
    times = np.random.default_rng(seed).normal(0.0, 1.0, 200).cumsum()
    assert has_trend(times) == has_trend(factor * times + zero) == has_trend(-times)
    assert has_trend(times) == has_trend(times[::-1])


def test_the_reason_of_a_refusal_is_stated() -> None:
    with pytest.raises(UsageError, match=r"too short, with 20 successful requests; 50 are needed"):
        with_window(measured_run(40), "steady")
    run = measured_run()
    run.request_rows["first_token_s"] += 0.1 * run.request_rows["released_s"]
    with pytest.raises(UsageError, match="TTFT does not settle in this run, it has a trend"):
        with_window(run, "steady")


def test_the_return_to_the_mean_by_known_answers():
    """±1 in turn: 100 · 99 · 4 / 100. A line of n steps: 12 / (n + 1)."""
    assert reversion(np.array([-1.0, 1.0] * 50)) == pytest.approx(396)
    assert reversion(np.linspace(0.0, 98.0, 99)) == pytest.approx(12 * 98 / (98 * 100))
    assert reversion(np.full(50, 3.0)) == np.inf
    independent = np.random.default_rng(2).normal(size=4000)
    assert reversion(independent) == pytest.approx(8000, rel=0.1)


def test_the_slope_of_a_line_and_its_error():
    slope, error = slope_and_error(np.linspace(3.0, 22.5, 40))
    assert (slope, error) == pytest.approx((0.5, 0.0), abs=1e-9)
    assert slope_and_error(np.full(9, 2.0)) == (0.0, 1.0)


def arrivals(n, swing, periods, seed):
    """n instants in [0, 1) whose rate follows a sine."""
    rng = np.random.default_rng(seed)
    kept: list[float] = []
    while len(kept) < n:
        at = rng.random()
        if rng.random() * (1 + swing) < 1 + swing * np.sin(2 * np.pi * periods * at):
            kept.append(at)
    return np.array(kept)


def test_one_day_in_the_window_is_found_and_four_days_are_none():
    assert all(has_wave(arrivals(300, 0.5, 1, seed)) for seed in range(20))
    assert sum(has_wave(arrivals(300, 0.5, 4, seed)) for seed in range(40)) <= 3
    assert sum(has_wave(arrivals(300, 0.0, 1, seed)) for seed in range(40)) <= 3
    assert has_wave(np.sqrt(np.linspace(0, 0.999, 300)))  # a ramp from zero
    assert not has_wave(np.linspace(0, 0.999, 300))
    assert not has_wave(np.linspace(0, 0.5, 19))
