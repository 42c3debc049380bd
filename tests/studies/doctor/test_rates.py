"""The search for the ceiling: it finds the ceiling, and stops in time."""

import json
from datetime import UTC, datetime

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loadgen.run.cores import machine_name
from loadgen.studies.doctor.fidelity import Fidelity, spread
from loadgen.studies.doctor.rates import (
    HIGHEST_RATE_PER_S,
    LOWEST_RATE_PER_S,
    ceiling_file,
    find_ceiling,
    write_ceiling,
)
from loadgen.studies.doctor.run import checkup, why_failed
from loadgen.studies.doctor.trial import ERROR_LIMIT_S, Trial, TrialProblem


def trial(rate_per_s, error_s=1e-4, problems=()):
    errors = spread(np.array([error_s]))
    return Trial(
        rate_per_s, 64 * rate_per_s, 10, Fidelity(errors, errors, errors, errors), 1e-5, problems, 4
    )


def machine_that_holds(limit_per_s):
    return lambda rate_per_s: trial(rate_per_s, 0 if rate_per_s <= limit_per_s else 1)


@given(st.floats(LOWEST_RATE_PER_S * 2, HIGHEST_RATE_PER_S))
def test_the_ceiling_is_found_from_below_within_15_per_cent(limit_per_s):
    found = find_ceiling(machine_that_holds(limit_per_s), lambda: True)
    assert found.best is not None
    assert found.best.rate_per_s <= limit_per_s <= found.best.rate_per_s * 1.16
    assert len(found.trials) <= 20
    assert not found.is_open or limit_per_s >= HIGHEST_RATE_PER_S


def test_a_machine_that_never_fails_has_an_open_ceiling():
    found = find_ceiling(machine_that_holds(1e9), lambda: True)
    assert found.is_open
    assert [t.rate_per_s for t in found.trials] == [100 * 2**k for k in range(7)]


def test_a_machine_that_holds_nothing_has_none():
    found = find_ceiling(machine_that_holds(0), lambda: True)
    assert (found.best, found.is_open) == (None, False)
    assert found.trials[-1].rate_per_s == 6.25


@given(st.integers(1, 12))
def test_without_time_the_search_ends_with_the_results_so_far(n_trials):
    left = iter([True] * (n_trials - 1))
    found = find_ceiling(machine_that_holds(777), lambda: next(left, False))
    assert len(found.trials) <= n_trials
    assert found.best is not None
    assert found.best.rate_per_s <= 777


def test_one_spoilt_trial_does_not_lower_the_ceiling():
    spoilt = iter([False, True])
    found = find_ceiling(
        lambda rate: trial(rate, 1.0 if rate == 400 and next(spoilt, False) else 0.0), lambda: True
    )
    assert found.best is not None
    assert found.best.rate_per_s == HIGHEST_RATE_PER_S


def test_a_rate_holds_only_trusted_and_true():
    assert trial(1, ERROR_LIMIT_S * 0.99).holds
    assert not trial(1, ERROR_LIMIT_S).holds
    assert not trial(1, 0.0, (TrialProblem("lateness", "late"),)).holds
    assert not trial(1, float("nan")).holds  # no request at all


def test_the_file_holds_the_ceiling_the_machine_and_the_time(tmp_path):
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert ceiling_file(trial(500), now) == {
        "events_per_s_per_core": 32000.0,
        "machine": machine_name(),
        "measured_utc": "2026-01-02T03:04:05+00:00",
    }
    path = write_ceiling(trial(500), tmp_path / "cache")
    assert path == tmp_path / "cache" / "ceiling.json"
    assert json.loads(path.read_text())["events_per_s_per_core"] == 32000.0
    assert [p.name for p in path.parent.iterdir()] == ["ceiling.json"]


def test_a_failed_trial_is_explained_by_the_check_that_has_a_remedy():
    problems = (
        TrialProblem("lateness", "p99 9 ms"),
        TrialProblem("instrument error", "Cause: other programs", "stop the other programs"),
    )
    assert why_failed(trial(20, 0.0137, problems), 32) == (
        "20 req/s × 32 tokens: p99 of the TTFT error is 13.7 ms, limit 5 ms; failed: lateness, "
        "instrument error",
        "instrument error: Cause: other programs",
        "next: stop the other programs; then check again",
    )
    assert why_failed(trial(20, 0.0137, problems[:1]), 32)[1:] == ("lateness: p99 9 ms",)
    assert why_failed(trial(20, 0.0137), 32) == (
        "20 req/s × 32 tokens: p99 of the TTFT error is 13.7 ms, limit 5 ms",
    )


def test_a_trial_states_its_problems_and_their_causes():
    problems = (
        TrialProblem("lateness", "p99 9 ms: too late"),
        TrialProblem("3 of 9 requests failed"),
    )
    result = checkup("traffic", (), trials=(trial(20, problems=problems),))
    (content,) = result.to_json()["trials"]
    assert content["problems"] == ["lateness: p99 9 ms: too late", "3 of 9 requests failed"]
    assert content["causes"] == ["lateness", "3 of 9 requests failed"]
    assert content["holds"] is False
