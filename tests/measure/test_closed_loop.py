"""The start of the users of a closed loop, which is no part of the figures."""

import math
from dataclasses import replace

import numpy as np
import pytest

from loadgen.manifest.self_report import ClientReport
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import due_rows, measured_window, with_counted_window, with_window
from loadgen.measure.closed_loop import (
    closed_goodput,
    closed_rate,
    counting_start,
    cycles,
    with_start_left_out,
)
from loadgen.measure.definitions import rescore
from loadgen.measure.statistics.intervals import Interval
from loadgen.records import CHUNKS, EDGES, Phase, Run, Status, TokenSource, empty_requests
from tests.runs import MANIFEST, SHARD, changed, schedule_rows, traffic

LIMITS = {"limits": {"timeout": "60s", "max_concurrency": 1000, "when_full": "drop"}}


def loop(
    cycles_s, n=None, ttft_s=0.1, first_ttft_s=2.0, slo=(), requests=None, join_s=0.0, fail=(),
    measure_s=1e4, warmup_s=0.0, kind="users",
):  # fmt: skip
    """Users without a pause, whose k-th requests take `cycles_s[user, k]`; the first token of the
    first request of each comes after `first_ttft_s`, of any other after `ttft_s`. Rows after the
    n-th release were not released. `fail`: (user, request) pairs."""
    cycles_s = np.asarray(cycles_s, float)
    users, each = cycles_s.shape
    ends_s = join_s * np.arange(users)[:, None] + np.cumsum(cycles_s, axis=1)
    released_s = np.hstack([join_s * np.arange(users)[:, None], ends_s[:, :-1]]).ravel()
    schedule = schedule_rows(np.full(users * each, np.nan))
    schedule["session_id"] = np.repeat(np.arange(users), each)
    is_first = np.tile(np.arange(each) == 0, users)
    schedule["scheduled_s"][is_first] = released_s[is_first]
    schedule["n_parents"], schedule["after_failure"] = ~is_first, ~is_first
    schedule["phase"] = np.where(released_s < warmup_s, Phase.warmup, Phase.measure)
    edges = np.zeros(int((~is_first).sum()), EDGES)
    edges["request_id"] = np.flatnonzero(~is_first)
    edges["after"] = edges["request_id"] - 1
    rows = empty_requests(schedule)
    kept = np.zeros(users * each, bool)
    kept[np.argsort(released_s, kind="stable")[: n or users * each]] = True
    first_s = released_s + np.where(is_first, first_ttft_s, ttft_s)
    for name, values in (
        ("released_s", released_s), ("sent_s", released_s), ("first_token_s", first_s),
        ("first_chunk_s", first_s), ("last_token_s", ends_s.ravel()), ("done_s", ends_s.ravel()),
    ):  # fmt: skip
        rows[name][kept] = values[kept]
    rows["status"] = np.where(kept, Status.ok, Status.not_released)
    rows["chunks"], rows["output_tokens"] = 2 * kept, 20 * kept
    rows["first_chunk_tokens"], rows["token_source"] = kept, np.where(kept, TokenSource.usage, 0)
    for user, k in fail:
        rows["status"][user * each + k] = Status.http_error
        rows["http_status"][user * each + k] = 500
    chunks = np.zeros(2 * int(kept.sum()), CHUNKS)
    chunks["request_id"] = np.repeat(np.flatnonzero(kept), 2)
    chunks["received_s"] = np.column_stack([first_s[kept], ends_s.ravel()[kept]]).ravel()
    chunks["tokens"] = np.tile([1, 19], int(kept.sum()))
    manifest = changed(
        MANIFEST,
        classes={"default": traffic(is_closed_loop=True)},
        scenario={"resolved": {**LIMITS, "arrivals": {"kind": kind}}},
        window={
            "warmup_s": warmup_s, "measure_s": measure_s, "drain_s": 60.0, "requests": requests,
        },
        n_requests=users * each,
        slo=tuple(slo),
    )  # fmt: skip
    return Run(manifest, schedule, rows, chunks, edges, instrument=ClientReport((SHARD,)))


def users_of(summary):
    assert summary.closed_loop is not None
    return summary.closed_loop


def measured(*args, **keys):
    return with_start_left_out(with_counted_window(loop(*args, **keys)))


def staggered(users=20, each=30, seed=3):
    """Cycles of 2 s on average; the first take 2.1 to 4 s, evenly spaced, the second 2.5 s."""
    cycles_s = np.random.default_rng(seed).lognormal(math.log(2) - 0.02, 0.2, (users, each))
    cycles_s[:, 0], cycles_s[:, 1] = 2.1 + 0.1 * np.arange(users), 2.5
    return cycles_s


def test_the_window_begins_when_95_per_cent_of_the_users_had_their_first_answer():
    """The 19th of 20 users has it at 3.9 s."""
    run = measured(staggered(), n=500, requests=500)
    assert measured_window(run).start_s == pytest.approx(3.9)
    released_s = run.request_rows["released_s"]
    assert np.array_equal(due_rows(run), released_s >= 3.9)


