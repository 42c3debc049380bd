"""The capacity of a target under a scenario, wired together: probe after probe, each a run in its
own directory, until the answer is narrow enough, the time is up or somebody interrupts.

    <out>/capacity.json  capacity.csv  report.html   the answer, and the probes that it rests on
    <out>/probes/NN/                                 the run directory of each probe
    <out>/servers/                                   the logs of a server of ours
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from loadgen.cell import Cell, differing
from loadgen.cell_server import CellServer
from loadgen.drive.engine_logs import ServedRun
from loadgen.early import EarlyEnd
from loadgen.errors import RunInvalid, TargetError, UsageError
from loadgen.manifest import version
from loadgen.measure.attainment import due_rows, measured_window, meets_own, promises_by_class
from loadgen.measure.capacity.answer import Capacity, Unit, conclude, probe_json, read_probe
from loadgen.measure.capacity.budget import within
from loadgen.measure.capacity.probe import N_BLOCKS, Grade, Probe, in_blocks, overloaded
from loadgen.measure.capacity.search import Ask, Question, State, judge, next_probe
from loadgen.measure.per_request import Mask, per_request
from loadgen.measure.slo import parse_slo
from loadgen.measure.verdict import IMPLIED_ATTAINMENT
from loadgen.records import Run, Status
from loadgen.run import SIMULATED, Finished, execute
from loadgen.run_directory import free
from loadgen.run_options import RunOptions
from loadgen.target import finish
from loadgen.workload.scaling import Over, amount, probed, scaled
from loadgen.workload.scenario import Scenario
from targets.settle import settle

SCHEMA = 1
_SHORTEST = 0.25  # of the scenario's window, where its rate is steady
_TRIES = 2  # at a load at which the client could not be trusted


@dataclass(frozen=True)
class Asked:
    """What to search. `attainment` None: what the scenario promises, else 99 %. `between` bounds
    the load; `budget_s` bounds the time of all probes, virtual time for `sim`."""

    scenario: Scenario
    target: str
    options: RunOptions = field(default_factory=RunOptions)
    over: Over = "rate"
    attainment: float | None = None
    between: tuple[float, float] | None = None
    budget_s: float = math.inf
    confidence: float = 0.95
    precision: float = 0.05

    @property
    def unit(self) -> Unit:
        return "req/s" if self.over == "rate" else "users"


def capacity(
    scenario: Scenario | Path | str,
    target: str,
    out_dir: Path | str | None = None,
    *,
    attainment: float | None = None,
    over: Over = "rate",
    between: tuple[float, float] | None = None,
    budget_s: float = math.inf,
    confidence: float = 0.95,
    precision: float = 0.05,
    resume: bool = False,
    **options: Any,
) -> Capacity:
    """The highest load at which a target keeps a scenario's promises, with an interval.

    Loads are requests per second, or users with `over="concurrency"`; further options are the
    fields of RunOptions (`engine`, `model`, `n_workers`, …). Probes are kept in `out_dir`, by
    default `runs/capacity-<scenario>-<time>`. Raises UsageError for what cannot be searched.
    """
    from loadgen.workload.scenario import load_scenario

    chosen = scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
    options.setdefault("environ", dict(os.environ))
    asked = Asked(
        chosen, target, RunOptions(**options), over, attainment, between, budget_s, confidence,
        precision,
    )  # fmt: skip
    directory = Path(out_dir) if out_dir else None
    return search(asked, directory, Console(quiet=True), resume=resume)


def search(asked: Asked, out_dir: Path | None, console: Console, *, resume: bool) -> Capacity:
    """`capacity`, telling `console` how it goes. Ctrl-C ends it with the best answer so far.

    Raises UsageError before anything runs, and for a directory that holds another search.
    """
    question = question_of(asked)
    directory = out_dir or _default(asked.scenario)
    probes = _kept(asked, question, directory, resume)
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
    asked: Asked,
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
    _write(asked, question, directory, searching.probes, answer)
    return answer


def _conclude_broken(
    asked: Asked, question: Question, directory: Path, probes: Sequence[Probe], console: Console
) -> None:
    """The files of a search whose target or instrument gave up, and where it stood."""
    answer = conclude(question, probes, asked.unit)
    _write(asked, question, directory, probes, answer)
    n = len(probes)
    console.print(
        f"ended after {n} {'probe' if n == 1 else 'probes'} ({answer.sentence()}), the last one "
        f"maybe spoilt by what follows; the same command with --out {directory} --resume goes on",
        soft_wrap=True,
        markup=False,
    )


def question_of(asked: Asked) -> Question:
    """What is searched, in numbers. Raises UsageError for a scenario without anything to keep, one
    that cannot be scaled, or bounds that are none."""
    scenario = asked.scenario
    has_promise = any(
        slo.scope == "request"
        for texts in (scenario.slo_texts(), *(c.slo_texts() for c in scenario.classes.values()))
        for slo in map(parse_slo, texts)
    ) or bool(scenario.promised())
    if not has_promise:
        raise UsageError(
            f"{scenario.name}: capacity counts the requests that keep their promises, and none is "
            "asked of each request; add e.g. --slo 'ttft<=500ms' ('p99(ttft)<=500ms' is the same "
            "as that with --attainment 99%)"
        )
    target = _target(asked)
    if not 0 < target < 1:
        raise UsageError(f"--attainment {target:g}: expected more than 0 % and less than 100 %")
    found = amount(scenario, asked.over)
    low, high = asked.between or (None, None)
    start = found.level if low is None or high is None else math.sqrt(low * high)
    share = _SHORTEST if found.is_steady else 1.0
    least_s = scenario.phases.warmup + share * scenario.phases.measure
    if asked.budget_s < least_s:
        raise UsageError(
            f"--budget {asked.budget_s:g}s: the shortest probe of {scenario.name} takes "
            f"{least_s:g} s ({scenario.phases.warmup:g} s of warm-up); allow several times that, "
            "or shorten phases.warmup and phases.measure"
        )
    return Question(
        target=target,
        start=max(1.0, round(start)) if asked.over == "concurrency" else start,
        precision=asked.precision,
        confidence=asked.confidence,
        low=low,
        high=high,
        warmup_s=scenario.phases.warmup,
        measure_s=scenario.phases.measure * share,
        is_integer=asked.over == "concurrency",
        is_fixed=not found.is_steady,
    )


def _target(asked: Asked) -> float:
    """As asked, else the strictest share that the scenario promises, else the implied one."""
    if asked.attainment is not None:
        return asked.attainment
    scenario = asked.scenario
    texts = [*scenario.slo_texts(), *(t for c in scenario.classes.values() for t in c.slo_texts())]
    stated = [slo.limit for slo in map(parse_slo, texts) if slo.metric == "attainment"]
    return max(stated, default=parse_slo(IMPLIED_ATTAINMENT).limit)


class _Search:
    """Probe after probe against one target."""

    def __init__(
        self,
        asked: Asked,
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
        with CellServer(self._directory / "servers", self._quiet) as servers:
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

    def _next(self) -> Ask | None:
        ask = next_probe(self._question, self.probes)
        if ask is None or ask.level >= self._client_limit * (1 - 1e-9):
            return None
        left_s = self._asked.budget_s - math.fsum(probe.spent_s for probe in self.probes)
        fitting = within(self._question, self.probes, ask, left_s)
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

    def _probe(self, ask: Ask, servers: CellServer) -> Probe | None:
        asked, number = self._asked, len(self.probes) + 1
        name = f"{number:02d}"
        run_dir = self._directory / "probes" / name
        if run_dir.exists():  # an interrupt left it
            shutil.rmtree(run_dir)
        scenario = probed(
            scaled(asked.scenario, ask.level, asked.over),
            ask.warmup_s,
            ask.measure_s,
            seed_of(asked.scenario, number),
        )
        early = None
        if not self._question.is_fixed:
            early = EarlyEnd(scenario, self._question.target, ask.effect)
        options = replace(
            asked.options, out_dir=run_dir, name=f"{asked.scenario.name}-{name}", early=early
        )
        begin_s = time.monotonic()
        finished = self._execute(Cell("probes", scenario, asked.target, options), servers)
        if finished.was_interrupted:
            return None
        spent_s = time.monotonic() - begin_s
        if asked.target == SIMULATED:
            spent_s = float(finished.run.manifest["engine"]["simulated_s"])
        grade: Grade = "measured" if early is None else early.grade
        return probe_of(finished, ask, grade, spent_s, self._question.target, name)

    def _execute(self, cell: Cell, servers: CellServer) -> Finished:
        if cell.target == SIMULATED:  # a new engine every time, idle and with nothing cached
            return execute(cell.scenario, cell.target, cell.options, self._quiet)
        begin_s = time.monotonic()
        server = servers.open(cell)
        if not servers.is_fresh:
            drain_s = cell.scenario.phases.drain
            finish(settle(server.endpoint, drain_s=drain_s, resets_cache=True))
        finished = execute(cell.scenario, cell.target, cell.options, self._quiet, server)
        said, directory = finished.run.manifest, finished.directory
        servers.served(
            ServedRun(directory, said["run"], said["epoch_monotonic_s"], begin_s, time.monotonic())
        )
        return finished

    def _keep(self) -> None:
        _store(self._asked, self._question, self._directory, self.probes, None)

    def _say_ask(self, ask: Ask) -> None:
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


def probe_of(
    finished: Finished, ask: Ask, grade: Grade, spent_s: float, target: float, name: str
) -> Probe:
    """What a finished run says as a probe. A run that was ended by its own `stop_when` was
    overrun; one of which the instrument is not trusted says nothing of the server, nor does one
    during which there was no server."""
    run, summary = finished.run, finished.summary
    window, columns, due = measured_window(run), per_request(run), due_rows(run)
    shared = [parse_slo(text) for text in run.manifest.get("slo") or ()]
    met = due & meets_own(run, columns, shared, promises_by_class(run))
    released_s = run.request_rows["released_s"]
    at_s = np.where(np.isfinite(released_s), released_s, run.schedule_rows["scheduled_s"])
    counted = due & np.isfinite(at_s)
    n_due, n_met = in_blocks(at_s[counted], met[counted], window.start_s, window.end_s)
    why = str(run.manifest.get("end_reason") or "")
    is_stopped = run.manifest["ended"] == "stopped"
    if is_stopped and grade == "measured":
        grade = "saturated"
    if gone := why_gone(run, due):
        grade, why = "broken", gone
    elif not summary.validity.trusted:
        failed = [c for c in summary.validity.checks if c.is_gate and c.ok is False]
        grade, why = "untrusted", "; ".join(f"{c.name}: {c.detail}" for c in failed)
    elif is_stopped and not sum(n_due):  # ended in its warm-up
        n_due, n_met = (LEAST_SEEN,) * N_BLOCKS, (0,) * N_BLOCKS
    probe = Probe(
        level=ask.level,
        due=n_due,
        met=n_met,
        warmup_s=ask.warmup_s,
        measured_s=max(window.length_s, 1e-3),
        spent_s=spent_s,
        grade=grade,
        name=name,
        why=why,
    )
    grows = any(check.name == "load" and check.ok is False for check in summary.validity.checks)
    if grade in ("measured", "saturated") and grows and probe.n_due:
        return replace(overloaded(probe, target), why=why or "its queue grew to the end")
    return probe


_STRAY = 0.01  # of the due requests: so many may find no connection, as any other miss


def why_gone(run: Run, due: Mask) -> str:
    """That a server ended, or could not be reached, during the run; "" where it was there.

    No connection at all (refused, no route, no name, a proxy that lets nobody through) is not how a
    server is slow: one that cannot keep up answers late, or with an error. More than 1 % of them,
    or one at the very end, and it was away. What the client had no connection left for says
    nothing of a server: the gate "client limits" sees to that.
    """
    if run.manifest.get("server_ended_s") is not None:
        return str(run.manifest.get("end_reason") or "the server ended")
    rows = run.request_rows[due]
    tried = rows[np.isfinite(rows["sent_s"])]
    is_ours = np.isin(tried["error_id"], run.names.client_limits)
    is_away = (tried["status"] == Status.connect_error) & ~is_ours
    refused = tried[is_away]
    if not len(refused):
        return ""
    is_last = bool(refused["sent_s"].max() >= tried["sent_s"].max())
    if len(refused) <= _STRAY * len(rows) and not is_last:
        return ""
    first = refused[np.argmin(refused["sent_s"])]
    return (
        f"{len(refused)} of {len(rows)} requests got no connection, the first "
        f"{first['sent_s']:.3g} s into the run: {run.names.errors[first['error_id']]}"
    )


LEAST_SEEN = 4
"""Misses per block that a probe which ended in its warm-up stands for."""


def seed_of(scenario: Scenario, number: int) -> int:
    """The seed of a probe: its own, so that chance does not repeat, and the same in every repeat of
    the search."""
    digest = hashlib.sha256(f"{scenario.seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _so_far(state: State, unit: Unit) -> str:
    if state.value is None or state.low is None or state.high is None:
        return "capacity not bracketed yet"
    ends = f"[{state.low:.4g}, {state.high:.4g}]"
    return f"capacity {state.value:.4g} {ends} {unit}"


def _default(scenario: Scenario) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return free(Path("runs") / f"capacity-{scenario.name}-{stamp}")


def _definition(asked: Asked, question: Question) -> dict[str, Any]:
    """What must be the same for a search to go on; time and precision may change."""
    return {
        "scenario": asked.scenario.resolved(),
        "target": asked.target,
        "engine": asked.options.engine,
        "model": asked.options.model,
        "over": asked.over,
        "attainment": question.target,
        "between": None if asked.between is None else list(asked.between),
    }


def _kept(asked: Asked, question: Question, directory: Path, resume: bool) -> list[Probe]:
    """The probes of a search that is to go on; none for a new one. Raises UsageError."""
    path = directory / "capacity.json"
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--out {directory}: is no directory")
    if not any(path.is_file() for path in directory.rglob("*")):
        if resume and not (directory / "probes").is_dir():
            raise UsageError(f"--resume: {directory} holds no search; leave --resume out")
        return []
    if not path.is_file():
        if resume and (directory / "probes").is_dir():
            return []  # interrupted before the first probe was done
        raise UsageError(f"--out {directory}: exists already and holds no capacity search")
    try:
        content = json.loads(path.read_text())
        probes = [read_probe(one) for one in content["probes"]]
        before = content["definition"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: cannot be read ({error!r}); choose another --out") from None
    if not resume and not probes:
        return []  # its target was never there, or it was interrupted in its first probe
    if not resume:
        raise UsageError(
            f"--out {directory}: holds a search with {len(probes)} probes; add --resume to go on, "
            "or choose another --out"
        )
    wanted = json.loads(json.dumps(_definition(asked, question)))
    if lines := differing(wanted, before):
        raise UsageError(
            f"--resume {directory}: it was another search ({'; '.join(lines)}); ask for the same, "
            "or choose another --out"
        )
    return probes


def _store(
    asked: Asked,
    question: Question,
    directory: Path,
    probes: Sequence[Probe],
    answer: Capacity | None,
) -> None:
    """capacity.json, replaced at once, so that an interrupt never leaves half a file."""
    best = answer or conclude(question, probes, asked.unit)
    content = {
        "schema": SCHEMA,
        "kind": "capacity",
        "command": list(asked.options.command),
        "definition": _definition(asked, question),
        "answer": best.to_json(),
        "probes": [probe_json(probe) for probe in probes],
    }
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / "capacity.json.part"
    part.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(directory / "capacity.json")


def _write(
    asked: Asked,
    question: Question,
    directory: Path,
    probes: Sequence[Probe],
    answer: Capacity,
) -> None:
    """The answer, for programs, for spreadsheets and, as a page, for people."""
    from reports.capacity_page import render
    from reports.capacity_view import csv_text
    from reports.page import write_page
    from reports.redaction import redact

    _store(asked, question, directory, probes, answer)
    (directory / "capacity.csv").write_text(csv_text(answer), encoding="utf-8")
    about = {
        "scenario": asked.scenario.name,
        "target": redact(asked.target),
        "engine": redact(asked.options.engine),
        "command": shlex.join(redact(word) for word in asked.options.command),
        "slobench": version(),
        "host": platform.node(),
        "promises": ", ".join(_promises(asked.scenario)),
        "text": asked.scenario.to_yaml(),
    }
    page = render(answer, judge(question, probes).posterior, about, asked.options.cache_dir)
    write_page(directory / "report.html", page)


def _promises(scenario: Scenario) -> list[str]:
    found = [text for text in scenario.slo_texts() if parse_slo(text).scope == "request"]
    for name, own in scenario.classes.items():
        found += [f"{name}: {t}" for t in own.slo_texts() if parse_slo(t).scope == "request"]
    return found
