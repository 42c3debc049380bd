"""Tables and sentences of the capacities of batching modes, shared by the page and the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from loadgen.measure.statistics.intervals import EstimateSection
from loadgen.studies.modes.result import ModeCapacitiesFile
from loadgen.studies.modes.seed_capacity import CapacityRatio
from loadgen.studies.modes.view import SIMULATED, heading
from reports.ending import MOST_FINDINGS, Ending, EndingRow

HEAD = ("mode", "capacity", "confidence interval", "best / mode", "seeds")
_MOST_EQUAL = 1e-9
_MOST_MODES = 5  # in an ending


def tables(result: ModeCapacitiesFile) -> Group:
    """The comparison in a terminal of 100 columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for number, title in enumerate(HEAD):
        table.add_column(title, overflow="fold", justify="right" if number else "left")
    for row in rows(result):
        table.add_row(*row)
    return Group(
        Text(heading(result), style="bold"),
        *(Text(line) for line in lead(result)),
        table,
        *(Text(f"note: {note}", style="yellow") for note in notes(result)),
    )


def ending(result: ModeCapacitiesFile) -> Ending:
    """The comparison in about ten lines: the best mode, and a line per mode."""
    best, findings, cells = lead(result), notes(result), rows(result)
    return Ending(
        "invalid" if result.n_untrusted else "met" if result.capacity.modes else "unknown",
        "BEST" if result.capacity.modes else "",
        best[0] if best else "no capacity was found",
        rows=tuple(_ending_row(row) for row in cells[:_MOST_MODES]),
        facts=(("compared", heading(result)),),
        findings=tuple(findings[:MOST_FINDINGS]),
        n_rows=max(0, len(cells) - _MOST_MODES),
        n_findings=max(0, len(findings) - MOST_FINDINGS),
        noun="mode",
    )


def _ending_row(cells: Sequence[str]) -> EndingRow:
    mode, capacity, interval, ratio, _ = cells
    facts = [capacity]
    facts += [f"between {interval.replace(' to ', ' and ')}"] if interval != "–" else []
    facts += [f"best / mode {ratio}"] if ratio not in ("–", "best") else []
    return EndingRow("", mode, ", ".join(facts))


def lead(result: ModeCapacitiesFile) -> list[str]:
    """The capacity of the best mode, and how many times it serves of each other mode."""
    modes = result.capacity.modes
    if not modes:
        return [
            f"no capacity: {row.mode}, seed {row.seed}: {row.sentence}" for row in result.searches
        ]
    best = modes[0]
    first = (
        f"{best.mode} has the highest capacity: {_rate(best.value)}{_interval(best)}, the "
        f"highest rate at which {100 * result.attainment:g} % of the requests meet the SLO"
    )
    return [first, *(_times(row) for row in result.capacity.ratios)]


def _times(row: CapacityRatio) -> str:
    """The ratio to another mode, and whether it may be chance."""
    if row.value is None:
        return f"no seed in common with {row.mode}"
    text = f"{row.value:.4g} times that of {row.mode}"
    if row.n < 2 or row.low is None or row.high is None:
        return f"{text} (one seed)"
    if abs(row.value - 1) < _MOST_EQUAL and row.high - row.low < _MOST_EQUAL:
        return f"equal to that of {row.mode}: the same requests met the SLO on every seed"
    doubt = "" if row.low > 1 else ", may be chance"
    return f"{text} [{row.low:.4g}, {row.high:.4g}]{doubt}"


def notes(result: ModeCapacitiesFile) -> list[str]:
    """Warnings on how far the numbers can be trusted."""
    texts = []
    if result.n_done < result.n_searches:
        texts.append(f"only {result.progress}")
    if n_open := sum(row.outcome == "open" for row in result.searches):
        texts.append(f"{n_open} searches found no end in 24 runs and are left out")
    if result.n_untrusted:
        texts.append(f"{result.n_untrusted} of {result.n_runs} runs cannot be trusted")
    texts += [f"{place}: no valid run" for place in result.without_valid_run]
    if result.target == "sim":
        texts.append(SIMULATED)
    return texts


def how(result: ModeCapacitiesFile) -> str:
    """The meaning of the numbers."""
    window = (
        "the scenario's own window"
        if result.requests is None
        else f"windows of {result.requests} requests after a warm-up of a quarter as many"
    )
    level, n = f"{100 * result.confidence:g} %", len(result.seeds)
    if n < 2:
        return f"The highest rate for a single seed, in {window}. A single seed has no interval."
    joint = " The intervals of all pairs hold together (Bonferroni)."
    return (
        f"Geometric mean over {n} seeds of the highest rate that meets the SLO in {window}, with "
        f"its {level} confidence interval (Student's t on the logarithms). Best / mode: capacity "
        "of the best mode over that of this mode, seed by seed with the same requests, with the "
        f"paired interval.{joint if len(result.capacity.ratios) > 1 else ''}"
    )


def rows(result: ModeCapacitiesFile) -> list[tuple[str, ...]]:
    """The cells of each mode in the order of `HEAD`, the best first."""
    ratios = {row.mode: row for row in result.capacity.ratios}
    found: list[tuple[str, ...]] = []
    for row in result.capacity.modes:
        ratio = ratios.get(row.mode)
        interval = "–" if row.low is None else f"{row.low:.4g} to {row.high:.4g}"
        times = "best"
        if ratio is not None:
            times = "–" if ratio.value is None else f"{ratio.value:.4g}"
            if ratio.low is not None:
                times += f" ({ratio.low:.4g} to {ratio.high:.4g})"
        found.append((row.mode, _rate(row.value), interval, times, f"{row.n}"))
    shown = {cells[0] for cells in found}
    for search in result.searches:
        if search.mode not in shown:
            shown.add(search.mode)
            found.append((search.mode, search.sentence, "–", "–", "1"))
    return found


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g} req/s"


def _interval(row: EstimateSection) -> str:
    return "" if row.low is None else f" [{row.low:.4g}, {row.high:.4g}]"


def to_csv(result: ModeCapacitiesFile) -> str:
    """A line per run of every search: mode, seed, the search's outcome and capacity, and the run's
    rate with its counts."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["mode", "seed", "outcome", "capacity_per_s", "rate_per_s", "n_due", "n_met"])
    for search in result.searches:
        for run in search.runs:
            writer.writerow(
                [
                    search.mode,
                    search.seed,
                    search.outcome,
                    f"{search.rate_per_s:.9g}",
                    f"{run.rate_per_s:.9g}",
                    run.n_due,
                    run.n_met,
                ]
            )
    return text.getvalue()
