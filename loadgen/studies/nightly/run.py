"""A night: every cell measured in turns, compared with its baseline, and added to it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen.archive import checksums
from loadgen.archive.directory import make_directory
from loadgen.archive.directory_lock import held
from loadgen.errors import UsageError
from loadgen.live.watching import Watch
from loadgen.measure.summary import plain_json
from loadgen.run.run_options import RunOptions
from loadgen.studies.cells.cell import differing
from loadgen.studies.cells.order import run_cells
from loadgen.studies.cells.runner import Between
from loadgen.studies.compare.judgement import Options, exit_code
from loadgen.studies.nightly.baseline import Baseline
from loadgen.studies.nightly.matrix import NightCell, night_cells
from loadgen.studies.nightly.measuring import CellProgress, machine_speed_s
from loadgen.studies.nightly.page import render
from loadgen.studies.nightly.record import CellNight
from loadgen.studies.nightly.spec import is_nightly, load_nightly
from loadgen.studies.nightly.values import trend
from loadgen.studies.nightly.verdict import CellVerdict, History, judge_night, night_word
from loadgen.studies.nightly.view import junit, markdown
from loadgen.whole_file import read_result

_BEGINNING = "night.json"
_MUST_AGREE = ("target.model", "target.api", "control.target.model", "control.target.api")
"""Values known only from the server's answers; a night in which they differ is not compared."""


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
    verdict: str
    cells: tuple[CellVerdict, ...]
    facts: dict[str, Any]

    @property
    def exit_code(self) -> int:
        return int(self.facts["exit_code"])


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
        self, console: Console, now: datetime, directory: Path, watch: Watch | None = None
    ) -> FinishedNight:
        """Measure a night, judge it, add it to the baseline and write its files; continues an
        interrupted night in `directory`.

        Raises UsageError before the first run, for a damaged baseline or a `directory` with a
        finished night; KeyboardInterrupt when interrupted: the baseline is unchanged, finished runs
        stay.
        """
        began = _beginning(directory, now)
        histories = {
            cell.name: self.store.history(cell, self.file.window, began["night"])
            for cell in self.cells
        }
        self.store.check_writable()
        for cell in self.cells:
            self._print_new_baseline(cell, histories[cell.name], console)
        make_directory(directory)
        with held(directory, f"--out {directory}", f"the night of {self.path}"):
            if _beginning(directory, now) != began:  # by another process since it was read
                raise UsageError(f"--out {directory}: another night began there; choose another")
            _write_beginning(directory, began)
            nights = self._measure(directory, began, histories, console, watch)
            night = self._judged(directory, began, histories, nights)
            _write_night(night, self.options.run.cache_dir)
            return night

    def _judged(
        self,
        directory: Path,
        began: Mapping[str, str],
        histories: Mapping[str, History],
        nights: Sequence[CellNight],
    ) -> FinishedNight:
        """Judges a night and adds it to the baseline."""
        judged = [
            replace(found, not_excluded=cell.not_excluded)
            for cell, found in zip(
                self.cells, judge_night(nights, histories, self.file.options()), strict=True
            )
        ]
        verdict = night_word(judged)
        with self.store.writing(f"the night {began['night']} of {self.path}"):
            for cell, night, found in zip(self.cells, nights, judged, strict=True):
                of_measures = {row.measure: row.verdict for row in found.measures if row.is_gated}
                judged_night = replace(night, verdict=found.verdict, verdicts=of_measures)
                self.store.add(cell, judged_night)
                self.store.prune(cell, self.file.keep, self.file.window)
        facts = self._facts(directory, began, nights, judged)
        return FinishedNight(directory, verdict, tuple(judged), facts)

    def _measure(
        self,
        directory: Path,
        began: Mapping[str, str],
        histories: Mapping[str, History],
        console: Console,
        watch: Watch | None,
    ) -> list[CellNight]:
        measured: dict[str, CellProgress] = defaultdict(CellProgress)
        with_gauge = {cell.name for cell in self.cells if cell.needs_machine_speed}
        for result in run_cells(
            [cell.cell.watched(watch) for cell in self.cells],
            directory,
            repeats=self.file.repeats,
            console=console,
            between=Between(warm_up_s=self.file.warm_up),
            controls={
                cell.name: cell.control.watched(watch) for cell in self.cells if cell.control
            },
            gauge=lambda cell: machine_speed_s() if cell.name in with_gauge else None,
        ):
            measured[result.cell.name].add(result, directory, self.file.metrics)
        nights = []
        for cell in self.cells:
            own = measured[cell.name]
            of_control = measured[cell.control.name] if cell.control else None
            night = CellNight(
                cell=cell.name,
                night=began["night"],
                started_utc=began["started_utc"],
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
                style="yellow", markup=False, soft_wrap=True,
            )  # fmt: skip

    def _facts(
        self,
        directory: Path,
        began: Mapping[str, str],
        nights: Sequence[CellNight],
        judged: Sequence[CellVerdict],
    ) -> dict[str, Any]:
        verdict, options = night_word(judged), self.file.options()
        code = 0 if verdict == "baseline" else exit_code(verdict, self.file.fail_on)
        cells = [
            _cell_facts(cell, night, found, self.store, options)
            for cell, night, found in zip(self.cells, nights, judged, strict=True)
        ]
        return {
            "schema": 1,
            "kind": "nightly",
            "night": began["night"],
            "started_utc": began["started_utc"],
            "verdict": verdict,
            "exit_code": code,
            "fail_on": self.file.fail_on,
            "confidence": self.file.confidence,
            "window": self.file.window,
            "repeats": self.file.repeats,
            "file": str(self.path),
            "baseline": str(self.store.root),
            "directory": str(directory),
            "link": self.options.link,
            "command": list(self.options.run.command),
            "cells": cells,
        }


