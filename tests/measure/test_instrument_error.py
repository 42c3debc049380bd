"""INVALID by what the load generator's own error does to the verdict: known answers and
properties."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.manifest.sections import InstrumentLimits
from loadgen.manifest.self_report import ClientReport
from loadgen.measure.aggregate import summarize
from loadgen.measure.per_request import per_request
from loadgen.measure.slo import parse_slo
from loadgen.measure.slo_result import SloResult
from loadgen.measure.summary import Summary, ValidityCheck
from loadgen.measure.validity.checks import own_lateness
from loadgen.measure.validity.error_bound import (
    WorkerDelay,
    error_bound,
    shifted,
    usual_delay_s,
    worker_delays,
)
from loadgen.measure.validity.survival import survives, unsettled
from loadgen.records import Run, Status
from tests.runs import (
    SHARD,
    changed,
    measured_run,
    replace_schedule,
    two_classes,
    with_manifest,
    with_shard,
    with_shards,
)

LIMITS = InstrumentLimits(
    lateness_s=None, loop_lag_s=0.005, read_backlog_s=0.0025, cpu_share=0.9, run_delay_share=0.01
)


def load_check(summary: Summary) -> ValidityCheck:
    return next(check for check in summary.validity.checks if check.name == "offered load")


def gate_of(summary: Summary) -> ValidityCheck:
    return next(c for c in summary.validity.checks if c.name == "instrument error")


def lagging(run: Run, lag_s: float) -> Run:
    """A run whose reads may all have been late by `lag_s`: it holds no record of single stalls."""
    lag = {"n": 2000, "p50": 0.0, "p99": lag_s, "max": lag_s}
    return with_shard(run, loop_lag_s=lag, stalls=None)


def stalled(run: Run, *spans: tuple[float, float, float]) -> Run:
    lag = {"n": 2000, "p50": 0.0, "p99": 0.0, "max": 9.0}
    stalls = {"over_s": 0.005, "spans_s": [list(span) for span in spans]}
    return with_shard(run, loop_lag_s=lag, stalls=stalls, run_delay_share=0.0)


# The examples of the rule.


def test_a_small_p99_far_below_its_limit_stands_with_19_ms_of_lag() -> None:
    run = lagging(measured_run(ttft_s=0.011, slo=["p99(ttft) <= 1s"]), 0.019)
    summary = summarize(run)
    assert (summary.verdict, summary.exit_code) == ("met", 0)
    assert summary.validity.trusted
    (result,) = summary.slo
    assert result.survives is True
    assert result.error == pytest.approx(0.019 + 0.0002)  # sent 0.2 ms late
    assert "+ up to 19.2 ms instrument error" in summary.reasons[0]
    assert any(f.startswith("Event loop: the load generator was held up") for f in summary.findings)


def test_failures_far_above_their_limit_stand_in_spite_of_a_starved_client() -> None:
    run = measured_run(slo=["error_rate <= 0.1%"])
    run.request_rows["status"][20:][::10] = Status.http_error
    summary = summarize(lagging(run, 2.0))
    assert (summary.verdict, summary.exit_code) == ("missed", 1)
    assert summary.validity.trusted
    assert summary.slo[0].proven is True


def test_a_miss_that_the_error_cannot_explain_stands() -> None:
    """P50 98 ms against 50 ms: 30 ms of error leave 68 ms."""
    summary = summarize(lagging(measured_run(slo=["p50(ttft) <= 50ms"]), 0.03))
    assert (summary.verdict, summary.slo[0].survives) == ("missed", True)


@pytest.mark.parametrize(
    ("slo", "lag_s"),
    [
        ("p50(ttft) <= 110ms", 0.02),  # met at 98 ms
        ("p50(ttft) <= 90ms", 0.02),  # missed at 98 ms
        ("mean(e2e) <= 300ms", 0.02),  # met at about 290 ms
        ("p99(itl) <= 20ms", 0.006),  # met at about 16 ms
        ("max(ttft) <= 200ms", 0.08),
        ("attainment >= 99%", 0.1),
        ("goodput >= 9.9/s", 0.1),
    ],
)
def test_a_result_that_the_error_can_turn_is_invalid(slo: str, lag_s: float) -> None:
    slos = [slo] if "(" in slo else ["ttft <= 200ms", slo]
    healthy = summarize(lagging(measured_run(slo=slos), 0.0001))
    assert healthy.verdict in ("met", "missed")
    summary = summarize(lagging(measured_run(slo=slos), lag_s))
    assert (summary.verdict, summary.exit_code) == ("no_verdict", 3)
    assert not summary.validity.trusted
    found = gate_of(summary)
    assert (found.ok, found.is_gate) == (False, True)
    assert slo in found.detail
    assert "instrument error" in found.detail
    assert found.remedy
    assert f"Remedy: {found.remedy}." in summary.reasons[0]


def test_a_miss_stands_where_the_whole_error_cannot_turn_it() -> None:
    """A P50 of 2 s against 100 ms: 150 ms of error, more than the limit, leave 1.85 s."""
    for slo in (["p50(ttft) <= 100ms"], ["ttft <= 100ms"], ["mean(ttft) <= 100ms"]):
        run = measured_run(ttft_s=2.0, slo=slo)
        disturbed = summarize(lagging(run, 0.15))
        assert (disturbed.verdict, disturbed.validity.trusted) == ("missed", True)
        assert any(result.error_reaches_limit for result in disturbed.slo)
        starved = summarize(lagging(run, 9.0))  # any of it may be the client's own
        assert (starved.verdict, starved.validity.trusted) == ("no_verdict", False)


def test_an_error_as_large_as_the_limit_never_leaves_a_met_slo() -> None:
    for slo in (["p50(ttft) <= 150ms"], ["ttft <= 150ms"], ["mean(ttft) <= 150ms"]):
        run = measured_run(ttft_s=0.01, slo=slo)
        assert summarize(lagging(run, 0.1)).verdict == "met"
        assert summarize(lagging(run, 0.15)).verdict == "no_verdict"


def test_one_certain_miss_decides_whatever_other_results_are_open() -> None:
    run = measured_run(n_failed=20, slo=["error_rate <= 0.1%", "p50(ttft) <= 110ms"])
    summary = summarize(lagging(run, 0.02))
    assert (summary.verdict, summary.validity.trusted) == ("missed", True)
    assert [result.survives for result in summary.slo] == [True, False]


def test_the_slos_of_classes_count_too() -> None:
    run = two_classes(chat=["p50(ttft) <= 110ms"], rag=["ttft <= 5s"])
    assert summarize(run).verdict == "met"
    summary = summarize(lagging(run, 0.02))
    assert (summary.verdict, summary.validity.trusted) == ("no_verdict", False)
    assert "chat: p50(ttft) <= 110ms" in gate_of(summary).detail
    assert {c.verdict for c in summary.classes.values()} == {"no_verdict"}
    far = summarize(lagging(two_classes(chat=["p50(ttft) <= 1s"], rag=["ttft <= 5s"]), 0.02))
    assert far.verdict == "met"
    assert far.classes["chat"].slo[0].error == pytest.approx(0.0202)


def test_a_class_is_open_beside_a_class_that_misses_in_any_case() -> None:
    """rag takes 1 s; chat's P50 is 98 ms, and 20 ms may be the load generator's."""
    run = two_classes(chat=["p50(ttft) <= 110ms"], rag=["p50(ttft) <= 50ms"])
    summary = summarize(lagging(run, 0.02))
    assert (summary.verdict, summary.validity.trusted) == ("missed", True)
    assert {n: c.verdict for n, c in summary.classes.items()} == {
        "chat": "no_verdict",
        "rag": "missed",
    }


def test_the_waits_of_a_class_at_the_common_cap_are_no_error() -> None:
    """With 2 in flight at most, chat alone keeps each of rag's requests waiting for 300 ms."""
    run = two_classes(rag=["p50(ttft) <= 5s"])
    run.request_rows["sent_s"][run.schedule_rows["class_id"] == 1] += 0.3
    limits = {"max_concurrency": 2, "when_full": "wait"}
    capped = with_manifest(run, scenario={"resolved": {"limits": limits}})
    free, held = (summarize(r).classes["rag"].slo[0].error for r in (run, capped))
    assert free == pytest.approx(0.3, abs=0.01)
    assert held < 0.01


