"""Each way a run can stop being believable is caught and named; what is harmless is left alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loadgen.manifest.self_report import ClientReport
from loadgen.measure.aggregate import summarize
from loadgen.measure.summary import ValidityCheck
from loadgen.measure.validity.client_checks import held_by_cap
from loadgen.records import EDGES, Run, Status
from tests.runs import changed, measured_run, with_manifest, with_shard, with_shards


def check(run: Run, name: str) -> ValidityCheck:
    return next(c for c in summarize(run).validity.checks if c.name == name)


def test_a_healthy_run_passes_every_check() -> None:
    summary = summarize(measured_run())
    assert [c.name for c in summary.validity.checks if c.ok is False] == []
    assert summary.validity.trusted


@pytest.mark.parametrize(
    ("name", "reading", "words"),
    [
        ("client CPU", {"cpu_share": 0.95}, "95 % of one core"),
        ("run delay", {"run_delay_share": 0.02}, "other programs used the machine"),
        ("throttling", {"throttled_share": 0.03}, "CPU quota"),
        ("event loop", {"loop_lag_s": {"n": 9, "p50": 0.0, "p99": 0.0061, "max": 0.1}}, "6.1 ms"),
    ],
)
def test_a_client_that_could_not_keep_up_is_named_with_its_cause(
    name: str, reading: dict[str, Any], words: str
) -> None:
    run = with_shard(measured_run(), **reading)
    found = check(run, name)
    assert (found.ok, found.is_gate, found.is_timing) == (False, False, True)
    assert words in found.detail
    assert found.detail.startswith("the load generator was held up: ")
    assert any(f.lower().startswith(name.lower()) for f in summarize(run).findings)


def on_cores(
    programs_s: float, idle_s: float, online: int = 4, n: int = 1, own_s: float = 0.5
) -> Run:
    """A run of 10 s whose worker may use n of the machine's cores."""
    cores = {"allowed": list(range(n)), "online": online, "own_s": own_s, "idle_s": idle_s,
             "programs_s": programs_s, "total_s": 10.0 * n}  # fmt: skip
    return with_shard(measured_run(), cores=cores)


def test_a_core_that_somebody_else_keeps_busy_is_named_although_nothing_was_delayed() -> None:
    found = check(on_cores(programs_s=9.99, idle_s=0.0), "shared cores")
    assert (found.ok, found.is_timing) == (False, True)
    assert "held up: other programs took 94.9 % of the time of the load generator's core," in (
        found.detail
    )
    assert check(on_cores(19.9, 0.0, n=2), "shared cores").ok is False
    assert check(on_cores(9.99, 0.0, online=1), "shared cores").ok is False


@pytest.mark.parametrize(
    "run",
    [
        on_cores(programs_s=0.6, idle_s=9.3),  # alone
        on_cores(programs_s=9.2, idle_s=0.6),  # others left 6 % of it
        on_cores(programs_s=9.0, idle_s=0.0, own_s=8.7),  # the client itself; interrupts the rest
        on_cores(programs_s=0.6, idle_s=0.0),  # the host took 94 %
        on_cores(programs_s=39.9, idle_s=0.0, n=4),  # free to go to any core of the machine
    ],
)
def test_a_core_with_room_or_one_of_all_is_not_shared(run: Run) -> None:
    assert check(run, "shared cores").ok is True


def test_a_server_that_the_run_started_is_no_stranger_on_its_core() -> None:
    run = on_cores(programs_s=9.9, idle_s=0.0)
    ours = replace(run, instrument=changed(run.instrument, family_s=9.0))
    assert check(ours, "shared cores").ok is True


def test_two_workers_on_the_same_cores_are_not_strangers_to_each_other() -> None:
    run = on_cores(programs_s=9.9, idle_s=0.0, own_s=4.8)
    shard = run.instrument.shards[0]
    both = with_shards(run, shard, changed(shard, shard=1))
    assert check(both, "shared cores").ok is True
    unknown = with_shards(run, shard, changed(shard, cores=None))
    assert check(unknown, "shared cores").ok is None


def test_who_lifts_the_limit_of_run_delay_lifts_that_of_shared_cores() -> None:
    run = with_manifest(on_cores(9.9, 0.0), instrument_limits={"run_delay_share": 1.0})
    assert check(run, "shared cores").ok is True


def test_a_host_that_takes_the_machine_away_is_named_as_the_cause() -> None:
    lag = {"n": 9, "p50": 0.0, "p99": 0.03, "max": 0.1}
    run = with_shard(measured_run(), loop_lag_s=lag, stolen_share=0.12)
    assert "gave 12 % of its time to others (steal)" in check(run, "event loop").detail
    steal = check(run, "steal")
    assert (steal.ok, steal.is_gate) == (False, False)
    assert summarize(with_shard(measured_run(), stolen_share=0.12)).validity.trusted


