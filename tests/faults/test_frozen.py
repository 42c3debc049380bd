"""Processes that stop working: load-generating processes, servers, plug-ins."""

import json
import os
import signal
import socket
import time

import pytest

from tests.e2e.test_distributed import descendants
from tests.faults.test_hangup import LOAD, MOCK, counts_of, read_until, started, workers_of
from tests.waits import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(120)]
ENDLESS = """
from loadgen.drive.payloads import Payloads

take = Payloads.take

def endless(self, row):
    while row == 40:
        pass
    return take(self, row)

Payloads.take = endless
"""

PRINTING = """
import os
from loadgen.drive.payloads import Payloads

take = Payloads.take

def printing(self, row):
    print("row", row, flush=True)
    os.write(1, b"no line end")
    return take(self, row)

Payloads.take = printing
"""

TORN = """
import os
from loadgen.drive.shard_loop import Shard

report = Shard._report

def torn(self):
    report(self)
    if self._number == 0 and self._n_released > 40:
        os.write(self._write_message.__self__._fd, b'{"kind": "be{"kind": "beat"}' + bytes([10]))

Shard._report = torn
"""

ENDLESS_POLICY = """
from reference_engine.policies.chunked import Chunked

def plan(self, view):
    while True:
        pass

Chunked.plan = plan
"""


def ended_s(directory):
    """Seconds from the end of the measured window to the report."""
    window_s = json.loads((directory / "manifest.json").read_text())["window"]["measure_s"]
    begun = (directory / "schedule.parquet").stat().st_mtime
    return (directory / "report.html").stat().st_mtime - begun - window_s


def test_a_frozen_worker_is_killed_and_loses_its_rows_only(cli, tmp_path):
    words = ("run", *MOCK, *LOAD, "--duration=6s", *cli.lenient, "--workers=2", "--out=run")
    with started(cli, *words, cwd=tmp_path) as process:
        read_until(process.stderr, "5/6 s")
        frozen, _ = workers_of(process.pid)
        os.kill(frozen, signal.SIGSTOP)
        _, stderr = process.communicate(timeout=40)
        assert not os.path.exists(f"/proc/{frozen}")
    assert process.returncode == 3, stderr
    counts, total = counts_of(tmp_path / "run")
    assert min(counts["ok"], counts["lost"]) > 80
    assert counts["ok"] + counts["lost"] == total
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert "no progress for 5 s: killed" in manifest["end_reason"]
    assert ended_s(tmp_path / "run") < 15


@pytest.mark.parametrize("n_requests", [40, 40_000])  # the latter's task fills its pipe
def test_a_process_that_is_frozen_before_its_task_ends_the_run_at_once(cli, tmp_path, n_requests):
    rate = f"--rate={n_requests}/s"
    words = ("run", *MOCK, "--input-len=64", "--output-len=8", rate, "--duration=1s", "--out=run")
    with started(cli, *words, "--workers=1", *cli.lenient, cwd=tmp_path) as process:
        read_until(process.stderr, "models")
        (frozen,) = workers_of(process.pid)
        os.kill(frozen, signal.SIGSTOP)
        stopped_s = time.monotonic()
        _, stderr = process.communicate(timeout=40)
        assert time.monotonic() - stopped_s < 15
        assert not os.path.exists(f"/proc/{frozen}")
    assert process.returncode == 3, stderr
    assert "worker 0 died at its start: no progress for 5 s: killed" in stderr
    assert not (tmp_path / "run").exists()


def test_the_reason_of_a_death_is_printed_and_recorded(cli, tmp_path):
    words = ("run", *MOCK, *LOAD, "--duration=6s", *cli.lenient, "--workers=2", "--out=run")
    with started(cli, *words, cwd=tmp_path) as process:
        read_until(process.stderr, "5/6 s")
        os.kill(workers_of(process.pid)[0], signal.SIGKILL)
        _, stderr = process.communicate(timeout=40)
    assert process.returncode == 3, stderr
    reason = "died (ended by SIGKILL; nothing in its log)"
    assert f"{reason}: its requests are lost, the others go on" in stderr
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert reason in manifest["end_reason"]
    (number,) = manifest["dead_workers"]
    assert f"worker {number} died" in stderr
    reasons = json.loads((tmp_path / "run" / "summary.json").read_text())["reasons"]
    assert reasons[0].endswith(f"see logs/shard-{number}.log.")


