"""Locust's page with ours in it, in a real browser: what fails here when Locust's page changes."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from contextlib import closing, contextmanager, suppress

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]  # no types

from loadgen.cli.scale import locustfile_path
from tests.browser import Watched, chromium, needs_chromium
from tests.e2e.test_distributed import MOCK, free_port, started
from tests.waits import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), needs_chromium]
PATIENCE_MS = 90_000
DURATION_S = 900  # longer than every wait together: a run ends because it is stopped
LOAD = ("--scenario=quickstart", "--rate=20/s", f"--duration={DURATION_S}s", "--warmup=0s")
KEY = "sk-not-for-anybody"
CHARTS_ARE_DRAWN = "document.querySelectorAll('#slo-charts svg').length === 8"
FORM_ORDER = ("host", "scenario", "slo", "rate", "userCount")
PANEL = ["TTFT", "TPOT", "ITL", "E2E", "Send lateness"]


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@contextmanager
def page(cli, cwd, *load):
    """The address of a page in one process with no worker but itself."""
    port = free_port()
    with started(
        cli, "web", f"--web-port={port}", *MOCK, *(load or LOAD), *cli.lenient,
        cwd=cwd, environ={"OPENAI_API_KEY": KEY},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        yield listening(process, port)
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(60) == 130


def listening(process, port):
    """The page's address, once it accepts connections, which is a little after its message."""
    assert any("Starting web interface" in line for line in process.stderr)
    wait_until(lambda: is_listening(port), 60, f"port {port} took no connection")
    return f"http://127.0.0.1:{port}"


