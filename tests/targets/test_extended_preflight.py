"""The extended preflight against real server processes that differ in one respect each."""

import asyncio

import pytest

from targets.embed import mock
from targets.endpoint import read_target
from targets.extended_preflight import extended_preflight
from targets.preflight import preflight
from targets.preflight_checks import EXTENDED_CHECKS
from targets.truth_server import truth_server


def extended_checks(url, script=""):
    """Every check by name."""
    header = f"headers: {{x-mock: '{script}'}}\n" if script else ""
    endpoint = read_target(f"url: {url}\n{header}", "t.yaml", {})

    async def both():
        result = await preflight(
            endpoint, endpoint.adapter(), max_input_tokens=10, max_output_tokens=10, timeout_s=5
        )
        result.or_raise()
        checks = await extended_preflight(
            endpoint, result, lambda n, number: (f"text {number} " * n)[:n], timeout_s=5
        )
        assert tuple(check.check for check in checks) == EXTENDED_CHECKS
        return {check.check: check for check in checks}

    return asyncio.run(both())


def test_a_healthy_server_passes_the_extended_preflight(mock_url):
    checks = extended_checks(mock_url)
    assert checks["http"].ok
    assert checks["connections"].detail == "20 small requests on 1 connections, 4 streams on 1"
    assert "64 chunks in" in checks["chunking"].detail
    assert "no sign of a cache" in checks["prefix_cache"].detail


def test_a_server_that_packs_tokens_without_counting_them(mock_url):
    checks = extended_checks(mock_url, "coalesce=4,reject=continuous_usage_stats")
    assert "4 tokens per chunk" in checks["chunking"].detail
    assert checks["chunking"].ok is False


def test_a_count_that_cannot_be_is_not_shown_per_chunk(mock_url):
    check = extended_checks(mock_url, "usage=half,reject=continuous_usage_stats")["chunking"]
    assert check.ok is False
    assert check.detail.startswith("an unknown number of tokens per chunk")


def test_a_server_that_reports_new_prompts_as_cached(mock_url):
    check = extended_checks(mock_url, "cached_tokens=1800")["prefix_cache"]
    assert check.ok is False
    assert "1800 of" in check.detail


CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'


async def answered_by(head, body, use):
    """Answer every request with a list of models or with these bytes, and close. `use` gets the
    port."""

    async def serve(reader, writer):
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            length = [w.split(b":")[1] for w in request.lower().split(b"\r\n") if b"content-l" in w]
            await reader.readexactly(int(length[0]) if length else 0)
            models = b'{"data":[{"id":"m"}]}'
            listed = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(models), models)
            writer.write(listed if request.startswith(b"GET") else head + b"\r\n" + body)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the preflight connects and leaves
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        return await use(server.sockets[0].getsockname()[1])


def test_odd_framing_is_reported_without_secrets():
    """HTTP/1.0, no length, a connection per request, and the API key in a header."""
    head = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\nkeep-alive: sk-very-secret\r\n"

    async def check(port):
        text = f"url: http://127.0.0.1:{port}\napi_key_env: KEY\n"
        endpoint = read_target(text, "t.yaml", {"KEY": "sk-very-secret"})
        result = await preflight(
            endpoint, endpoint.adapter(), max_input_tokens=1, max_output_tokens=1, timeout_s=5
        )
        return await extended_preflight(
            endpoint, result.or_raise(), lambda n, number: "x" * n, timeout_s=5
        )

    result = asyncio.run(answered_by(head, CHUNK + b"data: [DONE]\n\n", check))
    checks = {check.check: check for check in result}
    assert checks["http"].detail == "HTTP/1.0; neither chunked nor of stated length"
    assert checks["connections"].ok is False
    assert "4 streams on 4; keep-alive: [redacted]" in checks["connections"].detail
    assert checks["chunking"].ok is False  # no usage: an unknown number of tokens


def test_a_server_that_mostly_fails_leaves_checks_unknown(tmp_path):
    # This seed answers request 0, the preflight's, and fails the seven after it: three attempts
    # of a check are not enough.
    with mock({"fail": "500:60%", "seed": "51", "ttft": "1ms", "itl": "0ms"}, tmp_path) as served:
        checks = extended_checks(served.endpoint.url)
    assert "GET /v1/models" in checks["round_trip"].detail  # which needs no completion
    assert checks["http"].ok is None
    assert checks["http"].detail == "answered 500"
    assert checks["connections"].ok is None
    assert "scripted failure 500" in checks["connections"].detail


@pytest.mark.parametrize(("limit", "streams"), [(1, 4), (2, 2)])
def test_a_server_that_closes_connections_is_counted(tmp_path, truth_cache, limit, streams):
    script = {"ttft_s": 0.001, "itl_s": 0.0, "requests_per_connection": limit}
    with truth_server(tmp_path, cache_dir=truth_cache, **script) as server:
        check = extended_checks(server.url)["connections"]
    assert check.ok is False
    assert check.detail.endswith((f"4 streams on {streams}", f"4 streams on {streams + 1}"))


def test_a_stream_in_one_write_is_reported_as_blocks(tmp_path, truth_cache):
    with truth_server(tmp_path, cache_dir=truth_cache, ttft_s=0.001, burst=64) as server:
        check = extended_checks(server.url)["chunking"]
    assert check.ok is None
    assert "64 chunks per read" in check.detail
