"""Scenarios in virtual time: the recorded tables against the schedule and the cost model."""

import json
import signal
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import slobench as sb
from loadgen.archive.store import read_run
from loadgen.errors import UsageError
from loadgen.lab.sim_options import read_settings, sim_options
from loadgen.lab.simulate import record, simulate
from loadgen.lab.simulated_engine import build
from loadgen.lab.virtual_client import VirtualClient
from loadgen.measure.aggregate import summarize
from loadgen.measure.statistics.intervals import BoundedSection
from loadgen.records import FinishReason, Status, schedule_sha256
from loadgen.studies.modes.cell import cell_of
from loadgen.workload.scenario import (
    Scenario,
    load_scenario,
    scenario_from_flags,
    shipped_scenarios,
)
from loadgen.workload.schedule import make_plan
from reference_engine.model.hardware_file import write_calibrated
from reference_engine.model.zoo import resolve
from reference_engine.state.cost_model import (
    MeasuredSteps,
    NotMeasured,
    StepCost,
    StepShape,
    model_on_hardware,
)

QUIET = Console(quiet=True)
NEEDS_FILES = {"azure_replay", "mooncake_replay"}
SHORT = ["phases.warmup=0s", "phases.measure=20s", "phases.drain=60s"]


def steady(rate="1/s", n_in=1000, n_out=5, duration="10s", **flags):
    return scenario_from_flags(
        rate=rate, input_len=n_in, output_len=n_out, duration=duration, **flags
    )


def on_a_grid(n_in=1000, n_out=5, **overrides):
    """One request a second, far enough apart to be alone."""
    return steady(
        n_in=n_in,
        n_out=n_out,
        overrides={"arrivals": {"kind": "constant", "rate": "1/s"}, **overrides},
    )


def test_a_request_alone_takes_what_its_steps_cost():
    run = simulate(on_a_grid(), shape="8b", hardware="h200")
    cost = model_on_hardware(resolve("8b"), "h200").cost
    first_s = cost.estimate(StepShape(1, 1000, 1000 * 500.0))
    rest_s = [cost.estimate(StepShape(1, 0, 0.0, 1, 1000 + k)) for k in range(4)]
    rows = run.request_rows
    assert (rows["first_token_s"] - rows["released_s"]) == pytest.approx(first_s)
    assert (rows["done_s"] - rows["first_token_s"]) == pytest.approx(sum(rest_s))
    assert np.array_equal(rows["released_s"], run.schedule_rows["scheduled_s"])
    assert np.array_equal(rows["sent_s"], rows["released_s"])
    gaps_s = np.diff(run.chunk_rows["received_s"].reshape(-1, 5), axis=1)
    assert gaps_s == pytest.approx(np.tile(rest_s, (len(rows), 1)))


@pytest.mark.parametrize("name", sorted(set(shipped_scenarios()) - NEEDS_FILES))
def test_every_scenario_leaves_a_consistent_record(name):
    scenario = load_scenario(name, SHORT)
    run = simulate(scenario, max_model_len=131_072)
    plan, rows = make_plan(scenario), run.request_rows
    assert run.manifest.schedule_sha256 == schedule_sha256(*plan)
    assert run.manifest.clock == "virtual"
    summary = summarize(run)
    assert summary.validity.trusted, summary.reasons
    ok = rows["status"] == Status.ok
    assert ok.any()
    assert np.array_equal(
        rows["output_tokens"][ok], np.maximum(plan.schedule["output_tokens"], 1)[ok]
    )
    assert np.array_equal(
        rows["input_tokens"][ok], np.maximum(plan.schedule["input_tokens"], 1)[ok]
    )
    n_chunks = np.bincount(run.chunk_rows["request_id"], minlength=len(rows))
    assert np.array_equal(n_chunks, rows["chunks"])
    assert (rows["finish_reason"][ok] == FinishReason.length).all()
    for earlier, later in (("released_s", "first_token_s"), ("first_token_s", "done_s")):
        assert (rows[earlier][ok] <= rows[later][ok]).all()


