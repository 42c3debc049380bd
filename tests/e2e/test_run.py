"""Whole runs against the scripted mock server: real processes, real sockets, real files."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from loadgen.archive import store
from loadgen.archive.store import read_run
from loadgen.archive.verify import verify
from loadgen.records import Status
from targets.mock_script import Failure, Script

pytestmark = pytest.mark.e2e


def flags(rate="40/s", out=16, seconds="2s", **settings):
    """A small run without a file."""
    given = [f"--rate={rate}", "--input-len=64", f"--output-len={out}", f"--duration={seconds}"]
    return [*given, *(f"--set={key}={value}" for key, value in settings.items())]


def truth(directory):
    """What the mock says it did: x-seq → (read, first write, last write), seconds, monotonic."""
    with (directory / "logs" / "truth.csv").open() as lines:
        rows = {int(row["seq"]): row for row in csv.DictReader(lines)}
    return {seq: row for seq, row in rows.items() if seq >= 0}  # the preflight's have none


def ledger(directory):
    """How every scheduled request ended; the summary's counts must add up to the same."""
    run = read_run(directory)
    by_status = np.bincount(run.request_rows["status"], minlength=len(Status))
    counts = json.loads((directory / "summary.json").read_text())["counts"]
    assert by_status.sum() == counts["scheduled"] == len(run.schedule_rows)
    counted = sum(counts[status.name] for status in Status)
    assert counted + counts["warmup"] + counts["not_due"] == counts["scheduled"]
    return {status.name: int(by_status[status]) for status in Status}, int(by_status.sum())


@pytest.fixture(scope="module")
def plain(cli, tmp_path_factory):
    """An ordinary run of a fresh interpreter, which several tests check."""
    where = tmp_path_factory.mktemp("plain")
    result = cli.fresh(
        "run", "--target=mock", "--engine=ttft=50ms,itl=10ms", *flags(), "--slo=ttft<=30s",
        *cli.lenient, "--out=run", cwd=where,
    )  # fmt: skip
    return result, where / "run"


def test_a_run_that_meets_its_slo_exits_0_and_leaves_every_file(plain):
    result, directory = plain
    assert result.returncode == 0, result.stdout + result.stderr
    assert {path.name for path in directory.iterdir()} == {
        "manifest.json", "schedule.parquet", "edges.parquet", "requests.parquet",
        "chunks.parquet", "summary.json", "report.html", "logs", "checksums.sha256",
    }  # fmt: skip
    (found,) = verify(directory)
    n_files = sum(path.is_file() for path in directory.rglob("*"))
    assert (found.state, found.n_files) == ("verified", n_files - 1)
    assert (directory.parent / "latest").resolve() == directory.resolve()
    assert "report.html" in result.stderr
    assert "MET" in result.stdout


def test_every_request_and_token_is_recorded(plain):
    run = read_run(plain[1])
    assert (run.request_rows["status"] == Status.ok).all()
    assert (run.request_rows["output_tokens"] == 16).all()
    assert len(run.chunk_rows) == 16 * len(run.request_rows)
    assert list(run.requests.status.cat.categories) == [status.name for status in Status]


def test_the_client_samples_its_loop_and_processor_a_hundred_times_a_second(plain):
    _, directory = plain
    (shard,) = read_run(directory).instrument["shards"]
    assert shard["loop_lag_s"]["n"] >= shard["processor"]["looks"] > 50
    assert 0 <= shard["processor"]["slow_s"] <= shard["window_s"]
    assert 1e-8 < shard["processor"]["usual_s"] < 1e-4


def test_client_and_server_instants_are_in_causal_order(plain):
    """Both clocks are CLOCK_MONOTONIC of one machine: sent before read, written before received."""
    run = read_run(plain[1])
    said = truth(plain[1])
    rows = run.request_rows
    assert sorted(said) == rows["request_id"].tolist()
    epoch_s = run.manifest.epoch_s
    for row in rows:
        line = said[int(row["request_id"])]
        read_s, first_s, last_s = (
            int(line[name]) * 1e-9 - epoch_s for name in ("read_ns", "first_ns", "last_ns")
        )
        assert row["sent_s"] < read_s < first_s < row["first_token_s"]
        assert last_s < row["last_token_s"] <= row["done_s"]


