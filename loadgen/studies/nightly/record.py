"""The record of a cell in a single night: a few numbers per run, by which later nights are
judged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.measure.measures import Measure, Measured, measure
from loadgen.studies.compare.numbers import GATED, SHOWN, SHOWN_OF_AGENTS

RECORDED = tuple(
    dict.fromkeys(
        [
            *GATED,
            *SHOWN,
            *(
                f"{aggregate}({metric})"
                for metric in ("ttft", "ttfat", "tpot", "itl", "max_itl", "e2e")
                for aggregate in ("mean", "p50", "p90", "p95", "p99")
            ),
        ]
    )
)
"""Measures recorded of every run, whether or not they decide today, so that others can decide
later."""


@dataclass(frozen=True, slots=True)
class RunNumbers:
    """A run: its value per measure text (NaN: none). `reasons` explain why it cannot be compared;
    without reasons it can. `directory` is the run's own directory. `control` is the run made right
    next to it, if its cell has a control. `pace_s` is the time of a fixed calculation on its
    machine before and after the run, if it was measured. `planned_s` is the planned length of
    warm-up and measured window, if it was recorded. `n_trees` are the due trees of agents that met
    or missed their SLOs."""

    name: str
    schedule_sha256: str
    n_due: int
    reasons: tuple[str, ...]
    values: Mapping[str, float]
    directory: str = ""
    control: RunNumbers | None = None
    pace_s: float | None = None
    planned_s: float | None = None
    n_trees: int = 0

    def n_of(self, measure: Measure) -> int:
        """The number of due requests, or of trees."""
        return self.n_trees if measure.is_about_trees else self.n_due

    @property
    def is_trusted(self) -> bool:
        return not self.why_left_out

    @property
    def has_reasoning(self) -> bool:
        """Whether TTFAT was recorded and differs from TTFT."""
        pairs = ((f"{a}(ttfat)", f"{a}(ttft)") for a in ("p50", "p99"))
        return any(_differ(self.values.get(ttfat), self.values.get(ttft)) for ttfat, ttft in pairs)

    @property
    def why_left_out(self) -> tuple[str, ...]:
        """Its own reasons and those of its control, since neither can be used without the other."""
        of_control = self.control.reasons if self.control is not None else ()
        return (*self.reasons, *(f"Its control: {reason}" for reason in of_control))


@dataclass(frozen=True, slots=True)
class CellNight:
    """A night of a cell. `night` sorts by time; `factor` is the configuration that may differ
    between nights (version, commit, flags), flat; `slos` are its SLOs; `failures` explain
    missing repeats; `verdicts` by measure text are those of its deciding measures; `link` leads to
    the CI job."""

    cell: str
    night: str
    started_utc: str
    factor: Mapping[str, object]
    slos: tuple[str, ...]
    is_closed_loop: bool
    runs: tuple[RunNumbers, ...]
    failures: tuple[str, ...] = ()
    verdict: str = ""
    link: str = ""
    verdicts: Mapping[str, str] = field(default_factory=dict)

    @property
    def trusted(self) -> tuple[RunNumbers, ...]:
        return tuple(run for run in self.runs if run.is_trusted)


def numbers_of(run: Measured, measures: Sequence[str] = (), directory: str = "") -> RunNumbers:
    """The values of a run: the requested measures, all of `RECORDED`, and those of its agents."""
    of_agents = () if run.of_trees is None else SHOWN_OF_AGENTS
    return RunNumbers(
        name=run.name,
        schedule_sha256=run.schedule_sha256,
        n_due=run.n_due(),
        reasons=run.summary.validity.why_not_comparable,
        values={
            text: _rounded(run.value(measure(text)))
            for text in dict.fromkeys([*measures, *RECORDED, *of_agents])
        },
        directory=directory,
        planned_s=run.run.manifest.window.warmup_s + run.run.manifest.window.measure_s,
        n_trees=0 if run.of_trees is None else len(run.of_trees.outcomes.hits),
    )


def _differ(value: float | None, other: float | None) -> bool:
    """Whether both were recorded, and differ; NaN equals NaN."""
    if value is None or other is None:
        return False
    return value != other and not (math.isnan(value) and math.isnan(other))


def _rounded(value: float) -> float:
    """Nine significant digits, as earlier nights were stored; otherwise equal runs would differ."""
    return float(f"{value:.9g}")


def to_json(night: CellNight) -> dict[str, Any]:
    """As JSON; a missing number is null."""
    return {
        "cell": night.cell,
        "night": night.night,
        "started_utc": night.started_utc,
        "factor": dict(night.factor),
        "slos": list(night.slos),
        "is_closed_loop": night.is_closed_loop,
        "failures": list(night.failures),
        "verdict": night.verdict,
        "verdicts": dict(night.verdicts),
        "link": night.link,
        "runs": [_run_json(run) for run in night.runs],
    }


def _run_json(run: RunNumbers) -> dict[str, Any]:
    content: dict[str, Any] = {
        "name": run.name,
        "schedule_sha256": run.schedule_sha256,
        "n_due": run.n_due,
        "reasons": list(run.reasons),
        "directory": run.directory,
        "values": {
            text: value if math.isfinite(value) else None for text, value in run.values.items()
        },
    }
    if run.pace_s is not None:
        content["pace_s"] = run.pace_s
    if run.planned_s is not None:
        content["planned_s"] = run.planned_s
    if run.n_trees:
        content["n_trees"] = run.n_trees
    return content if run.control is None else {**content, "control": _run_json(run.control)}


def from_json(content: Mapping[str, Any]) -> CellNight:
    """The record that `to_json` wrote. Raises KeyError, TypeError or ValueError for other
    content."""
    runs = tuple(map(_run_of, content["runs"]))
    return CellNight(
        cell=str(content["cell"]),
        night=str(content["night"]),
        started_utc=str(content["started_utc"]),
        factor=dict(content["factor"]),
        slos=tuple(map(str, content["slos"])),
        is_closed_loop=bool(content["is_closed_loop"]),
        runs=runs,
        failures=tuple(map(str, content["failures"])),
        verdict=str(content["verdict"]),
        link=str(content["link"]),
        verdicts={str(k): str(v) for k, v in content["verdicts"].items()},
    )


def _run_of(content: Mapping[str, Any]) -> RunNumbers:
    return RunNumbers(
        name=str(content["name"]),
        schedule_sha256=str(content["schedule_sha256"]),
        n_due=int(content["n_due"]),
        reasons=tuple(map(str, content["reasons"])),
        values={
            measure(text).text: math.nan if value is None else float(value)
            for text, value in content["values"].items()
        },
        directory=str(content["directory"]),
        control=_run_of(content["control"]) if "control" in content else None,
        pace_s=float(content["pace_s"]) if "pace_s" in content else None,
        planned_s=float(content["planned_s"]) if "planned_s" in content else None,
        n_trees=int(content.get("n_trees", 0)),
    )
