"""SIGHUP (a closed terminal) and kills: what drains, what is kept, and what names the kept rows."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest

from loadgen.archive.store import read_run
from loadgen.records import Status
from tests.runs import measured_run, with_manifest, write_to
from tests.waits import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(120)]
LOAD = ("--rate=40/s", "--input-len=64", "--output-len=8")
MOCK = ("--target=mock", "--engine=ttft=5ms,itl=1ms")
SWEEP = (
    "sweep", "quickstart", *MOCK, "--over=rate=6/s,12/s", "--repeats=1", "--duration=5s",
    "--warmup=0s", "--out=s",
)  # fmt: skip
NIGHT = """\
schema: 1
baseline: baseline
scenarios: [steady.yaml]
targets: [mock]
"""


@contextmanager
def started(cli, *words, cwd, module="loadgen", prefix=()):
    """A process that leads a session, as a terminal's; its whole group is killed at the end."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", module, *map(str, words)],
        cwd=cwd, env=cli.environ, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def read_until(stream, text):
    seen = []
    for line in stream:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError(f"no line contains {text!r}: {''.join(seen)}")


def counts_of(directory):
    rows = read_run(directory).request_rows
    return {status.name: int((rows["status"] == status).sum()) for status in Status}, len(rows)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_to_every_process_of_a_run_drains_and_keeps(cli, tmp_path, number):
    words = ("run", *MOCK, *LOAD, "--duration=60s", *cli.lenient, "--workers=2", "--out=run")
    with started(cli, *words, cwd=tmp_path) as process:
        read_until(process.stderr, "5/60 s")
        shards = workers_of(process.pid)
        assert len(shards) == 2
        for pid in (*shards, process.pid):  # as a service manager does
            os.kill(pid, number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    counts, total = counts_of(tmp_path / "run")
    assert counts["lost"] == 0
    assert counts["ok"] > 100
    assert counts["ok"] + counts["not_released"] + counts["cancelled"] == total
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["end_reason"] == f"you stopped the run ({number.name})"
    assert (tmp_path / "run" / "report.html").is_file()


def workers_of(parent):
    """The load-generating processes: the children that are copies of their parent, or shards."""
    with open(f"/proc/{parent}/task/{parent}/children") as listed:
        children = [int(pid) for pid in listed.read().split()]
    return [
        pid for pid in children if _command(pid) == _command(parent) or "shard" in _command(pid)
    ]


def _command(pid):
    with open(f"/proc/{pid}/cmdline") as words:
        return words.read()


def test_nohup_lets_a_run_go_on(cli, tmp_path):
    words = ("run", *MOCK, *LOAD, "--duration=7s", "--slo=ttft<=30s", *cli.lenient, "--out=run")
    with started(cli, *words, cwd=tmp_path, prefix=["nohup"]) as process:
        read_until(process.stderr, "5/7 s")
        os.killpg(process.pid, signal.SIGHUP)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr


def test_the_rows_of_a_killed_run_are_recovered_by_the_command_that_is_named(cli, tmp_path):
    words = ("run", *MOCK, *LOAD, "--duration=60s", *cli.lenient, "--out=run")
    with started(cli, *words, cwd=tmp_path) as process:
        read_until(process.stderr, "5/60 s")
        process.kill()
        process.wait()
    parts = tmp_path / "run" / "parts"
    wait_until(lambda: list(parts.glob("shard-*.npz")), 30, "the worker wrote no rows")
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["ended"] == "running"
    again = cli(*words, cwd=tmp_path)
    assert again.returncode == 2
    assert "it is unfinished: slobench report run" in again.stderr
    recovered = cli("report", "run", cwd=tmp_path)
    assert recovered.returncode == 0, recovered.stderr
    assert "no verdict" in recovered.stdout.splitlines()[0].lower()  # INVALID on a busy machine
    counts, total = counts_of(tmp_path / "run")
    assert counts["lost"] == 0
    assert counts["ok"] > 100
    assert sum(counts.values()) == total


@pytest.mark.parametrize("has_tables", [False, True])
def test_a_crash_after_the_recording_names_the_command_that_recovers_it(
    tmp_path, capsys, has_tables
):
    """Also between the tables and the manifest, which is written last."""
    from loadgen.archive.directory import run_directory
    from loadgen.cli.exit_codes import guarded

    def body():
        with run_directory("chat", tmp_path / "run", force=False) as directory:
            write_to(directory, with_manifest(measured_run(n_requests=5), ended="running"))
            if not has_tables:
                (directory / "requests.parquet").unlink()
            (directory / "parts").mkdir()
            (directory / "parts" / "shard-0.npz").touch()
            raise OSError(28, "No space left on device")

    assert guarded(body, {}) == 3
    assert f"slobench report {tmp_path / 'run'}" in capsys.readouterr().err


def test_a_search_keeps_its_probes_and_names_resume(cli, tmp_path):
    words = (
        "capacity", "capacity_search", "--target=mock", "--engine=ttft=400ms,itl=1ms",
        "--between=10/s:40/s", "--slo=ttft<=200ms", "--warmup=0s", "--duration=2s",
        *cli.lenient, "--out=found",
    )  # fmt: skip
    with started(cli, *words, cwd=tmp_path) as process:
        read_until(process.stderr, "probe 1")
        process.send_signal(signal.SIGHUP)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "the same command with --out found --resume continues" in stderr
    assert json.loads((tmp_path / "found" / "capacity.json").read_text())["answer"][
        "is_interrupted"
    ]


def test_a_sweep_names_the_command_that_continues_it(cli, tmp_path):
    with started(cli, *SWEEP, *cli.lenient, cwd=tmp_path) as process:
        read_until(process.stderr, "sending")
        process.send_signal(signal.SIGHUP)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "slobench sweep --out s --resume continues" in stderr


def test_a_night_leaves_its_baseline_as_it_was(cli, tmp_path):
    (tmp_path / "steady.yaml").write_text(
        "schema: 1\nname: steady\nseed: 7\narrivals: {kind: constant, rate: 5/s}\n"
        "requests: {input_tokens: 16, output_tokens: 8}\n"
        "phases: {warmup: 0s, measure: 20s, drain: 5s}\n"
    )
    (tmp_path / "nightly.yaml").write_text(NIGHT)
    with started(cli, "nightly", "nightly.yaml", "--out=night", cwd=tmp_path) as process:
        read_until(process.stderr, "sending")
        process.send_signal(signal.SIGHUP)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "--out night --resume continues" in stderr
    assert not list((tmp_path / "baseline").glob("**/*.json"))


def test_a_mock_server_writes_its_log(cli, tmp_path):
    words = ("--log", tmp_path / "log.csv")
    with started(cli, *words, cwd=tmp_path, module="targets.mock_server") as process:
        read_until(process.stdout, "READY")
        process.send_signal(signal.SIGHUP)
        assert process.wait(20) == 0
    assert (tmp_path / "log.csv").is_file()


@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_engine_leaves_with_0(cli, tmp_path, workers):
    words = ("--device=toy", "--port=0", f"--http-workers={workers}")
    with started(cli, *words, cwd=tmp_path, module="reference_engine") as process:
        read_until(process.stdout, "READY")
        process.send_signal(signal.SIGHUP)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0, stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    "words",
    [
        ("web", "--headless", "--workers=2", *MOCK, "--scenario=quickstart"),
        ("worker", "--master=127.0.0.1"),
    ],
)
def test_a_signal_while_locust_is_imported_ends_with_130(cli, tmp_path, number, words):
    with started(cli, *words, cwd=tmp_path) as process:
        wait_until(lambda: "locust_start" in _command(process.pid), 30, "Locust does not start")
        process.send_signal(number)  # at once: the interpreter has not even begun
        _, stderr = process.communicate(timeout=20)
    assert (process.returncode, stderr) == (130, "slobench: interrupted\n")