def test_an_error_as_large_as_a_limit_counts_for_the_requests_that_have_the_limit() -> None:
    """20 ms of error against 10 ms: a quarter of the requests, of which half may miss."""
    run = two_classes(rag=["ttft <= 10ms"], slo=["attainment >= 50%"])
    (share,) = summarize(lagging(run, 0.02)).slo
    assert (share.met, share.error_reaches_limit) == (True, False)
    strict = two_classes(rag=["ttft <= 10ms"], slo=["attainment >= 80%"])
    assert summarize(lagging(strict, 0.02)).slo[0].error_reaches_limit


def test_an_error_as_large_as_limits_that_requests_brought_counts_for_the_whole_run() -> None:
    """A quarter of the requests brought 1 ms to a class with a share of its own."""
    run = two_classes(rag=["attainment >= 90%"], slo=["attainment >= 90%"])
    own_s = np.where(np.arange(220) % 4 == 3, 0.001, 0.0)
    summary = summarize(lagging(replace_schedule(run, ttft_slo_s=own_s), 0.02))
    assert [result.text for result in summary.slo] == ["attainment >= 90%"]
    assert summary.slo[0].error_reaches_limit


def test_growth_that_the_error_can_explain_is_no_overload() -> None:
    """TTFT grows from 2.4 s to 3.9 s; 0.5 s of error at either end leave less than 1.5-fold."""
    run = measured_run(slo=["p99(ttft) <= 60s"], ttft_s=2.0)
    delay_s = 0.1 * run.schedule_rows["scheduled_s"]
    for name in ("first_chunk_s", "first_token_s", "first_answer_s", "last_token_s", "done_s"):
        run.request_rows[name] += delay_s
    assert summarize(run).reason_kinds == ("overloaded",)
    summary = summarize(lagging(run, 0.5))
    assert (summary.verdict, summary.reason_kinds) == ("no_verdict", ("invalid",))
    assert "the growth of TTFT over the window can be the load generator's" in summary.reasons[0]