def test_no_measured_ttft_is_below_the_script_and_tpot_is_the_servers(plain):
    """The TPOT that was measured best; the server's own is 10 ms unless it was held up."""
    rows, said = read_run(plain[1]).request_rows, truth(plain[1])
    assert (rows["first_token_s"] - rows["sent_s"]).min() >= 0.050
    decode_ns = [
        int(line["last_ns"]) - int(line["first_ns"])
        for line in (said[row] for row in rows["request_id"].tolist())
    ]
    theirs_s = np.array(decode_ns) * 1e-9 / 15
    ours_s = (rows["last_token_s"] - rows["first_token_s"]) / 15
    assert np.abs(ours_s - theirs_s).min() < 0.001
    assert np.abs(theirs_s - 0.010).min() < 0.001


def test_an_existing_run_is_not_overwritten_without_force(plain, cli):
    _, directory = plain
    again = ["run", "--target=mock", *flags(seconds="500ms"), *cli.lenient, f"--out={directory}"]
    refused = cli(*again, cwd=directory.parent)
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_a_missed_slo_exits_1_with_the_verdict_in_json(cli, tmp_path):
    result = cli(
        "run", "--target=mock", "--engine=ttft=300ms,itl=1ms", *flags(seconds="1s"),
        "--slo=p50(ttft)<=100ms", *cli.lenient, "--json", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    assert json.loads(result.stdout)["verdict"] == "missed"


def test_a_percentile_of_too_few_requests_exits_3(cli, tmp_path):
    run = ("run", "--target=mock", "--engine=ttft=1ms,itl=1ms", *flags(seconds="1s"), *cli.lenient)
    result = cli(*run, "--slo=p99.9(ttft)<=5s", "--json", "--out=run", cwd=tmp_path)
    assert result.returncode == 3, result.stderr
    summary = json.loads(result.stdout)
    assert summary["verdict"] == "no_verdict"
    assert "which needs at least 1\u202f000" in summary["reasons"][0]
    assert "which needs at least 1\u202f000" in (tmp_path / "run" / "report.html").read_text()
    assert "which needs at least 1\u202f000" in cli("rescore", "run", cwd=tmp_path).stdout


def test_fewer_successful_requests_than_asked_for_exit_3(cli, tmp_path):
    """The run keeps the number; `rescore` may ask for another."""
    run = ("run", "--target=mock", "--engine=ttft=1ms,itl=1ms", *flags(seconds="1s"), *cli.lenient)
    result = cli(
        *run, "--slo=error_rate<=1%", "--min-requests=1000", "--json", "--out=run", cwd=tmp_path
    )
    assert result.returncode == 3, result.stderr
    summary = json.loads(result.stdout)
    assert summary["min_requests"] == 1000
    assert "fewer than the 1\u202f000 that --min-requests requires" in summary["reasons"][0]
    assert cli("rescore", "run", cwd=tmp_path).returncode == 3
    assert cli("rescore", "run", "--min-requests=2", cwd=tmp_path).returncode == 0
    assert cli("rescore", "run", "--min-requests=0", cwd=tmp_path).returncode == 2


def test_a_stall_shows_from_the_release_and_not_from_the_send(cli, tmp_path):
    """One connection, 1.4 s of silence: one request of 250 saw the stall after it was sent, but
    seventy were due during it. Coordinated omission would hide them."""
    result = cli(
        "run", "--target=mock", "--engine=ttft=1ms,itl=1ms,stall=1.4s@2s",
        *flags(rate="50/s", out=2, seconds="5s"), "--set=limits.max_concurrency=1",
        "--set=limits.when_full=wait", "--set=arrivals.kind=constant", *cli.lenient,
        "--out=run", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert metrics["ttft_s"]["percentiles"]["p99"]["value"] > 1.2
    assert metrics["ttft_from_send_s"]["percentiles"]["p99"]["value"] < 0.7


FAILURES = {
    "500": ("http_error", "HTTP 500"),
    "401": ("http_error", "HTTP 401"),
    "cut": ("stream_error", "middle of the response"),
    "inband": ("stream_error", "error in the stream"),
    "short": ("truncated", "short of the requested tokens"),
    "utf8": ("stream_error", "not understood"),
    "notsse": ("stream_error", "not an event stream"),
    "reset": ("stream_error", "clos"),
    "hang": ("timeout", "limits.timeout"),
}  # the mock's failure → the status of its row, words of its error


def test_each_way_to_fail_is_a_row_with_its_status(cli, tmp_path):
    script = ",".join(f"fail={kind}:4%" for kind in FAILURES)
    result = cli(
        "run", "--target=mock", f"--engine=ttft=1ms,itl=1ms,{script},seed=1534",
        *flags(rate="100/s", seconds="2s"), "--set=limits.timeout=1500ms", *cli.lenient,
        "--slo=ttft<=30s", "--out=run", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    counts, total = ledger(tmp_path / "run")
    script_of_mock = Script(failures=tuple(Failure(kind, 0.04) for kind in FAILURES), seed=1534)
    rows = read_run(tmp_path / "run").requests
    kinds = rows.request_id.map(script_of_mock.failure)
    assert counts["ok"] == kinds.isna().sum() > total / 3
    assert (rows.status[kinds.isna()] == "ok").all()
    for kind, (status, words) in FAILURES.items():
        failed = rows[kinds == kind]
        assert len(failed) >= 3, kind
        assert (failed.status == status).all(), (kind, failed.status.unique())
        assert failed.error.astype(str).str.contains(words).all(), (kind, failed.error.unique())


def test_a_dead_server_ends_the_run_early_with_the_reason(cli, tmp_path):
    result = cli(
        "run", "--target=mock", "--engine=ttft=1ms,itl=1ms,fail=503:60%,seed=137",
        *flags(rate="50/s", seconds="30s"), "--set=stop_when.over=1s", *cli.lenient,
        "--slo=ttft<=30s", "--out=run", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 3, result.stderr
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["ended"] == "stopped"
    assert "stop_when.error_rate" in manifest["end_reason"]
    counts, _ = ledger(tmp_path / "run")
    assert counts["not_released"] > 0


def test_truncated_answers_are_seen_during_the_run_and_do_not_end_it(cli, tmp_path):
    result = cli(
        "run", "--target=mock", "--engine=ttft=1ms,itl=1ms,fail=short:60%,seed=137",
        "--set=stop_when.over=1s",
        *flags(rate="20/s", seconds="6s"), *cli.lenient, "--slo=ttft<=500ms", "--out=run",
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    line = next(line for line in result.stderr.splitlines() if line.startswith("5/6 s"))
    assert "failed 0" not in line
    assert "attainment >= 99% 100 % ok" not in line
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["ended"] == "completed"


@pytest.mark.faults
def test_a_server_that_freezes_ends_the_run_and_was_not_overloaded(cli, tmp_path):
    result = cli(
        "run", "--target=mock", "--engine=ttft=1ms,itl=1ms,stall=1h@1s",
        *flags(rate="20/s", seconds="3s"), "--set=phases.drain=60s", *cli.lenient,
        "--slo=ttft<=500ms", "--out=run", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    assert "NO BYTE for" in result.stderr
    assert " ok before" in result.stderr
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["ended"], manifest["end_kind"]) == ("stopped", "silent")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["verdict"], summary["cause"]["kind"]) == ("missed", "stopped_answering")
    assert 0.5 < summary["cause"]["since_s"] < 2.5
    assert summary["capacity_command"] == ""
    counts, _ = ledger(tmp_path / "run")
    assert counts["cancelled"] > 20
    done_s = read_run(tmp_path / "run").request_rows["done_s"]
    assert np.nanmax(done_s) < 20  # not the drain of 60 s


def test_a_run_that_is_never_to_end_early_waits_for_a_server_that_freezes(cli, tmp_path):
    result = cli(
        "run", "--target=mock", "--engine=ttft=1ms,itl=1ms,stall=13s@1s", "--set=stop_when=never",
        *flags(rate="20/s", seconds="2s"), "--set=phases.drain=60s", *cli.lenient, "--out=run",
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "NO BYTE for" in result.stderr
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["ended"] == "completed"
    counts, total = ledger(tmp_path / "run")
    assert counts["ok"] == total


def start(cli, *args, cwd):
    return subprocess.Popen(
        [sys.executable, "-m", "loadgen", *args],
        cwd=cwd,
        env=cli.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process, *words):
    for line in process.stderr:
        if any(word in line for word in words):
            return
    raise AssertionError(f"it ended without saying {words!r}")


def test_ctrl_c_keeps_and_reports_what_was_measured(cli, tmp_path):
    process = start(
        cli, "run", "--target=mock", "--engine=ttft=5ms,itl=1ms", *flags(seconds="60s"),
        *cli.lenient, "--slo=ttft<=30s", "--out=run", cwd=tmp_path,
    )  # fmt: skip
    try:
        wait_for(process, "5/60 s")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, stderr
    directory = tmp_path / "run"
    counts, _ = ledger(directory)
    assert counts["ok"] > 100
    assert counts["not_released"] > 1000
    assert (directory / "report.html").is_file()
    assert json.loads((directory / "summary.json").read_text())["verdict"] == "no_verdict"


def test_a_killed_shard_loses_its_rows_and_nothing_else(cli, tmp_path):
    process = start(
        cli, "run", "--target=mock", "--engine=ttft=5ms,itl=1ms", *flags(seconds="7s"),
        *cli.lenient, "--workers=2", "--out=run", cwd=tmp_path,
    )  # fmt: skip
    try:
        wait_for(process, "5/7 s", "6/7 s")  # a busy machine may skip a line
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
        own = Path(f"/proc/{process.pid}/cmdline").read_text()  # the first one's, too: a copy
        shards = sorted(
            int(p) for p, c in commands.items() if c == own or "loadgen.drive.shard" in c
        )
        assert len(shards) == 2
        os.kill(shards[0], signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 3, stderr
    counts, total = ledger(tmp_path / "run")
    assert counts["lost"] > 0
    assert counts["ok"] > 0
    assert counts["lost"] + counts["ok"] == total


def test_a_killed_shard_loses_at_most_its_last_part(cli, tmp_path):
    process = start(
        cli, "run", "--target=mock", "--engine=ttft=1ms,itl=1ms", "--rate=1100/s", "--duration=7s",
        "--input-len=8", "--output-len=1", *cli.lenient, "--workers=1", "--out=run", cwd=tmp_path,
    )  # fmt: skip
    try:
        wait_for(process, "5/7 s", "6/7 s")  # a busy machine may skip a line
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        own = Path(f"/proc/{process.pid}/cmdline").read_text()
        (shard,) = [pid for pid in children if Path(f"/proc/{pid}/cmdline").read_text() == own]
        os.kill(int(shard), signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 3, stderr
    counts, total = ledger(tmp_path / "run")
    assert counts["ok"] == 4096
    assert counts["lost"] == total - 4096


def test_a_run_that_cannot_begin_leaves_the_old_one_in_place(plain, cli, tmp_path):
    directory = tmp_path / "kept"
    shutil.copytree(plain[1], directory)
    before = (directory / "summary.json").read_bytes()
    result = cli(
        "run", "--target=http://127.0.0.1:9", *flags(seconds="1s"), f"--out={directory}", "--force",
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 3
    assert (directory / "summary.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_run_ended_before_its_parts_were_merged_can_still_be_reported(plain, cli, tmp_path):
    """As it looks after a kill -9 of the controlling process: parts of the shards, no tables."""
    directory = tmp_path / "cut"
    shutil.copytree(plain[1], directory)
    run = read_run(directory)
    (directory / "parts").mkdir()
    for shard in (0, 1):
        mine = run.request_rows["request_id"] % 2 == shard
        chunks = run.chunk_rows[run.chunk_rows["request_id"] % 2 == shard]
        part = directory / "parts" / f"shard-{shard}.npz"
        store.write_part(part, run.request_rows[mine], chunks, run.names)
    for name in ("requests.parquet", "chunks.parquet", "summary.json", "report.html"):
        (directory / name).unlink()
    result = cli("report", directory, "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    again = read_run(directory)
    assert again.request_rows.tobytes() == run.request_rows.tobytes()
    assert again.chunk_rows.tobytes() == run.chunk_rows.tobytes()
    assert json.loads(result.stdout)["verdict"] == "no_verdict"
    assert not (directory / "parts").exists()


def test_the_concurrency_limit_holds_over_all_workers(cli, tmp_path):
    result = cli(
        "run", "--target=mock", "--engine=ttft=20ms,itl=1ms", *flags(rate="100/s", seconds="1s"),
        "--set=limits.max_concurrency=3", "--set=limits.when_full=wait", *cli.lenient,
        "--workers=2", "--out=run", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode in (0, 1, 3), result.stderr
    rows = read_run(tmp_path / "run").request_rows
    sent = rows[np.isfinite(rows["sent_s"])]
    in_flight = [
        int(np.sum((sent["sent_s"] <= at_s) & (sent["done_s"] > at_s))) for at_s in sent["sent_s"]
    ]
    assert max(in_flight) == 3


def test_being_terminated_early_leaves_no_process_and_no_directory(cli, tmp_path):
    process = start(
        cli, "run", "--target=reference", "--engine=device=toy", *flags(seconds="60s"),
        "--out=run", cwd=tmp_path,
    )  # fmt: skip
    try:
        wait_for(process, "reference engine:")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert children
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert not list(tmp_path.iterdir())


def test_two_workers_send_the_same_requests_as_one(cli, tmp_path):
    for n in (1, 2):
        result = cli(
            "run", "--target=mock", "--engine=ttft=1ms,itl=1ms", *flags(seconds="1s"),
            *cli.lenient, f"--workers={n}", f"--out=run{n}", cwd=tmp_path,
        )  # fmt: skip
        assert result.returncode in (0, 3), result.stderr
    one, two = read_run(tmp_path / "run1"), read_run(tmp_path / "run2")
    assert one.manifest.schedule_sha256 == two.manifest.schedule_sha256
    assert set(two.request_rows["shard"]) == {0, 1}
    assert (two.request_rows["status"] == Status.ok).all()
    for column in ("request_id", "input_tokens", "output_tokens"):
        assert (one.request_rows[column] == two.request_rows[column]).all()


def test_report_recomputes_a_run_under_other_slos(plain, cli, tmp_path):
    directory = plain[1]
    before = (directory / "requests.parquet").read_bytes()
    assert "MET" in (directory / "report.html").read_text()
    other = ("report", directory, "--slo=p50(ttft)<=20ms", "--json")
    assert cli(*other, cwd=tmp_path).returncode == 2
    result = cli(*other, "--overwrite", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["verdict"] == "missed"
    cli("report", directory, cwd=tmp_path)
    assert json.loads((directory / "summary.json").read_text())["verdict"] == "met"
    assert (directory / "requests.parquet").read_bytes() == before


@pytest.mark.parametrize(
    "load",
    [
        ["--rate=40/s"],
        ["--concurrency=7", "--workers=2"],
        [
            *("--concurrency=40", "--workers=2"),  # a wait of 1 s for a slot
            *("--set=limits.max_concurrency=4", "--set=limits.when_full=wait"),
        ],
    ],
)
def test_exactly_so_many_requests_count(cli, tmp_path, load):
    """Two workers stop late; what they send after the last counted request does not count."""
    result = cli(
        "run", "--target=mock", "--engine=ttft=100ms,itl=2ms", *load, "--input-len=16",
        "--output-len=4", "--num-prompts=60", "--warmup=300ms", *cli.lenient, "--out=run",
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode in (0, 3), result.stdout + result.stderr
    run = read_run(tmp_path / "run")
    window = run.manifest.window
    released_s = np.sort(run.request_rows["released_s"])
    last_s = released_s[np.searchsorted(released_s, 0.3) + 59]
    end_s = window.warmup_s + window.measure_s
    assert last_s < end_s < last_s + 1.0
    assert np.count_nonzero((released_s >= 0.3) & (released_s < end_s)) == 60
    assert np.count_nonzero(released_s >= 0.3) < 110  # two workers on their own would send 120
    assert run.manifest.ended == "completed"
    counts = json.loads((tmp_path / "run" / "summary.json").read_text())["counts"]
    assert (counts["due"], counts["ok"]) == (60, 60)
