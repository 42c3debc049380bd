"""A measured window that a number of requests limits: exactly so many are planned, whatever the
arrivals."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import ScenarioError
from loadgen.records import Phase
from loadgen.workload.scaling import scaled, with_window
from loadgen.workload.scenario import Scenario, load_scenario, scenario_from_flags, varied
from loadgen.workload.schedule import make_plan, make_schedule
from tests import strategies

RENEWALS = st.builds(
    lambda arrivals, rate_per_s: {**arrivals, "rate": f"{rate_per_s}/s"},
    strategies.renewals,
    st.floats(0.01, 1000),
)
MODULATED = strategies.modulated.filter(lambda arrivals: arrivals.get("sojourn") != "pareto")
"""Without pauses of infinite variance, which can last longer than the search for the window."""
LENGTHS: dict[str, Any] = {"input_tokens": 16, "output_tokens": 4}


def scenario(arrivals, seed=0, **phases):
    values = {"name": "counted", "seed": seed, "requests": LENGTHS, "phases": phases}
    return Scenario.model_validate({**values, "arrivals": arrivals})


def trace(tmp_path, times_s):
    path = tmp_path / "trace.csv"
    rows = "".join(f"{at_s},16,4\n" for at_s in times_s)
    path.write_text(f"timestamp,input_tokens,output_tokens\n{rows}")
    return {"kind": "trace", "path": str(path)}


def n_measured(plan):
    return int(np.count_nonzero(plan["phase"] == Phase.measure))


@settings(max_examples=60, deadline=None)
@given(
    arrivals=RENEWALS | MODULATED,
    n=st.integers(1, 200),
    seed=st.integers(0, 2**32),
    warmup=st.sampled_from([0, 1, 7]),
)
def test_exactly_so_many_requests_are_measured(arrivals, n, seed, warmup):
    counted = scenario(arrivals, seed, warmup=f"{warmup}s", requests=n)
    plan = make_schedule(counted)
    assert n_measured(plan) == n
    last_s = float(plan["scheduled_s"][-1])
    assert warmup + counted.phases.measure == pytest.approx(last_s, abs=3e-6)
    assert last_s < counted.horizon_s


@settings(max_examples=30, deadline=None)
@given(arrivals=RENEWALS, n=st.integers(2, 100), seed=st.integers(0, 2**32))
def test_the_schedule_is_that_of_a_window_of_this_length(arrivals, n, seed):
    counted = scenario(arrivals, seed, warmup="1s", requests=n)
    known = counted.with_known_window()
    assert (known.phases.requests, known.phases.measure) == (None, counted.phases.measure)
    expected = make_schedule(known)
    assert make_schedule(counted).tobytes() == expected[: len(make_schedule(counted))].tobytes()


@pytest.mark.parametrize(
    ("n", "length_s"),
    [(1, 0.5), (2, 1.5), (3, 1.5), (4, 1.5), (5, 4.5)],
)
def test_the_window_ends_with_the_last_request_of_a_trace(tmp_path, n, length_s):
    times_s = [0, 1, 2, 2, 2, 5, 9]
    counted = scenario(trace(tmp_path, times_s), warmup="500ms", requests=n)
    assert counted.phases.measure == pytest.approx(length_s, abs=3e-6)
    plan = make_schedule(counted)
    assert plan["scheduled_s"].tolist() == times_s[: n + 1]
    assert n_measured(plan) == n


def test_requests_at_the_same_instant_are_not_all_taken():
    batches = {"kind": "batch", "rate": "8/s", "size": 4, "instants": "constant"}
    plan = make_schedule(scenario(batches, requests=6))
    assert np.unique(plan["scheduled_s"], return_counts=True)[1].tolist() == [4, 2]


def test_classes_share_the_number():
    arrivals = {"kind": "constant", "rate": "10/s"}
    classes = {
        "slow": {"arrivals": {"kind": "constant", "rate": "1/s"}, "requests": LENGTHS},
        "fast": {"weight": 1.0, "requests": LENGTHS},
    }
    values = {"name": "two", "arrivals": arrivals, "classes": classes, "phases": {"requests": 110}}
    plan = make_schedule(Scenario.model_validate(values))
    assert len(plan) == 110
    assert np.bincount(plan["class_id"]).tolist() == [10, 100]


def test_another_rate_needs_another_window():
    counted = scenario({"kind": "constant", "rate": "10/s"}, requests=100)
    assert counted.phases.measure == pytest.approx(9.95, abs=0.06)
    faster = varied(counted, {"arrivals.rate": "20/s"})
    assert faster.phases.measure == pytest.approx(counted.phases.measure / 2, abs=1e-5)
    assert scaled(counted, 20.0, "rate").phases == faster.phases


def test_a_window_that_a_search_chooses_replaces_the_number():
    counted = scenario({"kind": "poisson", "rate": "10/s"}, requests=100, at_most="1h")
    chosen = with_window(counted, 1.0, 5.0, 3)
    assert (chosen.phases.requests, chosen.phases.at_most) == (None, None)
    assert chosen.phases.measure == 5.0


def test_the_longest_time_comes_first_if_it_is_shorter():
    counted = scenario({"kind": "constant", "rate": "10/s"}, requests=100, at_most="2s")
    assert counted.phases.measure == 2.0
    assert n_measured(make_schedule(counted)) == 20


def test_equal_scenarios_have_equal_windows():
    arrivals = {"kind": "poisson", "rate": "10/s"}
    counted = scenario(arrivals, requests=30)
    assert counted.with_values(counted.resolved()) == counted
    assert "requests: 30" in counted.to_yaml()
    assert "measure" not in counted.to_yaml()
    assert counted.phases.measure != scenario(arrivals, seed=1, requests=30).phases.measure


def test_phases_of_two_scenarios_do_not_share_a_window():
    slow = scenario({"kind": "constant", "rate": "1/s"}, requests=30)
    values = {"name": "fast", "requests": LENGTHS, "phases": slow.phases}
    fast = Scenario.model_validate({**values, "arrivals": {"kind": "constant", "rate": "100/s"}})
    assert fast.phases.measure == pytest.approx(0.295, abs=0.006)
    assert slow.phases.measure == pytest.approx(29.5, abs=0.6)


@pytest.mark.parametrize(
    ("arrivals", "phases", "problem"),
    [
        ({"kind": "burst", "requests": 9}, {"requests": 5}, "5 requests arrive at once, at 0s"),
        ({"kind": "burst", "requests": 9}, {"requests": 10}, "9 of the 10 requests arrive in"),
        (
            {"kind": "burst", "requests": 9},
            {"requests": 5, "warmup": "1s"},
            "0 of the 5 requests arrive in",
        ),
    ],
)
def test_a_number_that_makes_no_window_is_refused(arrivals, phases, problem):
    with pytest.raises(ValueError, match=problem):
        scenario(arrivals, **phases)


def test_a_trace_that_is_too_short_is_refused(tmp_path):
    with pytest.raises(ValueError, match="3 of the 8 requests arrive in the 30 days"):
        scenario(trace(tmp_path, [0, 1, 2]), requests=8)
    looped = {**trace(tmp_path, [0, 1, 2]), "loop": True}
    assert n_measured(make_schedule(scenario(looped, requests=8))) == 8


def test_open_and_closed_loops_together_are_refused():
    users = {"kind": "users", "users": 2, "think": "0s"}
    classes = {
        "loop": {"arrivals": users, "requests": LENGTHS},
        "open": {"arrivals": {"kind": "poisson", "rate": "1/s"}, "requests": LENGTHS},
    }
    with pytest.raises(ValueError, match="5 requests of open and closed loops together"):
        Scenario.model_validate({"name": "two", "classes": classes, "phases": {"requests": 5}})


def test_the_requests_of_a_closed_loop_end_the_window_during_the_run():
    counted = scenario_from_flags(concurrency=3, input_len=16, output_len=4, num_prompts=20)
    assert (counted.requests_in_flow, counted.phases.measure) == (20, 600.0)
    plan = make_plan(counted)
    per_user = np.bincount(plan.schedule["session_id"])
    assert per_user.tolist() == [22] * 3  # one user alone can send them all, and is not dry then
    shorter = varied(counted, {"phases.at_most": "30s"})
    assert shorter.phases.measure == 30.0


def test_a_plan_is_no_longer_than_its_time_allows():
    timed = scenario_from_flags(concurrency=3, input_len=16, output_len=4, duration="2s")
    counted = scenario_from_flags(
        concurrency=3, input_len=16, output_len=4, num_prompts=10**6, duration="2s"
    )
    assert len(make_schedule(counted)) == len(make_schedule(timed))


def test_sessions_end_the_window_during_the_run():
    counted = scenario({"kind": "constant", "rate": "10/s"}, requests=30)
    talking = varied(counted, {"session": {"turns": 3}})
    assert (counted.requests_in_flow, talking.requests_in_flow) == (None, 30)
    plan = make_schedule(talking)
    assert np.count_nonzero(plan["n_parents"] == 0) == 30  # at the latest with the 30th session
    assert talking.phases.measure == counted.phases.measure


FILE = """\
schema: 1
arrivals: {kind: poisson, rate: 8/s}
requests: {input_tokens: 8, output_tokens: 4}
phases: {warmup: 1s, WINDOW}
"""


@pytest.mark.parametrize(
    ("window", "flags", "settings", "expected"),
    [
        ("measure: 10s", {"num_prompts": 5}, [], {"requests": 5}),
        ("measure: 10s", {}, ["phases.requests=5"], {"requests": 5}),
        ("requests: 9, at_most: 1m", {"duration": "10s"}, [], {"measure": "10s"}),
        ("requests: 9, at_most: 1m", {}, ["phases.measure=10s"], {"measure": "10s"}),
        (
            "measure: 10s",
            {"num_prompts": 5, "duration": "3s"},
            [],
            {"requests": 5, "at_most": "3s"},
        ),
        ("requests: 9, at_most: 1m", {"num_prompts": 5}, [], {"requests": 5, "at_most": "1m"}),
    ],
)
def test_a_flag_or_setting_replaces_the_window_of_the_file(
    tmp_path, window, flags, settings, expected
):
    path = tmp_path / "s.yaml"
    path.write_text(FILE.replace("WINDOW", window))
    phases = load_scenario(path, settings, flags=flags).resolved()["phases"]
    expected = {"warmup": "1s", "drain": "30s", **expected}
    assert {key: value for key, value in phases.items() if value is not None} == expected


def test_both_in_one_place_are_refused_with_both_values():
    with pytest.raises(
        ScenarioError, match=r"5 requests end the measured window, and so does .*7s"
    ):
        scenario_from_flags(
            rate="1/s",
            input_len=1,
            output_len=1,
            num_prompts=5,
            overrides=["phases.measure=7s", "phases.requests=5"],
        )