def test_the_same_scenario_gives_the_same_tables():
    scenario = load_scenario("agent_multi_turn", SHORT)
    first, second = simulate(scenario), simulate(scenario)
    assert first.request_rows.tobytes() == second.request_rows.tobytes()
    assert first.chunk_rows.tobytes() == second.chunk_rows.tobytes()


def test_users_think_after_each_answer_and_never_overlap():
    scenario = load_scenario("closed_loop_users", ["phases.measure=60s"])
    run = simulate(scenario)
    released_s, done_s = run.request_rows["released_s"], run.request_rows["done_s"]
    child, parent = run.edge_rows["request_id"], run.edge_rows["after"]
    went = np.isfinite(released_s[child]) & np.isfinite(done_s[parent])
    assert went.any()
    thought_s = released_s[child][went] - done_s[parent][went]
    assert thought_s == pytest.approx(run.schedule_rows["think_s"][child][went])


def test_shared_prefixes_and_earlier_turns_come_from_the_cache():
    shared = simulate(load_scenario("rag_shared_prefix", SHORT))
    cached, prefix = shared.request_rows["cached_tokens"], shared.schedule_rows["prefix_tokens"]
    assert cached.max() > 0
    assert (cached <= prefix).all()
    agents = simulate(load_scenario("agent_multi_turn", SHORT))
    turns = (agents.schedule_rows["context"] > 0) & (agents.schedule_rows["n_parents"] > 0)
    answered = turns & (agents.request_rows["status"] == Status.ok)
    assert answered.any()
    assert (agents.request_rows["cached_tokens"][answered] > 1200 - 16).all()
    assert simulate(steady()).request_rows["cached_tokens"].max() == 0


@pytest.mark.parametrize(("context", "cached"), [("scripted", 64), ("real", 112)])
def test_only_a_real_answer_is_found_in_the_cache_again(context, cached):
    # 64 tokens of question and 64 of answer, whose last one was never computed: 7 blocks of 16
    session = {"turns": 2, "think": "100ms", "context": context}
    run = simulate(on_a_grid(n_in=64, n_out=64, session=session))
    later = (run.schedule_rows["n_parents"] > 0) & (run.request_rows["status"] == Status.ok)
    assert later.any()
    assert (run.request_rows["input_tokens"][later] == 192).all()
    assert (run.request_rows["cached_tokens"][later] == cached).all()


def test_a_promise_of_time_is_kept_by_giving_up():
    scenario = on_a_grid(n_in=10_000, n_out=400, limits={"timeout": "1s"})
    run = simulate(scenario)
    rows = run.request_rows
    assert (rows["status"] == Status.timeout).all()
    assert rows["done_s"] - rows["released_s"] == pytest.approx(np.ones(len(rows)))
    assert 0 < rows["chunks"].max() < 400
    assert "limits.timeout" in run.names.errors[int(rows["error_id"][0])]


def test_requests_over_the_cap_are_dropped_or_wait_as_the_scenario_sets():
    flags = {"rate": "40/s", "n_out": 200, "max_concurrency": 4}
    dropped = simulate(steady(**flags))
    assert (dropped.request_rows["status"] == Status.dropped).any()
    waits = simulate(steady(**flags, overrides=["limits.when_full=wait", "limits.timeout=10m"]))
    rows = waits.request_rows
    assert not (rows["status"] == Status.dropped).any()
    assert (rows["sent_s"] > rows["released_s"]).any()


def test_a_request_longer_than_the_context_is_an_error_row():
    run = simulate(on_a_grid(n_in=5000), max_model_len=4096, shape="tiny", hardware="cpu")
    assert (run.request_rows["http_status"] == 400).all()
    assert "context here is 4096" in run.names.errors[1]


def test_answers_shorter_than_declared_stop_by_themselves():
    run = simulate(on_a_grid(n_out=5), declared_max_tokens=100)
    assert (run.request_rows["finish_reason"] == FinishReason.stop).all()
    assert (run.request_rows["output_tokens"] == 5).all()


