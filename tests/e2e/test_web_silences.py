"""Who falls silent during a run over Locust, for how long, and what becomes of the requests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time

import numpy as np
import pytest

from loadgen.archive.store import read_run
from loadgen.records import Status
from targets.truth_server import truth_server
from tests.e2e.test_distributed import MOCK, descendants, free_port, is_gone, started
from tests.waits import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
TOLD = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
ALTERED = """
from loadgen.workload.prompts import Prompts

render = Prompts.render
Prompts.render = lambda self, row, fit: render(self, row, fit).upper()
"""


class Said:
    """The lines of a process's stderr, as they arrive; all of them for failure messages."""

    def __init__(self, process):
        self._process, self.lines = process, []

    def wait_for(self, pattern):
        """Until a line matches the pattern."""
        for line in self._process.stderr:
            self.lines.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError(f"no line matches {pattern!r}: {self}")

    def wait_for_load(self, server_of):
        """Until the server spends CPU time on requests, which is a little after "sending" is
        printed; its process id. `server_of` returns that once the server runs."""
        self.wait_for("sending")
        server = server_of()
        enough = cpu_ticks(server) + 5
        wait_until(lambda: cpu_ticks(server) >= enough, 60, "the server received no load")
        return server

    def exit_code(self):
        self.lines += self._process.stderr.readlines()
        return self._process.wait(120)

    def __str__(self):
        return "".join(self.lines)


def cpu_ticks(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return sum(map(int, stat.read().rpartition(")")[2].split()[11:13]))


def n_unread_requests(pid):
    """Connections to a server's port with bytes that it has not read."""
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    inodes = {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    addresses = {row[1].split(":")[1] for row in listening}
    received = [row[4].split(":")[1] for row in rows if row[1].split(":")[1] in addresses]
    return sum(int(n_bytes, 16) > 100 for n_bytes in received)


def below(process, words):
    return [pid for pid, line in descendants(process.pid).items() if words in line]


def mock_of(master):
    (server,) = below(master, "targets.mock_server")
    return server


def locust_workers(master):
    """The Locust processes with a load process each."""
    generators = set(below(master, "loadgen.web.load_process"))
    tree = set(descendants(master.pid)) - generators
    return [pid for pid in tree if len(set(descendants(pid)) & generators) == 1]


def test_workers_that_hang_and_come_back_lose_nothing(cli, tmp_path):
    """Locust ends a test when its last worker is silent; the run must go on."""
    with started(
        cli, "web", "--headless", "--workers=2", *MOCK, "--scenario=quickstart", "--rate=20/s",
        "--duration=13s", "--warmup=0s", "--slo=ttft<=60s", *cli.lenient, "--out=run",
        cwd=tmp_path, **TOLD,
    ) as master:  # fmt: skip
        said = Said(master)
        said.wait_for_load(lambda: mock_of(master))
        for_long, shortly = locust_workers(master)
        os.kill(for_long, signal.SIGSTOP)
        os.kill(shortly, signal.SIGSTOP)
        said.wait_for("is silent")
        said.wait_for("is silent")
        os.kill(shortly, signal.SIGCONT)
        said.wait_for("is back")
        said.wait_for(r"\b1\d/13 s")  # by then silent for longer than a lease
        os.kill(for_long, signal.SIGCONT)
        said.wait_for("is back")
        assert said.exit_code() == 0, str(said)
    run = read_run(tmp_path / "run")
    assert (run.request_rows["status"] == Status.ok).all()
    assert {one["state"] for one in run.manifest["workers"]} == {"done"}
    assert run.manifest.ended == "completed"


def test_a_server_that_hangs_is_late_for_all_that_it_kept_waiting(cli, tmp_path):
    """Two seconds of six: every arrival goes out on time, and every tenth waits a second at least.
    Whoever waits for answers before asking again would hide it."""
    with started(
        cli, "web", "--headless", "--workers=2", *MOCK, "--scenario=quickstart", "--rate=40/s",
        "--duration=6s", "--warmup=0s", "--slo=ttft<=60s", "--set=limits.max_concurrency=1000",
        *cli.lenient, "--out=run", cwd=tmp_path, **TOLD,
    ) as master:  # fmt: skip
        said = Said(master)
        server = said.wait_for_load(lambda: mock_of(master))
        os.kill(server, signal.SIGSTOP)
        wait_until(lambda: n_unread_requests(server) >= 75, 30, "too few requests waited")
        os.kill(server, signal.SIGCONT)
        assert said.exit_code() == 0, str(said)
    rows = read_run(tmp_path / "run").request_rows
    assert (rows["status"] == Status.ok).all()
    assert np.isfinite(rows["sent_s"]).all()
    e2e_s = np.sort(rows["last_token_s"] - rows["released_s"])
    assert e2e_s[int(0.9 * len(e2e_s))] > 1.0
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert told["metrics"]["e2e_s"]["percentiles"]["p90"]["value"] > 1.0


def test_workers_whose_master_is_killed_soon_send_nothing_more(cli, tmp_path, truth_cache):
    """The lease lasts 5 s without a message; until then the workers go on."""
    port = free_port()
    with truth_server(tmp_path, cache_dir=truth_cache, pinned=False) as server:
        with (
            started(cli, "worker", "--master=127.0.0.1", f"--port={port}", cwd=tmp_path) as one,
            started(cli, "worker", "--master=127.0.0.1", f"--port={port}", cwd=tmp_path) as other,
            started(
                cli, "web", "--headless", "--expect-workers=2", f"--master-port={port}",
                f"--target={server.url}", "--scenario=quickstart", "--rate=40/s", "--warmup=0s",
                "--duration=100s", "--max-skew=10s", *cli.lenient, "--out=run",
                cwd=tmp_path, **TOLD,
            ) as master,
        ):  # fmt: skip
            said = Said(master)
            said.wait_for_load(lambda: server.child.pid)
            generators = [pid for w in (one, other) for pid in below(w, "loadgen.web.load_process")]
            master.kill()
            killed_ns = time.monotonic_ns()
            assert len(generators) == 2
            assert all(is_gone(generator) for generator in generators)
        arrived_s = (server.finish().rows["arrived_ns"].astype(np.int64) - killed_ns) * 1e-9
    last_s = arrived_s.max()
    assert 3 < last_s < 8  # five ticks of a worker, and what is on its way
    ours = (arrived_s > 0) & (arrived_s < 3)
    assert ours.sum() > 60, "they did not go on until then"


def test_a_worker_that_would_send_something_else_stops_the_start(cli, tmp_path):
    """The same version with an altered file, which writes prompts in capitals."""
    port = free_port()
    (tmp_path / "altered.py").write_text(ALTERED)
    with (
        started(
            cli, "worker", "--master=127.0.0.1", f"--port={port}", "--plugin=altered.py",
            cwd=tmp_path,
        ) as _,
        started(
            cli, "web", "--headless", "--expect-workers=1", f"--master-port={port}", *MOCK,
            "--scenario=quickstart", "--max-skew=10s", "--out=run", cwd=tmp_path, **TOLD,
        ) as master,
    ):  # fmt: skip
        said = Said(master)
        assert said.exit_code() == 3, str(said)
    assert re.search(r"would\s+send\s+other\s+requests:\s+SHA-256", str(said))
    assert "nothing was sent" in str(said)
    assert not (tmp_path / "run" / "requests.parquet").exists()
