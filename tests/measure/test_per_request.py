"""The columns against a loop that follows the definitions one request at a time."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import RunInvalid
from loadgen.measure.catalog import METRICS
from loadgen.measure.per_request import per_request
from loadgen.measure.statistics.population import BLOCK
from loadgen.records import CHUNKS, REQUESTS, Run, TokenSource, empty_requests
from tests.runs import MANIFEST, measured_run, runs, schedule_rows


def by_the_book(run: Run, position: int) -> dict[str, float]:
    """The metrics of one request, straight from the definitions, in plain Python."""
    row = {name: run.request_rows[name][position].item() for name in REQUESTS.names or ()}
    chunks = [
        (chunk["received_s"].item(), chunk["tokens"].item())
        for chunk in run.chunk_rows
        if chunk["request_id"] == row["request_id"]
    ]
    gaps = [(b - a, tokens or 1) for (a, _), (b, tokens) in pairwise(chunks)]
    n = row["chunks"] if row["token_source"] == TokenSource.none else row["output_tokens"]
    later_tokens = n - (row["first_chunk_tokens"] or 1)
    is_root = run.schedule_rows["n_parents"][position] == 0
    return {
        "ttft_s": row["first_token_s"] - row["released_s"],
        "ttft_from_send_s": row["first_token_s"] - row["sent_s"],
        "ttfat_s": row["first_answer_s"] - row["released_s"],
        "tpot_s": (row["last_token_s"] - row["first_token_s"]) / later_tokens
        if later_tokens > 0
        else math.nan,
        "e2e_s": row["last_token_s"] - row["released_s"],
        "e2e_from_send_s": row["last_token_s"] - row["sent_s"],
        "close_s": row["done_s"] - row["released_s"],
        "e2e_per_token_s": (row["last_token_s"] - row["released_s"]) / n if n else math.nan,
        "max_itl_s": max((gap / tokens for gap, tokens in gaps), default=math.nan),
        "max_stall_s": max((gap for gap, _ in gaps), default=math.nan),
        "queue_client_s": row["sent_s"] - row["released_s"],
        "connect_s": math.nan if row["reused_connection"] else row["connected_s"] - row["sent_s"],
        "lateness_s": row["sent_s"] - row["released_s"] if is_root else math.nan,
    }


@given(runs())
def test_every_column_is_what_the_definition_says(run: Run) -> None:
    columns = per_request(run)
    for position in range(len(run.request_rows)):
        for metric, expected in by_the_book(run, position).items():
            found = columns.column(metric)[position]
            assert found == pytest.approx(expected, nan_ok=True, abs=1e-12), metric


@given(runs())
def test_every_gap_between_chunks_of_one_request_is_kept_once(run: Run) -> None:
    gaps = per_request(run).gaps
    expected = [
        (a["request_id"], b["received_s"] - a["received_s"], max(1, int(b["tokens"])))
        for a, b in pairwise(run.chunk_rows)
        if a["request_id"] == b["request_id"]
    ]
    found = zip(run.request_rows["request_id"][gaps.row], gaps.icl_s, gaps.tokens, strict=True)
    assert list(found) == expected
    assert gaps.itl_s == pytest.approx([icl / tokens for _, icl, tokens in expected])


def test_the_oracle_covers_every_request_metric_of_the_catalogue() -> None:
    covered = by_the_book(measured_run(30), 3)
    assert {m.name for m in METRICS.values() if m.scope == "request"} == set(covered)


def _one(output_tokens: int, first_chunk_tokens: int, received_s: list[float]) -> Run:
    schedule = schedule_rows([1.0])
    rows = empty_requests(schedule)
    rows["status"], rows["token_source"] = 0, TokenSource.usage
    rows["released_s"] = rows["sent_s"] = 1.0
    rows["output_tokens"], rows["chunks"] = output_tokens, len(received_s)
    rows["first_chunk_tokens"] = first_chunk_tokens
    if received_s:
        rows["first_token_s"], rows["last_token_s"] = received_s[0], received_s[-1]
    chunks = np.array([(0, at, 0) for at in received_s], CHUNKS)
    return Run(MANIFEST, schedule, rows, chunks)


@pytest.mark.parametrize(
    ("output_tokens", "first_chunk_tokens", "received_s", "tpot_s"),
    [
        (11, 0, [2.0, 3.0], 0.1),  # the first chunk's count is unknown: n − 1
        (11, 6, [2.0, 3.0], 0.2),  # 5 tokens came after the first chunk
        (1, 0, [2.0], math.nan),
        (4, 4, [2.0], math.nan),  # all in the first chunk: undefined, not zero
        (0, 0, [], math.nan),
    ],
)
def test_tpot_counts_the_tokens_after_the_first_chunk(
    output_tokens: int, first_chunk_tokens: int, received_s: list[float], tpot_s: float
) -> None:
    columns = per_request(_one(output_tokens, first_chunk_tokens, received_s))
    assert columns.tpot_s[0] == pytest.approx(tpot_s, nan_ok=True)


def test_latency_starts_at_the_planned_instant_not_at_the_send() -> None:
    run = _one(2, 0, [2.4, 2.5])
    run.request_rows["sent_s"] = 2.3
    columns = per_request(run)
    assert columns.ttft_s[0] == pytest.approx(1.4)
    assert columns.ttft_from_send_s[0] == pytest.approx(0.1)


@given(st.sampled_from(["shorter", "other ids"]))
def test_a_record_that_does_not_match_its_schedule_is_refused(how: str) -> None:
    run = measured_run(30)
    rows = run.request_rows[:-1] if how == "shorter" else run.request_rows[::-1]
    with pytest.raises(RunInvalid, match="request_ids differ"):
        per_request(replace(run, request_rows=rows))


def test_chunks_of_an_unscheduled_request_are_refused() -> None:
    run = measured_run(30)
    chunks = run.chunk_rows.copy()
    chunks["request_id"][-20:] = 4000
    with pytest.raises(RunInvalid, match="never scheduled"):
        per_request(replace(run, chunk_rows=chunks))


@given(runs())
def test_groups_of_gaps_are_those_of_their_rows(run: Run) -> None:
    gaps = per_request(run).gaps
    assert np.array_equal(gaps.row, np.repeat(gaps.rows, gaps.sizes))
    assert (gaps.sizes > 0).all()
    wanted = np.arange(len(run.request_rows)) % 2 == 0
    assert np.array_equal(gaps.of(wanted), wanted[gaps.row])


def test_gaps_are_the_same_where_blocks_of_chunks_are_cut() -> None:
    """More chunks than a block holds, and requests that cross its end."""
    n_requests, n_chunks = 3, BLOCK // 2 + 7
    schedule = schedule_rows(np.arange(float(n_requests)), tokens=n_chunks)
    chunks = np.zeros((n_requests, n_chunks), CHUNKS)
    chunks["request_id"] = schedule["request_id"][:, None]
    rng = np.random.default_rng(4)
    received_s = np.cumsum(rng.random(chunks.shape), axis=1)
    chunks["received_s"], chunks["tokens"] = received_s, rng.integers(1, 4, chunks.shape)
    run = Run(measured_run().manifest, schedule, empty_requests(schedule), chunks.ravel())
    gaps = per_request(run).gaps
    assert np.array_equal(gaps.icl_s, np.diff(received_s, axis=1).ravel())
    assert np.array_equal(gaps.tokens, chunks["tokens"][:, 1:].ravel())
    assert gaps.starts.tolist() == [0, n_chunks - 1, 2 * (n_chunks - 1)]
    assert gaps.is_counted


@given(runs())
def test_in_flight_counts_the_requests_released_before_that_had_not_ended(run: Run) -> None:
    rows = run.request_rows
    released_s, done_s = rows["released_s"], rows["done_s"]
    order = sorted(
        (position for position in range(len(rows)) if np.isfinite(released_s[position])),
        key=lambda position: (released_s[position], position),
    )
    found = per_request(run).in_flight
    for place, position in enumerate(order):
        before = order[:place]
        assert found[position] == sum(not done_s[one] < released_s[position] for one in before)