class InterruptOnce:
    """An early stop that never stops the run, and sends one SIGINT after 20 ended requests."""

    n_ended = 0

    def note(self, now_s, ended):
        before, self.n_ended = self.n_ended, self.n_ended + len(ended)
        if before < 20 <= self.n_ended:
            signal.raise_signal(signal.SIGINT)

    def reason(self, now_s, in_flight):
        return None


def test_preempt_is_the_fate_of_kv_for_the_engine_and_a_switch_of_the_mode():
    plain = sim_options({"mode": "mlfq", "preempt": "never"})
    assert (plain.policy_args, plain.memory.preempt) == ({"preempt": "never"}, "auto")
    assert sim_options({"mode": "mlfq", "preempt": "swap"}).memory.preempt == "swap"


def test_a_group_of_replicas_keeps_the_durations_of_the_other_settings():
    shared = {"host_memory": "200e9", "host_latency": "2ms"}
    options = sim_options({**shared, "replicas": "1:hardware=a100+1:host_latency=5ms"})
    replicas = build(options, is_sharing=False).simulator.replicas
    caps = [replica.executor.caps for replica in replicas]
    assert [c.copy_latency_s for c in caps] == [0.002, 0.005]


def test_an_interrupt_ends_the_run_with_the_results_so_far():
    scenario = steady(rate="5/s", duration="300s")
    options = sim_options({})
    run = record(scenario, make_plan(scenario), options, QUIET, early=InterruptOnce())
    assert run.manifest.ended == "interrupted"
    statuses = run.request_rows["status"]
    assert (statuses == Status.ok).any()
    assert (statuses == Status.not_released).any()
    assert set(statuses) <= {Status.ok, Status.cancelled, Status.not_released}
    assert summarize(run).verdict == "no_verdict"


def test_waits_are_given_by_class_and_reason():
    run = simulate(load_scenario("mixed_classes", [*SHORT, "arrivals.rate=20/s"]), max_num_seqs=8)
    waits = run.manifest["engine"]["waits_s"]
    assert set(waits) <= {"chat", "completion", "summaries"}
    queued_s = float(np.nansum(run.request_rows["server_queue_s"]))
    assert sum(sum(by.values()) for by in waits.values()) == pytest.approx(queued_s)
    assert max(waits["chat"], key=waits["chat"].get) == "no_seq_slot"


def test_a_run_directory_is_the_ordinary_one(tmp_path):
    run = sb.simulate("quickstart", out_dir=tmp_path / "run", mode="chunked", token_budget=64)
    again = read_run(tmp_path / "run")
    assert again.request_rows.tobytes() == run.request_rows.tobytes()
    assert again.manifest.target.kind == "sim"
    assert again.manifest["target"]["policy"]["token_budget"] == 64
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"manifest.json", "schedule.parquet", "edges.parquet", "requests.parquet"} <= names
    assert {"chunks.parquet", "summary.json", "report.html"} <= names
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["verdict"] == "met"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("mode=chunkd", "unknown batching mode 'chunkd'; did you mean 'chunked'"),
        ("mode=chunked,token_budgt=3", "unknown setting 'token_budgt' of mode 'chunked'; did you"),
        ("token_budget=none", "token_budget: Input should be a valid integer"),
        ("mode=chunked,watermark=2", "mode 'chunked': watermark: Input should be less than 1"),
        ("hardware=h20", "hardware: unknown 'h20'; did you mean 'h200'"),
        ("shape=8c", "shape: '8c' is neither a shape nor a local model directory"),
        (
            "shape=tiny,hardware=cpu,kv_dtype=fp8",
            "kv_dtype: no costs of 'fp8' were measured on a cpu",
        ),
        ("shape=8b,hardware=cpu", "hardware: no costs of '8b' were measured on a cpu"),
        ("shape=70b", "141 GB of weights do not fit into 1 × 141 GB of h200; use more of them"),
        ("mode=chunked,mode=static", "setting 'mode' is given twice"),
    ],
)
def test_an_invalid_setting_lists_the_valid_ones(settings, message):
    scenario = on_a_grid()
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        record(scenario, make_plan(scenario), sim_options(read_settings(settings)), QUIET)


