"""A night: every cell measured in turns, compared with its baseline, and added to it."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs
from rich.console import Console

from loadgen.errors import TargetError
from loadgen.live.watching import Watch
from loadgen.measure.summary import plain_json
from loadgen.run.run_options import RunOptions
from loadgen.studies.cells.cell import differing
from loadgen.studies.cells.order import run_cells
from loadgen.studies.cells.runner import Between, CellFailure, CellRun
from loadgen.studies.compare.judgement import Options, exit_code
from loadgen.studies.nightly.baseline import Baseline
from loadgen.studies.nightly.files import opened, write
from loadgen.studies.nightly.matrix import NightCell, night_cells
from loadgen.studies.nightly.measuring import CellProgress, machine_speed_s
from loadgen.studies.nightly.record import CellNight
from loadgen.studies.nightly.result import CellResult, NightResult, NightRun
from loadgen.studies.nightly.spec import is_nightly, load_nightly
from loadgen.studies.nightly.values import trend
from loadgen.studies.nightly.verdict import (
    CellVerdict,
    History,
    NightWord,
    judge_night,
    night_word,
)

_MUST_AGREE = (
    "target.model",
    "target.api",
    "control.target.model",
    "control.target.api",
    "prompt_sharing",
)
"""Values known only from the server's answers or from the plan; a night in which they differ is not
compared."""


@dataclass(frozen=True)
class NightOptions:
    """Options of a night besides its file. `engine`: settings of the bundled engine under test, on
    top of the file's; they do not change the baseline's key. `baseline`, `repeats` and `fail_on`
    replace the file's; `link`: URL of the CI job; `run`: options of every run."""

    baseline: Path | None = None
    engine: str = ""
    repeats: int | None = None
    fail_on: str = ""
    link: str = ""
    run: RunOptions = field(default_factory=RunOptions)


@dataclass(frozen=True)
class FinishedNight:
    """A finished night: `facts` are nightly.json."""

    directory: Path
    facts: NightResult

    @property
    def verdict(self) -> NightWord:
        return self.facts.verdict

    @property
    def cells(self) -> tuple[CellResult, ...]:
        return self.facts.cells

    @property
    def exit_code(self) -> int:
        return self.facts.exit_code


class _Beginning(NamedTuple):
    """The name of a night, which sorts by time, and the time at which it began."""

    night: str
    started_utc: str

    @classmethod
    def of(cls, began_utc: str) -> _Beginning:
        return cls(f"{datetime.fromisoformat(began_utc):%Y%m%dT%H%M%S.%f}Z", began_utc)


