"""Result of a capacity search: sentences, a row per probe, and the probes as CSV."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from loadgen.measure.statistics.intervals import Interval
from loadgen.measure.statistics.proportions import wilson
from loadgen.measure.wording import csv_cell
from loadgen.studies.capacity.probe import UNUSABLE, Probe
from loadgen.studies.capacity.result import Capacity

if TYPE_CHECKING:
    from rich.console import Group

HEAD = ("probe", "load", "window", "due", "SLO met", "confidence interval", "goodput", "result")
_STYLES = {"found": "bold green", "misses": "bold red"}


def attainment_interval(probe: Probe, answer: Capacity) -> Interval:
    """SLO attainment with Wilson's interval, for the effective number of independent requests."""
    if not probe.n_due:
        return Interval(float("nan"))
    n = max(1, round(probe.n_due / (answer.design_effect or 1.0)))
    interval = wilson(round(probe.attainment * n), n, answer.confidence)
    low, high = interval.low or 0.0, 1.0 if interval.high is None else interval.high
    return Interval(probe.attainment, min(low, probe.attainment), max(high, probe.attainment))


def heading(answer: Capacity) -> str:
    """`CAPACITY 7.4 req/s [7.1, 7.7], 95 %`."""
    return f"CAPACITY {answer.sentence()}"


def lines(answer: Capacity) -> list[str]:
    """The lines below the heading."""
    share = f"{100 * answer.attainment:g} %"
    return [
        f"the highest load at which at least {share} of requests meet the SLO",
        *([answer.cause] if answer.cause else []),
        answer.sureness(),
    ]


def next_steps(answer: Capacity) -> list[str]:
    """The steps that follow from the answer."""
    if answer.client_limit is not None:
        return [
            "The load generator could not send more: use a machine for it alone or more workers"
            " (--workers), and search again; slobench doctor measures how much this machine can"
            " send."
        ]
    if answer.outcome == "rate_limited":
        return [
            "Have the rate limit raised, or search a server without one: above it latency was not"
            " measured, and no further search changes this."
        ]
    if answer.outcome == "misses":
        return [
            "Open the page of the lowest probe: it shows which SLO was missed and why the slowest"
            " requests waited. Then search at lower loads (--between), or relax the SLO."
        ]
    if answer.outcome == "found" and answer.low is not None:
        step = (
            f"Plan with the lower bound, {answer.low:.4g} {answer.unit}: up to this load the SLO is"
            f" met, with {100 * answer.confidence:g} % confidence."
        )
        missed = [p for p in answer.probes if p.is_usable and p.n_due
                  and p.attainment < answer.attainment]  # fmt: skip
        if missed:
            first = min(missed, key=lambda probe: probe.level)
            step += (
                f" The page of probe {first.name}, at {first.level:.4g} {answer.unit}, shows what"
                " fails first above it."
            )
        return [step]
    return ["Search longer (a larger --budget) with --resume, which reuses all probes so far."]


def row(probe: Probe, answer: Capacity) -> tuple[str, ...]:
    """The cells of a probe, in the order of `HEAD`."""
    share = attainment_interval(probe, answer)
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
        probe.grade,
    )


def table(answer: Capacity) -> Group:
    """A rich renderable of at most 100 columns."""
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
    unusable = [p for p in answer.probes if p.grade in UNUSABLE and p.why != answer.cause]
    notes = [Text(f"note: probe {p.name} is not used: {p.why}", overflow="fold") for p in unusable]
    return Group(title, *below, *([grid] if answer.probes else []), *notes)


def csv_text(answer: Capacity) -> str:
    """A line per probe, in the order of measurement; shares as numbers, times in seconds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ("probe", "level", "unit", "warmup_s", "measured_s", "spent_s", "due", "met", "attainment",
         "low", "high", "goodput_per_s", "grade")
    )  # fmt: skip
    for probe in answer.probes:
        share = attainment_interval(probe, answer)
        writer.writerow(
            (csv_cell(probe.name), f"{probe.level:.9g}", answer.unit, f"{probe.warmup_s:.6g}",
             f"{probe.measured_s:.6g}", f"{probe.spent_s:.6g}", probe.n_due, probe.n_met,
             f"{share.value:.6g}", f"{share.low or 0.0:.6g}", f"{share.high or 0.0:.6g}",
             f"{probe.goodput_per_s:.6g}", probe.grade)
        )  # fmt: skip
    return text.getvalue()