def test_swapping_brings_preempted_work_back_and_takes_its_time():
    scenario = steady(rate="6/s", n_in=600, n_out=400, duration="5s")
    tight: dict[str, Any] = {"kv_blocks": 300, "shape": "8b"}
    swapped = simulate(scenario, **tight, swap_blocks=2000, preempt="swap")
    again = simulate(scenario, **tight, preempt="recompute")
    assert swapped.manifest["engine"]["preemptions"] > 0
    assert again.manifest["engine"]["preemptions"] > 0
    assert (swapped.request_rows["output_tokens"] == 400).all()
    assert not np.array_equal(swapped.request_rows["done_s"], again.request_rows["done_s"])


def test_planning_ahead_wastes_a_row_for_each_answer_that_stops_by_itself():
    # the engine knows where max_tokens ends an answer, but not where the answer ends by itself
    scenario = on_a_grid(n_out=5)
    ahead = simulate(scenario, async_depth=1, declared_max_tokens=50)
    n_wasted = ahead.manifest["engine"]["padding_tokens"]
    assert len(ahead.request_rows) - 1 <= n_wasted <= len(ahead.request_rows)
    assert simulate(scenario, declared_max_tokens=50).manifest["engine"]["padding_tokens"] == 0


def test_a_request_is_scheduled_by_the_promise_it_brought(tmp_path):
    """Ten long prompts before a short prompt with a tighter SLO, which goes first."""
    lines = [f"0.{k:03},4000,2,{20000 if k < 10 else 500}" for k in range(11)]
    trace = tmp_path / "t.csv"
    trace.write_text("\n".join(["when,in,out,first", *lines, "20,10,1,"]) + "\n")
    columns = {"kind": "columns", "time": "when", "input_tokens": "in", "output_tokens": "out"}

    def ttft_s(**more):
        arrivals = {"kind": "trace", "path": str(trace), "format": {**columns, **more}}
        run = simulate(
            on_a_grid(n_in=1, arrivals=arrivals, requests=None), mode="deadline", shape="8b"
        )
        rows = run.request_rows
        return (rows["first_token_s"] - rows["released_s"])[10]

    assert ttft_s(ttft_slo="first") < 0.5 * ttft_s()


class RecordingEngine:
    """An engine that stores the requests that it receives, and never answers."""

    def __init__(self, now_s):
        self.now_s, self.requests = now_s, []

    def submit(self, request):
        self.requests.append(request)


def test_a_deadline_is_the_e2e_limit_after_the_arrival():
    scenario = steady(
        slo=["e2e <= 2s"], overrides={"arrivals": {"kind": "constant", "rate": "1/s"}}
    )
    engine: Any = RecordingEngine(now_s=5.5)
    VirtualClient(scenario, make_plan(scenario)).act(engine)
    assert len(engine.requests) >= 5
    for request in engine.requests:
        assert request.deadline_s == pytest.approx(request.arrived_s + 2)


def test_a_failed_request_makes_a_percentile_of_a_cell_infinite():
    run = simulate(steady(rate="40/s", n_out=200, max_concurrency=4))
    cell = cell_of(run, summarize(run), "chunked", 1.0, {})
    assert 0 < cell.n_ok < cell.n_due
    assert cell.ttft_p99 == BoundedSection(value=None)


