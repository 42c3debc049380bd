"""Arrival processes against closed forms and scipy. Seeds are fixed; statistical bounds state the
false-alarm rate they were sized for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import stats

from loadgen.measure.statistics.time_series import describe_arrivals
from loadgen.workload.arrivals import ARRIVALS
from loadgen.workload.layout import Purpose, RandomStreams
from loadgen.workload.scenario import scenario_from_flags
from loadgen.workload.schedule import make_schedule, merge, split
from tests import strategies


def generator(seed):
    return np.random.Generator(np.random.PCG64(seed))


def poisson_of_1e5():
    """About 1e5 arrivals over 20 000 windows of 1 s."""
    return ARRIVALS.build({"kind": "poisson", "rate": "5/s"}).times(generator(20240607), 20_000.0)


@given(strategies.arrivals, st.integers(0, 2**32), st.floats(0, 1000))
def test_instants_are_sorted_and_inside_the_window(spec, seed, mean_count):
    process = ARRIVALS.build(spec)
    horizon_s = mean_count / process.mean_rate_per_s(1.0)
    times = process.times(generator(seed), horizon_s)
    assert times.dtype == np.float64
    assert np.all(np.diff(times) >= 0)
    assert np.all((times >= 0) & (times < horizon_s))


@given(strategies.arrivals, st.integers(0, 2**32), st.floats(1, 300), st.floats(1, 10))
def test_a_longer_window_only_adds_arrivals(spec, seed, mean_count, factor):
    process = ARRIVALS.build(spec)
    short_s = mean_count / process.mean_rate_per_s(1.0)
    short = process.times(generator(seed), short_s)
    long = process.times(generator(seed), short_s * factor)
    assert np.array_equal(long[: len(short)], short)
    assert np.all(long[len(short) :] >= short_s)


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "mmpp", "rate": "20/s"}
        | {"states": [{"weight_rate": w, "mean_stay": "3s"} for w in (1, 6)]},
        {"kind": "hawkes", "rate": "20/s", "branching": 0.5, "decay": "1s"},
        {"kind": "batch", "rate": "20/s", "size": 4},
        {"kind": "diurnal", "rate": "20/s", "peak_to_trough": 3, "period": "60s"},
    ],
    ids=lambda spec: spec["kind"],
)
def test_the_merged_schedule_of_all_shards_is_the_process(spec):
    scenario = scenario_from_flags(
        rate="1/s", input_len=10, output_len=10, duration="100s", overrides={"arrivals": spec}
    )
    schedule = make_schedule(scenario)
    for n_shards in (2, 7):
        merged = merge(split(schedule, n_shards)[::-1])
        assert merged.tobytes() == schedule.tobytes()
    drawn = ARRIVALS.build(spec).times(RandomStreams(0).stream(Purpose.arrivals), 100.0)
    assert np.array_equal(schedule["scheduled_s"], drawn)


def test_poisson_counts_have_dispersion_one():
    # var/mean of 20 000 Poisson counts has standard deviation sqrt(2/20 000) = 0.01: 3 sigma
    counts, _ = np.histogram(poisson_of_1e5(), 20_000, (0.0, 20_000.0))
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.03)


def test_poisson_gaps_are_uncorrelated():
    # rho_1 of 1e5 independent gaps has standard deviation 0.003: 0.01 is 3 sigma
    gaps_s = np.diff(poisson_of_1e5())
    assert abs(np.corrcoef(gaps_s[:-1], gaps_s[1:])[0, 1]) < 0.01


def test_poisson_gaps_are_exponential():
    gaps_s = np.diff(poisson_of_1e5())
    assert stats.kstest(gaps_s, stats.expon(scale=0.2).cdf).pvalue > 0.01


def test_poisson_instants_are_uniform_over_the_window():
    assert stats.kstest(poisson_of_1e5(), stats.uniform(0, 20_000).cdf).pvalue > 0.01


def test_poisson_instants_lie_on_no_lattice():
    # rounding to ms or to seconds would show in the fractional part
    times = poisson_of_1e5()
    for step_s in (1.0, 1e-2, 1e-3):
        assert stats.kstest(times / step_s % 1.0, "uniform").pvalue > 0.01
    assert len(np.unique(times)) == len(times)


@pytest.mark.parametrize("cv", [0.3, 0.8, 1.0, 1.8, 3.0])
def test_gamma_gaps_have_the_asked_law(cv):
    times = ARRIVALS.build({"kind": "gamma", "rate": "5/s", "cv": cv}).times(
        generator(77), 20_000.0
    )
    gaps_s = np.diff(times)
    law = stats.gamma(1 / cv**2, scale=cv**2 / 5)
    # instants near 1e4 s resolve 2e-12 s, and at cv 3 one gap in 25 is shorter: compare above 1 ns
    above = law.cdf(1e-9)
    seen_s = gaps_s[gaps_s > 1e-9]
    assert len(seen_s) / len(gaps_s) == pytest.approx(1 - above, abs=0.005)
    # p > 0.01: five draws at fixed seeds, 5 % that a right generator would have failed at one
    assert stats.kstest(seen_s, lambda x: (law.cdf(x) - above) / (1 - above)).pvalue > 0.01
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.03)
    assert abs(np.corrcoef(gaps_s[:-1], gaps_s[1:])[0, 1]) < 0.012


def test_gamma_counts_disperse_to_cv_squared_over_long_windows():
    times = ARRIVALS.build({"kind": "gamma", "rate": "50/s", "cv": 2.0}).times(
        generator(5), 20_000.0
    )
    counts, _ = np.histogram(times, 2_000, (0.0, 20_000.0))  # 500 arrivals each
    # relative standard deviation sqrt(2/2000) = 3 %, three of them
    assert counts.var() / counts.mean() == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "constant", "rate": "3/s"},
        {"kind": "poisson", "rate": "3/s"},
        {"kind": "gamma", "rate": "3/s", "cv": 3.0},
        {"kind": "gamma", "rate": "3/s", "cv": 0.4},
        {"kind": "weibull", "rate": "3/s", "shape": 0.5},
        {"kind": "weibull", "rate": "3/s", "shape": 3.0},
        {"kind": "on_off", "rate": "3/s", "on": "1s", "off": "4s"},
        {"kind": "on_off", "rate": "3/s", "on": "1s", "off": "4s"}
        | {"sojourn": "pareto", "alpha": 1.5},
        {"kind": "mmpp", "rate": "3/s"}
        | {
            "states": [
                {"weight_rate": 1, "mean_stay": "5s"},
                {"weight_rate": 9, "mean_stay": "1s"},
                {"weight_rate": 0, "mean_stay": "2s"},
            ]
        },
        {"kind": "hawkes", "rate": "3/s", "branching": 0.8, "decay": "2s"},
        {"kind": "batch", "rate": "3/s", "size": {"kind": "uniform", "min": 1, "max": 7}},
        {
            "kind": "sum",
            "of": [{"kind": "constant", "rate": "1/s"}, {"kind": "poisson", "rate": "2/s"}],
        },
    ],
    ids=lambda spec: spec["kind"],
)
def test_the_mean_count_is_rate_times_time_even_for_a_short_window(spec):
    # 2.5 arrivals expected. Starting with a whole gap instead of its residual, gamma with cv 3
    # would give about (cv² − 1)/2 = 4 more; hawkes without a past would give a fifth at first.
    process = ARRIVALS.build(spec)
    assert process.mean_rate_per_s(2.5 / 3) == pytest.approx(3.0, rel=1e-15)
    rng = generator(11)
    counts = [len(process.times(rng, 2.5 / 3)) for _ in range(1000)]
    standard_error = np.std(counts) / np.sqrt(1000)
    assert abs(np.mean(counts) - 2.5) < 3.3 * standard_error  # false alarm 1 in 1000


@pytest.mark.parametrize("shape", [0.5, 1.0, 2.5])
def test_weibull_gaps_have_the_asked_law(shape):
    times = ARRIVALS.build({"kind": "weibull", "rate": "5/s", "shape": shape}).times(
        generator(78), 20_000.0
    )
    gaps_s = np.diff(times)
    law = stats.weibull_min(shape, scale=0.2 / stats.weibull_min(shape).mean())
    # p > 0.01: three draws at fixed seeds, 3 % that a right generator would have failed at one
    assert stats.kstest(gaps_s, law.cdf).pvalue > 0.01
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(law.std() / law.mean(), rel=0.03)
    assert abs(np.corrcoef(gaps_s[:-1], gaps_s[1:])[0, 1]) < 0.012


def test_constant_gaps_do_not_vary():
    times = ARRIVALS.build({"kind": "constant", "rate": "7/s"}).times(generator(3), 10_000.0)
    gaps_s = np.diff(times)
    assert len(times) == 70_000
    assert gaps_s.std() / gaps_s.mean() < 1e-10  # float64 rounding of instants near 1e4 s
    assert times[-1] - times[0] == pytest.approx(69_999 / 7, rel=1e-15)


def test_constant_begins_at_a_random_phase():
    process = ARRIVALS.build({"kind": "constant", "rate": "1/s"})
    rng = generator(8)
    firsts = [process.times(rng, 2.0)[0] for _ in range(500)]
    assert stats.kstest(firsts, "uniform").pvalue > 0.01


def test_a_window_shorter_than_any_gap_may_be_empty():
    process = ARRIVALS.build({"kind": "poisson", "rate": "1/h"})
    assert process.times(generator(1), 1e-3).size == 0


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"kind": "poisson", "rate": 8}, "a rate needs its unit"),
        ({"kind": "gamma", "rate": "8/s", "cv": 0}, "greater than 0"),
        ({"kind": "gamma", "rate": "8/s", "cv": "1.5"}, "valid number"),
        ({"kind": "poisson", "rate": "8/s", "cv": 2}, "unknown key 'cv'"),
    ],
)
def test_parameters_that_cannot_be_meant_are_refused(spec, said):
    with pytest.raises(ValidationError, match=said):
        ARRIVALS.build(spec)


def test_the_description_of_arrivals_knows_a_textbook_sequence():
    seconds = describe_arrivals(np.arange(100.0), 100.0)
    assert seconds["gap_cv"] == 0.0
    assert seconds["dispersion"] == 0.0
    assert seconds["dispersion_window_s"] == 5.0
    assert seconds["gap_lag1"] is None  # gaps that do not vary have no correlation
    assert seconds["peak_in_1s"] == 1


def test_the_description_finds_the_busiest_second_wherever_it_begins():
    times = np.array([0.0, 5.7, 5.9, 6.1, 6.69, 6.71, 9.0])
    assert describe_arrivals(times, 10.0)["peak_in_1s"] == 4
