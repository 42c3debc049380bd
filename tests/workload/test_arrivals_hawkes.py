"""Self-exciting arrivals against the theory of the exponential Hawkes process."""

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats

from loadgen.errors import ScenarioError
from loadgen.workload.arrivals import ARRIVALS

SPEC = {"kind": "hawkes", "rate": "5/s", "branching": 0.6, "decay": "2s"}
RATE, BRANCHING, BETA = 5.0, 0.6, 0.5  # per second
THETA = BETA * (1 - BRANCHING)
HORIZON_S = 80_000.0


def generator(seed):
    return np.random.Generator(np.random.PCG64(seed))


@pytest.fixture(scope="module")
def instants():
    return ARRIVALS.build(SPEC).times(generator(51), HORIZON_S)


def count_variance(window_s):
    """Of counts, from the covariance density αm(2β − α)/(2(β − α)) · e^{−(β − α)s}, α = branching
    · β (Hawkes 1971, section 3), integrated twice."""
    alpha = BRANCHING * BETA
    density = alpha * RATE * (2 * BETA - alpha) / (2 * (BETA - alpha))
    decayed = THETA * window_s
    twice = density / THETA**2 * (decayed - 1 + np.exp(-decayed))
    return RATE * window_s + 2 * twice, density / THETA**2 * (1 - np.exp(-decayed)) ** 2


def test_the_mean_rate_is_the_asked_one(instants):
    # long-run dispersion 1/(1 − n)² = 6.25: 4 sigma
    assert len(instants) == pytest.approx(400_000, abs=4 * np.sqrt(6.25 * 400_000))


@pytest.mark.parametrize(("window_s", "allowed"), [(1.0, 0.025), (10.0, 0.07), (100.0, 0.23)])
def test_counts_disperse_as_in_theory(instants, window_s, allowed):
    counts, _ = np.histogram(instants, int(HORIZON_S / window_s), (0.0, HORIZON_S))
    variance, _ = count_variance(window_s)
    # over 40 seeds the estimate was off by 0.63 %, 1.7 % and 5.8 % rms: four of those
    assert counts.var() / counts.mean() == pytest.approx(variance / (RATE * window_s), rel=allowed)


@pytest.mark.parametrize("window_s", [1.0, 10.0])
def test_neighbouring_windows_are_correlated_as_in_theory(instants, window_s):
    counts, _ = np.histogram(instants, int(HORIZON_S / window_s), (0.0, HORIZON_S))
    variance, covariance = count_variance(window_s)
    # over 40 seeds the standard deviation was at most 1.4/sqrt(m): four of them
    assert np.corrcoef(counts[:-1], counts[1:])[0, 1] == pytest.approx(
        covariance / variance, abs=6 / np.sqrt(len(counts))
    )


def test_rescaled_by_its_own_intensity_it_is_poisson_of_rate_one(instants):
    # the increments of ∫λ between arrivals are independent exponentials (Ogata 1988, section 3.3);
    # by t = 60 s, thirty times the kernel's length, what came before 0 has no influence
    gaps_s = np.diff(instants)
    excitation, increments = 0.0, np.empty(len(gaps_s))
    base = RATE * (1 - BRANCHING)
    for i, gap_s in enumerate(gaps_s.tolist()):
        excitation += BRANCHING * BETA  # of the arrival at the beginning of the gap
        left = excitation * np.exp(-BETA * gap_s)
        increments[i] = base * gap_s + (excitation - left) / BETA
        excitation = left
    increments = increments[instants[:-1] > 60]
    assert stats.kstest(increments, "expon").pvalue > 0.01
    assert abs(np.corrcoef(increments[:-1], increments[1:])[0, 1]) < 4 / np.sqrt(len(increments))


def test_the_window_opens_in_the_stationary_state():
    # Without a past the first 2 s would see 5 arrivals, not 10, and their variance would
    # lack what came before.
    process, rng = ARRIVALS.build(SPEC), generator(52)
    counts = np.array([len(process.times(rng, 2.0)) for _ in range(3000)])
    variance, _ = count_variance(2.0)
    assert abs(counts.mean() - 10) < 3.3 * np.sqrt(variance / 3000)
    # kurtosis of these counts is 3.6, so the variance is known to sqrt(2.6/3000) = 3 %
    assert counts.var() == pytest.approx(variance, rel=0.11)


def test_without_branching_it_is_poisson():
    times = ARRIVALS.build({**SPEC, "branching": 0}).times(generator(53), 10_000.0)
    assert stats.kstest(np.diff(times), stats.expon(scale=0.2).cdf).pvalue > 0.01


def test_the_instants_lie_on_no_lattice(instants):
    for step_s in (1e-2, 1e-3):
        assert stats.kstest(instants / step_s % 1.0, "uniform").pvalue > 0.01


def test_the_same_seed_gives_the_same_bytes():
    first, second = (ARRIVALS.build(SPEC).times(generator(54), 500.0) for _ in range(2))
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"branching": 1.0}, r"less than or equal to 0\.999"),
        ({"branching": -0.1}, "greater than or equal to 0"),
        ({"decay": "0s"}, "greater than 0"),
        ({"decay": 2}, "a duration needs its unit"),
    ],
)
def test_parameters_that_cannot_be_meant_are_refused(changes, said):
    with pytest.raises(ValidationError, match=said):
        ARRIVALS.build({**SPEC, **changes})


def test_a_memory_beyond_reason_is_refused():
    process = ARRIVALS.build({**SPEC, "branching": 0.999, "decay": "1h"})
    with pytest.raises(ScenarioError, match=r"memory of 3\.6e\+06s.*lower branching or decay"):
        process.times(generator(1), 10.0)
