"""Fits recover what made the data, and say how far off they are."""

import os
from pathlib import Path

import numpy as np
import pytest
from scipy import integrate, linalg, stats

from loadgen.errors import TraceFileError
from loadgen.units import parse_duration_s, parse_rate_per_s
from loadgen.workload.fit import (
    copula_correlation,
    fit,
    fit_file,
    fit_lengths,
    ks_distance,
    power_law_exponent,
)
from loadgen.workload.fit_arrivals import (
    DispersionCurve,
    TwoStates,
    fit_arrivals,
    gamma_shape,
    mmpp_log_likelihood,
)
from loadgen.workload.lengths import LENGTHS
from loadgen.workload.renewal import Gamma
from loadgen.workload.scenario import load_scenario
from loadgen.workload.schedule import make_schedule
from loadgen.workload.traces.file import load_trace
from loadgen.workload.traces.trace import TRACES

SAMPLES = Path(__file__).parent.parent / "golden" / "traces"
SHARED = Path(os.environ.get("SLOBENCH_SHARED", "../shared")) / "traces"


def length_spec(tokens):
    """The proposed distribution, which is not a bare number."""
    spec = fit_lengths(tokens).spec
    assert not isinstance(spec, int)
    return spec


def rng(seed=1):
    return np.random.Generator(np.random.PCG64(seed))


def mmpp_times(n, rates, stays, seed=1):
    """A two-state MMPP drawn the plain way: one exponential race after the other."""
    draw, state, now = rng(seed), 0, 0.0
    times: list[float] = []
    while len(times) < n:
        to_arrival = draw.exponential(1 / rates[state])
        to_change = draw.exponential(stays[state])
        now += min(to_arrival, to_change)
        if to_arrival < to_change:
            times.append(now)
        else:
            state = 1 - state
    return np.array(times) - times[0]


# ------------------------------------------------------------------------------------- arrivals


@pytest.mark.parametrize("cv", [0.4, 1.8, 3.0])
def test_gamma_arrivals_are_found_with_their_cv(cv):
    # standard error of the ML shape at n = 4000 is below 3 %, of cv below 1.5 %; 5 % are accepted
    gaps = rng().gamma(cv**-2, cv**2 / 20.0, 4000)
    found = fit_arrivals(np.concatenate([[0.0], np.cumsum(gaps)]))
    assert found.spec["kind"] == "gamma"
    assert found.spec["cv"] == pytest.approx(cv, rel=0.05)
    # the mean of n gaps has relative deviation cv/√n, at most 4.8 %; 4 sigma
    assert parse_rate_per_s(found.spec["rate"]) == pytest.approx(20, rel=4 * cv / 4000**0.5)


def test_poisson_arrivals_are_not_made_more_of():
    found = fit_arrivals(np.cumsum(rng().exponential(0.1, 5000), dtype=np.float64))
    assert found.spec["kind"] == "poisson"
    assert found.distance["poisson"] < 0.2


def test_equal_gaps_are_constant():
    assert fit_arrivals(np.linspace(0.0, 24.75, 100)).spec == {"kind": "constant", "rate": "4/s"}


def test_requests_around_a_lattice_are_constant_with_their_jitter_in_a_note():
    """Uniform jitter of ±100 ms has a standard deviation of 57.7 ms."""
    times_s = 0.5 * np.arange(2000) + rng().uniform(-0.1, 0.1, 2000) + 0.1
    found = fit_arrivals(times_s - times_s[0])
    assert found.spec["kind"] == "constant"
    assert parse_rate_per_s(found.spec["rate"]) == pytest.approx(2.0, rel=1e-3)
    (note,) = found.notes
    assert note.startswith("a request every 0.5s, with a jitter of 5")
    assert found.has_fit


def test_regular_gaps_whose_errors_build_up_are_gamma():
    found = fit_arrivals(np.cumsum(rng().gamma(100.0, 0.01, 3000)))
    assert found.spec["kind"] == "gamma"
    assert found.spec["cv"] == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("n_batches", [60, 1000])
