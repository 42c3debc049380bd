"""A capacity search in words: the answer, a row per probe, and the probes as CSV."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from loadgen.measure.capacity.capacity_probe import UNUSABLE, Probe
from loadgen.measure.capacity.capacity_result import Capacity
from loadgen.measure.statistics.intervals import Interval
from loadgen.measure.statistics.proportions import wilson

if TYPE_CHECKING:
    from rich.console import Group

HEAD = ("probe", "load", "window", "due", "kept", "interval", "goodput", "how it ended")
_STYLES = {"found": "bold green", "misses": "bold red"}


def attainment_interval(probe: Probe, answer: Capacity) -> Interval:
    """The share that kept its promises, with Wilson's interval of as many independent requests as
    the probe's are worth."""
    if not probe.n_due:
        return Interval(float("nan"))
    worth = max(1, round(probe.n_due / (answer.design_effect or 1.0)))
    found = wilson(round(probe.attainment * worth), worth, answer.confidence)
    low, high = found.low or 0.0, 1.0 if found.high is None else found.high
    return Interval(probe.attainment, min(low, probe.attainment), max(high, probe.attainment))


def heading(answer: Capacity) -> str:
    """`CAPACITY 7.4 req/s [7.1, 7.7], 95 %`."""
    return f"CAPACITY {answer.sentence()}"


def lines(answer: Capacity) -> list[str]:
    """What stands below it."""
    share = f"{100 * answer.attainment:g} %"
    return [f"the highest load at which at least {share} keep their promises", answer.sureness()]


def next_steps(answer: Capacity) -> list[str]:
    """What follows from the answer, for whoever has only its page."""
    if answer.client_limit is not None:
        return [
            "The client could not send more: give it a machine of its own or more processes"
            " (--workers), and search again; slobench doctor says what this machine can send."
        ]
    if answer.outcome == "misses":
        return [
            "Open the page of the lowest probe: it says which promise broke and what the slowest"
            " requests waited for. Then ask for less: --between, or an easier promise."
        ]
    if answer.outcome == "found" and answer.low is not None:
        told = (
            f"Plan with the lower end, {answer.low:.4g} {answer.unit}: up to there the promises"
            f" are kept with {100 * answer.confidence:g} % confidence."
        )
        broken = [p for p in answer.probes if p.is_usable and p.n_due
                  and p.attainment < answer.attainment]  # fmt: skip
        if broken:
            first = min(broken, key=lambda probe: probe.level)
            told += (
                f" What breaks first beyond it is on the page of probe {first.name}, at"
                f" {first.level:.4g} {answer.unit}."
            )
        return [told]
    return ["Search longer (a larger --budget), with --resume: what is known is kept."]


def row(probe: Probe, answer: Capacity) -> tuple[str, ...]:
    """The cells of one probe, in the order of `HEAD`."""
    found = attainment_interval(probe, answer)
    ends = "–"
    if found.low is not None and found.high is not None:
        ends = f"[{100 * found.low:.1f}, {100 * found.high:.1f}]"
    return (
        probe.name or "–",
        f"{probe.level:.4g} {answer.unit}",
        f"{probe.measured_s:.0f} s",
        str(probe.n_due),
        f"{100 * probe.attainment:.1f} %" if probe.n_due else "–",
        ends,
        f"{probe.goodput_per_s:.3g}/s",
        probe.grade,
    )


def table(answer: Capacity) -> Group:
    """One rich renderable of at most 100 columns."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in HEAD:
        grid.add_column(name, no_wrap=name != HEAD[-1])
    for probe in sorted(answer.probes, key=lambda probe: probe.level):
        grid.add_row(*map(Text, row(probe, answer)))
    title = Text(heading(answer), style=_STYLES.get(answer.outcome, "bold yellow"))
    below = [Text(f"  {line}", overflow="fold") for line in lines(answer)]
    doubts = [p for p in answer.probes if p.grade in UNUSABLE]
    notes = [
        Text(f"note: probe {p.name} says nothing of the server: {p.why}", overflow="fold")
        for p in doubts
    ]
    return Group(title, *below, *([grid] if answer.probes else []), *notes)


def csv_text(answer: Capacity) -> str:
    """A line per probe, in the order they were made; shares as numbers, times in seconds."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(
        ("probe", "level", "unit", "warmup_s", "measured_s", "spent_s", "due", "met", "attainment",
         "low", "high", "goodput_per_s", "grade")
    )  # fmt: skip
    for probe in answer.probes:
        found = attainment_interval(probe, answer)
        writer.writerow(
            (probe.name, f"{probe.level:.9g}", answer.unit, f"{probe.warmup_s:.6g}",
             f"{probe.measured_s:.6g}", f"{probe.spent_s:.6g}", probe.n_due, probe.n_met,
             f"{found.value:.6g}", f"{found.low or 0.0:.6g}", f"{found.high or 0.0:.6g}",
             f"{probe.goodput_per_s:.6g}", probe.grade)
        )  # fmt: skip
    return written.getvalue()
