"""What is told of a request as it ends, from bytes nobody has decoded yet."""

import bisect
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.archive.decode import decode
from loadgen.archive.exchange import Exchange
from loadgen.drive.live_sample import (
    FIELDS,
    FINE_BOUNDS_S,
    GAP_BOUNDS_S,
    LiveSamples,
    coarse_counts,
)
from loadgen.records import Status
from tests.archive.test_decode import ADAPTER, DONE, FINISH, ROLE, token, usage
from tests.runs import schedule_rows

MS = 1_000_000


def answered(*reads, row=0):
    """Released at 1 s, sent 2 ms later, a read every 10 ms from 1.1 s on, done 5 ms after."""
    made = Exchange(row, sent_ns=1002 * MS, http_status=200, parts=list(reads))
    made.times = [(1100 + 10 * k) * MS for k in range(len(reads))]
    made.done_ns = made.times[-1] + 5 * MS
    looks = [ADAPTER.looks_like_token(read) for read in reads]
    made.first_guess_ns = made.times[looks.index(True)] if any(looks) else 0
    return made


def told(*exchanges, status=Status.ok):
    glimpses = LiveSamples(schedule_rows([0.0, 0.1, 0.2]), ADAPTER)
    for exchange in exchanges:
        glimpses.ended(exchange, status, 1000 * MS)
    beat = glimpses.take()
    return [dict(zip(FIELDS, line, strict=True)) for line in beat["ended"]], beat["gaps"]


def test_a_streamed_answer_is_told_without_its_role_finish_and_usage():
    one = answered(ROLE, token("a"), token("b"), token("c"), FINISH, usage(3), DONE)
    (line,), ((class_id, counts, sum_s),) = told(one)
    assert line["status"] == Status.ok
    assert line["ttft_s"] == pytest.approx(0.110)
    assert line["lateness_s"] == pytest.approx(0.002)
    assert line["tpot_s"] == pytest.approx(0.010)
    assert line["e2e_s"] == pytest.approx(0.130)
    assert line["close_s"] == pytest.approx(0.165)
    assert line["duration_s"] == pytest.approx(0.163)
    assert line["max_stall_s"] == pytest.approx(0.010)
    assert line["n_events"] == 3
    assert class_id == 0
    assert (sum(counts), counts[FINE_BOUNDS_S.index(0.01)]) == (2, 2)
    assert sum_s == pytest.approx(0.020)


def test_tokens_that_share_a_read_share_its_gap():
    last = token("c") + token("d") + FINISH + usage(4) + DONE
    (line,), ((_, counts, sum_s),) = told(answered(token("a"), token("b"), last))
    assert line["n_events"] == 4
    assert line["tpot_s"] == pytest.approx(0.020 / 3)
    assert counts[FINE_BOUNDS_S.index(0.005)] == 2  # 10 ms shared by two
    assert counts[FINE_BOUNDS_S.index(0.01)] == 1
    assert sum_s == pytest.approx(0.020)


def test_tokens_that_came_with_the_first_one_arrived_with_it():
    """As in the decoded rows: two gaps, and TPOT without the first arrival."""
    one = answered(token("a") + token("b"), token("c"), token("d") + FINISH + usage(4) + DONE)
    (line,), ((_, counts, sum_s),) = told(one)
    assert line["n_events"] == 4
    assert line["tpot_s"] == pytest.approx(0.010)
    assert (counts[0], sum(counts), sum_s) == (0, 2, pytest.approx(0.020))
    (line,), ((_, counts, sum_s),) = told(answered(token("a") + token("b") + FINISH + DONE))
    assert (line["n_events"], line["tpot_s"], sum(counts), sum_s) == (2, None, 0, 0.0)


def test_a_role_chunk_that_came_with_the_first_token_is_none():
    one = answered(ROLE, token("a"), token("b"))
    one.times[0] = one.times[1]  # one read, two fragments
    (line,), ((_, counts, _),) = told(one)
    assert (line["n_events"], sum(counts)) == (2, 1)


def test_a_read_of_a_whole_answer_has_the_tokens_between_its_role_and_its_end():
    whole = ROLE + token("a") + b": ping\n\n" + token("b") + token("c") + FINISH + usage(3) + DONE
    (line,), _ = told(answered(whole))
    assert (line["n_events"], line["tpot_s"]) == (3, None)