def test_an_invalid_run_proves_nothing() -> None:
    chat = ["p50(ttft) <= 110ms", "p99(ttft) <= 300ms"]
    run = two_classes(chat, rag=["p50(ttft) <= 5s"], slo=["error_rate <= 5%"])
    assert summarize(run).slo[0].proven is True
    assert summarize(run).classes["chat"].slo[1].n_needed is not None
    invalid = summarize(lagging(run, 0.02))
    everything = [*invalid.slo, *(r for c in invalid.classes.values() for r in c.slo)]
    assert {result.proven for result in everything} == {None}
    assert {result.n_needed for result in everything} == {None}
    assert '"proven": true' not in str(invalid.to_json()).replace("'", '"').lower()


def test_proven_holds_with_the_error_added_to_the_confidence_bound() -> None:
    """P50 98 ms, at most about 100 ms with 95 % confidence: 105 ms is proven by 1 ms of error, not
    by 6 ms, at which it is still met."""
    run = measured_run(slo=["p50(ttft) <= 105ms"])
    near = summarize(lagging(run, 0.001)).slo[0]
    far = summarize(lagging(run, 0.006)).slo[0]
    assert (near.proven, near.met, near.survives) == (True, True, True)
    assert (far.proven, far.met, far.survives) == (False, True, True)
    assert far.n_needed is None, "more requests would not help"


