"""Rows of a distributed run whose master or worker was killed: kept on disk, and collected."""

import json
import os
import signal

import pytest

from tests.e2e.test_distributed import descendants, free_port
from tests.faults.test_hangup import MOCK, counts_of, read_until, started
from tests.waits import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(180)]
RUN = (
    "web", "--headless", *MOCK, "--scenario=quickstart", "--rate=20/s", "--duration=60s",
    "--warmup=0s", "--out=run",
)  # fmt: skip


@pytest.fixture
def own_cache(cli, tmp_path, monkeypatch):
    """A cache directory without the rows of other tests; yields the folder of kept rows."""
    monkeypatch.setitem(cli.environ, "XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "slobench" / "unconfirmed"


def kept_parts(folder):
    return sorted(folder.glob("*/shard-[0-9].npz"))


def control_of(master):
    (control,) = [p for p, c in descendants(master.pid).items() if "web.control_process" in c]
    return control


def collected(cli, tmp_path):
    """The counts after `slobench collect`, which must leave nothing behind."""
    result = cli("collect", "run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(("NO VERDICT", "INVALID"))
    assert not (tmp_path / "run" / "parts").exists()
    assert (tmp_path / "run" / "report.html").is_file()
    again = cli("collect", "run", cwd=tmp_path)
    assert again.returncode == 2
    assert "no worker keeps rows of run run" in again.stderr
    return counts_of(tmp_path / "run")


@pytest.mark.parametrize("killed", ["all processes", "locust"])
def test_the_rows_of_a_killed_master_are_collected(cli, tmp_path, own_cache, killed):
    port = free_port()
    master_words = (*RUN, "--expect-workers=2", f"--master-port={port}", *cli.lenient)
    worker_words = ("worker", "--master=127.0.0.1", f"--port={port}")
    with (
        started(cli, *master_words, cwd=tmp_path) as master,
        started(cli, *worker_words, cwd=tmp_path),
        started(cli, *worker_words, cwd=tmp_path),
    ):
        read_until(master.stderr, "/60 s")
        control = control_of(master)
        if killed == "all processes":
            os.kill(control, signal.SIGKILL)
        os.kill(master.pid, signal.SIGKILL)
        master.wait()
        wait_until(lambda: len(kept_parts(own_cache)) == 2, 40, "the workers kept no rows")
        wait_until(lambda: not os.path.exists(f"/proc/{control}"), 60, "the control process stays")
    ended = json.loads((tmp_path / "run" / "manifest.json").read_text())["ended"]
    assert ended == ("running" if killed == "all processes" else "stopped")
    counts, total = collected(cli, tmp_path)
    assert counts["lost"] == 0
    assert counts["ok"] > 50
    assert sum(counts.values()) == total
    assert not list(own_cache.iterdir())
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["ended"] == "stopped"
    assert len(manifest["instrument"]["shards"]) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_rows_of_a_killed_or_frozen_control_process_are_collected(
    cli, tmp_path, own_cache, number
):
    words = (*RUN, "--workers=2", *cli.lenient)
    with started(cli, *words, cwd=tmp_path) as master:
        read_until(master.stderr, "/60 s")
        os.kill(control_of(master), number)
        _, stderr = master.communicate(timeout=60)
    assert master.returncode == 3, stderr
    reason = "ended by SIGKILL" if number == signal.SIGKILL else "stopped for 5 s: killed"
    assert f"the control process has no result: {reason}; " in stderr
    assert "slobench collect run" in stderr
    wait_until(lambda: len(kept_parts(own_cache)) == 2, 40, "the workers kept no rows")
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["ended"] == "running"
    counts, total = collected(cli, tmp_path)
    assert counts["lost"] == 0
    assert counts["ok"] > 50
    assert sum(counts.values()) == total


def test_two_interrupts_end_a_run_whose_control_process_is_frozen(cli, tmp_path, own_cache):
    with started(cli, *RUN, "--workers=1", *cli.lenient, cwd=tmp_path) as master:
        read_until(master.stderr, "/60 s")
        control = control_of(master)
        os.kill(control, signal.SIGSTOP)
        master.send_signal(signal.SIGINT)

        def ended():
            master.send_signal(signal.SIGINT)
            return not os.path.exists(f"/proc/{control}")

        wait_until(ended, 3, "the control process was not killed")
        _, stderr = master.communicate(timeout=60)
    assert master.returncode in (3, 130), stderr
    assert "slobench collect run" in stderr


def test_a_frozen_master_does_not_hold_the_report(cli, tmp_path, own_cache):
    """The control process waits for the drain and 5 s, then reports without the missing rows."""
    words = [word.replace("60s", "8s") for word in RUN]
    with started(cli, *words, "--set=phases.drain=1s", "--workers=2", *cli.lenient,
                 cwd=tmp_path) as master:  # fmt: skip
        read_until(master.stderr, "/8 s")
        os.kill(master.pid, signal.SIGSTOP)
        wait_until((tmp_path / "run" / "report.html").is_file, 30, "there is no report")
        os.kill(master.pid, signal.SIGCONT)
        _, stderr = master.communicate(timeout=60)
    assert master.returncode == 3, stderr
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["ended"] == "stopped"
    wait_until(lambda: len(kept_parts(own_cache)) == 2, 40, "the workers kept no rows")
    counts, total = collected(cli, tmp_path)
    assert counts["lost"] == 0
    assert sum(counts.values()) == total


def test_a_worker_that_gets_sigterm_finishes_its_requests_and_delivers_its_rows(
    cli, tmp_path, own_cache
):
    words = [word.replace("60s", "10s").replace("ttft=5ms", "ttft=2s") for word in RUN]
    with started(cli, *words, "--workers=2", *cli.lenient, cwd=tmp_path) as master:
        read_until(master.stderr, "/10 s")
        processes = descendants(master.pid)
        generator = next(p for p, c in processes.items() if "web.load_process" in c)
        (worker,) = [p for p in processes if generator in descendants(p) and p != master.pid]
        os.kill(worker, signal.SIGTERM)
        _, stderr = master.communicate(timeout=60)
    assert master.returncode == 3, stderr
    counts, total = counts_of(tmp_path / "run")
    assert counts["not_released"] > 20
    assert counts["ok"] + counts["not_released"] == total
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert "its worker was told to end" in manifest["end_reason"]
    assert not list(own_cache.iterdir())


def test_the_rows_of_a_killed_worker_are_collected(cli, tmp_path, own_cache):
    words = [word.replace("60s", "10s") for word in RUN]
    with started(cli, *words, "--workers=2", *cli.lenient, cwd=tmp_path) as master:
        read_until(master.stderr, "/10 s")
        processes = descendants(master.pid)
        generator = next(p for p, c in processes.items() if "web.load_process" in c)
        (worker,) = [p for p in processes if generator in descendants(p) and p != master.pid]
        os.kill(worker, signal.SIGKILL)
        _, stderr = master.communicate(timeout=60)
    assert master.returncode == 3, stderr
    assert "slobench collect run" in stderr
    lost = counts_of(tmp_path / "run")[0]["lost"]
    assert lost > 0
    assert len(kept_parts(own_cache)) == 1
    counts, total = collected(cli, tmp_path)
    assert counts["lost"] == 0
    assert sum(counts.values()) == total


def test_a_run_whose_rows_have_arrived_leaves_nothing_on_its_workers(cli, tmp_path, own_cache):
    words = [word.replace("60s", "2s") for word in RUN]
    with started(cli, *words, "--workers=2", *cli.lenient, cwd=tmp_path) as master:
        _, stderr = master.communicate(timeout=60)
    assert counts_of(tmp_path / "run")[0]["lost"] == 0, stderr
    assert not list(own_cache.iterdir())
