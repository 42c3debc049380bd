"""Schedules: a function of the scenario alone, and of nothing else in it than they must be."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import ScenarioError
from loadgen.records import OPTIONAL, SCHEDULE, Phase, schedule_sha256
from loadgen.workload.scenario import load_scenario, scenario_from_flags
from loadgen.workload.schedule import make_schedule, merge, split
from tests import strategies


def scenario(**changes):
    settings = {"rate": "50/s", "input_len": 100, "output_len": 20, "duration": "20s"}
    return scenario_from_flags(**{**settings, **changes})


@pytest.mark.parametrize("name", ["quickstart", "chat_poisson", "chat_bursty", "power_law_mix"])
def test_the_same_scenario_gives_the_same_bytes(name):
    first, second = (make_schedule(load_scenario(name)) for _ in range(2))
    assert first.dtype == SCHEDULE
    assert first.tobytes() == second.tobytes()


def test_another_process_with_another_hash_seed_gives_the_same_bytes():
    script = (
        "from loadgen.workload.scenario import load_scenario as l\n"
        "from loadgen.workload.schedule import make_schedule as m\n"
        "from loadgen.records import schedule_sha256 as h\n"
        "print(h(m(l('chat_bursty'))))"
    )
    there = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    here = schedule_sha256(make_schedule(load_scenario("chat_bursty")))
    assert there == [here, here]


def test_another_seed_gives_another_schedule():
    hashes = {schedule_sha256(make_schedule(scenario(seed=seed))) for seed in range(20)}
    assert len(hashes) == 20


def test_a_seed_means_what_it_has_always_meant():
    # A change here changes what every seed means: see CHANGELOG, "Breaking". Instants are compared
    # to 1 ns, not by hash: the last bit of a logarithm may differ between processors.
    rows = make_schedule(
        scenario(
            rate="4/s",
            duration="18s",
            input_len={"kind": "lognormal", "median": 96, "sigma": 0.6, "max": 384},
            output_len={"kind": "power_law", "alpha": 1.5, "min": 8, "max": 64},
            seed=3,
        )
    )
    assert len(rows) == 72
    instants_s = [0.052325809779, 0.349109180352, 0.541015873077, 0.602921142339]
    assert rows["scheduled_s"][:4] == pytest.approx(instants_s, abs=1e-9)
    assert rows["input_tokens"][:8].tolist() == [44, 100, 112, 118, 74, 107, 275, 58]
    assert rows["output_tokens"][:8].tolist() == [8, 9, 50, 44, 16, 9, 11, 24]
    assert rows["prompt_seed"][:2].tolist() == [14438991663939649885, 2475265305768411481]


def test_lengths_do_not_move_arrivals_and_arrivals_do_not_move_lengths():
    plain = make_schedule(scenario())
    longer = make_schedule(
        scenario(input_len={"kind": "lognormal", "median": 50, "sigma": 1.0, "max": 900})
    )
    assert np.array_equal(plain["scheduled_s"], longer["scheduled_s"])
    assert np.array_equal(plain["prompt_seed"], longer["prompt_seed"])
    assert not np.array_equal(plain["input_tokens"], longer["input_tokens"])
    drawn = scenario(output_len={"kind": "power_law", "alpha": 1.5, "min": 1, "max": 99})
    slow, fast = make_schedule(drawn), make_schedule(drawn.model_copy(update=twice_the_rate()))
    n = min(len(slow), len(fast))
    assert np.array_equal(slow["output_tokens"][:n], fast["output_tokens"][:n])


def twice_the_rate():
    return {"arrivals": scenario(rate="100/s").arrivals}


def test_input_and_output_lengths_are_drawn_independently():
    law = {"kind": "uniform", "min": 1, "max": 1000}
    rows = make_schedule(scenario(rate="1000/s", input_len=law, output_len=law))
    correlation = np.corrcoef(rows["input_tokens"], rows["output_tokens"])[0, 1]
    assert abs(correlation) < 4 / np.sqrt(len(rows))  # 4 sigma


def test_rows_are_numbered_in_the_order_they_are_due():
    rows = make_schedule(scenario())
    assert rows["request_id"].tolist() == list(range(len(rows)))
    assert np.array_equal(rows["session_id"], rows["request_id"])
    assert np.all(np.diff(rows["scheduled_s"]) >= 0)
    assert not rows["n_parents"].any()


def test_the_warm_up_comes_first_and_is_marked():
    rows = make_schedule(scenario(warmup="5s", duration="15s"))
    is_warmup = rows["phase"] == Phase.warmup
    assert np.array_equal(is_warmup, rows["scheduled_s"] < 5.0)
    assert rows["scheduled_s"].max() < 20.0
    assert is_warmup.sum() == pytest.approx(250, abs=80)  # 5 sigma of a Poisson count


def test_a_shared_prefix_adds_to_the_input_and_spreads_over_its_groups():
    shared = scenario(overrides=["requests.shared_prefix={tokens: 350, groups: 4}"])
    rows = make_schedule(shared)
    assert set(rows["prefix_tokens"]) == {350}
    assert set(rows["input_tokens"]) == {450}
    assert np.unique(rows["prefix_id"]).tolist() == [1, 2, 3, 4]


def test_without_a_shared_prefix_its_columns_are_zero():
    rows = make_schedule(scenario())
    assert not rows["prefix_id"].any()
    assert not rows["prefix_tokens"].any()


def test_a_schedule_without_requests_says_what_to_change():
    with pytest.raises(ScenarioError, match=r"no request arrives .* phases\.measure or raise"):
        make_schedule(scenario(rate="1/d"))


def test_a_schedule_beyond_memory_is_refused_before_it_is_drawn():
    with pytest.raises(ScenarioError, match=r"2e\+10 requests, at most 2e\+07"):
        make_schedule(scenario(rate="1e9/s"))


@settings(max_examples=50)
@given(strategies.schedules(), st.integers(1, 12))
def test_merge_undoes_split(rows, n_shards):
    parts = split(rows, n_shards)
    assert len(parts) == n_shards
    assert merge(parts).tobytes() == rows.tobytes()
    assert merge(parts[::-1]).tobytes() == rows.tobytes()


@settings(max_examples=50)
@given(strategies.schedules(), st.integers(1, 12))
def test_split_keeps_sessions_whole_and_in_order(rows, n_shards):
    parts = split(rows, n_shards)
    sessions = [set(part["session_id"]) for part in parts]
    assert sum(map(len, sessions)) == len(set(rows["session_id"]))
    for part in parts:
        assert np.all(np.diff(part["request_id"].astype(int)) > 0)


@given(st.integers(1, 200), st.integers(1, 12))
def test_split_deals_single_requests_out_in_turn(n, n_shards):
    rows = np.zeros(n, SCHEDULE)
    rows["request_id"] = rows["session_id"] = np.arange(n)
    sizes = [len(part) for part in split(rows, n_shards)]
    assert max(sizes) - min(sizes) <= 1


def test_the_fingerprint_is_that_of_the_raw_rows_and_of_cancels_where_there_are_any():
    rows = make_schedule(scenario())
    names = [name for name in SCHEDULE.names or () if name not in OPTIONAL]
    plain = np.zeros(len(rows), [(name, SCHEDULE[name]) for name in names])
    for name in names:
        plain[name] = rows[name]
    assert schedule_sha256(rows) == hashlib.sha256(plain.tobytes()).hexdigest()
    cancelled = rows.copy()
    cancelled["cancel_after_s"][3] = 1.5
    kept = np.zeros(len(rows), [(name, SCHEDULE[name]) for name in (*names, "cancel_after_s")])
    for name in kept.dtype.names or ():
        kept[name] = cancelled[name]
    assert schedule_sha256(cancelled) == hashlib.sha256(kept.tobytes()).hexdigest()
    for name in OPTIONAL:
        cancelled[name][3] = 1.5
    assert schedule_sha256(cancelled) == hashlib.sha256(cancelled.tobytes()).hexdigest()
    changed = rows.copy()
    changed["output_tokens"][-1] += 1
    assert schedule_sha256(changed) != schedule_sha256(rows)
