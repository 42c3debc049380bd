"""The search for a capacity, wired together: probe after probe, each a run in its own directory,
until the answer is narrow enough, the time is up or somebody interrupts."""

from __future__ import annotations

import contextlib
import hashlib
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from loadgen.capacity.capacity_files import default_directory, kept_probes, store, write
from loadgen.capacity.capacity_spec import CapacitySpec, question_of
from loadgen.capacity.early_stop import EarlyStop
from loadgen.capacity.observed import probe_of
from loadgen.cells.cell import Cell
from loadgen.cells.servers import CellServers
from loadgen.drive.engine_logs import ServedRun
from loadgen.errors import RunInvalid, TargetError, UsageError
from loadgen.measure.capacity.capacity_probe import Grade, Probe
from loadgen.measure.capacity.capacity_result import Capacity, Unit, conclude
from loadgen.measure.capacity.next_probe import (
    NextProbe,
    Question,
    SearchState,
    fit_into,
    judge,
    next_probe,
)
from loadgen.run.execute import SIMULATED, FinishedRun, execute
from loadgen.run.run_options import RunOptions
from loadgen.run.target import finish
from loadgen.workload.scaling import scaled, with_window
from loadgen.workload.scenario import Scenario
from targets.quiesce import quiesce

_TRIES = 2  # at a load at which the client could not be trusted


def search(
    asked: CapacitySpec, out_dir: Path | None, console: Console, *, resume: bool
) -> Capacity:
    """`capacity`, telling `console` how it goes. Ctrl-C ends it with the best answer so far.

    Raises UsageError before anything runs, and for a directory that holds another search.
    """
    question = question_of(asked)
    directory = out_dir or default_directory(asked.scenario)
    probes = kept_probes(asked, question, directory, resume)
    with _cache(asked.options) as cache_dir:  # every probe has a page, and plotting is slow to make
        asked = replace(asked, options=replace(asked.options, cache_dir=cache_dir))
        return _searched(asked, question, directory, console, probes)


@contextlib.contextmanager
def _cache(options: RunOptions) -> Iterator[Path]:
    if options.cache_dir is not None:
        yield options.cache_dir
        return
    with tempfile.TemporaryDirectory(prefix="slobench-") as directory:
        yield Path(directory)


def _searched(
    asked: CapacitySpec,
    question: Question,
    directory: Path,
    console: Console,
    probes: Sequence[Probe],
) -> Capacity:
    searching = _Search(asked, question, directory, console, probes)
    try:
        is_interrupted = not searching.run()
    except KeyboardInterrupt:
        is_interrupted = True
    except (TargetError, RunInvalid):
        if searching.probes:  # what they say stays, and so do the figures
            _conclude_broken(asked, question, directory, searching.probes, console)
        raise
    answer = conclude(question, searching.probes, asked.unit, is_interrupted)
    if is_interrupted:
        console.print(
            f"interrupted after {len(searching.probes)} probes; the same command with "
            f"--out {directory} --resume goes on",
            soft_wrap=True,
            markup=False,
        )
    write(asked, question, directory, searching.probes, answer)
    return answer


def _conclude_broken(
    asked: CapacitySpec,
    question: Question,
    directory: Path,
    probes: Sequence[Probe],
    console: Console,
) -> None:
    """The files of a search whose target or instrument gave up, and where it stood."""
    answer = conclude(question, probes, asked.unit)
    write(asked, question, directory, probes, answer)
    n = len(probes)
    console.print(
        f"ended after {n} {'probe' if n == 1 else 'probes'} ({answer.sentence()}), the last one "
        f"maybe spoilt by what follows; the same command with --out {directory} --resume goes on",
        soft_wrap=True,
        markup=False,
    )


