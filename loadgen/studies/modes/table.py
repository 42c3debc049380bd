"""The comparison of cells: each mode's numbers over the seeds, and its difference from the first
mode; and its files.

With the same seed every mode receives the same requests at the same times. Differences are
therefore computed seed by seed, with the interval of paired samples, which is much narrower than
the two separate intervals.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from loadgen.errors import MissingDependency
from loadgen.measure.statistics.intervals import EstimateSection, mean_over, over_runs
from loadgen.studies.modes.result import Leader, ModeCell, ModeRow, ModesFile, Quantities
from loadgen.studies.study import Place

QUANTITIES = Quantities.__struct_fields__
DIFFERENCES = ("goodput", "attainment", "output_tokens_per_s", "ttft_p99", "itl_p99")
RATIOS = ("ttft_p99", "tpot_p50", "itl_p99", "goodput", "output_tokens_per_s")


def rows(cells: Sequence[ModeCell], confidence: float) -> list[ModeRow]:
    """A row per mode, rate and class ("" is all traffic), in the order of the cells."""
    groups: dict[tuple[str, float | None], list[ModeCell]] = {}
    for cell in cells:
        groups.setdefault((cell.mode, cell.rate_per_s), []).append(cell)
    first = cells[0].mode if cells else ""
    return [
        _row(name, group, groups.get((first, rate), []), confidence)
        for (_, rate), group in groups.items()
        for name in ("", *group[0].classes)
    ]


def _row(
    name: str, cells: Sequence[ModeCell], baseline: Sequence[ModeCell], confidence: float
) -> ModeRow:
    means = {
        quantity: over_runs([getattr(cell.part(name), quantity) for cell in cells], confidence)
        for quantity in QUANTITIES
    }
    return ModeRow(
        mode=cells[0].mode,
        rate_per_s=cells[0].rate_per_s,
        class_name=name,
        n_seeds=len(cells),
        n_due=sum(cell.part(name).n_due for cell in cells),
        offered_rate_per_s=_mean_offered_per_s(cells, name),
        **means,
        difference={q: difference(cells, baseline, name, q, confidence) for q in DIFFERENCES},
        ratio={q: ratio(cells, baseline, name, q, confidence) for q in RATIOS},
        waits_s=_waits(cells, name),
    )


def leaders(cells: Sequence[ModeCell], confidence: float) -> list[Leader]:
    """The mode with the best goodput at each rate, the runner-up (None: the only mode), and the
    paired difference between the two."""
    rates = dict.fromkeys(cell.rate_per_s for cell in cells)
    found = []
    for rate in rates:
        groups: dict[str, list[ModeCell]] = {}
        for cell in cells:
            if cell.rate_per_s == rate and cell.goodput.value is not None:
                groups.setdefault(cell.mode, []).append(cell)
        means = {m: float(np.mean([c.goodput.value for c in g])) for m, g in groups.items()}
        order = sorted(means, key=lambda mode: -means[mode])
        if not order:
            continue
        best, second = order[0], order[1] if len(order) > 1 else None
        gap = difference(groups[best], groups.get(second or "", []), "", "goodput", confidence)
        found.append(Leader(rate_per_s=rate, best=best, runner_up=second, difference=gap))
    return found


def _mean_offered_per_s(cells: Sequence[ModeCell], name: str) -> float | None:
    """None for a closed loop, which offers no rate."""
    rates = [cell.part(name).offered_rate_per_s for cell in cells]
    known = [rate for rate in rates if rate is not None]
    return float(np.mean(known)) if len(known) == len(rates) else None


def difference(
    cells: Sequence[ModeCell],
    baseline: Sequence[ModeCell],
    name: str,
    quantity: str,
    confidence: float,
) -> EstimateSection:
    """The mean difference from the first mode, seed by seed, with its paired interval (Student's
    t). Seeds that only one mode has, or with a missing value, are left out."""
    pairs = _pairs(cells, baseline, name, quantity)
    return mean_over([ours - theirs for ours, theirs in pairs], confidence)


def ratio(
    cells: Sequence[ModeCell],
    baseline: Sequence[ModeCell],
    name: str,
    quantity: str,
    confidence: float,
) -> EstimateSection:
    """The ratio to the first mode: the geometric mean of the ratios per seed, with its paired
    interval (Student's t on the logarithms). Seeds with a zero or missing value are left out."""
    pairs = _pairs(cells, baseline, name, quantity)
    logs = [math.log(ours / theirs) for ours, theirs in pairs if ours and theirs]
    mean_log = mean_over(logs, confidence)
    value, low, high = (_exp(end) for end in (mean_log.value, mean_log.low, mean_log.high))
    return EstimateSection(value=value, low=low, high=high, n=mean_log.n)


def _pairs(
    cells: Sequence[ModeCell], baseline: Sequence[ModeCell], name: str, quantity: str
) -> list[tuple[float, float]]:
    """(value, first mode's value) of each seed that has both."""
    theirs = {cell.seed: getattr(cell.part(name), quantity).value for cell in baseline}
    pairs = [(getattr(cell.part(name), quantity).value, theirs.get(cell.seed)) for cell in cells]
    return [(mine, base) for mine, base in pairs if mine is not None and base is not None]


def _exp(logarithm: float | None) -> float | None:
    """None for the open bound of an interval from very few seeds."""
    return None if logarithm is None or abs(logarithm) >= 700 else math.exp(logarithm)


def _waits(cells: Sequence[ModeCell], name: str) -> dict[str, float]:
    """Seconds of waiting per due request, by reason, the longest first."""
    n_due = sum(cell.part(name).n_due for cell in cells)
    total: dict[str, float] = {}
    for cell in cells:
        for class_name, by_reason in cell.waits_s.items():
            if name in ("", class_name):
                for reason, seconds in by_reason.items():
                    total[reason] = total.get(reason, 0.0) + seconds
    return {
        reason: seconds / max(1, n_due)
        for reason, seconds in sorted(total.items(), key=lambda entry: -entry[1])
    }


def to_csv(table: Iterable[ModeRow]) -> str:
    """The rows as CSV: a column for each quantity, each bound of its interval, and each paired
    difference and ratio. Times in seconds; an empty cell is a missing value."""
    lines, names = [], list[str]()
    for row in table:
        flat: dict[str, object] = {
            "mode": row.mode,
            "rate_per_s": row.rate_per_s,
            "class": row.class_name,
            "n_seeds": row.n_seeds,
            "n_due": row.n_due,
            "offered_rate_per_s": row.offered_rate_per_s,
        }
        estimates = {quantity: getattr(row, quantity) for quantity in QUANTITIES}
        for kind, others in (("difference", row.difference), ("ratio", row.ratio)):
            estimates |= {f"{quantity}_{kind}": found for quantity, found in others.items()}
        for name, found in estimates.items():
            flat |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
        names = names or list(flat)
        lines.append(",".join(_csv(flat[name]) for name in names))
    return "\n".join([",".join(names), *lines]) + "\n"


def _csv(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return f'"{text}"' if set(text) & set(',"\n') else text


def write_all(place: Place[ModesFile], result: ModesFile, cache_dir: Path | None) -> None:
    """Writes `modes.json`, `modes.csv` and `modes.html`; with rates also the curve of goodput:
    `goodput.csv`, and `goodput.svg` and `goodput.pdf` where vl-convert-python is installed."""
    from loadgen.studies.modes.charts import paper
    from loadgen.studies.modes.page import render
    from reports.printed import write_figure

    place.write(result)
    place.write_text("modes.csv", to_csv(result.rows))
    place.write_text("modes.html", render(result, cache_dir))
    if result.rates_per_s is not None:
        all_traffic = [row for row in result.rows if not row.class_name]
        place.write_text("goodput.csv", to_csv(all_traffic))
        try:
            for suffix in ("svg", "pdf"):
                figure = place.directory / f"goodput.{suffix}"
                write_figure(paper(result), figure)
                place.cover(figure)
        except MissingDependency as missing:
            sys.stderr.write(f"goodput.svg and goodput.pdf are left out: {missing}\n")