class Nightly:
    """A nightly file with its scenarios and targets, checked before the first run."""

    def __init__(self, path: Path, options: NightOptions) -> None:
        changed = {"repeats": options.repeats, "fail_on": options.fail_on}
        self.file = load_nightly(path).model_copy(
            update={key: value for key, value in changed.items() if value}
        )
        self.path, self.options = path, options
        self.store = Baseline(options.baseline or path.parent / self.file.baseline)
        self.cells = night_cells(self.file, path, options.run, options.engine)

    def accept(self, now: datetime) -> dict[str, list[str]]:
        """Accept the last better or worse nights of each cell as its new level; cell → nights."""
        now_utc = now.isoformat(timespec="seconds")
        with self.store.writing(f"nightly --accept of {self.path}"):
            return {cell.name: self.store.accept(cell, now_utc) for cell in self.cells}

    def run(
        self,
        console: Console,
        out: Path | None = None,
        watch: Watch | None = None,
        *,
        resume: bool = False,
    ) -> FinishedNight:
        """Measure a night, judge it, add it to the baseline and write its files to `out`, by
        default `runs/nightly-<time>`; `resume` continues an interrupted night there.

        Raises UsageError before the first run, also for a damaged baseline or a finished night;
        TargetError for a control that cannot be measured; KeyboardInterrupt when interrupted: the
        baseline is unchanged, finished runs stay.
        """
        options = self.options.run
        with opened(out, resume=resume, command=options.command) as place:
            began = _Beginning.of(place.marker.began_utc)
            histories = {
                cell.name: self.store.history(cell, self.file.window, began.night)
                for cell in self.cells
            }
            self.store.check_writable()
            for cell in self.cells:
                self._print_new_baseline(cell, histories[cell.name], console)
            try:
                nights = self._measure(place.directory, began, histories, console, watch)
                result = self._judged(place.directory, began, histories, nights)
            except KeyboardInterrupt:
                kept = "there is no verdict; the measured runs are kept"
                place.print_interrupted(console, kept)
                raise
            write(place, result, options.cache_dir)
            return FinishedNight(place.directory, result)

    def _judged(
        self,
        directory: Path,
        began: _Beginning,
        histories: Mapping[str, History],
        nights: Sequence[CellNight],
    ) -> NightResult:
        """Judges a night and adds it to the baseline."""
        judged = [
            structs.replace(found, not_excluded=cell.not_excluded)
            for cell, found in zip(
                self.cells, judge_night(nights, histories, self.file.options()), strict=True
            )
        ]
        with self.store.writing(f"the night {began.night} of {self.path}"):
            for cell, night, found in zip(self.cells, nights, judged, strict=True):
                of_measures = {row.measure: row.verdict for row in found.measures if row.is_gated}
                judged_night = replace(night, verdict=found.verdict, verdicts=of_measures)
                self.store.add(cell, judged_night)
                self.store.prune(cell, self.file.keep, self.file.window)
        return self._result(directory, began, nights, judged)

    def _measure(
        self,
        directory: Path,
        began: _Beginning,
        histories: Mapping[str, History],
        console: Console,
        watch: Watch | None,
    ) -> list[CellNight]:
        measured: dict[str, CellProgress] = defaultdict(CellProgress)
        with_gauge = {cell.name for cell in self.cells if cell.needs_machine_speed}
        controls = {cell.name: cell.control.watched(watch) for cell in self.cells if cell.control}
        running = run_cells(
            [cell.cell.watched(watch) for cell in self.cells],
            directory,
            repeats=self.file.repeats,
            console=console,
            between=Between(warm_up_s=self.file.warm_up),
            controls=controls,
            gauge=lambda cell: machine_speed_s() if cell.name in with_gauge else None,
        )
        names = {control.name for control in controls.values()}
        with closing(running):  # an error below stops the servers
            for result in running:
                progress = measured[result.cell.name]
                if result.cell.name in names and not progress.numbers:
                    _check_control(result)
                progress.add(result, directory, self.file.metrics)
        nights = []
        for cell in self.cells:
            own = measured[cell.name]
            of_control = measured[cell.control.name] if cell.control else None
            night = CellNight(
                cell=cell.name,
                night=began.night,
                started_utc=began.started_utc,
                factor={**own.factor(), **(of_control.factor_of_control() if of_control else {})},
                slos=tuple(json.dumps(plain_json(part)) for part in own.slos()),
                is_closed_loop=own.manifest is not None and own.manifest.has_closed_loop,
                runs=own.runs if of_control is None else own.paired_with(of_control),
                failures=own.failures,
                link=self.options.link,
            )
            nights.append(_marked_if_other(night, histories[cell.name]))
        return nights

    def _print_new_baseline(self, cell: NightCell, history: History, console: Console) -> None:
        if history.baseline:
            return
        for folder, agrees in self.store.relatives(cell).items():
            lines = "; ".join(differing(cell.agrees, agrees))
            console.print(
                f"{cell.name}: starts a new baseline; {folder} is not comparable: {lines}",
                style="yellow",
                markup=False,
                soft_wrap=True,
            )

    def _result(
        self,
        directory: Path,
        began: _Beginning,
        nights: Sequence[CellNight],
        judged: Sequence[CellVerdict],
    ) -> NightResult:
        verdict, options = night_word(judged), self.file.options()
        return NightResult(
            night=began.night,
            started_utc=began.started_utc,
            verdict=verdict,
            exit_code=0 if verdict == "baseline" else exit_code(verdict, self.file.fail_on),
            fail_on=self.file.fail_on,
            confidence=self.file.confidence,
            window=self.file.window,
            repeats=self.file.repeats,
            file=str(self.path),
            baseline=str(self.store.root),
            directory=str(directory),
            link=self.options.link,
            command=list(self.options.run.command),
            cells=tuple(
                _cell_result(cell, night, found, self.store, options)
                for cell, night, found in zip(self.cells, nights, judged, strict=True)
            ),
        )


