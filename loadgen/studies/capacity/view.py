"""Result of a capacity search: sentences, a row per probe, and the probes as CSV."""

from __future__ import annotations

import csv
import io
import math
from typing import TYPE_CHECKING

from loadgen.measure.statistics.intervals import Interval
from loadgen.measure.wording import csv_cell
from loadgen.studies.capacity.probe import UNUSABLE, Probe
from loadgen.studies.capacity.result import Capacity, promise_text

if TYPE_CHECKING:
    from rich.console import Group

_INTERVAL = "confidence interval"
HEAD = ("probe", "load", "window", "due", "SLO met", _INTERVAL, "goodput", "result")
_COLOURS = {"met": "bold green", "missed": "bold red", "unknown": "bold yellow"}
_RESUME = "all probes so far are reused"
_MOST_ROWS = 3  # of the probes in a terminal


def attainment_interval(probe: Probe) -> Interval:
    """SLO attainment with the bounds of the probe's own dependent requests; no bounds where it was
    too short for them, or ended by its outcome."""
    if probe.grade != "measured" or probe.low is None or probe.high is None:
        return Interval(probe.attainment)
    return Interval(
        probe.attainment, min(probe.low, probe.attainment), max(probe.high, probe.attainment)
    )


def heading(answer: Capacity) -> str:
    """`CAPACITY between 40 and 66 req/s; promise 40`."""
    return f"CAPACITY {answer.sentence()}"


def lines(answer: Capacity, slos: str = "the SLO") -> list[str]:
    """The lines below the heading. `slos`: the limits that were searched."""
    share = f"{100 * answer.attainment:g} %"
    return [
        *([answer.cause] if answer.cause else []),
        answer.sureness(),
        f"the highest load at which at least {share} of {answer.counted} meet {slos}",
        *answer.method_lines(),
    ]


def next_steps(answer: Capacity) -> list[str]:
    """The steps that follow from the answer."""
    if answer.client_limit is not None:
        return [
            "The load generator could not send more: use a machine for it alone or more workers"
            " (--workers), and search again; slobench doctor measures how much this machine can"
            " send."
        ]
    if answer.outcome == "contradictory":
        return [
            "The server changed between probes, or a probe was lucky: open the pages of the probes"
            " at these two loads, then search again, or longer (--budget) with --resume."
        ]
    if answer.outcome == "rate_limited":
        return [
            "Have the rate limit raised, or search a server without one: above it latency was not"
            " measured, and no further search changes this."
        ]
    is_below = answer.low is None and answer.high is not None
    if answer.outcome == "misses" or (is_below and not any(p.n_met for p in answer.probes)):
        return [
            "Open the page of the lowest probe: it shows which SLO was missed and why the slowest"
            " requests waited. Then search at lower loads (--between), or relax the SLO."
        ]
    promised = None
    if answer.value is not None and answer.low is not None and answer.high is not None:
        promised = promise_text(answer.low, answer.high)
    if promised:
        steps = [
            f"Plan with {promised} {answer.unit}: up to this load the SLO is met"
            f" ({100 * answer.confidence:g} % confidence)."
        ]
        missed = [
            p for p in answer.probes if p.is_usable and p.n_due and p.attainment < answer.attainment
        ]
        if missed:
            first = min(missed, key=lambda probe: probe.level)
            steps.append(
                f"The page of probe {first.name}, at {first.level:.4g} {answer.unit}, shows what"
                " fails first above it."
            )
        if answer.outcome != "found":
            steps.append(
                "The same command with a larger --budget, --out and --resume narrows the interval:"
                f" {_RESUME}."
            )
        return steps
    if answer.outcome == "at_least":
        return [
            f"Search higher loads: the highest of --between, {answer.low:.4g} {answer.unit}, still"
            " meets the SLO."
        ]
    return [
        "Search longer: write the same command with a larger --budget, --out (this directory) and"
        f" --resume; {_RESUME}."
    ]


def tone(answer: Capacity) -> str:
    """The colour of a page's banner: met where both sides of the capacity are known."""
    if answer.value is not None:
        return "met"
    return "missed" if answer.outcome == "misses" else "unknown"


