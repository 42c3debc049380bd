"""Between two measurements: the server is asked until nothing is in flight, and to forget."""

import asyncio
import http.server
import socket
import threading

import pytest

from targets.endpoint import Endpoint, read_target
from targets.quiesce import quiesce, unreachable_reason

BUSY = "vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n"
IDLE = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"


class Server(http.server.ThreadingHTTPServer):
    """Tells `metrics` in turn, the last again and again; answers a POST by `statuses`, else 404."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.metrics, self.statuses = [IDLE], {}
        self.asked: list[tuple[str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self):
        metrics = self.server.metrics
        self.answer(200, metrics.pop(0) if len(metrics) > 1 else metrics[0])

    def do_POST(self):
        self.answer(self.server.statuses.get(self.path, 404), "")

    def answer(self, status, text):
        self.server.asked.append((self.path, self.headers.get("authorization")))
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server() as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield listening
        listening.shutdown()
        thread.join()


def settled(endpoint, drain_s=30.0, resets_cache=True):
    checks = asyncio.run(quiesce(endpoint, drain_s=drain_s, resets_cache=resets_cache))
    return {check.check: check for check in checks}


def test_it_waits_until_nothing_is_in_flight(server):
    server.metrics, server.statuses = [BUSY, BUSY, IDLE], {"/reset_prefix_cache": 200}
    found = settled(Endpoint(url=server.url))
    assert found["drained"].ok
    assert found["drained"].detail.startswith("nothing in flight, after 0.")
    assert (found["cache_reset"].ok, found["cache_reset"].detail) == (
        True,
        "POST /reset_prefix_cache",
    )
    assert [path for path, _ in server.asked] == ["/metrics"] * 3 + ["/reset_prefix_cache"]


def test_a_server_that_never_drains_is_told_and_waited_for_no_longer(server):
    server.metrics = [BUSY]
    drained = settled(Endpoint(url=server.url), drain_s=0.0)["drained"]
    assert drained.ok is False
    assert drained.detail.startswith("3 requests still in flight after ")


def test_the_second_name_is_tried_where_the_first_is_not_known(server):
    server.statuses = {"/flush_cache": 200}
    assert settled(Endpoint(url=server.url))["cache_reset"].detail == "POST /flush_cache"


@pytest.mark.parametrize(
    ("status", "ok", "detail"),
    [
        (404, None, "the server has none of POST /reset_prefix_cache, /flush_cache"),
        (405, None, "the server has none of POST /reset_prefix_cache, /flush_cache"),
        (302, False, "POST /reset_prefix_cache answered 302"),
        (500, False, "POST /reset_prefix_cache answered 500"),
    ],
)
def test_what_a_server_does_not_do_is_told(server, status, ok, detail):
    server.statuses = {"/reset_prefix_cache": status}
    found = settled(Endpoint(url=server.url))["cache_reset"]
    assert (found.ok, found.detail) == (ok, detail)


def test_without_metrics_nobody_knows_what_is_in_flight(server):
    server.metrics = ["process_cpu_seconds_total 3\n"]
    drained = settled(Endpoint(url=server.url))["drained"]
    assert (drained.ok, drained.detail) == (None, "its metrics do not count requests")
    off = read_target(f"url: {server.url}\nmetrics_url: off\n", "t.yaml", {})
    assert settled(off)["drained"].detail == "its metrics are switched off (metrics_url: off)"


def test_a_server_that_is_gone_is_told_and_nothing_is_raised(server):
    found = settled(Endpoint(url="http://127.0.0.1:1"))
    assert found["drained"].ok is None
    assert found["cache_reset"].ok is False
    assert "POST /reset_prefix_cache failed: " in found["cache_reset"].detail


def test_both_carry_the_endpoints_key_and_the_cache_can_be_kept(server):
    endpoint = read_target(f"url: {server.url}", "t.yaml", {"OPENAI_API_KEY": "k"})
    assert list(settled(endpoint, resets_cache=False)) == ["drained"]
    settled(endpoint)
    assert {key for _, key in server.asked} == {"Bearer k"}


def test_who_answers_anything_can_be_reached_and_who_is_gone_cannot(server):
    there = Endpoint(url=server.url)
    assert asyncio.run(unreachable_reason(there)) == ""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        gone = Endpoint(url=f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert asyncio.run(unreachable_reason(gone)).startswith("cannot connect to 127.0.0.1:")
