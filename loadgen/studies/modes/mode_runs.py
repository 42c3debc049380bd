"""The runs behind a comparison of modes: each a mode, a scenario and a seed, run here or in worker
processes, and stored as a cell."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait as await_any
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from loadgen.archive import checksums
from loadgen.errors import RunInvalid
from loadgen.lab.sim_options import sim_options
from loadgen.lab.simulate import record
from loadgen.manifest.json_section import encoded, read_section
from loadgen.measure.aggregate import summarize
from loadgen.run.manifest import version
from loadgen.run.run_options import RunOptions
from loadgen.studies.modes.cell import cell_of, read_waits
from loadgen.studies.modes.result import ModeCell
from loadgen.studies.modes.spec import Mode
from loadgen.system.endings import blocked, ending_signals, exit_words
from loadgen.system.plugins import load_plugin
from loadgen.system.whole_file import read_result
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan

_REAPED_S = 1.0


@dataclass(frozen=True)
class ModeRun:
    """A cell to run, ready to be sent to another process."""

    scenario: dict[str, Any]  # resolved; a Scenario may hold classes of plugins not loaded there
    source: str
    mode: Mode
    rate_per_s: float | None
    target: str
    settings: dict[str, str]
    run_dir: Path | None
    plugins: tuple[Path, ...]
    command: tuple[str, ...]
    cache_dir: Path | None

    @property
    def name(self) -> str:
        """The name of the cell's files; cells that differ in any setting have different names."""
        rate = "" if self.rate_per_s is None else f"-{self.rate_per_s:g}"
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", self.mode.label)
        content = [self.scenario, self.mode.label, self.target, self.settings, version()]
        content += [path.read_text() for path in self.plugins]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return f"{slug}{rate}-seed{self.scenario['seed']}-{digest[:10]}"


def finished(
    todo: deque[ModeRun], n_workers: int, console: Console
) -> Iterator[tuple[ModeRun, ModeCell]]:
    """Runs all of `todo`, in processes if `n_workers` is more than 1, and yields each as it ends.
    Runs that the caller appends meanwhile run, too."""
    if n_workers <= 1:
        while todo:
            task = todo.popleft()
            yield task, _run(task, console)
        return
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(n_workers, spawn, initializer=_obey_parent)
    futures: dict[Future[ModeCell], ModeRun] = {}
    others, workers = {*multiprocessing.active_children()}, set[BaseProcess]()
    try:
        while todo or futures:
            while todo:
                task = todo.popleft()
                with blocked(ending_signals()):  # in the new process, until it ignores them
                    futures[pool.submit(_run_quietly, task)] = task
                workers |= {*multiprocessing.active_children()} - others
            for future in wait(futures, return_when=FIRST_COMPLETED).done:
                yield futures.pop(future), future.result()
    except BaseException as error:
        reason = _death(workers) if isinstance(error, BrokenProcessPool) else ""
        for worker in workers:
            worker.kill()
        pool.shutdown(wait=False, cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise RunInvalid(
                f"a simulating process died ({reason}); the finished cells are kept: the same "
                "command with this --out continues there"
            ) from None
        raise
    pool.shutdown()


def _death(workers: Collection[BaseProcess]) -> str:
    """How the process that died ended."""
    by_sentinel = {worker.sentinel: worker for worker in workers}
    codes = []
    for sentinel in await_any(list(by_sentinel), _REAPED_S):
        assert isinstance(sentinel, int), "a sentinel is a descriptor"
        by_sentinel[sentinel].join(_REAPED_S)
        codes.append(by_sentinel[sentinel].exitcode)
    return next((exit_words(code) for code in codes if code), "its exit status is unknown")


def _obey_parent() -> None:
    """Leaves the signals that end a program to the parent process, which kills this process; ends
    this process if the parent has ended."""
    for number in ending_signals():
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ending_signals())
    parent = multiprocessing.parent_process()
    assert parent is not None, "the initializer runs in a process of the pool"

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, name="parent", daemon=True).start()


def _run_quietly(task: ModeRun) -> ModeCell:
    for plugin in task.plugins:
        load_plugin(plugin)
    return _run(task, Console(quiet=True))


def _run(task: ModeRun, console: Console) -> ModeCell:
    scenario = Scenario.model_validate(task.scenario).from_source(task.source)
    run = {"sim": _simulated, "reference": _measured}[task.target]
    cell: ModeCell = run(task, scenario, console)
    return cell


def _simulated(task: ModeRun, scenario: Scenario, console: Console) -> ModeCell:
    from loadgen.run.conclude import write_results

    settings = {**task.settings, **task.mode.parameters, "mode": task.mode.kind}
    options, plan, quiet = sim_options(settings), make_plan(scenario), Console(quiet=True)
    if task.run_dir is not None:
        task.run_dir.mkdir(parents=True, exist_ok=True)
    run = record(
        scenario,
        plan,
        options,
        quiet,
        directory=task.run_dir,
        command=task.command,
        is_interruptible=False,
    )
    summary = summarize(run)
    if task.run_dir is not None:
        write_results(run, summary, task.run_dir, task.cache_dir)
        checksums.cover_rest(task.run_dir)
    assert run.manifest.engine is not None, "a simulated run has a simulated engine"
    waits_s = run.manifest.engine.waits_s
    return cell_of(run, summary, task.mode.label, task.rate_per_s, waits_s)


def _measured(task: ModeRun, scenario: Scenario, console: Console) -> ModeCell:
    """Runs a real engine in a process of its own, for this cell alone."""
    from loadgen.run.execute import execute

    settings = {**task.settings, **task.mode.parameters, "mode": task.mode.kind}
    options = RunOptions(
        out_dir=task.run_dir,
        force=True,
        engine=",".join(f"{key}={value}" for key, value in settings.items()),
        command=task.command,
        environ=dict(os.environ),
        cache_dir=task.cache_dir,
        plugins=task.plugins,
    )
    finished = execute(scenario, "reference", options, console)
    if finished.was_interrupted:
        raise KeyboardInterrupt
    waits_s = read_waits(finished.run)
    return cell_of(finished.run, finished.summary, task.mode.label, task.rate_per_s, waits_s)


def load(cells_dir: Path, task: ModeRun) -> ModeCell | None:
    """The stored cell of a run; None without one. Raises RunInvalid for a file that was changed."""
    path = cells_dir / f"{task.name}.json"
    if not path.exists():
        return None
    checksums.check_read(cells_dir.parent, f"{cells_dir.name}/{path.name}")
    try:
        return read_section(json.loads(read_result(path)), ModeCell, str(path))
    except (OSError, ValueError) as error:
        raise RunInvalid(f"{path}: cannot be read: {error}") from None


def store(cells_dir: Path, task: ModeRun, cell: ModeCell) -> None:
    cells_dir.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(encoded(cell), indent=1) + b"\n"
    checksums.replace(cells_dir.parent, f"{cells_dir.name}/{task.name}.json", content)
