"""The doctor's questions to real server processes, in ways that servers differ."""

import asyncio

import pytest

from targets.embed import mock
from targets.endpoint import read_target
from targets.extended_preflight import extended_preflight
from targets.preflight import preflight
from targets.preflight_checks import EXTENDED_CHECKS
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
        checks = await extended_preflight(
            endpoint, found, lambda n, which: (f"text {which} " * n)[:n], timeout_s=5
        )
        assert tuple(check.check for check in checks) == EXTENDED_CHECKS
        return {check.check: check for check in checks}

    return asyncio.run(both())


def test_a_healthy_server_is_all_well(mock_url):
    checks = examined(mock_url)
    assert checks["http"].ok
    assert checks["connections"].detail == "20 small requests on 1 connections, 4 streams on 1"
    assert "64 chunks in" in checks["chunking"].detail
    assert "no sign of a cache" in checks["prefix_cache"].detail


def test_a_server_that_packs_tokens_without_counting_them(mock_url):
    checks = examined(mock_url, "coalesce=4,reject=continuous_usage_stats")
    assert "4 tokens per chunk" in checks["chunking"].detail
    assert checks["chunking"].ok is False


def test_a_server_that_says_everything_is_cached(mock_url):
    check = examined(mock_url, "cached_tokens=1800")["prefix_cache"]
    assert check.ok is False
    assert "1800 of" in check.detail


CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'


async def answered_by(head, body, port_known):
    """Serve every request with a list of models or with these bytes, closing afterwards."""

    async def serve(reader, writer):
        try:
            asked = await reader.readuntil(b"\r\n\r\n")
            length = [w.split(b":")[1] for w in asked.lower().split(b"\r\n") if b"content-l" in w]
            await reader.readexactly(int(length[0]) if length else 0)
            models = b'{"data":[{"id":"m"}]}'
            listed = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(models), models)
            writer.write(listed if asked.startswith(b"GET") else head + b"\r\n" + body)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the preflight connects and leaves
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        return await port_known(server.sockets[0].getsockname()[1])


def test_odd_framing_is_told_and_secrets_are_not():
    """HTTP/1.0, no length, a connection per request, and the API key in a header."""
    head = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\nkeep-alive: sk-very-secret\r\n"

    async def ask(port):
        text = f"url: http://127.0.0.1:{port}\napi_key_env: KEY\n"
        endpoint = read_target(text, "t.yaml", {"KEY": "sk-very-secret"})
        found = await preflight(
            endpoint, endpoint.adapter(), max_input_tokens=1, max_output_tokens=1, timeout_s=5
        )
        return await extended_preflight(
            endpoint, found.or_raise(), lambda n, number: "x" * n, timeout_s=5
        )

    found = asyncio.run(answered_by(head, CHUNK + b"data: [DONE]\n\n", ask))
    checks = {check.check: check for check in found}
    assert checks["http"].detail == "HTTP/1.0; neither chunked nor of stated length"
    assert checks["connections"].ok is False
    assert "4 streams on 4; keep-alive: [redacted]" in checks["connections"].detail
    assert checks["chunking"].ok is False  # no usage: an unknown number of tokens


def test_a_server_that_fails_more_often_than_not_leaves_questions_open(tmp_path):
    # This seed answers request 0, the preflight's, and fails the seven after it: three attempts
    # of a question are not enough.
    with mock({"fail": "500:60%", "seed": "51", "ttft": "1ms", "itl": "0ms"}, tmp_path) as served:
        checks = examined(served.endpoint.url)
    assert "GET /v1/models" in checks["round_trip"].detail  # which asks for no completion
    assert checks["http"].ok is None
    assert checks["http"].detail == "answered 500"
    assert checks["connections"].ok is None
    assert "scripted failure 500" in checks["connections"].detail


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
