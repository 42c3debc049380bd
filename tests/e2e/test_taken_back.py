"""Requests that are cancelled on purpose, and runs that end themselves, against the mock server."""

import csv
import json

import numpy as np
import pytest

from loadgen.archive.store import read_run
from loadgen.records import ON_PURPOSE, Status

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("transport", ["fast", "aiohttp"])
def test_the_server_sees_the_cancelled_requests_go(cli, tmp_path, transport):
    """Answers of 0.5 s, a third of them given up after 0.2 s: the server's log says which."""
    result = cli(
        "run", "--target=mock", "--engine=ttft=100ms,itl=25ms", "--rate=60/s", "--input-len=30",
        "--output-len=16", "--duration=1500ms", "--slo=ttft<=10s", "--slo=error_rate<=0%",
        "--set=requests.cancel={share: 33%, after: 200ms}", f"--transport={transport}",
        *cli.lenient, "--json", "--out=run", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    counts = json.loads(result.stdout)["counts"]
    run = read_run(tmp_path / "run")
    drawn = run.schedule_rows["cancel_after_s"] > 0
    rows = run.request_rows[drawn]
    assert counts["withdrawn"] == len(rows) > 10
    assert counts["due"] == counts["ok"] == np.count_nonzero(~drawn)
    assert (rows["status"] == Status.cancelled).all()
    assert {run.names.errors[i] for i in rows["error_id"]} == {ON_PURPOSE}
    ran_s = rows["done_s"] - rows["sent_s"]
    assert ran_s.min() >= 0.2 - 1e-6
    with (tmp_path / "run" / "logs" / "truth.csv").open() as lines:
        outcome = {int(row["seq"]): row["outcome"] for row in csv.DictReader(lines)}
    seen = [outcome[request_id] for request_id in run.request_rows["request_id"].tolist()]
    assert (np.array(seen) == "aborted").tolist() == drawn.tolist()


def test_an_overrun_server_ends_the_run(cli, tmp_path):
    """One connection at a time, 80 ms each: 12 requests a second of the 40 that are asked."""
    result = cli(
        "run", "--target=mock", "--engine=ttft=80ms,itl=0ms", "--rate=40/s", "--input-len=30",
        "--output-len=1", "--duration=60s", "--set=limits.max_concurrency=1",
        "--set=limits.when_full=wait", "--set=stop_when.saturated=2s", "--set=phases.drain=1s",
        *cli.lenient, "--json", "--out=run", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 3, result.stderr
    summary = json.loads(result.stdout)
    assert summary["verdict"] == "no_verdict"
    assert summary["reasons"][0].startswith("The run was stopped: ")
    assert "(stop_when.saturated 2 s)" in summary["reasons"][0]
    assert 2.0 <= summary["window"]["length_s"] <= 12.0
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["ended"] == "stopped"