# Evidence that is broken stays INVALID.


def test_lost_rows_are_invalid_though_the_error_is_nothing() -> None:
    run = lagging(measured_run(slo=["p99(ttft) <= 1s"]), 0.0)
    run.request_rows["status"][50] = Status.lost
    summary = summarize(run)
    assert not summary.validity.trusted
    assert gate_of(summary).ok is True


def test_a_client_that_falls_ever_further_behind_sent_other_traffic_than_planned() -> None:
    """At the end of 20 s it is 4 s behind: a fifth of the load, whatever the SLO."""
    run = measured_run(n_failed=20, slo=["error_rate <= 0.1%"])
    rows = run.request_rows
    behind_s = 0.2 * rows["released_s"]
    for name in ("sent_s", "first_token_s", "last_token_s", "done_s"):
        rows[name] += behind_s
    summary = summarize(run)
    assert not summary.validity.trusted
    failed = [c.name for c in summary.validity.checks if c.is_gate and c.ok is False]
    assert failed == ["offered load"]
    assert " 1 s late (5 % of the measured window)" in load_check(summary).detail
    held = summarize(with_manifest(run, instrument_limits={"lateness_s": 60.0}))
    assert held.verdict == "missed"
    assert load_check(held).detail.endswith("60 s late (instrument.lateness)")


# The error bound.


def test_a_stall_counts_for_the_reads_inside_it_only() -> None:
    """At most the time since the stall began plus 5 ms, and the latest probe's delay plus 15 ms."""
    worker = WorkerDelay(0, 0.001, np.array([[10.0, 10.5, 0.3], [20.0, 20.02, 0.006]]))
    read_s = np.array([9.9, 10.0, 10.1, 10.5, 10.6, 20.01, 20.02, np.nan])
    expected = [0.001, 0.005, 0.105, 0.315, 0.001, 0.015, 0.021, 0.001]
    assert worker.at(read_s) == pytest.approx(expected)


def test_the_usual_delay_is_the_largest_of_its_readings() -> None:
    quiet = changed(
        SHARD,
        loop_lag_s={"n": 900, "p50": 0.0, "p99": 0.0003, "max": 0.2},
        stalls={"over_s": 0.005, "spans_s": []},
        run_delay_share=0.0,
    )

    def usual(is_shared: bool = False, **changes: Any) -> float:
        return usual_delay_s(changed(quiet, **changes), LIMITS, is_shared)

    assert usual() == 0.0003
    assert usual(loop_lag_s={"p99": 0.03}) == 0.005  # later reads are in stalls
    assert usual(stalls=None) == 0.2
    assert usual(run_delay_share=0.014) == pytest.approx(0.014 * 0.01 * math.log(100))
    backlog = {"looks": 9000, "waiting": 400, "bytes_max": 9, "reads": 9000, "wait_mean_s": 0.003}
    assert usual(backlog=backlog) == 0.006
    assert usual(backlog={**backlog, "waiting": 19}) == 0.0003
    assert usual(cpu_share=0.91) == usual(throttled_share=0.02) == usual(is_shared=True) == 0.005


def test_each_worker_answers_for_its_own_requests() -> None:
    run = measured_run(4)
    run.request_rows["shard"] = [0, 1, 0, 1]
    shard = run.instrument.shards[0]
    slow = changed(shard, shard=1, loop_lag_s={"n": 9, "p50": 0.0, "p99": 0.5, "max": 0.5})
    bound = error_bound(with_shards(run, shard, slow), np.zeros(4))
    assert bound.first_token_s.tolist() == [0.0008, 0.5, 0.0008, 0.5]


