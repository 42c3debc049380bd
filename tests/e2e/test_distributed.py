"""Runs over Locust's master and workers, as processes on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram

from loadgen.archive.store import read_run
from loadgen.records import Status
from loadgen.workload.scenario import load_scenario
from loadgen.workload.schedule import make_schedule

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
MOCK = ["--target=mock", "--engine=ttft=30ms,itl=3ms"]
ONE_WAY_S = 0.020


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def started(cli, *words, cwd, environ=None, module="loadgen", **streams):
    """A process of the command line, or of another module's; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, words)],
        cwd=cwd,
        env=cli.environ | (environ or {}),
        text=True,
        **streams,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


class Relay:
    """A TCP relay that holds every byte back by `ONE_WAY_S` in each direction."""

    def __init__(self, to_port):
        self.to_port, self.writers = to_port, []
        self.is_dialled = threading.Event()

    async def serve(self, is_up, is_over):
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        is_up(server.sockets[0].getsockname()[1])
        await is_over.wait()
        server.close()
        for writer in self.writers:
            writer.transport.abort()
        await asyncio.sleep(2 * ONE_WAY_S)  # what is held back finds its transport closed

    async def _connected(self, reader, writer):
        self.is_dialled.set()
        self.writers.append(writer)
        try:
            there, away = await asyncio.open_connection("127.0.0.1", self.to_port)
        except OSError:
            writer.close()
            return
        self.writers.append(away)
        await asyncio.gather(self._carry(reader, away), self._carry(there, writer))

    async def _carry(self, reader, writer):
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                loop.call_later(ONE_WAY_S, _write, writer, data)
        loop.call_later(ONE_WAY_S, writer.close)


def _write(writer, data):
    if not writer.is_closing():
        writer.write(data)


@contextmanager
def relay(to_port):
    """A relay in a thread of its own; yields its port, and an event for its first caller."""
    ports, is_up, loops, ours = [], threading.Event(), [], Relay(to_port)

    async def body():
        is_over = asyncio.Event()
        loops.append((asyncio.get_running_loop(), is_over))

        def up(port):
            ports.append(port)
            is_up.set()

        await ours.serve(up, is_over)

    thread = threading.Thread(target=asyncio.run, args=[body()])
    thread.start()
    assert is_up.wait(30)
    try:
        yield ports[0], ours.is_dialled
    finally:
        loop, is_over = loops[0]
        loop.call_soon_threadsafe(is_over.set)
        thread.join(30)


def nearest_rank(values, q):
    ordered = np.sort(values)
    return float(ordered[max(0, int(np.ceil(q * len(ordered))) - 1)])


