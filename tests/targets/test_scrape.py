"""A server's metrics during a run: read at the start, on each second and at the end."""

import asyncio
import http.server
import json
import threading
import time

import pytest

from loadgen.errors import TargetFileError
from targets.endpoint import Endpoint, read_target
from targets.scrape import Scraper, find_metrics, until_next_s


def metrics_check(endpoint):
    return asyncio.run(find_metrics(endpoint))


class Exporter(http.server.ThreadingHTTPServer):
    """Answers `replies` in turn, then repeats the last; records its requests."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.replies: list[tuple[int, str]] = [(200, "vllm:num_requests_waiting 3\n")]
        self.requests: list[tuple[str, str | None]] = []
        self.had_request = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Exporter

    def do_GET(self):
        exporter = self.server
        exporter.requests.append((self.path, self.headers.get("authorization")))
        status, text = exporter.replies[min(len(exporter.requests), len(exporter.replies)) - 1]
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
        exporter.had_request.set()

    def log_message(self, *args):
        pass


@pytest.fixture
def exporter():
    with Exporter() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("now_s", "left_s"), [(2.25, 0.75), (3.0, 1.0), (-0.5, 0.5)])
def test_the_next_reading_is_at_the_next_full_second(now_s, left_s):
    assert until_next_s(now_s) == left_s


def scraped(exporter, urls=None, epoch_ns=None):
    """A reading at the start and a reading at the end, within the first second."""
    endpoint = Endpoint(url=exporter.url)
    scraper = Scraper(urls or endpoint.metrics_urls(), endpoint)
    scraper.start(time.monotonic_ns() if epoch_ns is None else epoch_ns)
    assert exporter.had_request.wait(10)
    return scraper.stop()


def test_the_state_before_and_after_is_always_there(exporter):
    exporter.replies = [
        (200, "vllm:generation_tokens_total 5\n"),
        (200, "vllm:generation_tokens_total 75\n"),
    ]
    result = scraped(exporter)
    assert [(name, value) for _, name, value in result.rows] == [
        ("generation_tokens", 5.0),
        ("generation_tokens", 75.0),
    ]
    assert (result.n_scrapes, result.n_failed) == (2, 0)
    assert [path for path, _ in exporter.requests] == ["/metrics", "/metrics"]


def test_readings_are_stamped_on_the_clock_of_the_run(exporter):
    now_ns = time.monotonic_ns()
    result = scraped(exporter, epoch_ns=now_ns - 100_000_000_000)
    took_s = (time.monotonic_ns() - now_ns) * 1e-9
    times_s = [t_s for t_s, _, _ in result.rows]
    assert times_s == sorted(times_s)
    assert 100.0 <= times_s[0] <= times_s[-1] <= 100.0 + took_s


def test_readings_come_on_the_seconds_of_the_run(exporter):
    """The epoch is chosen so that the next second begins in 0.1 s."""
    endpoint = Endpoint(url=exporter.url)
    scraper = Scraper(endpoint.metrics_urls(), endpoint)
    scraper.start(time.monotonic_ns() - 6_900_000_000)
    deadline_s = time.monotonic() + 10
    while len(exporter.requests) < 2 and time.monotonic() < deadline_s:
        exporter.had_request.wait(0.01)
    result = scraper.stop()
    assert len(result.rows) >= 3
    first_s, second_s = (t_s for t_s, _, _ in result.rows[:2])
    assert int(second_s) > int(first_s) >= 6


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((503, "loading"), "answered 503"),
        ((200, "vllm:num_requests_waiting{ 3\n"), ""),
    ],
)
def test_a_reading_that_fails_is_counted_with_its_reason(exporter, reply, reason):
    exporter.replies = [reply, (200, "vllm:num_requests_waiting 3\n")]
    result = scraped(exporter)
    assert (result.n_scrapes, result.n_failed) == (2, 1)
    assert result.reason
    assert reason in result.reason
    assert len(result.rows) == 1


def test_a_server_that_has_ended_only_fails_the_readings(exporter):
    endpoint = Endpoint(url="http://127.0.0.1:9")
    scraper = Scraper(endpoint.metrics_urls(), endpoint)
    scraper.start(time.monotonic_ns())
    result = scraper.stop()
    assert result.rows == []
    assert result.n_failed == result.n_scrapes >= 1
    assert "cannot connect" in result.reason


def test_several_sources_are_one_reading(exporter):
    result = scraped(exporter, [f"{exporter.url}/metrics", f"{exporter.url}/other?x=1"])
    assert {value for _, _, value in result.rows} == {6.0}
    assert {path for path, _ in exporter.requests} == {"/metrics", "/other?x=1"}


def test_the_key_goes_to_the_endpoints_own_origin_only(exporter):
    with Exporter() as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        text = f"url: {exporter.url}/v1\nmetrics_url: ['{exporter.url}/metrics', '{other.url}/m']"
        endpoint = read_target(text, "t.yaml", {"OPENAI_API_KEY": "sk-own"})
        check, is_there = metrics_check(endpoint)
        other.shutdown()
        thread.join()
    assert is_there
    assert check.ok
    assert exporter.requests == [("/metrics", "Bearer sk-own")]
    assert other.requests == [("/m", None)]


def test_absent_metrics_are_a_warning_only_if_a_file_names_them(exporter):
    exporter.replies = [(404, "no")]
    usual, is_there = metrics_check(Endpoint(url=exporter.url))
    assert (usual.ok, is_there) == (None, False)
    assert "answered 404: queue and KV use of the server are unknown" in usual.detail
    named = Endpoint(url=exporter.url, metrics_url=(f"{exporter.url}/m",))
    check, is_there = metrics_check(named)
    assert (check.ok, is_there) == (False, True)


def test_metrics_of_something_else_are_none(exporter):
    exporter.replies = [(200, "go_goroutines 12\n")]
    check, is_there = metrics_check(Endpoint(url=exporter.url))
    assert (check.ok, is_there) == (None, False)
    assert "no known metric" in check.detail


def test_metrics_can_be_switched_off_in_the_file():
    endpoint = read_target("url: http://h\nmetrics_url: off", "t.yaml", {})
    assert endpoint.metrics_urls() == ()
    assert metrics_check(endpoint)[1] is False


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("localhost:8000", "is no http URL"),
        ("ftp://h/metrics", "is no http URL"),
        ("http://user:pw@h/metrics", "holds a user name"),
        ([3], "must be text"),
    ],
)
def test_an_unusable_metrics_url_is_one_line(value, problem):
    with pytest.raises(TargetFileError, match=r"^t.yaml:2: metrics_url") as caught:
        read_target(f"url: http://h\nmetrics_url: {json.dumps(value)}", "t.yaml", {})
    assert problem in str(caught.value)
    assert "pw" not in str(caught.value)