@pytest.mark.parametrize(
    ("most_stolen_s", "cause"),
    [
        (0.2, "took 200 ms of one core's time (steal), and the load generator stalled for 300 ms"),
        (0.1, "blocked the event loop"),
        (None, "blocked the event loop"),
    ],
)
def test_what_little_the_host_took_is_the_cause_of_stalls_that_are_not_much_longer(
    most_stolen_s: float | None, cause: str
) -> None:
    run = measured_run()
    run = with_shard(
        run,
        loop_lag_s={"n": 320, "p50": 0.0, "p99": 0.01, "max": 0.1},
        stalls={"over_s": 0.005, "spans_s": [[4.0, 4.1, 0.1], [9.0, 9.2, 0.2]]},
        stolen_share=0.002,
        cores={"most_stolen_s": most_stolen_s},
    )
    assert cause in check(run, "event loop").detail
    assert check(run, "steal").ok is True


STALLS = {"over_s": 0.005, "spans_s": [[4.0, 4.1, 0.1], [9.0, 9.2, 0.2]]}
LAG = {"n": 320, "p50": 0.0, "p99": 0.01, "max": 0.1}


def slowed(run: Run, slow_in_stalls_s: float, **more: object) -> Run:
    """Its client stalled for 300 ms, for so much of it on a processor at a twelfth of its speed."""
    looks = {"looks": 3200, "usual_s": 1e-6, "slow_s": 0.64, "slow_speed": 1 / 12}
    looks["slow_in_stalls_s"] = slow_in_stalls_s
    return with_shard(run, processor=looks, loop_lag_s=LAG, stalls=STALLS, **more)


def test_a_processor_that_was_slowed_down_is_named_as_the_cause_of_stalls() -> None:
    run = slowed(measured_run(), 0.16)
    expected = (
        "ran at 8.33 % of its usual speed for 160 ms of the 300 ms for which the load generator"
    )
    assert f"{expected} stalled" in check(run, "event loop").detail
    speed = check(run, "processor speed")
    assert (speed.ok, speed.is_gate) == (False, False)


def test_one_that_was_slow_at_other_times_is_not() -> None:
    run = slowed(measured_run(), 0.14)
    assert "something in its own process blocked the event loop" in check(run, "event loop").detail
    speed = check(run, "processor speed")
    assert speed.ok is True
    assert "below a third of its usual speed for 640 ms" in speed.detail


def test_a_processor_that_was_never_slow_says_so() -> None:
    looks = {"looks": 3200, "usual_s": 1e-6, "slow_s": 0.0, "slow_in_stalls_s": 0.0}
    run = with_shard(measured_run(), processor={**looks, "slow_speed": None})
    speed = check(run, "processor speed")
    assert (speed.ok, speed.detail) == (True, "never below a third of its usual speed")


def test_a_slow_processor_of_one_worker_is_no_cause_of_anothers_stalls() -> None:
    slow = slowed(measured_run(), 0.3).instrument.shards[0]
    longer = {"over_s": 0.005, "spans_s": [[4.0, 8.0, 4.0]]}
    other = changed(slow, shard=1, stalls=longer, processor=None)
    run = with_shards(measured_run(), slow, other)
    assert "blocked the event loop" in check(run, "event loop").detail


def test_late_requests_have_a_slow_processor_for_their_cause_too() -> None:
    run = slowed(measured_run(), 0.3)
    run.request_rows["sent_s"] += 0.03
    assert "of its usual speed" in check(run, "lateness").detail


def test_stolen_time_is_named_before_a_slow_processor() -> None:
    run = slowed(measured_run(), 0.3, stolen_share=0.12)
    assert "(steal)" in check(run, "event loop").detail
    assert "usual speed" not in check(run, "event loop").detail


def test_a_client_that_did_not_look_at_its_processor_says_so() -> None:
    assert check(with_shard(measured_run(), processor=None), "processor speed").ok is None


def test_the_worst_worker_is_named() -> None:
    run = measured_run()
    shard = run.instrument.shards[0]
    both = with_shards(run, shard, changed(shard, shard=1, cpu_share=0.5))
    assert "worker 1, the worst of 2" in check(both, "client CPU").detail


def test_limits_in_the_manifest_override_the_defaults() -> None:
    run = with_shard(measured_run(), cpu_share=0.95)
    assert check(with_manifest(run, instrument_limits={"cpu_share": 0.99}), "client CPU").ok


def late(run: Run, by_s: float) -> Run:
    run.request_rows["sent_s"] = run.request_rows["released_s"] + by_s
    return run


