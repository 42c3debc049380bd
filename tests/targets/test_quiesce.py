"""The idle state between two measurements: metrics polled to zero, the prefix cache emptied."""

import asyncio
import http.server
import io
import socket
import threading

import pytest
from rich.console import Console

from loadgen.run import target
from loadgen.studies.cells.runner import BETWEEN, CellRunner
from loadgen.workload.scenario import load_scenario
from targets.endpoint import Endpoint, read_target
from targets.quiesce import quiesce, unreachable_reason

BUSY = "vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n"
IDLE = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"


class Server(http.server.ThreadingHTTPServer):
    """Serves `metrics` in turn, then repeats the last; answers a POST by `statuses`, else 404."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.metrics, self.statuses = [IDLE], {}
        self.requests: list[tuple[str, str | None]] = []
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
        self.server.requests.append((self.path, self.headers.get("authorization")))
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


def quiesced(endpoint, drain_s=30.0, resets_cache=True):
    checks = asyncio.run(quiesce(endpoint, drain_s=drain_s, resets_cache=resets_cache))
    return {check.check: check for check in checks}


def test_it_waits_until_nothing_is_in_flight(server):
    server.metrics, server.statuses = [BUSY, BUSY, IDLE], {"/reset_prefix_cache": 200}
    checks = quiesced(Endpoint(url=server.url))
    assert checks["drained"].ok
    assert checks["drained"].detail.startswith("nothing in flight, after 0.")
    assert (checks["cache_reset"].ok, checks["cache_reset"].detail) == (
        True,
        "POST /reset_prefix_cache",
    )
    assert [path for path, _ in server.requests] == ["/metrics"] * 3 + ["/reset_prefix_cache"]


def test_a_server_that_never_drains_fails_the_check_at_the_limit(server):
    server.metrics = [BUSY]
    drained = quiesced(Endpoint(url=server.url), drain_s=0.0)["drained"]
    assert drained.ok is False
    assert drained.detail.startswith("3 requests still in flight after ")


def test_the_second_reset_path_is_tried_if_the_first_is_absent(server):
    server.statuses = {"/flush_cache": 200}
    assert quiesced(Endpoint(url=server.url))["cache_reset"].detail == "POST /flush_cache"


@pytest.mark.parametrize(
    ("status", "ok", "detail"),
    [
        (404, None, "the server has none of POST /reset_prefix_cache, /flush_cache"),
        (405, None, "the server has none of POST /reset_prefix_cache, /flush_cache"),
        (302, False, "POST /reset_prefix_cache answered 302"),
        (500, False, "POST /reset_prefix_cache answered 500"),
    ],
)
def test_a_reset_that_does_not_work_is_reported(server, status, ok, detail):
    server.statuses = {"/reset_prefix_cache": status}
    checks = quiesced(Endpoint(url=server.url))["cache_reset"]
    assert (checks.ok, checks.detail) == (ok, detail)


def test_a_check_is_printed_before_each_run_unless_the_server_does_not_support_it(server):
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    runner = CellRunner(None, console, BETWEEN, lambda cell: None)  # type: ignore[arg-type]
    up = target.Server("url", Endpoint(url=server.url), server.url)
    for _ in range(3):
        runner._settle(up, load_scenario("quickstart"))
    text = printed.getvalue()
    assert text.count("the server has none of POST") == 1
    assert text.count("prompts differ between runs") == 1
    assert text.count("nothing in flight") == 3


def test_without_metrics_the_requests_in_flight_are_unknown(server):
    server.metrics = ["process_cpu_seconds_total 3\n"]
    drained = quiesced(Endpoint(url=server.url))["drained"]
    assert (drained.ok, drained.detail) == (None, "its metrics do not count requests")
    off = read_target(f"url: {server.url}\nmetrics_url: off\n", "t.yaml", {})
    assert quiesced(off)["drained"].detail == "its metrics are switched off (metrics_url: off)"


def test_a_server_that_has_ended_fails_the_checks_and_raises_nothing(server):
    checks = quiesced(Endpoint(url="http://127.0.0.1:1"))
    assert checks["drained"].ok is None
    assert checks["cache_reset"].ok is False
    assert "POST /reset_prefix_cache failed: " in checks["cache_reset"].detail


def test_both_requests_carry_the_key_and_the_reset_is_optional(server):
    endpoint = read_target(f"url: {server.url}", "t.yaml", {"OPENAI_API_KEY": "k"})
    assert list(quiesced(endpoint, resets_cache=False)) == ["drained"]
    quiesced(endpoint)
    assert {key for _, key in server.requests} == {"Bearer k"}


def test_a_server_with_any_answer_is_reachable_and_one_that_has_ended_is_not(server):
    there = Endpoint(url=server.url)
    assert asyncio.run(unreachable_reason(there)) == ""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        gone = Endpoint(url=f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert asyncio.run(unreachable_reason(gone)).startswith("cannot connect to 127.0.0.1:")