def test_lateness_and_reads_add_up_and_a_rate_per_token_shares_them() -> None:
    run = lagging(measured_run(4, n_tokens=11), 0.02)
    run.request_rows["sent_s"][2] += 0.1
    columns = per_request(run)
    bound = error_bound(run, own_lateness(run, columns))
    assert bound.of("ttft_s", columns).tolist() == pytest.approx([0.0202, 0.0202, 0.1202, 0.0202])
    assert bound.of("e2e_s", columns)[2] == pytest.approx(0.1202)
    assert bound.of("tpot_s", columns).tolist() == pytest.approx([0.002] * 4)
    assert bound.of("e2e_per_token_s", columns)[2] == pytest.approx(0.1202 / 11)
    assert bound.of_gaps(run, columns).tolist() == pytest.approx([0.02] * 40)


def test_the_gaps_at_a_stall_are_uncertain_and_no_others() -> None:
    run = measured_run(3, n_tokens=6)
    run.chunk_rows["received_s"] = np.repeat([1.0, 2.0, 3.0], 6) + np.tile(np.arange(6) * 0.1, 3)
    run = stalled(run, (2.15, 2.25, 0.05))
    bound_s = error_bound(run, np.zeros(3)).of_gaps(run, per_request(run))
    assert np.flatnonzero(bound_s).tolist() == [6, 7]  # before and after the third chunk
    assert bound_s[6] == pytest.approx(0.055)


def test_a_short_stall_leaves_the_verdict_of_a_long_run_alone() -> None:
    """2 of 200 requests may be 300 ms off; 99.9 % of P90s do not care."""
    run = stalled(measured_run(slo=["p90(ttft) <= 140ms"]), (10.0, 10.3, 0.3))
    summary = summarize(run)
    assert (summary.verdict, summary.validity.trusted) == ("met", True)
    assert summary.slo[0].error < 0.01
    everywhere = summarize(lagging(measured_run(slo=["p90(ttft) <= 140ms"]), 0.3))
    assert everywhere.verdict == "no_verdict"


def test_a_request_given_up_in_a_stall_may_have_been_answered() -> None:
    run = measured_run(slo=["error_rate <= 0.5%"])
    run.request_rows["status"][100:104] = Status.timeout
    run.request_rows["done_s"][100:104] = 15.1
    assert summarize(stalled(run, (14.0, 14.2, 0.15))).verdict == "missed"
    summary = summarize(stalled(run, (15.0, 15.2, 0.15)))
    assert summary.verdict == "no_verdict"
    assert summary.slo[0].error == pytest.approx(4 / 200)
    run.request_rows["status"][100:104] = Status.http_error  # the server's answer
    assert summarize(stalled(run, (15.0, 15.2, 0.15))).verdict == "missed"


def test_a_simulated_run_has_no_error() -> None:
    run = replace(measured_run(slo=["p50(ttft) <= 105ms"]), instrument=ClientReport())
    run.request_rows["sent_s"] = run.request_rows["released_s"]
    summary = summarize(run)
    assert (summary.slo[0].error, summary.slo[0].survives) == (0.0, True)


def test_throughput_is_uncertain_by_the_requests_at_the_ends_of_the_window() -> None:
    run = lagging(measured_run(slo=["requests_per_s >= 9.8/s"]), 0.15)
    result = summarize(run).slo[0]
    assert 0 < result.error <= 4 / 20
    far = lagging(measured_run(slo=["output_tokens_per_s >= 150/s"]), 0.15)
    assert summarize(far).verdict == "met"


# Runs without an SLO.


@pytest.mark.parametrize(
    ("ttft_s", "lag_s", "is_valid"),
    [(0.1, 0.009, True), (0.1, 0.012, False), (0.01, 0.0045, True), (0.01, 0.0055, False)],
)
def test_without_an_slo_the_error_may_be_10_percent_of_the_values_or_5_ms(
    ttft_s: float, lag_s: float, is_valid: bool
) -> None:
    summary = summarize(lagging(measured_run(ttft_s=ttft_s, n_tokens=60), lag_s))
    assert summary.validity.trusted is is_valid
    assert (summary.exit_code, bool(summary.validity.imprecise)) == (
        0 if is_valid else 3,
        not is_valid,
    )
    if not is_valid:
        assert "p50 TTFT" in gate_of(summary).detail
        limit = with_manifest(
            lagging(measured_run(ttft_s=ttft_s, n_tokens=60), lag_s),
            instrument_limits={"lateness_s": 0.05},
        )
        assert summarize(limit).validity.trusted