def _beginning(directory: Path, now: datetime) -> dict[str, str]:
    """Name and start of the night: those of the interrupted night in `directory`, or new ones."""
    path = directory / _BEGINNING
    if (directory / "nightly.json").exists():
        raise UsageError(f"--out {directory}: holds a finished night; choose another directory")
    if not path.exists():
        utc = now.astimezone(UTC)
        return {"night": f"{utc:%Y%m%dT%H%M%S.%f}Z", "started_utc": utc.isoformat()}
    try:
        began = json.loads(read_result(path))
        return {key: str(began[key]) for key in ("night", "started_utc")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: is damaged ({error!r}); choose another --out") from None


def _write_beginning(directory: Path, began: Mapping[str, str]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _BEGINNING).write_text(json.dumps(began) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {directory}: cannot be created: {error.strerror}") from None


def _marked_if_other(night: CellNight, history: History) -> CellNight:
    """The night, marked as not comparable if its model or API is not that of the baseline."""
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


def _cell_facts(
    cell: NightCell, night: CellNight, found: CellVerdict, store: Baseline, options: Options
) -> dict[str, Any]:
    shown = [row.measure for row in found.measures if row.is_gated] or _first_measures(options)
    return {
        "cell": cell.name,
        "factors": dict(cell.cell.factors),
        "key": cell.key,
        "agrees": plain_json(dict(cell.agrees)),
        **plain_json(dataclasses.asdict(found)),
        "control": plain_json(cell.agrees.get("control")),
        "runs": [
            {
                "name": run.name,
                "directory": run.directory,
                "control_directory": run.control.directory if run.control else None,
                "reasons": list(run.why_left_out),
            }
            for run in night.runs
        ],
        "trends": {text: plain_json(trend(store.nights(cell), text)) for text in shown},
    }


def _first_measures(options: Options) -> list[str]:
    from loadgen.studies.compare.numbers import GATED

    return list(options.metrics or GATED)


def _write_night(night: FinishedNight, cache_dir: Path | None) -> None:
    """Write index.html, junit.xml, summary.md, as the mark of a finished night nightly.json, and
    the checksums of all files that are not in a run directory. `cache_dir` caches the plotting
    bundle."""
    result = (night.verdict, night.cells, night.facts)
    texts = {
        "index.html": render(*result, cache_dir),
        "junit.xml": junit(night.cells),
        "summary.md": markdown(*result),
        "nightly.json": json.dumps(night.facts, indent=1, allow_nan=False) + "\n",
    }
    for name, text in texts.items():
        (night.directory / name).write_text(text, encoding="utf-8")
    checksums.begin(night.directory, checksums.files_in(night.directory))


def nightly(
    file: Path | str,
    out_dir: Path | str,
    *,
    baseline: Path | str | None = None,
    engine: str = "",
    repeats: int | None = None,
    cache_dir: Path | str | None = None,
) -> FinishedNight:
    """Measure a nightly file into `out_dir`, compare it with its baseline and add it to that.

    `baseline` and `repeats` replace the file's; `engine`: settings of the bundled engine under
    test (`step_delay=10%`), which a control does not have; `cache_dir` caches the plotting bundle.
    The result has the `verdict`, the `cells` with their measures, and `facts`, the content of
    nightly.json. Raises UsageError before the first run and KeyboardInterrupt when interrupted;
    the same call then continues from there.
    """
    cache = None if cache_dir is None else Path(cache_dir)
    options = NightOptions(
        baseline=None if baseline is None else Path(baseline),
        engine=engine,
        repeats=repeats,
        run=RunOptions(environ=dict(os.environ), cache_dir=cache),
    )
    planned = Nightly(Path(file), options)
    return planned.run(Console(quiet=True), datetime.now().astimezone(), Path(out_dir))


def check_file(path: Path) -> str | None:
    """Checks a nightly file with its scenarios and targets; its content in words, None for another
    kind of file. Raises UsageError."""
    if not is_nightly(path):
        return None
    cells = Nightly(path, NightOptions(run=RunOptions(environ=dict(os.environ)))).cells
    controls = ", each with a control" if any(cell.control for cell in cells) else ""
    return f"{len(cells)} cells a night{controls}"