class _Search:
    """Probe after probe against one target."""

    def __init__(
        self,
        asked: CapacitySpec,
        question: Question,
        directory: Path,
        console: Console,
        probes: Sequence[Probe],
    ) -> None:
        self._asked, self._question, self._directory = asked, question, directory
        self._console, self._quiet = console, Console(quiet=True)
        self.probes = list(probes)
        self._client_limit = math.inf

    def run(self) -> bool:
        """True when there is nothing more to ask or no time left; False when interrupted."""
        self._keep()  # so that the page of the first probe, too, knows what it belongs to
        with CellServers(self._directory / "servers", self._quiet) as servers:
            while (ask := self._next()) is not None:
                self._say_ask(ask)
                probe = self._probe(ask, servers)
                if probe is None:
                    return False
                self.probes.append(probe)
                self._keep()
                self._say_probe(probe)
                self._check_still_there()
                if probe.grade == "untrusted" and self._tries_at(probe.level) >= _TRIES:
                    self._client_limit = min(self._client_limit, probe.level)
        return True

    def _next(self) -> NextProbe | None:
        ask = next_probe(self._question, self.probes)
        if ask is None or ask.level >= self._client_limit * (1 - 1e-9):
            return None
        left_s = self._asked.budget_s - math.fsum(probe.spent_s for probe in self.probes)
        fitting = fit_into(self._question, self.probes, ask, left_s)
        if fitting is None and not self.probes and not self._question.is_fixed:
            raise UsageError(
                f"--budget {self._asked.budget_s:g}s: is too short for a probe at "
                f"{ask.level:.4g} {self._asked.unit}; allow more, or begin "
                "higher with --between"
            )
        return fitting

    def _check_still_there(self) -> None:
        """One broken probe is made again; after a second one there is nothing to measure."""
        last = self.probes[-2:]
        if len(last) == 2 and all(probe.grade == "broken" for probe in last):
            raise TargetError(
                f"{self._asked.target}: could not be reached in two probes, one after the other "
                f"({last[-1].why}); see whether it still runs, and why it ended"
            )

    def _tries_at(self, level: float) -> int:
        return sum(p.grade == "untrusted" and p.level == level for p in self.probes)

    def _probe(self, ask: NextProbe, servers: CellServers) -> Probe | None:
        asked, number = self._asked, len(self.probes) + 1
        name = f"{number:02d}"
        run_dir = self._directory / "probes" / name
        if run_dir.exists():  # an interrupt left it
            shutil.rmtree(run_dir)
        scenario = with_window(
            scaled(asked.scenario, ask.level, asked.over),
            ask.warmup_s,
            ask.measure_s,
            seed_of(asked.scenario, number),
        )
        early = None
        if not self._question.is_fixed:
            early = EarlyStop(scenario, self._question.target, ask.effect)
        options = replace(
            asked.options, out_dir=run_dir, name=f"{asked.scenario.name}-{name}", early=early
        )
        begin_s = time.monotonic()
        finished = self._execute(Cell("probes", scenario, asked.target, options), servers)
        if finished.was_interrupted:
            return None
        spent_s = time.monotonic() - begin_s
        if (engine := finished.run.manifest.engine) is not None:
            spent_s = engine.simulated_s
        grade: Grade = "measured" if early is None else early.grade
        return probe_of(finished, ask, grade, spent_s, self._question.target, name)

    def _execute(self, cell: Cell, servers: CellServers) -> FinishedRun:
        if cell.target == SIMULATED:  # a new engine every time, idle and with nothing cached
            return execute(cell.scenario, cell.target, cell.options, self._quiet)
        begin_s = time.monotonic()
        up = servers.open(cell)
        if not up.is_fresh:
            drain_s = cell.scenario.phases.drain
            finish(quiesce(up.server.endpoint, drain_s=drain_s, resets_cache=True))
        finished = execute(cell.scenario, cell.target, cell.options, self._quiet, server=up.server)
        served = ServedRun.of(finished.run, finished.directory)
        up.served(served._replace(begin_s=begin_s, end_s=time.monotonic()))
        return finished

    def _keep(self) -> None:
        store(self._asked, self._question, self._directory, self.probes, None)

    def _say_ask(self, ask: NextProbe) -> None:
        load = f"{ask.level:.4g} {self._asked.unit}"
        self._console.print(
            f"probe {len(self.probes) + 1}: {load}, {ask.warmup_s:.3g} s warm-up + "
            f"{ask.measure_s:.3g} s",
            markup=False,
            soft_wrap=True,
        )

    def _say_probe(self, probe: Probe) -> None:
        found = f"  {100 * probe.attainment:.1f} % of {probe.n_due} kept"
        if probe.grade != "measured":
            found += f" ({probe.grade}: {probe.why})"
        state = judge(self._question, self.probes)
        line = f"{found}; {_so_far(state, self._asked.unit)}"
        self._console.print(line, markup=False, soft_wrap=True)


def seed_of(scenario: Scenario, number: int) -> int:
    """The seed of a probe: its own, so that chance does not repeat, and the same in every repeat of
    the search."""
    digest = hashlib.sha256(f"{scenario.seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _so_far(state: SearchState, unit: Unit) -> str:
    if state.value is None or state.low is None or state.high is None:
        return "capacity not bracketed yet"
    ends = f"[{state.low:.4g}, {state.high:.4g}]"
    return f"capacity {state.value:.4g} {ends} {unit}"