@pytest.mark.parametrize(
    "load",
    [
        {"concurrency": 4},
        {"rate": "20/s"},
        {"rate": "5/s", "overrides": {"session": {"turns": 3}}},
    ],
)
def test_a_number_of_requests_ends_the_window(load):
    counted = scenario_from_flags(input_len=64, output_len=16, num_prompts=100, warmup="1s", **load)
    run = simulate(counted)
    released_s = run.request_rows["released_s"]
    counted_s = np.sort(released_s[released_s >= 1.0])
    assert len(counted_s) == 100
    window = run.manifest.window
    end_s = window.warmup_s + window.measure_s
    assert counted_s[-1] < end_s
    if "concurrency" in load:  # the next user would have sent here
        done_s = run.request_rows["done_s"]
        assert end_s == pytest.approx(done_s[done_s > counted_s[-1]].min(), abs=3e-6)
    summary = summarize(run)
    assert (summary.counts["due"], summary.counts["ok"]) == (100, 100)
    assert run.manifest.ended == "completed"
    assert not [check for check in summary.validity.checks if check.ok is False]
    assert not [finding for finding in summary.findings if "not sent" in finding]


@pytest.mark.parametrize(("users", "n"), [(4, 100), (32, 64), (32, 320)])
def test_the_rate_of_a_number_of_requests_is_that_of_a_time(users, n):
    """A window up to the last release would lack a gap of each user: 64 requests of 32 users, at
    twice their rate."""
    flags: dict[str, Any] = {"concurrency": users, "input_len": 64, "output_len": 20}
    counted = simulate(scenario_from_flags(**flags, num_prompts=n))
    timed = summarize(simulate(scenario_from_flags(**flags, duration="60s")))
    per_s = n / counted.manifest.window.measure_s
    assert per_s == pytest.approx(timed.counts["due"] / 60, rel=0.01)


def test_a_number_that_the_server_cannot_reach_in_time_is_named():
    slow = scenario_from_flags(
        concurrency=1, input_len=64, output_len=200, num_prompts=500, duration="5s"
    )
    run = simulate(slow)
    summary = summarize(run)
    assert run.manifest.window.measure_s == 5.0
    assert 0 < summary.counts["due"] < 500
    named = f"{summary.counts['due']} of the 500 requests of phases.requests were sent in 5 s"
    assert [finding for finding in summary.findings if finding.startswith(named)]


def test_prefixes_are_found_in_whole_blocks():
    scenario = load_scenario(
        "agent_multi_turn", ["phases.warmup=0s", "phases.measure=10s", "phases.drain=30s"]
    )
    cached = {
        size: simulate(scenario, block_tokens=size).request_rows["cached_tokens"]
        for size in (16, 64)
    }
    assert (cached[64] % 64 == 0).all()
    assert (cached[16] % 16 == 0).all()
    assert (cached[16] % 64 != 0).any()
    assert 0 < cached[64].sum() < cached[16].sum()


@pytest.mark.parametrize("core", ["auto", "python"])
def test_a_decode_that_is_cancelled_in_time_needs_no_measured_end(core, tmp_path):
    """The answer would reach 700 tokens of context, of which 500 are measured; the request times
    out at 400."""
    measured = (
        MeasuredSteps("prompt", (1, 9), (1, 400), (0, 1e6)),
        MeasuredSteps("decode", decodes=(1, 9), context_tokens=(1, 500)),
    )
    path = tmp_path / "box.yaml"
    cost = StepCost(step_s=10e-3, measured=measured)
    write_calibrated(path, cost, None, {"name": "box", "model": "8b", "kv_tokens": 90_000})
    scenario = Scenario.model_validate(
        {
            "name": "cancelled",
            "arrivals": {"kind": "constant", "rate": "0.2/s"},
            "requests": {"input_tokens": 300, "output_tokens": 400},
            "phases": {"warmup": "0s", "measure": "12s"},
            "limits": {"timeout": "1s"},
        }
    )
    run = simulate(scenario, hardware=str(path), core=core)
    assert set(run.request_rows["status"]) == {Status.timeout}
    patient = scenario.with_values({**scenario.resolved(), "limits": {"timeout": "60s"}})
    with pytest.raises(NotMeasured, match="decode step of 551 tokens of context"):
        simulate(patient, hardware=str(path), core=core)