def is_listening(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def get(url, **headers):
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def test_a_run_is_started_watched_stopped_and_reported(cli, tmp_path, browser):
    """A single test, because each step needs the state that the step before it left."""
    with page(cli, tmp_path) as url:
        another_site_cannot_start_a_run(url)
        watch_a_run(browser, url)
        told = json.loads(get(f"{url}/slo/live.json"))
        everything_is_accounted_for(told)
        statistics_of_locust_are_as_exact_as_ours(url, told)
        and_as_the_report(url, tmp_path / "runs" / "latest")
        the_report_is_ours_where_locust_links_its_own(url)
        the_page_stands_alone_too(browser, url)
        nothing_secret_is_served(url)


def test_a_run_of_a_number_of_requests_shows_how_many_were_sent(cli, tmp_path, browser):
    load = ("--concurrency=2", "--input-len=16", "--output-len=8", "--num-prompts=100000")
    with page(cli, tmp_path, *load) as url:
        watched = Watched(browser, viewport={"width": 1280, "height": 1600})
        shown = watched.open(url)
        shown.get_by_role("button", name="Start").click(timeout=PATIENCE_MS)
        shown.wait_for_function(
            r"/Running: [1-9]\d* of 100000 measured/.test("
            "document.querySelector('#slo-verdict')?.textContent ?? '')",
            timeout=PATIENCE_MS,
        )
        assert watched.complaints == []
        watched.close()


def another_site_cannot_start_a_run(url):
    request = urllib.request.Request(
        f"{url}/swarm", data=b"user_count=1", headers={"Origin": "http://evil.example"}
    )
    with pytest.raises(urllib.error.HTTPError, match="403") as refused:
        urllib.request.urlopen(request, timeout=60)
    refused.value.close()
    with urllib.request.urlopen(f"{url}/slo/live.json", timeout=60) as answer:
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert json.load(answer)["state"] == "idle"


def watch_a_run(browser, url):
    watched = Watched(browser, viewport={"width": 1280, "height": 1600})
    page = watched.open(url)
    page.get_by_role("tab", name="LLM SLO").wait_for(state="hidden")
    form = page.get_by_role("combobox", name="Scenario")
    form.wait_for(timeout=PATIENCE_MS)  # the parameters are open
    assert page.get_by_label("Rate").input_value() == "20/s"
    form.select_option("chat_bursty")
    tops = [
        page.locator(f"[name={name}]").evaluate("field => field.getBoundingClientRect().top")
        for name in FORM_ORDER
    ]
    assert tops == sorted(tops)
    page.get_by_role("button", name="Start").click()  # and our tab opens
    page.wait_for_function(CHARTS_ARE_DRAWN, timeout=PATIENCE_MS)
    assert "Running:" in page.locator("#slo-verdict").inner_text()
    slos = page.locator("#slo-results")
    slos.get_by_role("row").nth(1).get_by_text("ok").wait_for(timeout=PATIENCE_MS)
    assert "SLOs" in page.locator("#slo-verdict").inner_text()
    assert page.locator("#slo-banner").get_attribute("class") in ("good", "bad")
    ttft, requests = (page.locator("#slo-charts > div").nth(k) for k in (0, 5))
    ttft.get_by_text("p99(ttft) <= 500ms").wait_for(timeout=PATIENCE_MS)  # the limit's line
    colors = requests.locator("path[aria-roledescription='line mark']").evaluate_all(
        "paths => paths.map((path) => path.getAttribute('stroke'))"
    )
    assert colors == ["#2e7d32", "#81c784", "#c62828"]  # met every SLO, ok, failed
    assert "scheduled =" in page.locator("#slo-ledger").inner_text()
    rows = page.locator("#slo-table tbody th").all_inner_texts()
    assert [row.removesuffix(" (≤)") for row in rows] == PANEL
    page.get_by_role("tab", name="LLM workers").click()
    page.get_by_role("cell", name="running").wait_for(timeout=PATIENCE_MS)
    assert not page.locator("#slo").is_visible()
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("tab", name="LLM SLO").click()
    page.wait_for_function(
        "document.querySelector('#slo-verdict').textContent.includes('exit code')",
        timeout=PATIENCE_MS,
    )
    said = page.locator("#slo").inner_text()
    assert "exit code 3" in said or "exit code 130" in said
    assert "not released" in said
    results = page.locator("#slo-results")
    assert results.locator("thead th").all_inner_texts()[:2] == ["SLO", "measured"]
    assert "p99(ttft)" in results.inner_text()
    assert watched.complaints == []
    watched.close()


def everything_is_accounted_for(told):
    ledger = told["facts"]["ledger"]
    assert sum(ledger.values()) == told["facts"]["scheduled"]
    assert ledger["not_released"] > 0
    assert ledger["lost"] == 0


def statistics_of_locust_are_as_exact_as_ours(url, told):
    e2e = told["facts"]["metrics"]["e2e"]

    def complete_row():  # Locust caches its response for two seconds
        rows = json.loads(get(f"{url}/stats/requests"))["stats"]
        (row,) = [row for row in rows if row["method"] == "LLM"]
        return row if row["num_requests"] == e2e["n"] else None

    row = wait_until(complete_row, 10, "Locust's statistics did not catch up")
    assert row["name"] == "default"
    assert row["num_requests"] == e2e["n"]
    assert row["max_response_time"] == pytest.approx(1e3 * e2e["max"], rel=5e-3)
    assert row["response_time_percentile_0.99"] == pytest.approx(1e3 * e2e["p99"], rel=5e-3)


def and_as_the_report(url, directory):
    e2e = json.loads((directory / "summary.json").read_text())["metrics"]["e2e_s"]
    (row,) = [row for row in json.loads(get(f"{url}/stats/requests"))["stats"] if row["method"]]
    assert e2e["n"] == row["num_requests"] > 20
    if e2e["n"] % 100:  # where 99 % of n is a whole number, Locust takes the rank above
        told_ms = 1e3 * e2e["percentiles"]["p99"]["value"]
        assert row["response_time_percentile_0.99"] == pytest.approx(told_ms, rel=5e-3)
    assert row["avg_content_length"] > 100


def the_report_is_ours_where_locust_links_its_own(url):
    report = get(f"{url}/slo/report")
    assert "slobench" in report
    assert get(f"{url}/stats/report?download=1") == report


def the_page_stands_alone_too(browser, url):
    watched = Watched(browser, viewport={"width": 390, "height": 800})
    page = watched.open(f"{url}/slo/")
    page.wait_for_function(CHARTS_ARE_DRAWN, timeout=PATIENCE_MS)
    assert "Report" in page.locator("#slo-verdict").inner_text()
    assert page.locator("#slo-banner").get_attribute("class") == "open"  # neither met nor missed
    assert Axe().run(page, context="#slo").response["violations"] == []
    assert all(asked.startswith(url) for asked in watched.requests)
    assert watched.complaints == []
    watched.close()


FIELDS = """() => [...document.querySelectorAll("form input, form textarea, form select")].map(
    (field) => [field.name, field.type, field.disabled, field.value,
                [...(field.options || [])].map((option) => option.value),
                field.closest(".MuiFormControl-root")?.querySelector("label")?.textContent])"""


def test_plain_locust_shows_the_same_form(cli, tmp_path, browser):
    """`locust -f $(slobench locustfile)`, here with a base path, against `slobench web`."""
    ports = [free_port(), free_port()]
    plain = [
        "-f", str(locustfile_path()), "--host=mock",
        "--web-host=127.0.0.1", f"--web-port={ports[1]}", "--web-base-path=/load",
    ]  # fmt: skip
    forms = []
    with (
        started(cli, "web", f"--web-port={ports[0]}", "--target=mock", cwd=tmp_path,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as ours,
        started(cli, *plain, module="locust", cwd=tmp_path,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as theirs,
    ):  # fmt: skip
        for process, port, path in ((ours, ports[0], "/"), (theirs, ports[1], "/load/")):
            watched = Watched(browser)
            page = watched.open(listening(process, port) + path)
            page.get_by_role("combobox", name="Scenario").wait_for(timeout=PATIENCE_MS)
            forms.append(page.evaluate(FIELDS))
            asked = f"http://127.0.0.1:{port}{path}slo/live.json"
            page.wait_for_event("requestfinished", is_below(asked))
            assert any(one.startswith(asked) for one in watched.requests)
            assert watched.complaints == []
            watched.close()
            process.send_signal(signal.SIGINT)
            process.stderr.read()
    assert forms[0] == forms[1]
    names = {name for name, *_ in forms[0]}
    assert {"scenario", "rate", "duration", "warmup", "seed", "slo", "model", "host"} <= names


def is_below(url):
    return lambda request: request.url.startswith(url)


def nothing_secret_is_served(url):
    for path in ("/", "/slo/", "/slo/live.json", "/slo/report", "/stats/requests", "/logs"):
        assert KEY not in get(url + path)


def status_of(opener, url, data=None, **headers):
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with opener.open(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


@pytest.mark.faults
def test_the_page_answers_under_its_own_names_and_to_its_own_pages_only(cli, tmp_path):
    """DNS rebinding, a cross-site POST, and Locust's routes that change its state by GET."""
    port = free_port()
    with started(
        cli, "web", f"--web-port={port}", "--allowed-host=gpu.example.org", "--target=mock",
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        url = listening(process, port)
        plain = urllib.request.build_opener()
        evil, cross = {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}
        assert [
            status_of(plain, f"{url}/slo/live.json"),
            status_of(plain, f"{url}/slo/live.json", Host=f"localhost:{port}"),
            status_of(plain, f"{url}/slo/live.json", Host="gpu.example.org"),
            status_of(plain, f"{url}/slo/live.json", **evil),
            status_of(plain, f"{url}/swarm", b"user_count=1", **evil),
            status_of(plain, f"{url}/swarm", b"user_count=1", Origin="null"),
            status_of(plain, f"{url}/stop", **cross),
            status_of(plain, f"{url}/stats/reset", **cross),
        ] == [200, 200, 200, 421, 421, 403, 403, 403]
        assert json.loads(get(f"{url}/slo/live.json"))["state"] == "idle"
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(60) == 130


@pytest.mark.faults
def test_a_large_form_is_refused_and_no_page_may_be_framed(cli, tmp_path):
    port = free_port()
    with started(
        cli, "web", f"--web-port={port}", "--target=mock",
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        url = listening(process, port)
        memory_kb = peak_kb(process.pid)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/swarm", data=b"a=" + bytes(64 << 20), timeout=60)
        with refused.value:
            assert refused.value.code == 413
        assert chunked_status(port, 64) == 411
        assert json.loads(get(f"{url}/slo/live.json"))["state"] == "idle"
        assert peak_kb(process.pid) - memory_kb < 16 << 10
        for path in ("/", "/slo/", "/slo/live.json", "/nothing"):
            try:
                answer = urllib.request.urlopen(f"{url}{path}", timeout=60)
            except urllib.error.HTTPError as missing:
                answer = missing
            with answer:
                assert answer.headers["X-Frame-Options"] == "DENY", path
                assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'none'", path
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(60) == 130


def peak_kb(pid):
    """The peak of resident memory, `VmHWM` of proc(5)."""
    with open(f"/proc/{pid}/status") as status:
        return int(status.read().partition("VmHWM:")[2].split()[0])


def chunked_status(port, n_mib):
    """The status of a form that does not state its length."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with closing(connection):
        form = (bytes(1 << 20) for _ in range(n_mib))
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        with suppress(ConnectionError):  # the page does not wait for the rest
            connection.request("POST", "/swarm", body=form, headers=headers)
        return connection.getresponse().status


@pytest.mark.faults
def test_guesses_at_the_password_are_slowed_down(cli, tmp_path):
    port = free_port()
    with started(
        cli, "web", f"--web-port={port}", "--web-login", cwd=tmp_path,
        environ={"SLOBENCH_WEB_PASSWORD": "open sesame"},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        url = listening(process, port)
        jar = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        pages = []
        for _ in range(12):
            with jar.open(f"{url}/slo/password", data=b"password=guess", timeout=60) as answer:
                pages.append(answer.read().decode())
        with jar.open(f"{url}/slo/password", data=b"password=open+sesame", timeout=60) as answer:
            pages.append(answer.read().decode())
        assert "Wrong password" in pages[0]
        assert "Too many attempts" in pages[-1]
        no_redirect = urllib.request.build_opener(KeepRedirects)
        with pytest.raises(urllib.error.HTTPError) as moved:
            no_redirect.open(f"{url}/slo/password", data=b"password=x", timeout=60)
        with moved.value:
            assert "SameSite=Strict" in moved.value.headers["Set-Cookie"]
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(60) == 130


class KeepRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None


def test_the_password_guards_our_routes(cli, tmp_path):
    port = free_port()
    with started(
        cli, "web", f"--web-port={port}", "--web-login", cwd=tmp_path,
        environ={"SLOBENCH_WEB_PASSWORD": "open sesame"},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        url = listening(process, port)
        jar = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        assert "login" in jar.open(f"{url}/slo/live.json", timeout=60).geturl()
        wrong = jar.open(f"{url}/slo/password", data=b"password=sesame", timeout=60)
        assert "Wrong password" in wrong.read().decode()
        jar.open(f"{url}/slo/password", data=b"password=open+sesame", timeout=60).close()
        assert json.loads(jar.open(f"{url}/slo/live.json", timeout=60).read())["state"] == "idle"
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(60) == 130