def _check_control(first: CellRun | CellFailure) -> None:
    """Raises TargetError for a control whose first run could not be measured: without a control no
    run of its cell counts, so hours of measuring would end without a verdict."""
    if isinstance(first, CellFailure):
        raise TargetError(
            f"{first.cell.name}: {first.reason}: the night ends here, since every run of its cell "
            "is compared with this control; the baseline is unchanged"
        )


def _marked_if_other(night: CellNight, history: History) -> CellNight:
    """The night, marked as not comparable if its model, API or prompts are not those of the
    baseline."""
    if not history.baseline or not night.runs:
        return night
    before = history.baseline[-1].factor
    others = [
        f"{key}: {before.get(key)} against {night.factor.get(key)}"
        for key in _MUST_AGREE
        if key in night.factor and before.get(key) != night.factor[key]
    ]
    if not others:
        return night
    reason = f"not comparable with the baseline: {', '.join(others)}"
    return replace(night, runs=tuple(replace(run, reasons=(reason,)) for run in night.runs))


def _cell_result(
    cell: NightCell, night: CellNight, found: CellVerdict, store: Baseline, options: Options
) -> CellResult:
    shown = [row.measure for row in found.measures if row.is_gated] or _first_measures(options)
    agrees: dict[str, Any] = dict(cell.agrees)
    return CellResult(
        **structs.asdict(found),
        factors=dict(cell.cell.factors),
        key=cell.key,
        agrees=agrees,
        control=agrees.get("control"),
        runs=tuple(
            NightRun(
                name=run.name,
                directory=run.directory,
                control_directory=run.control.directory if run.control else None,
                reasons=run.why_left_out,
            )
            for run in night.runs
        ),
        trends={text: trend(store.nights(cell), text) for text in shown},
    )


def _first_measures(options: Options) -> list[str]:
    from loadgen.studies.compare.numbers import GATED

    return list(options.metrics or GATED)


def nightly(
    file: Path | str,
    out_dir: Path | str | None = None,
    *,
    baseline: Path | str | None = None,
    engine: str = "",
    repeats: int | None = None,
    cache_dir: Path | str | None = None,
    resume: bool = False,
) -> FinishedNight:
    """Measure a nightly file into `out_dir`, by default `runs/nightly-<time>`, compare it with its
    baseline and add it to that.

    `baseline` and `repeats` replace the file's; `engine`: settings of the bundled engine under
    test (`step_delay=10%`), which a control does not have; `cache_dir` caches the plotting bundle.
    The result has the `verdict`, the `cells` with their measures, and `facts`, the content of
    nightly.json. Raises UsageError before the first run and KeyboardInterrupt when interrupted;
    the same call with `resume` then continues in `out_dir`.
    """
    cache = None if cache_dir is None else Path(cache_dir)
    options = NightOptions(
        baseline=None if baseline is None else Path(baseline),
        engine=engine,
        repeats=repeats,
        run=RunOptions(environ=dict(os.environ), cache_dir=cache),
    )
    planned = Nightly(Path(file), options)
    return planned.run(Console(quiet=True), Path(out_dir) if out_dir else None, resume=resume)


def check_file(path: Path) -> str | None:
    """Checks a nightly file with its scenarios and targets; its content in words, None for another
    kind of file. Raises UsageError."""
    if not is_nightly(path):
        return None
    cells = Nightly(path, NightOptions(run=RunOptions(environ=dict(os.environ)))).cells
    controls = ", each with a control" if any(cell.control for cell in cells) else ""
    return f"{len(cells)} cells a night{controls}"