def test_dispatch_lateness_over_5_ms_is_client_bound_and_10_s_of_ttft_allow_more() -> None:
    assert check(late(measured_run(), 0.0049), "lateness").ok
    assert check(late(measured_run(), 0.0051), "lateness").ok is False
    assert check(late(measured_run(slo=["p99(ttft) <= 10s"]), 0.19), "lateness").ok
    assert check(late(measured_run(slo=["p99(ttft) <= 10s"]), 0.21), "lateness").ok is False


def test_a_null_lateness_limit_follows_the_slos_in_use_and_a_set_one_stays() -> None:
    """The same rows, 0.1 s late: too late for `ttft <= 1s`, not for 10 s by either clock."""
    run = late(measured_run(slo=["ttft <= 1s"]), 0.1)
    derived = with_manifest(run, instrument_limits={"lateness_s": None})

    def is_fine(run: Run, slo: list[str] | None = None) -> bool | None:
        checks = summarize(run, slo=slo).validity.checks
        return next(c.ok for c in checks if c.name == "lateness")

    assert is_fine(derived) is False
    assert is_fine(derived, ["p99(ttft) <= 10s"])
    assert is_fine(derived, ["max(ttft_from_send) <= 10s"])
    assert is_fine(derived, ["ttft <= 10s", "ttft_from_send <= 1s"]) is False
    fixed = with_manifest(run, instrument_limits={"lateness_s": 0.05})
    assert is_fine(fixed, ["ttft <= 10s"]) is False


def test_a_wait_the_scenario_asked_for_is_not_lateness_of_the_client() -> None:
    """One request at a time at twice the rate it can do: all but the first ones wait for a slot."""
    run = measured_run(n_tokens=20, ttft_s=0.05, itl_s=0.01)
    rows = run.request_rows
    sent_s = np.maximum(rows["released_s"], np.arange(len(rows)) * 0.25)
    for name in ("first_token_s", "last_token_s", "done_s"):
        rows[name] += sent_s - rows["sent_s"]
    rows["sent_s"] = sent_s
    assert check(run, "lateness").ok is False
    limits = {"max_concurrency": 1, "when_full": "wait"}
    capped = with_manifest(run, scenario={"resolved": {"limits": limits}})
    assert check(capped, "lateness").ok is not False


def test_each_worker_holds_back_at_its_own_share_of_the_cap() -> None:
    """3 slots for 2 workers are 2 and 1: the second request of worker 1 waits, of worker 0 not."""
    run = measured_run(4)
    rows = run.request_rows
    rows["shard"] = [0, 0, 1, 1]
    rows["released_s"] = rows["sent_s"] = [1.0, 1.1, 1.0, 1.1]
    rows["done_s"] = 9.0
    limits = {"max_concurrency": 3, "when_full": "wait"}
    capped = with_manifest(run, scenario={"resolved": {"limits": limits}})
    assert held_by_cap(capped).tolist() == [False, False, False, True]


def test_a_request_released_off_its_planned_instant_fails_the_stimulus() -> None:
    run = measured_run()
    run.request_rows["released_s"][50] += 0.05
    assert check(run, "stimulus").ok is False
    assert "1 of 220" in check(run, "stimulus").detail


def test_planned_requests_that_were_never_released_fail_the_stimulus_of_a_whole_run() -> None:
    run = measured_run()
    run.request_rows["status"][50], run.request_rows["released_s"][50] = (
        Status.not_released,
        np.nan,
    )
    assert check(run, "stimulus").ok is False
    assert check(with_manifest(run, ended="interrupted"), "stimulus").ok


def test_a_turn_is_planned_at_its_parents_end_plus_think_time() -> None:
    run = measured_run()
    run.schedule_rows["n_parents"][219], run.schedule_rows["scheduled_s"][219] = 1, np.nan
    run.schedule_rows["think_s"][219] = 0.5
    edges = np.array([(219, 218, 0.0)], EDGES)
    run.request_rows["released_s"][219] = run.request_rows["done_s"][218] + 0.5
    assert check(replace(run, edge_rows=edges), "stimulus").ok
    run.request_rows["released_s"][219] += 0.1
    assert check(replace(run, edge_rows=edges), "stimulus").ok is False
    edges["delay_s"] = 0.1
    assert check(replace(run, edge_rows=edges), "stimulus").ok


def test_cached_tokens_beyond_the_declared_prefix_are_contamination_but_no_gate() -> None:
    run = measured_run()
    run.request_rows["cached_tokens"] = 96
    found = check(run, "cache")
    assert (found.ok, found.is_gate) == (False, False)
    summary = summarize(run)
    assert summary.validity.trusted
    assert any(
        finding.startswith("Cache: the server's cache held prompts that")
        for finding in summary.findings
    )
    run.schedule_rows["prefix_tokens"] = 64
    assert check(run, "cache").ok


def test_a_server_that_says_nothing_about_its_cache_is_not_called_clean() -> None:
    assert check(measured_run(), "cache").ok is None


