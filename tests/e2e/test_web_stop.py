"""The page's Stop and New over HTTP, with workers that come and stay."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import urllib.parse
import urllib.request

import numpy as np
import pytest

from loadgen.archive.store import read_run
from loadgen.records import Status
from tests.e2e.test_distributed import MOCK, free_port, started
from tests.e2e.test_web_page import get, listening
from tests.waits import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
FORM = {"scenario": "quickstart", "rate": "20/s", "duration": "120s", "warmup": "0s"}


def post(url, **form):
    data = urllib.parse.urlencode(form).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=100) as answer:
        return json.load(answer)


def until(url, holds):
    """The live facts as soon as a condition holds for them."""

    def facts_if_so():
        facts = json.loads(get(f"{url}/slo/live.json"))
        return facts if holds(facts) else None

    return wait_until(facts_if_so, 90, "the expected live facts did not come")


def shards(url):
    rows = json.loads(get(f"{url}/stats/requests"))["extended_stats"][0]["data"]
    return sorted(row["state"] for row in rows)


def is_sending(told):
    return told["facts"].get("sums", {}).get("sent", 0) > 20


def is_finished(told):
    return told["state"] == "finished"


def test_a_stop_keeps_ended_requests_and_the_next_run_has_the_late_joiner(cli, tmp_path):
    page_port, port = free_port(), free_port()

    def worker():
        return started(cli, "worker", "--master=127.0.0.1", f"--port={port}", cwd=tmp_path)

    with (
        started(
            cli, "web", f"--web-port={page_port}", "--expect-workers=2", f"--master-port={port}",
            *MOCK, "--max-skew=10s", *cli.lenient, "--out=run",
            cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        ) as process,
        worker(), worker(),
    ):  # fmt: skip
        url = listening(process, page_port)
        until(url, lambda told: shards(url) == ["idle", "idle"])
        a_form_that_is_none_is_refused(url)
        assert post(f"{url}/swarm", **FORM)["success"]
        until(url, is_sending)
        with worker():
            until(url, lambda told: shards(url) == ["idle", "running", "running"])
            stop_twice(url)
            the_end_came_soon(tmp_path / "run")
            manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
            assert manifest["end_reason"].endswith("(Stop on the page)")
            assert post(f"{url}/swarm", **FORM)["success"]
            told = until(url, is_sending)
            assert len(told["facts"]["shards"]) == 3
            post(f"{url}/stop")
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(60) == 130


def a_form_that_is_none_is_refused(url):
    for wrong, why in (
        ({"rate": "fast"}, "is not a rate"),
        ({"host": "example"}, "enter an http:// or https:// URL"),
        ({"scenario": "quikstart"}, "quickstart"),
    ):
        answer = post(f"{url}/swarm", **(FORM | wrong))
        assert answer["success"] is False
        assert why in answer["message"]


def stop_twice(url):
    """Both presses return with the result of the run; during the run a start is refused."""
    assert "start again when it has ended" in post(f"{url}/swarm", **FORM)["message"]
    presses = [threading.Thread(target=post, args=[f"{url}/stop"]) for _ in range(2)]
    for press in presses:
        press.start()
    told = until(url, is_finished)
    for press in presses:
        press.join(60)
    assert told["result"]["exit_code"] == 3
    ledger = told["facts"]["ledger"]
    assert sum(ledger.values()) == told["facts"]["scheduled"]
    assert ledger["not_released"] > 100
    assert ledger["lost"] == ledger["open"] == 0


def the_end_came_soon(directory):
    """By the recorded times: the time to write a report does not matter."""
    run = read_run(directory)
    assert np.nanmax(run.request_rows["done_s"]) < run.manifest["window"]["ended_s"] + 4
    statuses = set(run.request_rows["status"].tolist())
    assert statuses == {Status.ok, Status.not_released}
