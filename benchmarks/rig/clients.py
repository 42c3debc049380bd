"""The clients under test, each on one core: slobench as users run it, C, and aiohttp with JSON."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.archive.store import read_run
from loadgen.records import Status
from loadgen.studies.demo.bounded_command import Finished, finished
from loadgen.workload.scenario import load_scenario
from loadgen.workload.schedule import make_schedule
from targets.truth_log import TruthLog
from targets.truth_server import truth_server

SIDES = ("slobench", "C", "aiohttp")
_ENDS = ("arrived_ns", "last_ns")
OTHER_EVENTS = 4  # beside the tokens: role, finish, usage, [DONE]
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Load:
    """Open loop at `rate_per_s` (Poisson) or, with `users`, a closed loop without pauses."""

    tokens: int
    for_s: float
    rate_per_s: float = 0.0
    users: int = 0

    def scenario(self) -> str:
        arrivals = f"{{kind: poisson, rate: {self.rate_per_s:g}/s}}"
        if self.users:
            arrivals = f"{{kind: users, users: {self.users}, think: 0s}}"
        return (
            f"# {self.tokens} tokens each.\nschema: 1\nname: benchmark\nseed: 7\n"
            f"arrivals: {arrivals}\n"
            f"requests: {{input_tokens: 16, output_tokens: {self.tokens}}}\n"
            f"phases: {{measure: {self.for_s:g}s, drain: 30s}}\n"
            f"limits: {{timeout: 60s, max_concurrency: 20000}}\nstop_when: never\n"
        )


Columns = Mapping[str, NDArray[np.float64]]


def waits_s(
    command: Finished, arrived_ns: NDArray[np.int64], last_ns: NDArray[np.int64]
) -> tuple[float, float]:
    """Seconds from the start of a command to the arrival of its first request, and from the last
    token to its end, by the server's log."""
    if not len(arrived_ns):
        return math.nan, math.nan
    first_s, last_s = 1e-9 * float(arrived_ns.min()), 1e-9 * float(last_ns.max())
    return first_s - command.started_s, command.ended_s - last_s


@dataclass(frozen=True)
class Measured:
    """One run of one client, and the server's log of it. `rows` are the client's own: seq, due_s,
    sent_s, first_s, last_s, done_s, on CLOCK_MONOTONIC, answered requests only; CPU is of the
    client alone."""

    rows: Columns
    n_sent: int
    paced_cpu_s: float  # while requests were under way
    decoded_cpu_s: float  # …and until everything is decoded
    command: Finished
    log: TruthLog
    problems: Sequence[str] = ()  # gates of slobench's own instrument check that failed

    @property
    def waits_s(self) -> tuple[float, float]:
        """`waits_s` of the command and its own requests; of slobench, the preflight's are not."""
        arrived_ns, last_ns = (self.log.rows_of(self.rows["seq"])[name] for name in _ENDS)
        return waits_s(self.command, arrived_ns, last_ns)

    @property
    def n_events(self) -> int:
        """Server-sent events that came, of answered requests."""
        tokens = self.log.rows_of(self.rows["seq"])["sent_tokens"]
        return int(tokens.sum()) + OTHER_EVENTS * len(tokens)


Way = Callable[[str, int | None], AbstractContextManager[str]]


def _directly(url: str, cpu: int | None) -> AbstractContextManager[str]:
    return nullcontext(url)