def test_answers_of_another_length_than_asked_are_told() -> None:
    run = measured_run()
    run.schedule_rows["output_tokens"] = 40
    found = check(run, "output lengths")
    assert found.ok is False
    assert "40 tokens requested on average, 20 received; 200 of 200 answers differ" in found.detail


def test_what_was_not_recorded_is_unknown_not_fine() -> None:
    run = replace(measured_run(), instrument=ClientReport())
    unknown = {c.name for c in summarize(run).validity.checks if c.ok is None}
    assert {"event loop", "client CPU", "run delay", "throttling", "connections"} <= unknown


def test_usage_that_differs_from_counted_chunks_is_a_finding() -> None:
    run = measured_run()
    run.chunk_rows["tokens"], run.request_rows["first_chunk_tokens"] = 1, 1
    assert not any("do not add up" in finding for finding in summarize(run).findings)
    run.request_rows["output_tokens"][100] = 21
    assert any("In 1 of 200 answers" in finding for finding in summarize(run).findings)


def test_chunks_of_several_tokens_without_a_count_make_itl_per_chunk() -> None:
    run = measured_run()
    run.request_rows["output_tokens"] = 40
    assert any("2 tokens per chunk" in finding for finding in summarize(run).findings)


def test_answers_without_usage_are_told() -> None:
    run = measured_run()
    run.request_rows["token_source"][100:110] = 2
    assert any("10 of 200 answers came without" in finding for finding in summarize(run).findings)


def test_neighbours_that_are_alike_count_for_fewer_requests() -> None:
    run = measured_run(slo=["p50(ttft) <= 10s"])
    (plain,) = summarize(run).slo
    assert (plain.n, plain.n_effective, plain.too_short, plain.proven) == (200, 200, False, True)
    wave_s = 0.5 * np.sin(np.arange(220) / 20)
    for name in ("first_token_s", "first_answer_s", "last_token_s", "done_s"):
        run.request_rows[name] += 0.6 + wave_s
    summary = summarize(run, confidence=0.95)
    (waved,) = summary.slo
    assert waved.n_effective is not None
    assert waved.n_needed is not None
    assert waved.n_effective < 20
    assert (waved.too_short, waved.proven, waved.low, waved.high) == (True, False, None, None)
    assert summary.verdict == "no_verdict"
    assert "as informative as" in summary.reasons[0]
    assert waved.seconds_needed == pytest.approx(20 * waved.n_needed / 200)
    assert summary.metrics["ttft_s"].percentiles["p50"].low is None
    share = summarize(run, ["ttft <= 10s"]).attainment
    assert share.n_effective is not None
    assert share.n_effective < 20
    assert (share.low, share.high) == (None, None)


def test_requests_encoded_only_when_they_were_due_are_told_from_1_percent_on() -> None:
    for n_late, ok in ((2, True), (3, False)):  # of 220
        found = check(with_shard(measured_run(), encoded_late=n_late), "encoding")
        assert (found.ok, found.is_gate) == (ok, False)
        assert f"{n_late} of 220 requests" in found.detail
    summary = summarize(with_shard(measured_run(), encoded_late=3))
    assert summary.validity.trusted
    assert any(f.startswith("Encoding: 3 of 220 requests") for f in summary.findings)


def test_what_the_client_did_besides_measuring_is_told() -> None:
    run = with_shard(measured_run(), spilled_bytes=300_000_000)
    told = "The load generator wrote 300 MB of answers to its disk while measuring."
    assert told in summarize(run).findings
    assert not any("its disk" in finding for finding in summarize(measured_run()).findings)


def test_prompts_shorter_than_the_chat_template_are_counted() -> None:
    """A template of 30 tokens, 0.5 tokens per character: 30 tokens cannot be asked for, 31 can."""
    run = measured_run()
    run.schedule_rows["input_tokens"][100:107] = 30
    run.schedule_rows["input_tokens"][107:110] = 31
    run.schedule_rows["input_tokens"][:5] = 1  # warm-up
    fitted = with_manifest(run, target={"prompt_fit": [30.0, 0.5]})
    assert (
        "7 requests were planned with fewer tokens than the chat template alone needs (at least "
        "30.5), so the server counts more tokens than planned." in summarize(fitted).findings
    )
    assert not any("chat template" in finding for finding in summarize(run).findings)


def test_connections_refused_before_the_first_request_are_told() -> None:
    told = {"opened": 75, "reused": 79, "not_opened_ahead": 4}
    found = check(with_shard(measured_run(), connections=told), "connections")
    assert (found.ok, found.is_gate) == (False, False)
    assert (
        "75 opened, reused 79 times; the server refused 4 connections that were to be opened"
        in found.detail
    )
    fine = check(
        with_shard(measured_run(), connections={**told, "not_opened_ahead": 0}), "connections"
    )
    assert (fine.ok, fine.detail) == (True, "75 opened, reused 79 times")