# Causes and remedies.


CORES = {"allowed": [0, 1], "online": 4, "own_s": 0.4, "idle_s": 0.2, "programs_s": 19.8,
         "total_s": 20.0, "most_stolen_s": 0.0}  # fmt: skip


@pytest.mark.parametrize(
    ("reading", "cause", "remedy"),
    [
        ({"cpu_share": 0.97}, "its own CPU was full", "--workers"),
        (
            {"cpu_share": 0.97, "cores": {**CORES, "allowed": [0], "programs_s": 9.0}},
            "97 % of a core",
            "a machine with more cores",
        ),
        ({"throttled_share": 0.08}, "CPU quota of the container (cgroup)", "raise the CPU quota"),
        ({"stolen_share": 0.2}, "(steal)", "dedicated cores"),
        ({"cores": CORES}, "other programs used 97 % of the time of its 2 cores", "stop the other"),
        ({"run_delay_share": 0.2}, "20 % of the run for a core", "stop the other programs"),
        ({"cores": {**CORES, "idle_s": 8.0, "programs_s": 12.0}}, "58 % of the time", "stop the"),
        (
            {"run_delay_share": 0.004, "stalls": {"over_s": 0.005, "spans_s": [[9.0, 9.1, 0.2]]}},
            "it waited 0.4 % of the run for a core",  # 128 of 200 ms
            "stop the other programs",
        ),
        ({"cpu_share": 0.7}, "fell behind in bursts", "--workers"),
        ({}, "blocked the event loop", "slow code in plug-ins"),
    ],
)
def test_an_invalid_run_names_its_cause_and_the_remedy_for_that_cause(
    reading: dict[str, Any], cause: str, remedy: str
) -> None:
    run = lagging(measured_run(slo=["p50(ttft) <= 98ms"]), 0.02)
    quiet = {"cpu_share": 0.02, "run_delay_share": 0.0}
    found = gate_of(summarize(with_shard(run, **{**quiet, **reading})))
    assert found.ok is False
    assert cause in found.detail
    assert remedy in found.remedy
    if "cpu_share" not in reading:
        assert "--workers" not in found.detail + found.remedy


def test_a_server_that_the_run_started_is_named_instead_of_other_programs() -> None:
    run = lagging(measured_run(slo=["p50(ttft) <= 110ms"]), 0.02)
    run = with_shard(run, run_delay_share=0.2, cores=CORES)
    family = replace(run, instrument=changed(run.instrument, family_s=18.0))
    found = gate_of(summarize(family))
    assert "the server that this run started used up to 90 %" in found.detail
    assert "on other cores" in found.remedy


def test_a_healthy_client_beside_its_limit_is_not_called_held_up() -> None:
    run = lagging(measured_run(slo=["p50(ttft) <= 98ms"]), 0.001)
    found = gate_of(summarize(run))
    assert found.ok is False
    assert "as close to the limit" in found.detail


# Properties.


def result(met: bool | None, survived: bool | None, reaches: bool) -> SloResult:
    return SloResult(
        parse_slo("p99(ttft) <= 1s"), 0.5, None, None, 9, met, None, None,
        error_reaches_limit=reaches, survives=survived,
    )  # fmt: skip


def test_survival_is_the_same_result_at_both_ends() -> None:
    assert survives(True, True, True)
    assert not survives(True, False, True)
    assert survives(False, False, False)
    assert not survives(False, False, True)
    assert not survives(True, None, True)