class Rig:
    """The truth server on one core, a client on another, in a folder for their files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._c_client = folder / "c_client"
        flags = ["-O2", "-D_GNU_SOURCE", "-o", str(self._c_client), str(_HERE / "c_client.c")]
        subprocess.run([os.environ.get("CC", "cc"), *flags], check=True)

    def measure(
        self, side: str, load: Load, workers: int = 1, through: Way = _directly, **script: Any
    ) -> Measured:
        """One run of one of SIDES against a server that behaves as `script` (TruthScript) says.
        `through` takes the server's URL and core, and gives the client's target."""
        scenario = self._folder / "scenario.yaml"
        scenario.write_text(load.scenario())
        out = self._folder / "run"
        with truth_server(self._folder, cache_dir=self._folder, **script) as server:
            with server.client_cores():  # one core, also where there are more
                os.sched_setaffinity(0, {max(server.client_cpus)})
                with through(server.url, server.cpu) as target:
                    if side == "slobench":
                        command = _slobench(target, scenario, out, workers)
                    else:
                        command = self._other(side, target, load, scenario)
            log = server.finish()
        if side == "slobench":
            return _read_run(out, command, log)
        return _read_rows(self._folder / "rows.csv", command, log)

    def _other(self, side: str, url: str, load: Load, scenario: Path) -> Finished:
        how = ["--users", str(load.users), "--for", str(load.for_s)]
        if not load.users:
            due = self._folder / "due.f64"
            due_s(scenario).tofile(due)
            how = ["--due", str(due)]
        program = [str(self._c_client)]
        if side == "aiohttp":
            program = [sys.executable, str(_HERE / "aiohttp_client.py")]
        port, rows = url.rpartition(":")[2], str(self._folder / "rows.csv")
        words = ["--port", port, "--tokens", str(load.tokens), "--rows", rows, *how]
        return run_command([*program, *words])


def _slobench(url: str, scenario: Path, out: Path, workers: int) -> Finished:
    words = [str(scenario), f"--target={url}", f"--out={out}", "--force", f"--workers={workers}"]
    return run_command([sys.executable, "-m", "loadgen", "run", *words])


def _read_run(directory: Path, command: Finished, log: TruthLog) -> Measured:
    run = read_run(directory)
    rows = run.request_rows
    ok = rows["status"] == Status.ok
    epoch_s = run.manifest.epoch_s
    named = {
        "due_s": "released_s",
        "sent_s": "sent_s",
        "first_s": "first_token_s",
        "last_s": "last_token_s",
        "done_s": "done_s",
    }
    columns = {name: rows[column][ok] + epoch_s for name, column in named.items()}
    columns["seq"] = rows["request_id"][ok].astype(np.float64)
    shards = run.instrument.shards
    paced_cpu_s = sum((shard.cpu_share or 0.0) * shard.window_s for shard in shards)
    summary = json.loads((directory / "summary.json").read_text())
    checks = summary["validity"]["checks"]
    return Measured(
        rows=columns,
        n_sent=int(np.count_nonzero(np.isfinite(rows["sent_s"]))),
        paced_cpu_s=paced_cpu_s,
        decoded_cpu_s=paced_cpu_s + sum(shard.decoding.cpu_s for shard in shards),
        command=command,
        log=log,
        problems=[c["detail"] for c in checks if c["is_gate"] and c["ok"] is False],
    )


def _read_rows(path: Path, command: Finished, log: TruthLog) -> Measured:
    own_cpu_s = float(json.loads(command.output)["cpu_s"])
    names = path.open().readline().strip().split(",")
    table = np.genfromtxt(path, delimiter=",", skip_header=1, ndmin=2)
    columns = dict(zip(names, table.T, strict=True))
    answered = columns["done_ns"] > 0
    rows = {
        name.replace("_ns", "_s"): column[answered] * (1e-9 if name.endswith("_ns") else 1.0)
        for name, column in columns.items()
    }
    return Measured(rows, len(answered), own_cpu_s, own_cpu_s, command, log)


def due_s(scenario: Path) -> NDArray[np.float64]:
    """The instants slobench would send at, so that every client sends at the same ones."""
    due: NDArray[np.float64] = make_schedule(load_scenario(str(scenario), []))["scheduled_s"]
    return np.sort(due)


def run_command(words: Sequence[str]) -> Finished:
    """Runs a client to its end; exit codes 1 and 3 are verdicts of slobench."""
    done = finished(words, {"NO_COLOR": "1"})
    if done.exit_code not in (0, 1, 3):
        raise SystemExit(f"{' '.join(words)}: exit {done.exit_code}\n{done.output}")
    return done
