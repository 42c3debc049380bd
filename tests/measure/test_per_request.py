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
from loadgen.measure.per_request import event_gaps, per_request
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
    n = row["chunks"] if row["token_source"] == TokenSource.none else row["output_tokens"]
    first = row["first_chunk_tokens"] or 1
    share = max(1, max(0, n - first) / max(1, len(chunks) - 1))  # of a chunk of unknown size
    arrivals: list[list[float]] = []  # time, tokens at least, tokens of the first arrival
    for place, (at, tokens) in enumerate(chunks):
        if not arrivals or at != arrivals[-1][0]:
            arrivals.append([at, 0, 0.0])
        arrivals[-1][1] += tokens or 1
        arrivals[-1][2] += (tokens or share) if place else 0.0
    gaps = [(b - a, tokens) for (a, _, _), (b, tokens, _) in pairwise(arrivals)]
    later_tokens = n - first - round(arrivals[0][2] if arrivals else 0)
    is_root = run.schedule_rows["n_parents"][position] == 0
    return {
        "ttft_s": row["first_token_s"] - row["released_s"],
        "ttft_from_send_s": row["first_token_s"] - row["sent_s"],
        "ttfat_s": row["first_answer_s"] - row["released_s"],
        "tpot_s": (row["last_token_s"] - row["first_token_s"]) / later_tokens
        if later_tokens > 0 and row["last_token_s"] > row["first_token_s"]
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
            if metric == "max_itl_s" and columns.blocks and columns.has_no_itl[position]:
                expected = math.nan  # the stream came in blocks
            assert found == pytest.approx(expected, nan_ok=True, abs=1e-12), metric


@given(runs())
def test_every_gap_between_chunks_of_one_request_is_kept_once(run: Run) -> None:
    gaps = event_gaps(run)
    expected = [
        (a["request_id"], b["received_s"] - a["received_s"], max(1, int(b["tokens"])))
        for a, b in pairwise(run.chunk_rows)
        if a["request_id"] == b["request_id"]
    ]
    found = zip(run.request_rows["request_id"][gaps.row], gaps.icl_s, gaps.tokens, strict=True)
    assert list(found) == expected
    assert gaps.itl_s == pytest.approx([icl / tokens for _, icl, tokens in expected])


@given(runs())
def test_chunks_of_the_same_read_share_a_gap(run: Run) -> None:
    gaps = per_request(run).gaps
    expected: list[list[float]] = []
    for a, b in pairwise(run.chunk_rows):
        if a["request_id"] != b["request_id"]:
            joins_gap = False
        elif a["received_s"] != b["received_s"]:
            expected.append([b["received_s"] - a["received_s"], max(1, int(b["tokens"]))])
            joins_gap = True
        elif expected and joins_gap:
            expected[-1][1] += max(1, int(b["tokens"]))
    assert gaps.icl_s.tolist() == [gap for gap, _ in expected]
    assert gaps.tokens.tolist() == [tokens for _, tokens in expected]


def test_a_proxy_that_flushes_ten_events_does_not_shorten_tpot() -> None:
    """128 tokens, 5 ms apart from 40 ms on; the first flush has the role and 9 tokens."""
    written_s = [0.04 + 0.005 * k for k in range(128)]
    received_s = [1.0 + written_s[min(127, 10 * ((k + 1) // 10) + 8)] for k in range(128)]
    columns = per_request(_one(128, 1, received_s))
    assert columns.first_tokens[0] == 9
    assert columns.tpot_s[0] == pytest.approx(0.005)
    assert columns.gaps.tokens.tolist() == [10] * 11 + [9]
    assert columns.max_stall_s[0] == pytest.approx(0.05)
    assert not columns.is_unmeasured[0]


@pytest.mark.parametrize(
    ("output_tokens", "first_chunk_tokens", "received_s", "is_unmeasured"),
    [
        (32, 32, [2.0], True),  # one event
        (32, 1, [2.0] * 32, True),  # one read
        (2, 1, [2.0, 2.0], True),
        (1, 1, [2.0], False),
        (32, 1, [2.0] * 31 + [2.5], False),
        (0, 0, [], False),
    ],
)
def test_an_answer_in_one_arrival_has_no_tpot(
    output_tokens: int, first_chunk_tokens: int, received_s: list[float], is_unmeasured: bool
) -> None:
    columns = per_request(_one(output_tokens, first_chunk_tokens, received_s))
    assert bool(columns.is_unmeasured[0]) is is_unmeasured
    if is_unmeasured:
        assert math.isnan(columns.tpot_s[0])
        assert math.isnan(columns.max_itl_s[0])


def test_a_chunk_that_nobody_counted_may_hold_several_tokens() -> None:
    run = _one(1, 0, [2.0])
    run.request_rows["token_source"] = TokenSource.chunks
    assert per_request(run).is_unmeasured[0]
    run.schedule_rows["output_tokens"] = 1
    assert not per_request(run).is_unmeasured[0]


@pytest.mark.parametrize("n_joined", [1, 3])
def test_an_arrival_may_reach_over_the_end_of_a_block(n_joined: int) -> None:
    """Two requests; the second's chunk at the edge of a block joins the chunks around it."""
    n_chunks = BLOCK + 20
    schedule = schedule_rows([0.0, 1.0], tokens=n_chunks)
    chunks = np.zeros(5 + n_chunks, CHUNKS)
    chunks["request_id"][5:] = 1
    received_s = np.arange(5.0 + n_chunks)
    received_s[BLOCK + 1 : BLOCK + 1 + n_joined] = received_s[BLOCK]
    chunks["received_s"], chunks["tokens"] = received_s, 2
    gaps = per_request(Run(MANIFEST, schedule, empty_requests(schedule), chunks)).gaps
    assert len(gaps.icl_s) == 4 + n_chunks - 1 - n_joined
    assert gaps.tokens.max() == 2 + 2 * n_joined
    assert gaps.tokens.sum() == 2 * (4 + n_chunks - 1)


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