def test_what_leaves_a_verdict_open() -> None:
    met, open_met = result(True, True, False), result(True, False, False)
    missed, open_missed = result(False, True, False), result(False, False, False)
    starved = result(False, False, True)
    assert unsettled([met, missed]) == []
    assert unsettled([met, open_met]) == [open_met]
    assert unsettled([missed, open_met, open_missed, starved]) == []
    assert unsettled([open_missed, met]) == [open_missed]
    assert unsettled([result(None, None, False)]) == []


SLOS = st.sampled_from(
    [
        ["p50(ttft) <= 105ms"],
        ["p50(ttft) <= 90ms"],
        ["p99(ttft) <= 160ms", "p99(itl) <= 17ms"],
        ["mean(tpot) <= 10.5ms"],
        ["max(e2e) <= 400ms"],
        ["ttft <= 140ms"],
        ["ttft <= 140ms", "tpot <= 11ms", "goodput >= 5/s"],
        ["error_rate <= 1%"],
        ["requests_per_s >= 9.5/s"],
        ["max_stall <= 30ms", "attainment >= 50%"],
    ]
)


@given(
    SLOS,
    st.integers(0, 3),
    st.lists(st.floats(0.0, 0.3), min_size=3, max_size=3),
    st.sampled_from(["lag", "stall", "late"]),
)
def test_a_larger_error_never_makes_an_invalid_run_valid_and_never_turns_a_result(
    slos: list[str], n_failed: int, sizes_s: list[float], kind: str
) -> None:
    base = measured_run(slo=slos, n_failed=n_failed)
    as_measured = [r.met for r in summarize(lagging(base, 0.0)).slo]
    was_valid, error = True, [0.0] * len(as_measured)
    for size_s in sorted(sizes_s):
        run = lagging(base, size_s if kind == "lag" else 0.0)
        if kind == "stall":
            run = stalled(base, (5.0, 5.0 + 20 * size_s, size_s))
        elif kind == "late":
            run = replace(run, request_rows=base.request_rows.copy())
            run.request_rows["sent_s"] = run.request_rows["released_s"] + size_s
        summary = summarize(run)
        assert [r.met for r in summary.slo] == as_measured
        assert was_valid or not summary.validity.trusted
        assert all(r.error + 1e-9 >= e for r, e in zip(summary.slo, error, strict=True))
        was_valid, error = summary.validity.trusted, [r.error for r in summary.slo]
        if summary.validity.trusted:
            has_open = any(r.met is None for r in summary.slo if r.scope == "run")
            open_or_met = "no_verdict" if has_open else "met"  # too many failures for a mean
            assert summary.verdict == ("missed" if False in as_measured else open_or_met)


@given(st.floats(0.0, 0.5), st.sampled_from([1, -1]))
def test_shifted_columns_move_every_latency_by_its_bound(lag_s: float, sign: int) -> None:
    run = with_shard(lagging(measured_run(30, n_tokens=5), lag_s), run_delay_share=0.0)
    columns = per_request(run)
    bound = error_bound(run, own_lateness(run, columns))
    moved = shifted(run, columns, bound, sign, has_gaps=True)
    for name in ("ttft_s", "ttft_from_send_s", "ttfat_s", "e2e_s", "close_s"):
        expected = np.maximum(columns.column(name) + sign * (0.0002 + lag_s), 0.0)
        assert moved.column(name) == pytest.approx(expected)
    assert np.all(sign * (moved.max_stall_s - columns.max_stall_s) >= -1e-12)
    assert np.all(sign * (moved.max_itl_s - columns.max_itl_s) >= -1e-12)
    assert moved.output_tokens is columns.output_tokens


def test_a_lag_that_was_not_recorded_bounds_nothing() -> None:
    silent = changed(
        SHARD, loop_lag_s={"n": 0, "p50": 0.0, "p99": 0.0, "max": 0.0}, run_delay_share=None
    )
    (worker,) = worker_delays(ClientReport((silent,)), LIMITS)
    assert worker.usual_s == 0.0