@pytest.mark.parametrize("step_s", [1e-6, 1.0])
def test_batches_every_three_seconds_are_found_with_their_sizes(n_batches, step_s):
    """Sizes 2 and 14 at odds of 3 to 1: mean 5, variance 27, so a dispersion of 5.4 to 6 in long
    windows; the instants are in milliseconds or in whole seconds."""
    sizes = rng().permutation(np.tile([2, 2, 2, 14], n_batches // 4))
    times_s = np.repeat(3.0 * np.arange(len(sizes)), sizes)
    if step_s < 1:
        times_s = np.sort(times_s + rng().uniform(0.0, 1e-3, len(times_s)))
    found = fit_arrivals(times_s - times_s[0])
    assert found.spec["kind"] == "batch"
    assert found.spec["instants"] == "constant"
    assert found.spec["size"]["values"] == [2, 14]
    assert np.divide(*found.spec["size"]["weights"]) == pytest.approx(3.0)
    assert found.distance["batch, constant"] < 0.2 < found.distance["batch"]
    assert found.has_fit


def test_batches_at_random_instants_are_found():
    """Batches of 6 every 3 s on average have a dispersion of 6 in every window."""
    instants = np.cumsum(rng().exponential(3.0, 1000))
    found = fit_arrivals(np.repeat(instants - instants[0], 6))
    assert found.spec == {"kind": "batch", "rate": found.spec["rate"], "size": 6}
    assert parse_rate_per_s(found.spec["rate"]) == pytest.approx(2.0, rel=0.12)
    assert found.distance["batch"] < 0.2
    assert found.has_fit


def test_what_none_fits_is_to_be_replayed():
    """Batches that alternate between 1 and 20 requests every 5 s, in pairs 0.5 s apart: no
    candidate has this rhythm."""
    starts = 5.0 * np.arange(400)
    times_s = np.sort(np.concatenate([np.repeat(starts, 3), starts + 0.1, starts[::2] + 2.0]))
    times_s += rng().uniform(0.0, 0.02, len(times_s))
    found = fit_arrivals(np.sort(times_s) - times_s.min())
    assert min(found.distance.values()) > 0.2
    assert not found.has_fit


@pytest.mark.slow
@pytest.mark.parametrize("n", [30, 100, 500])
@pytest.mark.parametrize("cv", [1.0, 0.5, 2.0])
def test_poisson_and_gamma_always_fit(n, cv):
    """20 seeds each. At n = 30 their own curve is known to 30 %, so the distance alone would reject
    them."""
    for seed in range(20):
        gaps = rng(seed).gamma(cv**-2, cv**2, n)
        found = fit_arrivals(np.concatenate([[0.0], np.cumsum(gaps)]))
        assert found.has_fit, (seed, found)


def test_an_mmpp_is_found_with_its_rates_and_stays():
    # some 90 stays in each state: their means are known to 11 %; asked within 40 %
    times_s = mmpp_times(12_000, rates=(40.0, 5.0), stays=(3.0, 6.0))
    found = fit_arrivals(times_s)
    assert found.spec["kind"] == "mmpp"
    busy, calm = found.spec["states"]
    assert calm["weight_rate"] / busy["weight_rate"] == pytest.approx(5 / 40, rel=0.2)
    assert parse_duration_s(busy["mean_stay"]) == pytest.approx(3, rel=0.4)
    assert parse_duration_s(calm["mean_stay"]) == pytest.approx(6, rel=0.4)
    assert found.distance["mmpp"] < 0.2 < found.distance["poisson"]


def test_rounded_instants_do_not_look_like_bursts():
    times_s = np.floor(np.cumsum(rng().exponential(0.2, 4000), dtype=np.float64))
    found = fit_arrivals(times_s - times_s[0])
    assert found.spec["kind"] == "poisson"
    assert found.notes == (
        "instants are rounded to 1s, with ties; spread evenly over that interval",
    )


def test_the_gamma_shape_is_scipys():
    gaps = rng().gamma(0.3, 2.0, 3000)
    expected, _, _ = stats.gamma.fit(gaps, floc=0)
    assert gamma_shape(gaps[None, :]) == pytest.approx(expected, rel=1e-6)


def test_the_mmpp_likelihood_is_the_product_of_matrix_exponentials():
    rates, leaving = np.diag([4.0, 0.5]), np.array([[-0.3, 0.3], [0.7, -0.7]])
    gaps = rng().exponential(0.5, 7)
    state = np.array([0.7, 0.3]) @ rates  # π ∝ (σ₂, σ₁), just after an arrival
    state /= state.sum()
    for gap in gaps:
        state = state @ linalg.expm((leaving - rates) * gap) @ rates
    parameters = np.array([4.0, 0.5, 0.3, 0.7])
    assert mmpp_log_likelihood(gaps[None, :], parameters) == pytest.approx(np.log(state.sum()))
    twice = mmpp_log_likelihood(np.stack([gaps, gaps]), parameters)
    assert twice == pytest.approx(2 * np.log(state.sum()))


def test_the_dispersion_curve_is_the_integral_of_the_rates_autocovariance():
    states = TwoStates((8.0, 2.0), (0.5, 0.25))
    mean, variance = 4.0, 8.0  # a third of the time at 8/s, two thirds at 2/s

    curve = DispersionCurve(np.array([3.0]), np.ones(1), np.ones(1))
    covariance, _ = integrate.dblquad(
        lambda u, v: variance * np.exp(-0.75 * abs(u - v)), 0, 3, 0, 3, epsabs=1e-4
    )
    (found,) = states.dispersion(curve)
    assert found == pytest.approx(1 + covariance / (mean * 3), rel=1e-3)


# -------------------------------------------------------------------------------------- lengths


def test_a_lognormal_is_found():
    tokens = np.clip(np.rint(rng().lognormal(np.log(220), 0.9, 20_000)), 1, None).astype(np.uint32)
    spec = length_spec(tokens)
    assert spec["kind"] == "lognormal"
    assert spec["median"] == pytest.approx(220, rel=0.03)
    assert spec["sigma"] == pytest.approx(0.9, rel=0.03)


def test_a_power_law_is_found_with_its_exponent():
    weights = np.arange(8, 1025, dtype=float) ** -1.8
    tokens = rng().choice(np.arange(8, 1025), 20_000, p=weights / weights.sum()).astype(np.uint32)
    spec = length_spec(tokens)
    assert (spec["kind"], spec["min"]) == ("power_law", 8)
    assert spec["alpha"] == pytest.approx(1.8, abs=0.04)  # 4 standard errors


def test_a_power_law_exponent_maximises_the_likelihood():
    tokens = np.array([1, 1, 1, 2, 3, 5, 9], np.uint32)
    logs = np.log(np.arange(1, 10))
    grid = np.linspace(0.2, 3, 2801)
    likelihood = [-a * np.log(tokens).sum() - 7 * np.log(np.exp(-a * logs).sum()) for a in grid]
    assert power_law_exponent(tokens) == pytest.approx(grid[int(np.argmax(likelihood))], abs=2e-3)


def test_what_is_no_law_stays_as_observed():
    tokens = np.concatenate([rng().integers(10, 20, 5000), rng().integers(900, 950, 5000)])
    found = fit_lengths(tokens.astype(np.uint32))
    assert length_spec(tokens.astype(np.uint32))["kind"] == "empirical"
    assert found.distance["empirical"] < 0.02 < 0.05 < found.distance["lognormal"]
    assert fit_lengths(np.full(50, 64, np.uint32)).spec == 64


def test_the_ks_distance_is_scipys():
    tokens = rng().integers(1, 40, 300).astype(np.uint32)
    law = LENGTHS.build({"kind": "uniform", "min": 3, "max": 50})
    expected = max(abs(np.mean(tokens <= x) - stats.randint.cdf(x, 3, 51)) for x in range(60))
    assert ks_distance(tokens, law) == pytest.approx(expected)


@pytest.mark.parametrize("rho", [-0.6, 0.0, 0.8])
def test_the_copulas_correlation_is_recovered(rho):
    # standard error at n = 20 000 is below 0.008; 4 of them
    normal = rng().multivariate_normal([0, 0], [[1, rho], [rho, 1]], 20_000)
    tokens = np.rint(np.exp(5 + normal)).astype(np.uint32)
    assert copula_correlation(tokens[:, 0], tokens[:, 1]) == pytest.approx(rho, abs=0.032)


# ------------------------------------------------------------------------------- the whole thing


@pytest.fixture
def recorded(tmp_path):
    """A trace file of gamma arrivals and lognormal, correlated lengths."""
    n, draw = 3000, rng(5)
    gaps = draw.gamma(0.25, 4 / 10.0, n)
    normal = draw.multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]], n)
    tokens = np.maximum(np.rint(np.exp(5 + 0.7 * normal)), 1).astype(int)
    rows = [f"{t:.6f},{i},{o}" for t, (i, o) in zip(np.cumsum(gaps), tokens, strict=True)]
    path = tmp_path / "my trace.csv"
    path.write_text("\n".join(["when,asked,answered", *rows]))
    return path


