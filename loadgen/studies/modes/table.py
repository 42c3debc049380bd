"""The comparison of cells: each mode's numbers over the seeds, and its difference from the first
mode; and its files.

With the same seed every mode receives the same requests at the same times. Differences are
therefore computed seed by seed, with the interval of paired samples, which is much narrower than
the two separate intervals.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.errors import MissingDependency
from loadgen.measure.statistics.intervals import Estimate, mean_over, over_runs
from loadgen.studies.modes.cell import METRICS, PERCENTILES, Cell

QUANTITIES = (
    "goodput",
    "attainment",
    "output_tokens_per_s",
    *(f"{name.removesuffix('_s')}_{key}" for name in METRICS for key in PERCENTILES),
)
RATIOS = ("ttft_p99", "tpot_p50", "itl_p99", "goodput", "output_tokens_per_s")


def rows(cells: Sequence[Cell], confidence: float) -> list[dict[str, Any]]:
    """A row per mode, rate and class ("" is all traffic), in the order of the cells."""
    groups: dict[tuple[str, float | None], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell["mode"], cell["rate_per_s"]), []).append(cell)
    first = cells[0]["mode"] if cells else ""
    return [
        _row(mode, rate, name, group, groups.get((first, rate), []), confidence)
        for (mode, rate), group in groups.items()
        for name in ("", *group[0]["classes"])
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
        "offered_rate_per_s": _mean_offered_per_s(cells, name),
        **{q: over_runs([_part(c, name)[q] for c in cells], confidence) for q in QUANTITIES},
        "difference": {
            q: difference(cells, baseline, name, q, confidence)
            for q in ("goodput", "attainment", "output_tokens_per_s", "ttft_p99", "itl_p99")
        },
        "ratio": {q: ratio(cells, baseline, name, q, confidence) for q in RATIOS},
        "waits_s": _waits(cells, name),
    }


def leaders(cells: Sequence[Cell], confidence: float) -> list[dict[str, Any]]:
    """The mode with the best goodput at each rate, the runner-up (None: the only mode), and the
    paired difference between the two."""
    rates = dict.fromkeys(cell["rate_per_s"] for cell in cells)
    found = []
    for rate in rates:
        groups: dict[str, list[Cell]] = {}
        for cell in cells:
            if cell["rate_per_s"] == rate and cell["goodput"]["value"] is not None:
                groups.setdefault(cell["mode"], []).append(cell)
        means = {m: float(np.mean([c["goodput"]["value"] for c in g])) for m, g in groups.items()}
        order = sorted(means, key=lambda mode: -means[mode])
        if not order:
            continue
        best, second = order[0], order[1] if len(order) > 1 else None
        gap = difference(groups[best], groups.get(second or "", []), "", "goodput", confidence)
        found.append({"rate_per_s": rate, "best": best, "runner_up": second, "difference": gap})
    return found


def _mean_offered_per_s(cells: Sequence[Cell], name: str) -> float | None:
    """None for a closed loop, which offers no rate."""
    rates = [_part(cell, name)["offered_rate_per_s"] for cell in cells]
    return None if None in rates else float(np.mean(rates))


def difference(
    cells: Sequence[Cell], baseline: Sequence[Cell], name: str, quantity: str, confidence: float
) -> Estimate:
    """The mean difference from the first mode, seed by seed, with its paired interval (Student's
    t). Seeds that only one mode has, or with a missing value, are left out."""
    pairs = _pairs(cells, baseline, name, quantity)
    return mean_over([ours - theirs for ours, theirs in pairs], confidence)


def ratio(
    cells: Sequence[Cell], baseline: Sequence[Cell], name: str, quantity: str, confidence: float
) -> Estimate:
    """The ratio to the first mode: the geometric mean of the ratios per seed, with its paired
    interval (Student's t on the logarithms). Seeds with a zero or missing value are left out."""
    pairs = _pairs(cells, baseline, name, quantity)
    logs = [math.log(ours / theirs) for ours, theirs in pairs if ours and theirs]
    mean_log = mean_over(logs, confidence)
    return {"n": mean_log["n"]} | {key: _exp(mean_log[key]) for key in ("value", "low", "high")}


def _pairs(
    cells: Sequence[Cell], baseline: Sequence[Cell], name: str, quantity: str
) -> list[tuple[float, float]]:
    """(value, first mode's value) of each seed that has both."""
    theirs = {cell["seed"]: _part(cell, name)[quantity]["value"] for cell in baseline}
    pairs = [(_part(cell, name)[quantity]["value"], theirs.get(cell["seed"])) for cell in cells]
    return [(mine, base) for mine, base in pairs if mine is not None and base is not None]


def _exp(logarithm: float | None) -> float | None:
    """None for the open bound of an interval from very few seeds."""
    return None if logarithm is None or abs(logarithm) >= 700 else math.exp(logarithm)


def _waits(cells: Sequence[Cell], name: str) -> dict[str, float]:
    """Seconds of waiting per due request, by reason, the longest first."""
    n_due = sum(_part(cell, name)["n_due"] for cell in cells)
    total: dict[str, float] = {}
    for cell in cells:
        for class_name, by_reason in cell["waits_s"].items():
            if name in ("", class_name):
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
    """The rows as CSV: a column for each quantity, each bound of its interval, and each paired
    difference and ratio. Times in seconds; an empty cell is a missing value."""
    header = ["mode", "rate_per_s", "class", "n_seeds", "n_due", "offered_rate_per_s"]
    lines, names = [], list[str]()
    for row in table:
        flat = {key: row[key] for key in header}
        estimates = {quantity: row[quantity] for quantity in QUANTITIES}
        for kind in ("difference", "ratio"):
            estimates |= {f"{quantity}_{kind}": row[kind][quantity] for quantity in row[kind]}
        for name, estimate in estimates.items():
            bounds = {f"{name}_{bound}": estimate[bound] for bound in ("low", "high")}
            flat |= {name: estimate["value"]} | bounds
        names = names or list(flat)
        lines.append(",".join(_csv(flat[name]) for name in names))
    return "\n".join([",".join(names), *lines]) + "\n"


def _csv(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return f'"{text}"' if set(text) & set(',"\n') else text


def write_all(facts: dict[str, Any], directory: Path, cache_dir: Path | None) -> None:
    """Writes `modes.json`, `modes.csv` and `modes.html`; with rates also the curve of goodput:
    `goodput.csv`, and `goodput.svg` and `goodput.pdf` where vl-convert-python is installed."""
    from loadgen.studies.modes.charts import paper
    from loadgen.studies.modes.page import render
    from reports.page import write_page
    from reports.printed import write_figure

    text = json.dumps(facts, indent=1, allow_nan=False)
    (directory / "modes.json").write_text(text + "\n", encoding="utf-8")
    (directory / "modes.csv").write_text(to_csv(facts["rows"]), encoding="utf-8")
    write_page(directory / "modes.html", render(facts, cache_dir))
    if facts["rates_per_s"] is not None:
        all_traffic = [row for row in facts["rows"] if not row["class"]]
        (directory / "goodput.csv").write_text(to_csv(all_traffic), encoding="utf-8")
        try:
            for suffix in ("svg", "pdf"):
                write_figure(paper(facts), directory / f"goodput.{suffix}")
        except MissingDependency as missing:
            sys.stderr.write(f"goodput.svg and goodput.pdf are left out: {missing}\n")
