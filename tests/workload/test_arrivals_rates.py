"""Rates that vary in time, against the rate functions of their definitions, integrated by scipy."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import integrate, stats

from loadgen.workload.arrivals import ARRIVALS
from loadgen.workload.rate_curves import VaryingRate
from tests import strategies

HORIZON_S = 900.0


def straight(points):
    at_s, rates = zip(*points, strict=True)
    return lambda t: np.interp(t, at_s, rates)


# spec → (rate per second at t, instants where it is not smooth)
CASES: dict[str, Any] = {
    "linear ramp": (
        {"kind": "ramp", "from": "0/s", "to": "90/s", "over": "600s"},
        (lambda t: np.where(t < 600, 0.15 * t, 90.0), [600.0]),
    ),
    "exponential ramp": (
        {"kind": "ramp", "from": "80/s", "to": "5/s", "over": "500s", "shape": "exponential"},
        (lambda t: np.where(t < 500, 80.0 * (5 / 80) ** (t / 500), 5.0), [500.0]),
    ),
    "steps": (
        {
            "kind": "steps",
            "levels": [
                {"rate": "20/s", "for": "300s"},
                {"rate": "0/s", "for": "100s"},
                {"rate": "70/s", "for": "1s"},
            ],
        },
        (lambda t: np.select([t < 300, t < 400], [20.0, 0.0], 70.0), [300.0, 400.0]),
    ),
    "curve": (
        {
            "kind": "curve",
            "points": [
                {"at": "100s", "rate": "10/s"},
                {"at": "300s", "rate": "0/s"},
                {"at": "400s", "rate": "0/s"},
                {"at": "500s", "rate": "90/s"},
                {"at": "800s", "rate": "30/s"},
            ],
        },
        (
            straight([(100, 10.0), (300, 0.0), (400, 0.0), (500, 90.0), (800, 30.0)]),
            [100.0, 300.0, 400.0, 500.0, 800.0],
        ),
    ),
    "diurnal": (
        {
            "kind": "diurnal",
            "rate": "40/s",
            "peak_to_trough": 9.0,
            "period": "400s",
            "peak_at": "150s",
        },
        (lambda t: 40.0 * (1 + 0.8 * np.cos(2 * np.pi * (t - 150) / 400)), []),
    ),
    "steep diurnal": (
        {"kind": "diurnal", "rate": "40/s", "peak_to_trough": 999.0, "period": "300s"},
        (lambda t: 40.0 * (1 + 0.998 * np.cos(2 * np.pi * t / 300)), []),
    ),
    "flash crowd": (
        {
            "kind": "flash_crowd",
            "rate": "20/s",
            "peak": "400/s",
            "at": "300s",
            "rise": "5s",
            "decay": "60s",
        },
        (
            lambda t: 20 + 380 * np.where(t < 300, np.exp((t - 300) / 5), np.exp((300 - t) / 60)),
            [300.0],
        ),
    ),
}
cases = pytest.mark.parametrize("name", CASES)


def varying(spec):
    process = ARRIVALS.build(spec)
    assert isinstance(process, VaryingRate)
    return process


def build(name):
    return varying(CASES[name][0])


def expected(name, until_s):
    """Λ(until_s) by quadrature."""
    rate, kinks = CASES[name][1]
    edges = [0.0, *(kink for kink in kinks if kink < until_s), until_s]
    return sum(
        integrate.quad(rate, a, b, epsabs=1e-9, limit=200)[0] for a, b in itertools.pairwise(edges)
    )


def rescaled(name, times):
    """Λ(times), by adding up the quadrature of a fine grid that has the kinks among its points."""
    rate, kinks = CASES[name][1]
    grid = np.unique(np.concatenate([np.linspace(0, HORIZON_S, 90_001), kinks]))
    middle = (grid[:-1] + grid[1:]) / 2
    per_cell = rate(middle) * np.diff(grid)  # midpoint rule, exact for straight rates
    return np.interp(times, grid, np.concatenate([[0.0], np.cumsum(per_cell)]))


def times(name, seed):
    rng = np.random.Generator(np.random.PCG64(seed))
    return build(name).times(rng, HORIZON_S)


@cases
@pytest.mark.parametrize("until_s", [1e-3, 137.0, 450.0, 900.0])
def test_the_mean_rate_is_the_integral_of_the_rate(name, until_s):
    stated = build(name).mean_rate_per_s(until_s)
    assert stated == pytest.approx(expected(name, until_s) / until_s, rel=1e-9, abs=1e-12)


@cases
def test_rescaled_by_its_rate_it_is_poisson_of_rate_one(name):
    unit = rescaled(name, times(name, 61))
    # p > 0.01 twice in seven cases: 14 % that right generators would have failed at these seeds
    assert stats.kstest(np.diff(unit), "expon").pvalue > 0.01
    assert stats.kstest(unit, stats.uniform(0, expected(name, HORIZON_S)).cdf).pvalue > 0.01


@cases
def test_the_count_is_poisson_about_its_mean(name):
    n, mean = len(times(name, 62)), expected(name, HORIZON_S)
    assert abs(n - mean) < 4 * np.sqrt(mean)


@cases
def test_the_instants_lie_on_no_lattice(name):
    instants = times(name, 63)
    for step_s in (1.0, 1e-2, 1e-3):
        assert stats.kstest(instants / step_s % 1.0, "uniform").pvalue > 1e-3
    assert len(np.unique(instants)) == len(instants)


@given(strategies.varying, st.floats(0, 100))
def test_the_inverse_undoes_the_integral(spec, horizon_s):
    process = varying(spec)
    until = process.expected(horizon_s)
    (back_s,) = process.instants(np.array([until]))
    assert process.expected(back_s) == pytest.approx(until, rel=1e-9, abs=1e-9)


def test_silence_stays_silent():
    steps = times("steps", 64)
    assert not np.any((steps >= 300) & (steps < 400))
    curve = times("curve", 64)
    assert not np.any((curve > 300) & (curve < 400))


def test_after_a_last_level_of_zero_nothing_arrives():
    spec = {"kind": "steps", "levels": [{"rate": "9/s", "for": "5s"}, {"rate": "0/s", "for": "1s"}]}
    rng = np.random.Generator(np.random.PCG64(1))
    instants = ARRIVALS.build(spec).times(rng, 1e6)
    assert 20 < len(instants) < 75
    assert instants[-1] < 5


def test_a_constant_process_follows_the_curve_without_chance():
    points = CASES["curve"][0]["points"]
    process = ARRIVALS.build({"kind": "curve", "points": points, "process": "constant"})
    instants = process.times(np.random.Generator(np.random.PCG64(65)), HORIZON_S)
    assert np.diff(rescaled("curve", instants)) == pytest.approx(1.0, abs=1e-3)


def test_a_gamma_process_keeps_its_cv_in_operational_time():
    points = CASES["curve"][0]["points"]
    process = ARRIVALS.build({"kind": "curve", "points": points, "process": "gamma", "cv": 2.0})
    instants = process.times(np.random.Generator(np.random.PCG64(66)), HORIZON_S)
    unit = np.diff(rescaled("curve", instants))
    assert unit.mean() == pytest.approx(1.0, abs=4 * 2 / np.sqrt(len(unit)))
    assert unit.std() == pytest.approx(2.0, rel=0.05)


def test_the_busiest_hour_is_the_stated_multiple_of_the_quietest():
    process = build("diurnal")
    at_peak, at_trough = (
        process.expected(t + 0.5) - process.expected(t - 0.5) for t in (150.0, 350.0)
    )
    assert at_peak / at_trough == pytest.approx(9.0, rel=1e-3)
    assert process.mean_rate_per_s(400.0) == pytest.approx(40.0, rel=1e-12)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"kind": "ramp", "from": "0/s", "to": "0/s", "over": "1s"}, "both 0/s"),
        (
            {"kind": "ramp", "from": "0/s", "to": "9/s", "over": "1s", "shape": "exponential"},
            r"neither begin nor end at 0/s; write e\.g\. '0\.1/s'",
        ),
        ({"kind": "ramp", "from": "-1/s", "to": "9/s", "over": "1s"}, "or '0/s' for silence"),
        ({"kind": "ramp", "start": "1/s", "to": "9/s", "over": "1s"}, "unknown key 'start'"),
        ({"kind": "steps", "levels": []}, "is empty; name at least one"),
        ({"kind": "steps", "levels": [{"rate": "0/s", "for": "1s"}]}, "every rate is 0/s"),
        (
            {"kind": "curve", "points": [{"at": "3s", "rate": "1/s"}, {"at": "3s", "rate": "2/s"}]},
            "3s follows 3s; sort them, and for a jump use kind: steps",
        ),
        ({"kind": "curve", "points": [{"at": "3s", "rate": "0/s"}]}, "every rate is 0/s"),
        (
            {"kind": "curve", "points": [{"at": "3s", "rate": "1/s"}], "process": "gamma"},
            "add e.g. cv: 1.8",
        ),
        (
            {"kind": "curve", "points": [{"at": "3s", "rate": "1/s"}], "cv": 1.5},
            "cv belongs to process: gamma",
        ),
        ({**CASES["diurnal"][0], "peak_to_trough": 0.5}, "greater than or equal to 1"),
        ({**CASES["flash crowd"][0], "peak": "20/s"}, "peak 20/s is not above rate 20/s"),
    ],
)
def test_rates_that_cannot_be_meant_are_refused(spec, said):
    with pytest.raises(ValidationError, match=said):
        ARRIVALS.build(spec)