def test_the_cut_does_not_depend_on_latency():
    fast, slow = (measured(staggered(), n=500, requests=500, ttft_s=s) for s in (0.01, 1.5))
    assert measured_window(fast) == measured_window(slow)


def test_the_rate_of_the_whole_run_counts_the_burst_and_that_of_the_window_does_not():
    """100 requests of 20 users: 20 of them at once; the users make 10 requests per second."""
    cycles_s = np.random.default_rng(8).lognormal(math.log(2) - 0.02, 0.2, (20, 30))
    run = measured(cycles_s, n=100, requests=100)
    whole = summarize(with_window(run, "all"))
    assert whole.achieved_rate_per_s > 11.5
    assert users_of(whole).rate.value == whole.achieved_rate_per_s
    assert summarize(run).achieved_rate_per_s == pytest.approx(10.0, rel=0.08)


def test_a_long_run_has_an_interval_around_its_rate():
    summary = summarize(measured(staggered(), n=500, requests=500))
    rate = users_of(summary).rate
    assert rate.value == pytest.approx(summary.achieved_rate_per_s)
    assert rate.low is not None
    assert rate.high is not None
    assert rate.low < min(rate.value, 10)
    assert rate.high > max(rate.value, 10)
    assert users_of(summary).requests_needed is None
    goodput = summary.goodput.requests_per_s
    assert goodput.low is not None
    assert goodput.high is not None
    assert goodput.low < goodput.value < goodput.high


def test_a_slow_start_is_no_part_of_the_latencies_and_has_a_line_of_its_own():
    summary = summarize(measured(staggered(), n=500, requests=500, slo=["p90(ttft) <= 300ms"]))
    assert summary.metrics["ttft_s"].percentiles["p90"].value == pytest.approx(0.1)
    assert summary.verdict == "met"
    loop_ = users_of(summary)
    assert (loop_.users, loop_.start.first_p90_s) == (20, pytest.approx(2.0))
    assert loop_.text.startswith("20 users at once: p90 TTFT 2 s; ")
    assert summary.counts["start"] == loop_.start.requests == 40 - 2
    assert summary.counts["due"] == 500 - 38


def test_a_run_that_is_mostly_start_up_says_so_and_has_no_verdict_that_the_start_decided():
    slo = ["p90(ttft) <= 300ms", "p90(e2e) <= 5s", "requests_per_s >= 1/s", "error_rate <= 1%"]
    summary = summarize(measured(staggered(), n=45, requests=45, slo=slo))
    loop_ = users_of(summary)
    assert (loop_.is_start_up, loop_.is_left_out) == (True, False)
    assert (summary.counts["due"], loop_.requests_needed) == (45, 400)
    assert (loop_.rate.low, loop_.rate.high) == (None, None)
    assert summary.metrics["ttft_s"].percentiles["p50"].high is None
    assert [result.met for result in summary.slo] == [None, True, None, True]
    assert (summary.verdict, summary.exit_code) == ("no_verdict", 3)
    assert summary.reason_kinds == ("start_up", "start_up")
    assert "needs about 400 requests" in summary.reasons[0]
    assert any(finding.startswith("Mostly start-up") for finding in summary.findings)


def test_latencies_that_the_start_met_are_met_but_not_proven():
    summary = summarize(measured(staggered(), n=45, requests=45, slo=["p50(e2e) <= 60s"]))
    assert (summary.verdict, summary.certainty) == ("met", "in_run")


def test_one_request_per_user_after_the_start_is_enough_for_the_window():
    """The 39th request is released at 3.9 s, the time of the cut."""
    short, enough = (measured(staggered(), n=n, requests=n) for n in (57, 58))
    assert measured_window(short).start_s == 0.0
    assert due_rows(short).sum() == 57
    assert measured_window(enough).start_s == pytest.approx(3.9)
    assert due_rows(enough).sum() == 20
    of_all = [users_of(summarize(with_window(run, "all"))).is_start_up for run in (short, enough)]
    assert of_all == [True, False]


def test_failures_of_the_start_count_in_the_error_rate_alone():
    slo = ["error_rate <= 0.5%", "attainment >= 99%", "ttft <= 1s"]
    summary = summarize(measured(staggered(), n=500, requests=500, fail=[(0, 0), (3, 0), (7, 1)],
                                 slo=slo))  # fmt: skip
    by_metric = {result.metric: result for result in summary.slo}
    assert by_metric["error_rate"].value == pytest.approx(3 / 500)
    assert by_metric["error_rate"].n == 500
    assert by_metric["error_rate"].met is False
    assert (summary.attainment.value, summary.counts["failed"]) == (1.0, 0)
    assert users_of(summary).start.failed == 3
    assert "3 of 38 requests failed" in users_of(summary).text


def test_the_cut_waits_at_most_a_time_out_for_silent_users():
    """2 of 20 users never have an answer; the time-out is 60 s."""
    cycles_s = staggered(each=60)
    cycles_s[4:6, 0] = 1e6
    run = measured(cycles_s, measure_s=110.0)
    assert measured_window(run).start_s == 60.0