def test_a_fitted_file_gives_a_scenario_that_loads_and_looks_like_it(recorded, tmp_path):
    kind = {"kind": "columns", "time": "when", "input_tokens": "asked", "output_tokens": "answered"}
    text, facts = fit_file(recorded, TRACES.build(kind))
    path = tmp_path / "fitted.yaml"
    path.write_text(text)
    scenario = load_scenario(path)
    assert text.splitlines()[0].startswith("# Fitted to my trace.csv: 3000 requests in ")
    assert scenario.name == "my_trace_fit"
    assert isinstance(scenario.arrivals, Gamma)
    assert scenario.requests is not None
    assert scenario.arrivals.cv == pytest.approx(2, rel=0.1)
    assert scenario.requests.correlation == pytest.approx(0.5, abs=0.06)
    rows = make_schedule(scenario)
    assert np.median(rows["input_tokens"]) == pytest.approx(np.exp(5), rel=0.1)
    assert facts["n"] == 3000
    assert facts["arrivals"]["trace"]["gap_cv"] == pytest.approx(2, rel=0.15)
    assert facts["arrivals"]["fit"]["gap_cv"] == pytest.approx(2, rel=0.15)
    assert facts["chosen"] == "gamma"
    assert facts["has_fit"]


def test_a_trace_that_none_fits_comes_with_the_lines_that_replay_it(tmp_path):
    starts = 5.0 * np.arange(200)
    times_s = np.sort(np.concatenate([np.repeat(starts, 3), starts + 0.1, starts[::2] + 2.0]))
    path = tmp_path / "odd.csv"
    rows = [f"{t + 0.001 * (i % 7):.3f},10,20" for i, t in enumerate(times_s)]
    path.write_text("\n".join(["time,input_tokens,output_tokens", *rows]))
    kind = {"kind": "columns", "time": "time"}
    kind |= {"input_tokens": "input_tokens", "output_tokens": "output_tokens"}
    _, facts = fit_file(path, TRACES.build(kind))
    assert facts["has_fit"] is False
    (note,) = [note for note in facts["notes"] if note.startswith("none fits: replay it")]
    assert f'{{kind: trace, path: "{path}"}}' in note


def test_a_trace_without_times_or_rows_enough():
    with pytest.raises(TraceFileError, match="5 requests are too few; a fit needs 20"):
        fit(load_trace(SAMPLES / "mooncake.jsonl"))


def test_the_real_azure_hour_keeps_its_burstiness():
    path = SHARED / "AzureLLMInferenceTrace_code.csv"
    if not path.exists():
        pytest.skip(f"{path} is not there (set SLOBENCH_SHARED to the folder that holds traces/)")
    facts = fit(load_trace(path)).facts
    trace, fitted = facts["arrivals"]["trace"], facts["arrivals"]["fit"]
    assert trace["dispersion"] > 20
    assert fitted["dispersion"] == pytest.approx(trace["dispersion"], rel=0.35)
    assert fitted["dispersion_100"] == pytest.approx(trace["dispersion_100"], rel=0.5)
    assert any("the rate changes" in note for note in facts["notes"])
