"""A trial: the real load generator against a server that logs its own timestamps, and the
difference between the two."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console

from loadgen.archive import checksums
from loadgen.errors import RunInvalid, UsageError
from loadgen.manifest.json_section import encoded, read_section
from loadgen.measure.aggregate import summarize
from loadgen.records import Run, Status, Times
from loadgen.run.execute import record
from loadgen.run.run_options import RunOptions, RunSetup
from loadgen.run.target import Target
from loadgen.studies.doctor.fidelity import Fidelity, Truth, fidelity
from loadgen.system.whole_file import read_result
from loadgen.workload.prompts import PromptFit
from loadgen.workload.scenario import Scenario, scenario_from_flags, varied
from loadgen.workload.schedule import make_plan
from targets.embed import mock
from targets.endpoint import Endpoint
from targets.truth_log import TruthLog, read_truth_log
from targets.truth_server import truth_server

OUTPUT_TOKENS = 64
ERROR_LIMIT_S = 5e-3  # limit of the p99 TTFT error; equals that of the lateness check
_INPUT_TOKENS = 64
_MODEL = "truth"
_TTFT_S, _ITL_S = 0.05, 0.01
_WARMUP_S = 0.5
_DRAIN_S = 10.0
_FILE = "trial.json"


@dataclass(frozen=True)
class TrialSetup:
    """The place of the trials: a folder for their files, in the directory of the check, and the
    server that judges them. A trial whose result the folder holds is not measured again.

    The judge `mock` is for machines without a C compiler: it is written in Python and slower than
    the client. `cache_dir` stores the truth server's program; None compiles it each time. `cc` is a
    compiler, as in $CC.
    """

    folder: Path
    judge: Literal["truth", "mock"] = "truth"
    cache_dir: Path | None = None
    cc: str = ""


@dataclass(frozen=True)
class TrialProblem:
    """A problem of a trial: its `cause` in a few words, the measurement, and the remedy."""

    cause: str
    detail: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.cause}: {self.detail}" if self.detail else self.cause


@dataclass(frozen=True)
class Trial:
    """The result of a worker at a rate. `problems` lists the run's failed validity gates and timing
    checks, and its failed requests."""

    rate_per_s: float
    tokens_per_s: float  # received in the measured window
    n_requests: int
    fidelity: Fidelity
    cpu_s_per_token: float
    problems: tuple[TrialProblem, ...]
    wall_s: float

    @property
    def ttft_error_s(self) -> float:
        """p99."""
        return self.fidelity.ttft_error_s.p99

    @property
    def causes(self) -> tuple[str, ...]:
        """The problems in a few words each."""
        return tuple(problem.cause for problem in self.problems)

    @property
    def holds(self) -> bool:
        """Whether this machine can measure this rate: no problems, and the error below the
        limit."""
        return not self.problems and self.ttft_error_s < ERROR_LIMIT_S


def measure_trial(setup: TrialSetup, rate_per_s: float, seconds: float, number: int) -> Trial:
    """Poisson arrivals at a rate during `seconds` measured seconds, with a single worker and 64
    tokens each.

    Raises KeyboardInterrupt when the user ended it, MissingDependency without a C compiler.
    """
    scenario = _scenario(rate_per_s, seconds, number)
    return replace(_measured(setup, scenario, number, n_workers=1), rate_per_s=rate_per_s)


def measure_traffic(setup: TrialSetup, scenario: Scenario, measure_s: float) -> Trial:
    """The traffic of a scenario during `measure_s` seconds, with as many workers as a run of it
    would start. Its rate is that of the requests sent.

    Raises KeyboardInterrupt when the user ended it, MissingDependency without a C compiler.
    """
    phases = {"warmup": _WARMUP_S, "measure": measure_s, "drain": _DRAIN_S}
    settings: dict[str, object] = {
        **{f"phases.{name}": f"{seconds}s" for name, seconds in phases.items()},
        "slo": [],
        "stop_when": "never",
    }
    return _measured(setup, varied(scenario, settings), number=0, n_workers=0)


def _measured(setup: TrialSetup, scenario: Scenario, number: int, n_workers: int) -> Trial:
    """The trial of this number that the folder holds, or one that is measured now."""
    folder = setup.folder / f"trial-{number}"
    directory, name = setup.folder.parent, f"{setup.folder.name}/{folder.name}/{_FILE}"
    checksums.check_read(directory, name)
    if (stored := _stored(folder / _FILE)) is not None:
        return stored
    if folder.exists():  # left by an interrupt
        shutil.rmtree(folder)
    started_s = time.monotonic()
    run, log = _recorded(setup, scenario, folder, n_workers)
    if run.manifest.ended == "interrupted":
        raise KeyboardInterrupt
    trial = _judged(run, log, scenario.phases.measure, time.monotonic() - started_s)
    checksums.replace(directory, name, encoded(trial))
    return trial


def _stored(path: Path) -> Trial | None:
    """Raises UsageError for a damaged file."""
    try:
        return read_section(json.loads(read_result(path)), Trial, str(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RunInvalid) as error:
        raise UsageError(f"{path}: cannot be read: {error}; remove its folder") from None


def _scenario(rate_per_s: float, seconds: float, seed: int) -> Scenario:
    return scenario_from_flags(
        name="doctor",
        rate=f"{rate_per_s}/s",
        input_len=_INPUT_TOKENS,
        output_len=OUTPUT_TOKENS,
        warmup=f"{_WARMUP_S}s",
        duration=f"{seconds}s",
        seed=seed,
        max_concurrency=100_000,
        overrides={"limits.timeout": "10s", "phases.drain": f"{_DRAIN_S}s", "stop_when": "never"},
    )


def _recorded(
    bench: TrialSetup, scenario: Scenario, folder: Path, n_workers: int
) -> tuple[Run, TruthLog]:
    directory = folder / "run"
    directory.mkdir(parents=True)
    with _judge(bench, folder) as (url, finish):
        setup = RunSetup(
            scenario,
            make_plan(scenario),
            url,
            RunOptions(n_workers=n_workers),
            directory,
            Console(quiet=True),
        )
        return record(setup, _judge_target(url)), finish()


@contextmanager
def _judge(setup: TrialSetup, folder: Path) -> Iterator[tuple[str, Callable[[], TruthLog]]]:
    """Starts the server; yields its URL, and a function that ends it and reads its log."""
    if setup.judge == "mock":
        log = folder / "truth.csv"
        script = {"ttft": f"{_TTFT_S}s", "itl": f"{_ITL_S}s", "model": _MODEL}
        with mock(script, folder, truth=log) as served:

            def finish() -> TruthLog:
                served.child.end()
                return read_truth_log(log)

            yield served.endpoint.url, finish
        return
    with (
        truth_server(
            folder, cache_dir=setup.cache_dir, cc=setup.cc, ttft_s=_TTFT_S, itl_s=_ITL_S
        ) as server,
        server.client_cores(),
    ):
        yield server.url, server.finish


def _judge_target(url: str) -> Target:
    """The judge as a target. It needs no preflight: its behaviour is fixed."""
    endpoint = Endpoint(url=url, model=_MODEL)
    return Target("url", endpoint, endpoint.adapter(), PromptFit(8.0, 0.25), [])


def _judged(run: Run, log: TruthLog, seconds: float, wall_s: float) -> Trial:
    rows = run.request_rows
    is_due = rows["released_s"] >= _WARMUP_S
    counted = is_due & (rows["status"] == Status.ok)
    tokens_per_s = float(rows["output_tokens"][counted].sum()) / seconds
    cpu_s = sum((shard.cpu_share or 0.0) * shard.window_s for shard in run.instrument.shards)
    n_tokens = max(1, int(rows["output_tokens"].sum()))
    return Trial(
        rate_per_s=float(np.count_nonzero(is_due)) / seconds,
        tokens_per_s=tokens_per_s,
        n_requests=int(np.count_nonzero(rows["status"] != Status.not_released)),
        fidelity=fidelity(run, truth_of(run, log)),
        cpu_s_per_token=cpu_s / n_tokens,
        problems=tuple(_problems(run)),
        wall_s=wall_s,
    )


def _problems(run: Run) -> Iterator[TrialProblem]:
    for check in summarize(run).validity.checks:
        if (check.is_gate or check.is_timing) and check.ok is False:
            yield TrialProblem(check.name, check.detail, check.remedy)
    statuses = run.request_rows["status"]
    for status in np.unique(statuses):
        if status == Status.not_released and run.manifest.has_closed_loop:
            continue  # a closed loop plans more requests than it sends
        if status not in (Status.ok, Status.lost):  # lost rows fail a gate
            n = int(np.count_nonzero(statuses == status))
            ended = f"{n} of {len(statuses)} requests ended as {Status(status).name}"
            yield TrialProblem(ended)


def truth_of(run: Run, log: TruthLog) -> Truth:
    """The log's times in the rows of a run, on the run's clock. NaN for requests that never
    arrived."""
    rows = run.request_rows
    epoch_ns = round(run.manifest.epoch_s * 1e9)
    has_arrived = np.isin(rows["request_id"], log.rows["seq"])
    logged = log.rows_of(rows["request_id"][has_arrived])

    def instants_s(name: str) -> Times:
        values_s = np.full(len(rows), np.nan)
        since_ns = logged[name].astype(np.int64) - epoch_ns
        values_s[has_arrived] = np.where(logged[name] > 0, since_ns * 1e-9, np.nan)
        return values_s

    late_s = np.full(len(rows), np.nan)
    late_s[has_arrived] = logged["late_max_ns"] * 1e-9
    return Truth(instants_s("read_ns"), instants_s("first_ns"), instants_s("last_ns"), late_s)
