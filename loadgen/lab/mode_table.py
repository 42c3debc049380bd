"""Cells side by side: each mode's numbers over the seeds, and how far it is from the first mode.

The same seed gives every mode the same requests at the same instants, so what two modes differ by
is computed seed by seed and its interval is that of paired samples: much narrower than the two
intervals beside each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from loadgen.lab.mode_cell import METRICS, PERCENTILES, Cell
from loadgen.measure.statistics.intervals import Estimate, mean_over, over_runs

QUANTITIES = (
    "goodput",
    "attainment",
    "output_tokens_per_s",
    *(f"{name.removesuffix('_s')}_{key}" for name in METRICS for key in PERCENTILES),
)
RATIOS = ("ttft_p99", "tpot_p50", "itl_p99", "goodput", "output_tokens_per_s")


def rows(cells: Sequence[Cell], confidence: float) -> list[dict[str, Any]]:
    """One row per mode, rate and class ("" is all traffic), in the order of the cells."""
    groups: dict[tuple[str, float | None], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell["mode"], cell["rate_per_s"]), []).append(cell)
    first = cells[0]["mode"] if cells else ""
    return [
        _row(mode, rate, name, same, groups.get((first, rate), []), confidence)
        for (mode, rate), same in groups.items()
        for name in ("", *same[0]["classes"])
    ]


def _row(
    mode: str,
    rate: float | None,
    name: str,
    cells: Sequence[Cell],
    baseline: Sequence[Cell],
    confidence: float,
) -> dict[str, Any]:
    return {
        "mode": mode,
        "rate_per_s": rate,
        "class": name,
        "n_seeds": len(cells),
        "n_due": sum(_part(cell, name)["n_due"] for cell in cells),
        "offered_rate_per_s": float(
            np.mean([_part(cell, name)["offered_rate_per_s"] for cell in cells])
        ),
        **{q: over_runs([_part(c, name)[q] for c in cells], confidence) for q in QUANTITIES},
        "difference": {
            q: difference(cells, baseline, name, q, confidence)
            for q in ("goodput", "attainment", "output_tokens_per_s", "ttft_p99", "itl_p99")
        },
        "ratio": {q: ratio(cells, baseline, name, q, confidence) for q in RATIOS},
        "waits_s": _waits(cells, name),
    }


def difference(
    cells: Sequence[Cell], baseline: Sequence[Cell], name: str, quantity: str, confidence: float
) -> Estimate:
    """The mean difference to the first mode, seed by seed, with its paired interval (Student's t).
    Seeds that only one of them has are left out."""
    known = {cell["seed"]: _part(cell, name)[quantity]["value"] for cell in baseline}
    pairs = [
        (_part(cell, name)[quantity]["value"], known[cell["seed"]])
        for cell in cells
        if cell["seed"] in known
    ]
    gaps = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
    return mean_over(gaps, confidence)


def ratio(
    cells: Sequence[Cell], baseline: Sequence[Cell], name: str, quantity: str, confidence: float
) -> Estimate:
    """How many times the first mode's it is: the geometric mean over the seeds of each seed's own
    ratio, with its paired interval (Student's t on the logarithms). Seeds where either is 0 or
    unknown are left out."""
    known = {cell["seed"]: _part(cell, name)[quantity]["value"] for cell in baseline}
    pairs = [(_part(cell, name)[quantity]["value"], known.get(cell["seed"])) for cell in cells]
    logs = [math.log(ours / theirs) for ours, theirs in pairs if ours and theirs]
    found = mean_over(logs, confidence)
    ends = ("value", "low", "high")
    return {"n": found["n"]} | {
        end: None if found[end] is None else _times(found[end]) for end in ends
    }


def _times(logarithm: float) -> float | None:
    """None where one or two seeds leave the end of an interval open."""
    return math.exp(logarithm) if abs(logarithm) < 700 else None


def _waits(cells: Sequence[Cell], name: str) -> dict[str, float]:
    """Seconds of waiting by reason, per request due, the longest first."""
    n_due = sum(_part(cell, name)["n_due"] for cell in cells)
    total: dict[str, float] = {}
    for cell in cells:
        for of_class, by_reason in cell["waits_s"].items():
            if name in ("", of_class):
                for reason, seconds in by_reason.items():
                    total[reason] = total.get(reason, 0.0) + seconds
    return {
        reason: seconds / max(1, n_due)
        for reason, seconds in sorted(total.items(), key=lambda entry: -entry[1])
    }


def _part(cell: Cell, name: str) -> Mapping[str, Any]:
    part: Mapping[str, Any] = cell["classes"][name] if name else cell
    return part


def to_csv(table: Iterable[Mapping[str, Any]]) -> str:
    """The rows as text: a column per quantity and end of its interval, and of each paired
    difference. Seconds throughout; an empty cell is a value that does not exist."""
    header = ["mode", "rate_per_s", "class", "n_seeds", "n_due", "offered_rate_per_s"]
    lines, names = [], list[str]()
    for row in table:
        flat = {key: row[key] for key in header}
        for quantity in QUANTITIES:
            flat |= _flat(quantity, row[quantity])
        for quantity, estimate in row["difference"].items():
            flat |= _flat(f"{quantity}_difference", estimate)
        for quantity, estimate in row["ratio"].items():
            flat |= _flat(f"{quantity}_ratio", estimate)
        names = names or list(flat)
        lines.append(",".join(_csv(flat[name]) for name in names))
    return "\n".join([",".join(names), *lines]) + "\n"


def _flat(name: str, estimate: Estimate) -> dict[str, Any]:
    return {
        name: estimate["value"],
        f"{name}_low": estimate["low"],
        f"{name}_high": estimate["high"],
    }


def _csv(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return f'"{text}"' if set(text) & set(',"\n') else text