def run_far_away(cli, where):
    """A master and three workers, each behind a relay; an SLO that cannot be met."""
    port = free_port()
    with ExitStack() as stack:
        relays = [stack.enter_context(relay(port)) for _ in range(3)]
        for through, _ in relays:
            stack.enter_context(
                started(cli, "worker", "--master=127.0.0.1", f"--port={through}", cwd=where)
            )
        for _, is_dialled in relays:  # how long they take to start is not what a master waits for
            assert is_dialled.wait(120)
        master = stack.enter_context(
            started(
                cli, "web", "--headless", "--expect-workers=3", f"--master-port={port}", *MOCK,
                "--scenario=quickstart", "--rate=60/s", "--duration=4s", "--warmup=0s", "--seed=11",
                "--slo=ttft<=20ms", "--max-skew=10s", *cli.lenient, "--out=run",
                cwd=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
        said, _ = master.communicate(timeout=200)
        return master.returncode, said, where / "run"


def test_far_workers_make_the_run_that_one_machine_would(cli, tmp_path):
    """A single test: a fixture would repeat the run in each process of a parallel suite."""
    code, said, directory = run_far_away(cli, tmp_path)
    assert code in (1, 3), said  # the SLO is missed, or the machine too busy for its 20 ms
    run = read_run(directory)
    the_whole_schedule_is_kept(run, said)
    the_schedule_is_that_of_a_local_run(run)
    merged_percentiles_are_those_of_the_rows(run)
    merged_histograms_are_the_sum_of_the_shards(run, directory)
    assert {path.name for path in directory.iterdir()} >= {"report.html", "summary.json"}
    bounds_s = [one["start_skew_bound_s"] for one in run.manifest["workers"]]
    assert len(bounds_s) == 3
    assert all(ONE_WAY_S <= bound_s < 10 for bound_s in bounds_s)


def the_whole_schedule_is_kept(run, said):
    assert (run.request_rows["status"] == Status.ok).all(), said
    assert set(run.request_rows["shard"]) == {0, 1, 2}
    workers = run.manifest["workers"]
    assert sum(sum(one["last_frame"]["by_status"]) for one in workers) == len(run.schedule_rows)
    assert sum(one["last_frame"]["sent"] for one in workers) == len(run.schedule_rows)


def the_schedule_is_that_of_a_local_run(run):
    settings = ["arrivals.rate=60/s", "phases.measure=4s", "phases.warmup=0s", "seed=11"]
    planned = make_schedule(load_scenario("quickstart", settings))
    assert planned.tobytes() == run.schedule_rows.tobytes()


def merged_percentiles_are_those_of_the_rows(run):
    rows, live = run.request_rows, run.manifest["live"]
    exact = {
        "ttft": rows["first_token_s"] - rows["released_s"],
        "e2e": rows["last_token_s"] - rows["released_s"],
        "lateness": rows["sent_s"] - rows["released_s"],
    }
    for metric, values in exact.items():
        assert live[metric]["n"] == len(rows)
        for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
            assert live[metric][name] == pytest.approx(
                nearest_rank(values, q), rel=2e-3, abs=2e-6
            ), (metric, name)


def merged_histograms_are_the_sum_of_the_shards(run, directory):
    """Byte for byte, by the library's own decoding, adding and encoding."""
    told = json.loads((directory / "logs" / "histograms.json").read_text())
    assert sorted(told["shards"]) == ["0", "1", "2"]
    for metric, merged in told["merged"].items():
        summed = HdrHistogram(1, 600_000_000, 3)
        for shard in told["shards"].values():
            summed.decode_and_add(shard[metric])
        assert summed.encode().decode() == merged
        if metric != "itl":
            assert summed.get_total_count() == len(run.request_rows)


def descendants(pid):
    """Every process below one, by command line; those that end meanwhile are left out."""
    found: dict[int, str] = {}
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as children:
            below = [int(child) for child in children.read().split()]
        for child in below:
            with suppress(FileNotFoundError, ProcessLookupError):
                with open(f"/proc/{child}/cmdline", "rb") as line:
                    said = line.read().replace(b"\0", b" ").decode()
                found |= {child: said, **descendants(child)}
    return found


def is_gone(pid, within_s=30.0):
    """Whether a process ends in time; a zombie has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        readable, _, _ = select.select([handle], [], [], within_s)
    finally:
        os.close(handle)
    return bool(readable)


def test_the_packaged_locustfile_runs_under_locust_itself(cli, tmp_path):
    """`locust -f $(slobench locustfile)` in a single process; an SLO that is met exits 0."""
    found = cli("locustfile", cwd=tmp_path)
    lenient = "; ".join(word.removeprefix("--set=") for word in cli.lenient)
    done = subprocess.run(
        [
            sys.executable, "-P", "-m", "locust", "-f", found.stdout.strip(), "--headless",
            "--host=mock", "--engine=ttft=30ms,itl=3ms", "--scenario=quickstart", "--rate=20/s",
            "--duration=2s", "--warmup=0s", "--seed=5", "--slo=ttft<=60s", f"--set={lenient}",
            "--out=run",
        ],
        cwd=tmp_path, env=cli.environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "MET" in done.stdout
    run = read_run(tmp_path / "run")
    assert (run.request_rows["status"] == Status.ok).all()
    assert len(run.manifest["workers"]) == 1


def test_a_killed_worker_and_a_killed_generator_are_lost_and_the_third_goes_on(cli, tmp_path):
    """The load process of a killed worker keeps its rows and ends; lost requests are counted, no
    other file is left behind, and there is no verdict."""
    folder = tmp_path / "cache" / "slobench" / "unconfirmed"
    with started(
        cli, "web", "--headless", "--workers=3", *MOCK, "--scenario=quickstart", "--rate=30/s",
        "--duration=4s", "--warmup=0s", "--slo=ttft<=60s", *cli.lenient, "--out=run",
        cwd=tmp_path, environ={"XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as master:  # fmt: skip
        assert any(line.startswith("sending") for line in master.stderr)
        assert len(list(folder.iterdir())) == 3
        tree = descendants(master.pid)
        generators = {pid for pid, line in tree.items() if "loadgen.web.load_process" in line}
        assert len(generators) == 3, tree
        hosts = {pid: set(descendants(pid)) & generators for pid in set(tree) - generators}
        (worker, (its_own,)), (_, (generator,)), _ = [
            (pid, below) for pid, below in hosts.items() if len(below) == 1
        ]
        os.kill(worker, signal.SIGKILL)
        os.kill(generator, signal.SIGKILL)
        assert is_gone(its_own, within_s=10)  # it writes its rows
        said = master.stderr.read()
        assert master.wait(120) == 3, said
    kept = list(folder.iterdir())  # none if the worker was killed before it could relay the start
    assert len(kept) == len(list(folder.glob("*/shard-*.npz"))) <= 1
    run = read_run(tmp_path / "run")
    by_status = np.bincount(run.request_rows["status"], minlength=len(Status))
    lost = run.request_rows["status"] == Status.lost
    assert by_status.sum() == len(run.schedule_rows)
    assert by_status[Status.ok] + by_status[Status.lost] == len(run.schedule_rows)
    assert 0 < lost.sum() < len(run.schedule_rows)
    dead = [one for one in run.manifest["workers"] if one["state"] != "done"]
    assert sorted(one["state"] for one in dead) == ["died", "lost"]
    assert lost.sum() == sum(one["n_requests"] for one in dead)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["verdict"] == "no_verdict"