def row(probe: Probe, answer: Capacity) -> tuple[str, ...]:
    """The cells of a probe, in the order of `HEAD`."""
    share = attainment_interval(probe)
    interval = "–"
    if share.low is not None and share.high is not None:
        interval = f"[{100 * share.low:.1f}, {100 * share.high:.1f}]"
    return (
        probe.name or "–",
        f"{probe.level:.4g} {answer.unit}",
        f"{probe.measured_s:.0f} s",
        str(probe.n_due),
        f"{100 * probe.attainment:.1f} %" if probe.n_due else "–",
        interval,
        f"{probe.goodput_per_s:.3g}/s",
        _result(probe, answer),
    )


def _result(probe: Probe, answer: Capacity) -> str:
    """`✓ met`, `✗ missed`, or why the probe ended otherwise."""
    if probe.grade != "measured" or not probe.n_due:
        return probe.grade
    return "✓ met" if probe.attainment >= answer.attainment else "✗ missed"


def table(answer: Capacity, slos: str, *, is_full: bool) -> Group:
    """The ending of a search in about ten lines of at most 100 columns; with `is_full` all probes
    and steps. `slos`: the limits that were searched."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    columns = [number for number, name in enumerate(HEAD) if is_full or name != _INTERVAL]
    for number in columns:
        grid.add_column(HEAD[number], no_wrap=number != len(HEAD) - 1)
    shown = list(answer.probes) if is_full else _nearest(answer)
    for probe in sorted(shown, key=lambda probe: probe.level):
        cells = row(probe, answer)
        grid.add_row(*(Text(cells[number]) for number in columns))
    title = Text(heading(answer), style=_COLOURS[tone(answer)])
    below = [Text(f"  {line}", overflow="fold") for line in lines(answer, slos)]
    unusable = [p for p in answer.probes if p.grade in UNUSABLE and p.why != answer.cause]
    notes = [f"note: probe {p.name} is not used: {p.why}" for p in unusable]
    steps = next_steps(answer)
    if not is_full:
        more = len(unusable) - 1
        notes = [notes[0] + (f" (and {more} more: --full)" if more else "")] if notes else []
        steps = steps[:1]
    rest = [Text(line, overflow="fold") for line in (*notes, *(f"next: {step}" for step in steps))]
    return Group(title, *below, *([grid] if shown else []), *rest)


def _nearest(answer: Capacity) -> list[Probe]:
    """The highest load that met the SLO, the lowest that missed it, and the next nearest."""
    usable = [probe for probe in answer.probes if probe.is_usable]
    if answer.value is None:
        return sorted(usable, key=lambda probe: probe.level)[-_MOST_ROWS:]
    goal, value = answer.attainment, answer.value
    near = sorted(usable, key=lambda probe: abs(math.log(probe.level / value)))
    sides = [
        next((p for p in near if (p.attainment >= goal) is side), None) for side in (True, False)
    ]
    first = [probe for probe in sides if probe is not None]
    return [*first, *(probe for probe in near if probe not in first)][:_MOST_ROWS]


def csv_text(answer: Capacity) -> str:
    """A line per probe, in the order of measurement; shares as numbers, times in seconds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        (
            "probe",
            "level",
            "unit",
            "warmup_s",
            "measured_s",
            "spent_s",
            "due",
            "met",
            "attainment",
            "low",
            "high",
            "goodput_per_s",
            "grade",
        )
    )
    for probe in answer.probes:
        share = attainment_interval(probe)
        writer.writerow(
            (
                csv_cell(probe.name),
                f"{probe.level:.9g}",
                answer.unit,
                f"{probe.warmup_s:.6g}",
                f"{probe.measured_s:.6g}",
                f"{probe.spent_s:.6g}",
                probe.n_due,
                probe.n_met,
                f"{share.value:.6g}",
                _number(share.low),
                _number(share.high),
                f"{probe.goodput_per_s:.6g}",
                probe.grade,
            )
        )
    return text.getvalue()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
