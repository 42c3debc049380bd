"""The doctor's questions to real server processes, in ways that servers differ."""

import asyncio

import pytest

from targets.diagnosis import EXAMINED
from targets.embed import mock
from targets.endpoint import read_target
from targets.examination import examine
from targets.probe import preflight
from targets.truth_server import truth_server


def examined(url, script=""):
    """Every check by name."""
    header = f"headers: {{x-mock: '{script}'}}\n" if script else ""
    endpoint = read_target(f"url: {url}\n{header}", "t.yaml", {})

    async def both():
        found = await preflight(
            endpoint, endpoint.adapter(), max_input_tokens=10, max_output_tokens=10, timeout_s=5
        )
        found.or_raise()
        checks = await examine(
            endpoint, found, lambda n, which: (f"text {which} " * n)[:n], timeout_s=5
        )
        assert tuple(check.check for check in checks) == EXAMINED
        return {check.check: check for check in checks}

    return asyncio.run(both())


def test_a_healthy_server_is_all_well(mock_url):
    checks = examined(mock_url)
    assert checks["http"].ok
    assert checks["connections"].detail == "20 small requests on 1 connections, 4 streams on 1"
    assert "64 chunks in" in checks["chunking"].detail
    assert "no sign of one" in checks["prefix_cache"].detail


def test_a_server_that_packs_tokens_without_counting_them(mock_url):
    checks = examined(mock_url, "coalesce=4,reject=continuous_usage_stats")
    assert "4 tokens per chunk" in checks["chunking"].detail
    assert checks["chunking"].ok is False


def test_a_server_that_says_everything_is_cached(mock_url):
    check = examined(mock_url, "cached_tokens=1800")["prefix_cache"]
    assert check.ok is False
    assert "1800 of" in check.detail


def test_a_server_that_fails_half_of_the_time_leaves_questions_open(tmp_path):
    # This seed fails request 1 and more, but not the preflight's.
    with mock({"fail": "500:30%", "seed": "5", "ttft": "1ms", "itl": "0ms"}, tmp_path) as served:
        checks = examined(served.endpoint.url)
    unknown = [check for check in checks.values() if check.ok is None]
    assert any("scripted failure 500" in c.detail or "answered 500" in c.detail for c in unknown)
    assert checks["round_trip"].ok is not None or "GET" in checks["round_trip"].detail


@pytest.mark.parametrize(("limit", "streams"), [(1, 4), (2, 2)])
def test_a_server_that_closes_connections_is_counted(tmp_path, truth_cache, limit, streams):
    script = {"ttft_s": 0.001, "itl_s": 0.0, "requests_per_connection": limit}
    with truth_server(tmp_path, cache_dir=truth_cache, **script) as server:
        check = examined(server.url)["connections"]
    assert check.ok is False
    assert check.detail.endswith((f"4 streams on {streams}", f"4 streams on {streams + 1}"))


def test_a_stream_in_one_piece_is_told_from_one_in_pieces(tmp_path, truth_cache):
    with truth_server(tmp_path, cache_dir=truth_cache, ttft_s=0.001, burst=64) as server:
        check = examined(server.url)["chunking"]
    assert check.ok is None
    assert "64 chunks per read" in check.detail
