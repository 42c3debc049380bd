"""Stalls of the client's: which requests they touch, and what those change."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from loadgen.manifest.self_report import StallsReport
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import derived
from loadgen.measure.stalls import stalled_rows
from loadgen.records import Run
from tests.runs import SHARD, changed, measured_run, runs, with_manifest, with_shard, with_shards


def with_stalls(run: Run, *spans: tuple[float, float, float]) -> Run:
    return with_shard(run, stalls={"over_s": 0.005, "spans_s": [list(span) for span in spans]})


def check(run: Run, name: str) -> Any:
    return next(c for c in summarize(run).validity.checks if c.name == name)


def test_a_client_that_never_stalled_says_so() -> None:
    run = with_stalls(measured_run())
    assert (check(run, "stalls").ok, check(run, "stalls").is_gate) == (True, False)
    assert not derived(run)["client_stalled"].any()


def test_a_run_of_an_older_client_claims_nothing() -> None:
    assert check(measured_run(), "stalls").ok is None
    assert summarize(measured_run()).validity.stalls is None


def test_requests_in_a_stall_are_marked_counted_and_shown_with_and_without() -> None:
    """Three requests, stamped a second late in a stall that ends at 12.2 s."""
    run = measured_run()
    late = [105, 106, 107]  # released from 10.5 s on
    for name in ("first_token_s", "last_token_s", "done_s"):
        run.request_rows[name][late] += 1.0
    run = with_stalls(run, (11.55, 12.2, 0.6))
    marked = np.flatnonzero(derived(run)["client_stalled"])
    assert set(late) <= set(marked.tolist())
    assert set(marked.tolist()) <= set(range(102, 123))
    found = summarize(run).validity.stalls
    assert found is not None
    assert (found.n, found.rows) == (1, len(marked))
    assert found.longest_s == 0.6
    assert found.total_s == pytest.approx(0.65)
    all_s, without_s = found.p99_s["ttft_s"]
    assert all_s > 1.0 > 0.3 > without_s
    said = check(run, "stalls")
    assert (said.ok, said.is_gate) == (False, False)
    assert f"{len(marked)} of 200 requests" in said.detail
    assert "without them p99 TTFT 1" in said.detail
    assert any(
        sentence.startswith("Stalls: the load generator stalled")
        for sentence in summarize(run).findings
    )
    far = with_manifest(run, slo=("p99(ttft) <= 5s",))
    assert summarize(far).verdict == "met", "the stall is far from the limit"


def test_a_stall_that_touched_nobody_is_told_without_a_warning() -> None:
    run = with_stalls(measured_run(), (500.0, 500.1, 0.09))
    assert check(run, "stalls").ok is True
    assert "0 of 200 requests" in check(run, "stalls").detail


def test_a_stall_that_changes_no_percentile_is_no_finding() -> None:
    """One request in the middle of the others was sent in a stall."""
    run = with_stalls(measured_run(), (12.0001, 12.0003, 0.09))
    assert check(run, "stalls").ok is True
    assert "during stalls 1 of 200 requests" in check(run, "stalls").detail
    assert "without them" not in check(run, "stalls").detail
    assert not any("Stalls" in sentence for sentence in summarize(run).findings)


def test_stalls_that_touched_every_request_are_compared_with_nothing() -> None:
    run = with_stalls(measured_run(23), (0.0, 500.0, 0.09))
    assert check(run, "stalls").ok is None
    assert check(run, "stalls").detail.endswith(
        "during stalls 3 of 3 requests were sent or got their first or last token"
    )
    assert not any("Stalls" in sentence for sentence in summarize(run).findings)


@given(
    runs(),
    st.lists(st.floats(0.0, 25.0), max_size=8, unique=True),
)
def test_marks_agree_with_a_walk_over_rows_and_stalls(run: Run, ends: list[float]) -> None:
    ends = sorted(ends)[: len(ends) // 2 * 2]
    spans = [(a, b, b - a) for a, b in zip(ends[::2], ends[1::2], strict=True)]
    stalls = StallsReport(over_s=0.005, spans_s=tuple(spans))
    run = with_shards(run, structs.replace(SHARD, stalls=stalls))
    expected = [
        any(
            from_s <= row[name] <= until_s
            for name in ("sent_s", "first_token_s", "last_token_s")
            for from_s, until_s, _ in spans
        )
        for row in run.request_rows
    ]
    assert stalled_rows(run).tolist() == expected


def test_a_worker_s_stall_is_not_the_others() -> None:
    run = measured_run()
    run.request_rows["shard"][::2] = 1
    shard = run.instrument.shards[0]
    spans = {"over_s": 0.005, "spans_s": [[0.0, 100.0, 99.0]]}
    run = with_shards(run, shard, changed(shard, shard=1, stalls=spans))
    assert (stalled_rows(run) == (run.request_rows["shard"] == 1)).all()


BACKLOG = {"looks": 9000, "waiting": 400, "bytes_max": 90_000, "reads": 9000}


def test_bytes_that_wait_in_the_sockets_are_client_bound() -> None:
    slow = check(with_shard(measured_run(), backlog={**BACKLOG, "wait_mean_s": 0.003}),
                 "read backlog")  # fmt: skip
    assert (slow.ok, slow.is_timing) == (False, True)
    assert "held up: received bytes waited 3 ms on average before they were read" in slow.detail
    quick = check(with_shard(measured_run(), backlog={**BACKLOG, "wait_mean_s": 0.002}),
                  "read backlog")  # fmt: skip
    assert quick.ok
    allowed = with_manifest(
        with_shard(measured_run(), backlog={**BACKLOG, "wait_mean_s": 0.003}),
        instrument_limits={"read_backlog_s": 0.004},
    )
    assert check(allowed, "read backlog").ok


def test_a_few_looks_that_found_bytes_prove_nothing() -> None:
    chance = {**BACKLOG, "looks": 1000, "waiting": 1, "reads": 2, "wait_mean_s": 0.005}
    assert check(with_shard(measured_run(), backlog=chance), "read backlog").ok
    assert check(measured_run(), "read backlog").ok is None