def test_the_cut_waits_for_users_that_join_one_after_the_other():
    run = measured(staggered(each=60), join_s=1.0)
    assert measured_window(run).start_s == pytest.approx(18 + 3.9)
    assert users_of(summarize(run)).text.startswith("20 users within 19 s: ")


@pytest.mark.parametrize(
    ("keys", "starts_s"), [({"warmup_s": 10.0}, 10.0), ({"kind": "ramp"}, 0.0), ({}, 3.9)]
)
def test_a_longer_warm_up_and_a_fixed_window_stay(keys, starts_s):
    run = measured(staggered(), **keys)
    assert measured_window(run).start_s == pytest.approx(starts_s)
    assert (run.manifest.window.started_s is None) == bool(keys)


def test_a_single_user_has_no_start():
    run = measured(staggered(users=1), n=20, requests=20)
    assert due_rows(run).sum() == 20
    assert not users_of(summarize(run)).is_start_up


def test_all_requests_count_again_with_the_window_all():
    run = measured(staggered(), n=500, requests=500)
    whole = with_window(run, "all")
    assert due_rows(whole).sum() == 500
    assert measured_window(whole).start_s == 0.0
    assert measured_window(counting_start(run)) == measured_window(whole)
    assert measured_window(with_window(run, "2s:9s")).start_s == 2.0


def test_other_tools_count_the_start():
    run = measured(staggered(), n=500, requests=500)
    n = {row.definition: row.n for row in rescore(run) if row.metric == "ttft"}
    assert n == {"slobench": 462} | dict.fromkeys(
        ("vllm", "guidellm", "aiperf", "inference-perf", "mlperf"), 500
    )


def waiting_alike(users=8, each=40, n=190):
    """Users whose TTFT is a value of their cycle, the k-th requests of all of them."""
    run = loop(staggered(users, each), n=n, requests=n)
    rng, rows = np.random.default_rng(4), run.request_rows.copy()
    ttft_s = np.tile(rng.lognormal(-3, 1, each).clip(0.001, 1.0), users)
    for name in ("first_token_s", "first_chunk_s"):
        rows[name] = rows["released_s"] + ttft_s
    chunks = run.chunk_rows.copy()
    chunks["received_s"][::2] = rows["first_token_s"][chunks["request_id"][::2]]
    return with_start_left_out(with_counted_window(replace(run, request_rows=rows,
                                                           chunk_rows=chunks)))  # fmt: skip


def test_the_cycles_of_the_users_give_a_percentile_an_interval():
    run = waiting_alike()
    p50 = summarize(run).metrics["ttft_s"].percentiles["p50"]
    assert p50.low is not None
    assert p50.high is not None
    assert p50.low < p50.value < p50.high
    assert p50.n_effective is not None
    assert p50.n_effective < 80  # of 174 requests


def test_cycles_count_for_several_users_after_their_start_and_beside_no_open_loop():
    run = waiting_alike()
    due = due_rows(run)
    assert cycles(run, due) == pytest.approx(due.sum() / 8)
    assert cycles(run, due & (run.schedule_rows["session_id"] == 0)) == 0.0
    assert cycles(with_window(run, "all"), due) == 0.0
    classes = {
        "default": traffic(is_closed_loop=True), "other": traffic(is_closed_loop=False),
    }  # fmt: skip
    assert cycles(replace(run, manifest=changed(run.manifest, classes=classes)), due) == 0.0


def test_a_goodput_is_as_uncertain_as_the_rate_of_the_requests_that_met():
    """All requests of the first half of the window met, none of the second."""
    run = measured(staggered(), n=500, requests=500)
    due, window = due_rows(run), measured_window(run)
    met = due & (run.request_rows["released_s"] < (window.start_s + window.end_s) / 2)
    found = closed_goodput(run, due, met, window, 0.95, False, Interval(0.5, 0.5, 0.5))
    of_met = closed_rate(run, due, window, 0.95, False, met)
    assert (found.low, found.high) == (of_met.low, of_met.high)
    assert found.low is not None
    assert found.low < 0.7 * found.value


def test_users_in_lock_step_are_named():
    """Equal answers: all 20 users send in the same tenth of a second, every 2 s."""
    equal = np.full((20, 30), 2.0)
    equal[:, 0] += 0.005 * np.arange(20)
    together, apart = (summarize(measured(c, n=500, requests=500)) for c in (equal, staggered()))
    assert users_of(together).is_in_lock_step
    assert any("lock-step" in finding for finding in together.findings)
    assert not users_of(apart).is_in_lock_step
    assert not any("lock-step" in finding for finding in apart.findings)


def test_a_recorded_run_without_a_cut_gets_it_when_it_is_measured_again():
    """As `store.read_run` does for runs of earlier versions; a second time changes nothing."""
    run = measured(staggered(), n=500, requests=500)
    older = replace(run, manifest=changed(run.manifest, window={"started_s": None}))
    assert measured_window(with_start_left_out(older)) == measured_window(run)
    assert with_start_left_out(run).manifest == run.manifest
