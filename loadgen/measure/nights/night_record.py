"""What is kept of one night of one cell: a few numbers per run, enough to judge later nights by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.measure.comparison.compare import GATED, SHOWN
from loadgen.measure.comparison.measures import Measured, measure

KEPT = tuple(
    dict.fromkeys(
        [
            *GATED,
            *SHOWN,
            *(
                f"{aggregate}({metric})"
                for metric in ("ttft", "tpot", "itl", "max_itl", "e2e")
                for aggregate in ("mean", "p50", "p90", "p95", "p99")
            ),
        ]
    )
)
"""Measures kept of every run whatever decides today, so that others can decide tomorrow."""


@dataclass(frozen=True, slots=True)
class RunNumbers:
    """One run: its number per measure text (NaN: it has none). `reasons` say why it cannot be
    trusted; without any it can. `directory` is where the run itself was. `control` is the run that
    was made right beside it, if its cell has one; `pace_s` what its machine took for a fixed
    calculation before and after it, where that was asked."""

    name: str
    schedule_sha256: str
    n_due: int
    reasons: tuple[str, ...]
    values: Mapping[str, float]
    directory: str = ""
    control: RunNumbers | None = None
    pace_s: float | None = None

    @property
    def is_trusted(self) -> bool:
        return not self.why_left_out

    @property
    def why_left_out(self) -> tuple[str, ...]:
        """Its own reasons and those of its control: one of them alone says nothing."""
        of_control = self.control.reasons if self.control is not None else ()
        return (*self.reasons, *(f"Its control: {reason}" for reason in of_control))


@dataclass(frozen=True, slots=True)
class CellNight:
    """One night of one cell. `night` sorts by time; `factor` is what may differ between nights
    (version, commit, flags), flat; `promises` are the SLOs its attainment counts; `failures` say
    why repeats are missing; `link` leads to the CI job."""

    cell: str
    night: str
    started_utc: str
    factor: Mapping[str, object]
    promises: tuple[str, ...]
    is_closed_loop: bool
    runs: tuple[RunNumbers, ...]
    failures: tuple[str, ...] = ()
    verdict: str = ""
    link: str = ""

    @property
    def trusted(self) -> tuple[RunNumbers, ...]:
        return tuple(run for run in self.runs if run.is_trusted)


def numbers_of(one: Measured, asked: Sequence[str] = (), directory: str = "") -> RunNumbers:
    """The numbers of a run: those asked for and all of `KEPT`."""
    trusted = one.summary.validity.trusted
    return RunNumbers(
        name=one.name,
        schedule_sha256=one.schedule_sha256,
        n_due=one.n_due(),
        reasons=() if trusted else tuple(one.summary.reasons) or ("it cannot be trusted",),
        values={text: _kept(one.value(measure(text))) for text in dict.fromkeys([*asked, *KEPT])},
        directory=directory,
    )


def _kept(value: float) -> float:
    """Nine digits: tonight is rounded as the nights before were, or equal runs would differ."""
    return float(f"{value:.9g}")


def to_json(night: CellNight) -> dict[str, Any]:
    """As JSON; a number that is not there is null."""
    return {
        "cell": night.cell,
        "night": night.night,
        "started_utc": night.started_utc,
        "factor": dict(night.factor),
        "promises": list(night.promises),
        "is_closed_loop": night.is_closed_loop,
        "failures": list(night.failures),
        "verdict": night.verdict,
        "link": night.link,
        "runs": [_run_json(run) for run in night.runs],
    }


def _run_json(run: RunNumbers) -> dict[str, Any]:
    said: dict[str, Any] = {
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
        said["pace_s"] = run.pace_s
    return said if run.control is None else {**said, "control": _run_json(run.control)}


def from_json(said: Mapping[str, Any]) -> CellNight:
    """What `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
    runs = tuple(map(_run_of, said["runs"]))
    return CellNight(
        cell=str(said["cell"]),
        night=str(said["night"]),
        started_utc=str(said["started_utc"]),
        factor=dict(said["factor"]),
        promises=tuple(map(str, said["promises"])),
        is_closed_loop=bool(said["is_closed_loop"]),
        runs=runs,
        failures=tuple(map(str, said["failures"])),
        verdict=str(said["verdict"]),
        link=str(said["link"]),
    )


def _run_of(said: Mapping[str, Any]) -> RunNumbers:
    return RunNumbers(
        name=str(said["name"]),
        schedule_sha256=str(said["schedule_sha256"]),
        n_due=int(said["n_due"]),
        reasons=tuple(map(str, said["reasons"])),
        values={
            measure(text).text: math.nan if value is None else float(value)
            for text, value in said["values"].items()
        },
        directory=str(said["directory"]),
        control=_run_of(said["control"]) if "control" in said else None,
        pace_s=float(said["pace_s"]) if "pace_s" in said else None,
    )
