"""The checks of the extended preflight, for every answer that a server can give."""

import pytest

from targets import preflight_checks
from targets.preflight_checks import CONSEQUENCES, Chunking, ConnectionCounts, Head, Repeats
from targets.preflight_result import CHECKS, CHECKS_WITHOUT_TOKENS

HEAD = Head("1.1", "text/event-stream", "", True, False)


@pytest.mark.parametrize(
    ("request_s", "ok", "text"),
    [
        ([0.001] * 19, True, ""),
        ([0.03] * 19, False, "every TTFT includes it"),
        ([0.001] * 15 + [0.012] * 4, None, "cannot be seen"),
        ([0.001] * 18 + [0.5], True, ""),  # one outlier is nothing
    ],
)
def test_a_round_trip_is_near_far_or_unsteady(request_s, ok, text):
    check = preflight_checks.round_trip([0.0005] * 5, request_s)
    assert (check.ok, text in check.consequence) == (ok, True)
    assert "connecting 500 µs" in check.detail


@pytest.mark.parametrize(
    ("reading", "ok", "text"),
    [
        (ConnectionCounts(20, 1, 4, 1), True, ""),
        (ConnectionCounts(20, 0, 4, 1), True, ""),  # small requests reused an open connection
        (ConnectionCounts(20, 20, 4, 4), False, "every request opens a connection"),
        (ConnectionCounts(20, 1, 4, 4), False, "every request opens a connection"),
        (ConnectionCounts(20, 10, 4, 2), False, "some requests open"),
        (ConnectionCounts(20, 1, 4, 2), False, "some requests open"),
    ],
)
def test_connections_are_kept_or_not(reading, ok, text):
    check = preflight_checks.connections(reading)
    assert (check.ok, text in check.consequence) == (ok, True)


def test_a_keep_alive_header_is_shown():
    assert "keep-alive: timeout=5" in preflight_checks.connections(
        ConnectionCounts(20, 1, 4, 1, "timeout=5")
    ).detail  # fmt: skip


@pytest.mark.parametrize(
    ("head", "detail", "consequence"),
    [
        (HEAD, "HTTP/1.1, chunked", ""),
        (Head("1.1", "text/event-stream", "", False, True), "of stated length", ""),
        (Head("1.0", "text/event-stream", "", True, False), "HTTP/1.0", "serve HTTP/1.1"),
        (Head("1.1", "text/event-stream", "gzip", True, False), "gzip although", "compressor"),
        (Head("1.1", "text/event-stream", "", False, False), "neither chunked", "a cut stream"),
        (Head("1.1", "text/plain", "", True, False), "content-type text/plain", "proxies"),
    ],
)
def test_framing_has_its_faults(head, detail, consequence):
    check = preflight_checks.http(head)
    assert detail in check.detail
    assert consequence in check.consequence
    assert check.ok is (not consequence)


def test_several_faults_are_all_reported():
    check = preflight_checks.http(Head("1.0", "text/html", "br", False, False))
    assert check.detail.count(";") == 3


@pytest.mark.parametrize(
    ("reading", "ok", "detail"),
    [
        (Chunking(64, 64, 64, True), True, "1 tokens per chunk, 1 chunks per read"),
        (Chunking(64, 64, 60, False), True, "1.07 chunks per read"),
        (Chunking(64, 16, 16, True), True, "4 tokens per chunk"),
        (Chunking(64, 16, 16, False), False, "4 tokens per chunk"),
        (Chunking(None, 64, 64, False), False, "an unknown number of tokens per chunk"),
        (Chunking(64, 16, 3, False), False, "4 tokens per chunk, 5.33 chunks per read"),
        (Chunking(64, 64, 3, True), None, "21.3 chunks per read"),
    ],
)
def test_tokens_come_in_chunks_and_chunks_in_reads(reading, ok, detail):
    check = preflight_checks.chunking(reading)
    assert (check.ok, bool(check.consequence)) == (ok, ok is not True)
    assert detail in check.detail


def test_packed_tokens_and_blocks_are_both_reported():
    check = preflight_checks.chunking(Chunking(64, 16, 3, False))
    assert check.consequence.startswith("ITL is per chunk, not per token")
    assert "; chunks come in blocks" in check.consequence


@pytest.mark.parametrize(
    ("warm_s", "cold_cached", "warm_cached", "ok", "text"),
    [
        ([0.2] * 3, [0] * 3, [0] * 3, True, "no sign of a cache"),
        ([0.2] * 3, [None] * 3, [None] * 3, True, "no sign of a cache"),
        ([0.05] * 3, [0] * 3, [1984] * 3, True, "present: 1984 of 2000 prompt tokens cached"),
        ([0.05] * 3, [16] * 3, [1984] * 3, True, "present"),  # a template's block
        ([0.05] * 3, [None] * 3, [None] * 3, False, "present, but cached tokens are not stated"),
        ([0.05, 0.05, 0.2], [None] * 3, [None] * 3, True, "no sign of a cache"),  # one is not all
        ([0.05] * 3, [64] * 3, [1984] * 3, True, "present: 1984 of 2000 prompt tokens cached"),
        ([0.05] * 3, [65] * 3, [1984] * 3, False, "the server states 65 of 2000 cached tokens"),
        ([0.2] * 3, [1500] * 3, [1984] * 3, False, "cached tokens for a prompt never sent before"),
    ],
)
def test_a_prefix_cache_shows_by_time_or_by_count(warm_s, cold_cached, warm_cached, ok, text):
    check = preflight_checks.prefix_cache(
        Repeats(2000, [0.2] * 3, warm_s, cold_cached, warm_cached)
    )
    assert check.ok is ok
    assert text in check.detail


def test_every_check_of_the_preflight_has_its_consequence():
    assert set(CONSEQUENCES) == {*CHECKS, *CHECKS_WITHOUT_TOKENS}
