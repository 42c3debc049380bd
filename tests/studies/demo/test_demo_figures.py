"""Known latencies, the rule of agreement, and the rule of noticing."""

import math

import numpy as np
import pytest

from loadgen.foreign.build import Origin, build
from loadgen.foreign.foreign_run import JsonValue
from loadgen.foreign.vllm import read_vllm
from loadgen.studies.demo.figures import (
    Figures,
    Latencies,
    disagreements,
    figures_of,
    held_per_s,
    middle,
    rate_missed,
    recorded,
    rows_behind,
    shown_by,
    true,
)
from targets.truth_log import TRUTH, TruthLog
from tests.foreign.results import ITLS_S, TTFTS_S, vllm
from tests.runs import measured_run

MS = 1_000_000


def imported(**changes):
    (found,) = read_vllm([JsonValue(vllm(**changes), 1)], "v.json")
    return build(found, "v", Origin("v.json", "0" * 64, (), "1"))


def log(*reads_ms, ttft_ms=50, tokens=3, stall_ms=0, seqs=None):
    """Requests that were read at these times; tokens every 10 ms, the last after a stall."""
    rows = np.zeros(len(reads_ms), TRUTH)
    instants = []
    for k, read_ms in enumerate(reads_ms):
        times = [(read_ms + ttft_ms + 10 * j) * MS for j in range(tokens)]
        times[-1] += stall_ms * MS
        rows[k]["seq"] = -1 if seqs is None else seqs[k]
        rows[k]["arrived_ns"] = rows[k]["read_ns"] = read_ms * MS
        rows[k]["first_ns"], rows[k]["last_ns"] = times[0], times[-1]
        rows[k]["sent_tokens"], rows[k]["token_offset"] = tokens, k * tokens
        instants += times
    return TruthLog(rows, np.array(instants, np.uint64))


def figures(ttft_p50_s=0.05, ttft_p99_s=0.05, tpot_p99_s=0.01, itl_p99_s=0.01, longest=0.01):
    return Figures(100, ttft_p50_s, ttft_p99_s, tpot_p99_s, itl_p99_s, longest)


def test_percentiles_are_interpolated_linearly():
    found = figures_of(Latencies(np.arange(1.0, 6.0), np.array([1.0, 2.0]), np.array([7.0, 1.0])))
    assert (found.n, found.ttft_p50_s) == (5, 3.0)
    assert found.ttft_p99_s == pytest.approx(4.96)  # between 4 and 5
    assert found.tpot_p99_s == pytest.approx(1.99)
    assert found.longest_gap_s == 7.0


def test_latencies_that_a_tool_does_not_record_have_no_value():
    found = figures_of(Latencies(np.array([1.0]), np.empty(0), None))
    assert math.isnan(found.tpot_p99_s)
    assert math.isnan(found.itl_p99_s)
    assert math.isnan(found.longest_gap_s)


def test_the_latencies_of_a_file_are_those_that_it_holds():
    found = recorded(imported())
    assert found.ttft_s == pytest.approx(TTFTS_S)
    assert found.gaps_s == pytest.approx(np.concatenate(ITLS_S))
    # latency less TTFT over the tokens after the first: of 3, 3, 5 and 3 tokens
    assert found.tpot_s == pytest.approx([0.02, 0.02, 0.015, 0.05])


def test_the_ttft_of_slobench_counts_from_when_a_request_was_due():
    run = measured_run()
    rows = run.request_rows
    rows["sent_s"] = rows["released_s"] + 0.3
    found = recorded(run)
    ok = rows[rows["status"] == 0]
    assert found.ttft_s.min() == pytest.approx((ok["first_token_s"] - ok["released_s"]).min())


def test_the_latencies_of_a_log_begin_when_the_server_had_the_request():
    entries = log(0, 1000, stall_ms=40)
    found = true(entries.rows, entries)
    assert found.ttft_s == pytest.approx([0.05, 0.05])
    assert found.tpot_s == pytest.approx([0.03, 0.03])
    assert found.gaps_s == pytest.approx([0.01, 0.05, 0.01, 0.05])


def test_a_test_of_the_server_before_the_load_does_not_count():
    entries = log(0, 5000, 6000, 7000, 8500, 8600)
    entries.rows["last_ns"][-1] = 0  # given up by the client
    rows = rows_behind(imported(), entries)
    assert (rows["read_ns"] // MS).tolist() == [5000, 6000, 7000, 8500]
    assert held_per_s(rows) == pytest.approx(3 / 3.5)


def test_requests_of_slobench_are_found_by_their_number():
    run = measured_run()
    ids = run.request_rows["request_id"].tolist()
    assert set(run.request_rows["status"]) == {0}
    entries = log(*range(len(ids) + 1), seqs=[-1, *reversed(ids)])
    assert rows_behind(run, entries)["seq"].tolist() == ids[20:]  # the first 20 are a warm-up


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (figures(), []),
        (figures(0.0549, 0.0451), []),
        (figures(0.056, 0.05), ["p50 6 ms too high"]),
        (figures(0.044, 0.08), ["p50 6 ms too low", "p99 30 ms too high"]),
        (figures(math.nan, 0.05), ["no p50"]),
    ],
)
def test_a_percentile_disagrees_beyond_the_limit(reported, expected):
    assert list(disagreements(reported, figures(), 0.005)) == expected


def test_a_rate_is_held_within_the_scatter_of_a_poisson_process():
    assert rate_missed(40, 44, 400) == ""  # 10 %; 2.58 / 20 = 12.9 %
    assert rate_missed(40, 34, 400) == "rate 15 % low"
    assert rate_missed(40, 44, 1600) == "rate 10 % high"
    assert rate_missed(40, math.nan, 1) == "no rate"


def test_a_figure_shows_what_raises_it_by_a_fifth():
    steady, stalling = figures(), figures(tpot_p99_s=0.0125, longest=0.3)
    assert shown_by(figures(tpot_p99_s=0.0119, itl_p99_s=0.0119), stalling, steady) == []
    assert shown_by(figures(tpot_p99_s=0.0121), stalling, steady) == ["p99 TPOT"]
    assert shown_by(stalling, stalling, steady) == ["p99 TPOT", "longest gap"]
    assert shown_by(figures(tpot_p99_s=math.nan, longest=math.nan), stalling, steady) == []
    # delays of the tool itself are no stalls of the server
    assert shown_by(figures(itl_p99_s=0.2), stalling, steady) == []


def test_the_middle_of_rounds_is_their_median():
    found = middle([figures(0.05), figures(0.07), figures(math.nan)])
    assert found.n == 300
    assert found.ttft_p50_s == pytest.approx(0.06)