def test_a_second_interrupt_ends_a_frozen_run_within_2_s(cli, tmp_path):
    words = ("run", *MOCK, *LOAD, "--duration=60s", *cli.lenient, "--out=run")
    with started(cli, *words, cwd=tmp_path) as process:
        read_until(process.stderr, "5/60 s")
        (frozen,) = workers_of(process.pid)
        os.kill(frozen, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        read_until(process.stderr, "interrupted: waiting")
        process.send_signal(signal.SIGINT)
        read_until(process.stderr, "interrupted again")
        interrupted_s = time.monotonic()
        wait_until(lambda: not os.path.exists(f"/proc/{frozen}"), 10, "it was not killed")
        killed_s = time.monotonic() - interrupted_s
        _, stderr = process.communicate(timeout=40)
    assert process.returncode == 130, stderr
    assert killed_s < 2.0
    counts, total = counts_of(tmp_path / "run")
    assert counts["lost"] == total


def test_a_plug_in_in_an_endless_loop_costs_its_worker_only(cli, tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    words = (
        "run", *MOCK, *LOAD, "--duration=4s", *cli.lenient, "--workers=2", "--out=run",
        "--plugin=endless.py",
    )  # fmt: skip
    with started(cli, *words, cwd=tmp_path) as process:
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 3, stderr
    assert "no progress for 5 s: killed" in (tmp_path / "run" / "manifest.json").read_text()


def test_a_line_that_is_no_message_is_the_death_of_its_worker(cli, tmp_path):
    (tmp_path / "torn.py").write_text(TORN)
    words = (
        "run", *MOCK, *LOAD, "--duration=4s", *cli.lenient, "--workers=2", "--out=run",
        "--plugin=torn.py",
    )  # fmt: skip
    ended = cli(*words, cwd=tmp_path)
    assert ended.returncode == 3, ended.stderr
    reason = """unreadable message: '{"kind": "be{"kind": "beat"}': killed"""
    assert f"worker 0 died ({reason}): its requests are lost, the others go on" in ended.stderr
    assert reason in json.loads((tmp_path / "run" / "manifest.json").read_text())["end_reason"]
    counts, total = counts_of(tmp_path / "run")
    assert min(counts["ok"], counts["lost"]) > 60
    assert counts["ok"] + counts["lost"] == total


def test_the_output_of_a_plug_in_goes_to_the_log_of_its_worker(cli, tmp_path):
    (tmp_path / "printing.py").write_text(PRINTING)
    words = (
        "run", *MOCK, *LOAD, "--duration=2s", *cli.lenient, "--slo=ttft<=30s", "--out=run",
        "--plugin=printing.py",
    )  # fmt: skip
    ended = cli(*words, cwd=tmp_path)
    counts, total = counts_of(tmp_path / "run")
    assert counts["ok"] == total, ended.stderr
    assert "row 3\n" in (tmp_path / "run" / "logs" / "shard-0.log").read_text()


def test_a_paused_command_does_not_kill_its_workers(cli, tmp_path):
    """As when a laptop sleeps: all processes stop and continue."""
    words = ("run", *MOCK, *LOAD, "--duration=6s", *cli.lenient, "--slo=ttft<=60s", "--out=run")
    with started(cli, *words, cwd=tmp_path) as process:
        read_until(process.stderr, "5/6 s")
        everyone = [process.pid, *workers_of(process.pid)]
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        paused_s = time.monotonic()
        wait_until(lambda: time.monotonic() > paused_s + 7, 10, "no time passed")
        for pid in everyone:
            os.kill(pid, signal.SIGCONT)
        _, stderr = process.communicate(timeout=40)
    counts, total = counts_of(tmp_path / "run")
    assert counts["ok"] == total, stderr
    assert process.returncode in (0, 3), stderr  # 3: the pause can spoil what was measured


def test_a_frozen_server_is_killed_5_s_after_it_was_told_to_stop(cli, tmp_path):
    words = ("run", *MOCK, *LOAD, "--duration=7s", "--set=phases.drain=1s", "--out=run")
    with started(cli, *words, cwd=tmp_path) as process:
        read_until(process.stderr, "5/7 s")
        (server,) = [p for p, words in descendants(process.pid).items() if "mock_server" in words]
        os.kill(server, signal.SIGSTOP)
        _, stderr = process.communicate(timeout=40)
        assert not os.path.exists(f"/proc/{server}")
    assert process.returncode in (0, 1, 3), stderr  # there is no SLO; requests are unfinished
    assert ended_s(tmp_path / "run") < 15


def test_a_frozen_load_process_of_a_worker_is_killed(cli, tmp_path):
    words = (
        "web", "--headless", "--workers=2", *MOCK, "--scenario=quickstart", "--rate=20/s",
        "--duration=10s", "--warmup=0s", *cli.lenient, "--out=run",
    )  # fmt: skip
    with started(cli, *words, cwd=tmp_path) as process:
        read_until(process.stderr, "/10 s")
        frozen, _ = [p for p, c in descendants(process.pid).items() if "web.load_process" in c]
        os.kill(frozen, signal.SIGSTOP)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 3, stderr
    counts, total = counts_of(tmp_path / "run")
    assert counts["lost"] > 0
    assert counts["ok"] + counts["lost"] == total
    assert "no progress for 5 s: killed" in (tmp_path / "run" / "manifest.json").read_text()


def test_an_engine_whose_policy_does_not_return_ends_all_the_same(cli, tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS_POLICY)
    words = ("serve", "--device=toy", "--port=0", "--drain=0s", "--plugin=endless.py")
    with started(cli, *words, cwd=tmp_path) as process:
        url = read_until(process.stdout, "READY").split()[1]
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
            body = b'{"prompt": "a", "max_tokens": 4}'
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
            client.settimeout(0.5)
            with pytest.raises(TimeoutError):
                client.recv(1)
            process.send_signal(signal.SIGTERM)
            _, stderr = process.communicate(timeout=20)
    assert process.returncode == 4, stderr
    assert "the running step did not end within 5 s" in stderr
    assert "Traceback" not in stderr


def test_a_second_interrupt_ends_a_simulation_whose_policy_does_not_return(cli, tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS_POLICY)
    words = ("run", "--target=sim", *LOAD, "--duration=2s", "--out=run", "--plugin=endless.py")
    with started(cli, *words, cwd=tmp_path) as process:
        read_until(process.stderr, "simulated engine")
        process.send_signal(signal.SIGINT)  # noted: the simulation stops after its present step

        def ended():
            process.send_signal(signal.SIGINT)
            return process.poll() is not None

        wait_until(ended, 20, "the simulation went on")
        _, stderr = process.communicate()
    assert process.returncode == 130, stderr