def test_one_token_has_no_gap_and_no_answer_has_no_first_token():
    single, silent = answered(token("a"), FINISH, DONE), answered(FINISH, DONE, row=1)
    (one, none), gaps = told(single, silent)
    assert (one["tpot_s"], one["max_stall_s"], one["n_events"]) == (None, None, 1)
    assert (none["ttft_s"], none["e2e_s"], none["n_events"]) == (None, None, 0)
    assert none["lateness_s"] == pytest.approx(0.002)
    assert sum(gaps[0][1]) == 0


@pytest.mark.parametrize(
    "reads",
    [
        (ROLE, token("a"), token("b"), token("c"), FINISH, usage(3), DONE),
        (token("a"), token("b"), token("c") + token("d") + FINISH + usage(4) + DONE),
        (token("a") + token("b"), token("c") + token("d"), token("e") + FINISH + DONE),
        (token("a") + token("b") + FINISH + DONE,),
        (token("a"),),
        (FINISH, DONE),
    ],
)
def test_without_gaps_a_sample_differs_in_its_longest_gap_only(reads):
    rows = schedule_rows([0.0])
    full, quick = (LiveSamples(rows, ADAPTER, has_gaps=has_gaps) for has_gaps in (True, False))
    for samples in (full, quick):
        samples.ended(answered(*reads), Status.ok, 1000 * MS)
    (expected,), (sample,) = full.take()["ended"], (beat := quick.take())["ended"]
    assert sample == expected._replace(max_stall_s=None)
    assert beat["gaps"] == []


def test_classes_are_told_apart_and_everything_is_told_once():
    rows = schedule_rows([0.0, 0.1, 0.2])
    rows["class_id"], rows["tpot_slo_s"][1] = (1, 0, 1), 0.05
    glimpses = LiveSamples(rows, ADAPTER)
    for row in (0, 1):
        glimpses.ended(answered(token("a"), token("b"), row=row), Status.ok, 1000 * MS)
    glimpses.unsent(2, Status.dropped)
    beat = glimpses.take()
    assert [line[:2] for line in beat["ended"]] == [(1, 0), (0, 0), (1, Status.dropped)]
    assert [line[-1] for line in beat["ended"]] == [None, (0.0, 0.05, 0.0), None]
    assert [len(line) for line in beat["ended"]] == [len(FIELDS)] * 3
    assert sorted(entry[0] for entry in beat["gaps"]) == [0, 1]
    assert glimpses.take() == {"ended": [], "gaps": []}


def test_fine_gaps_are_coarse_ones_and_five_percent_apart():
    ratios = [after / before for before, after in itertools.pairwise(FINE_BOUNDS_S)]
    assert 1 < min(ratios) < max(ratios) <= 1.05
    gaps_s = [0.00001, 0.001, 0.0011, 0.03, 0.05, 19.0, 20.1, 99.0]
    counts = [0] * (len(FINE_BOUNDS_S) + 1)
    for gap_s in gaps_s:
        counts[bisect.bisect_left(FINE_BOUNDS_S, gap_s)] += 1
    told = coarse_counts(counts)
    at = {k: n for k, n in enumerate(told) if n}
    ends = {0.001: 2, 0.0025: 1, 0.05: 2, 20.0: 1}
    assert at == {GAP_BOUNDS_S.index(end): n for end, n in ends.items()} | {len(GAP_BOUNDS_S): 2}


CALL = b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"a"}]}}]}\n\n'


@given(
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 3),
    st.sampled_from(["reasoning", "reasoning_content"]),
)
def test_the_first_token_of_the_answer_is_found_behind_any_reasoning(n, m, n_calls, word):
    """By the decoded rows, where every event is a read."""
    reads = [token("r", word)] * n + [token("a")] * m + [CALL] * n_calls
    if not reads:
        return
    made = answered(ROLE, *reads, FINISH, DONE)
    made.headers_ns = 1050 * MS
    decoded = decode(made, ADAPTER)
    (line,), _ = told(made)
    expected = (decoded.first_answer_ns - 1000 * MS) * 1e-9 if decoded.first_answer_ns else None
    assert line["ttfat_s"] == (None if expected is None else pytest.approx(expected))
    assert (line["ttfat_s"] == line["ttft_s"]) == (n == 0 and m > 0)
