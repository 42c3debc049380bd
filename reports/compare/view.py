"""A comparison in words: the verdict, a row per measure, and what was changed between the sides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loadgen.measure.comparison.compare import Comparison
from loadgen.measure.comparison.contrast import Noise, runs_needed, smallest_effect
from loadgen.measure.comparison.judgement import POWER, ComparedMeasure
from loadgen.measure.wording import format_count, format_number, format_value

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

MARKS = {"better": "▲ better", "same": "= same", "worse": "▼ worse", "inconclusive": "? open"}
_STYLES = {"better": "bold green", "same": "bold green", "worse": "bold red"}
HEAD = ("measure", "A", "B", "change", "interval", "verdict", "p (Holm)", "needs")
_SENTENCES = {
    "worse": "B is worse than A.",
    "better": "B is better than A.",
    "same": "B is the same as A, to within the margins.",
    "inconclusive": "These runs cannot tell.",
    "invalid": "A side has no run that can be trusted.",
}


def sentence(comparison: Comparison) -> str:
    """The verdict as a sentence."""
    return _SENTENCES[comparison.verdict]


def lines(comparison: Comparison) -> list[str]:
    """What the verdict rests on: the deciding measures that got worse or better, or are open."""
    deciding = [one for one in comparison.measures if one.is_gated]
    telling = [one for one in deciding if one.verdict == comparison.verdict]
    if comparison.verdict == "same":
        return [f"Inside the margins: {', '.join(one.measure for one in telling)}."] * bool(telling)
    return [
        f"{one.measure}: {format_value(one.a, one.unit)} → {format_value(one.b, one.unit)},"
        f" {change(one.change, one.unit)} {interval(one)}"
        for one in telling
    ]


def next_steps(comparison: Comparison) -> list[str]:
    """What to do about the verdict."""
    if comparison.verdict == "invalid":
        return ["The notes above say why no run can be trusted; mend that and measure again."]
    if comparison.verdict in ("worse", "better"):
        n = len(comparison.changes)
        return [
            f"What was changed stands below ({n} {'key' if n == 1 else 'keys'})."
            if n
            else "Nothing that a run records was changed between the sides: look at the machine,"
            " or at what the labels of the target do not say."
        ]
    open_ones = [o for o in comparison.measures if o.is_gated and o.verdict == "inconclusive"]
    known = [one for one in open_ones if one.runs_needed is not None]
    if not open_ones:
        return []
    if not known:
        return ["Measure three or more runs of each side, in turns: one a side tells nothing."]
    most = max(known, key=lambda one: one.runs_needed or 0)
    return [f"Measure more runs of each side, in turns: {most.measure} needs {needs(most)}."]


def sides_line(comparison: Comparison) -> str:
    """How many runs stand on each side and how they belong together."""
    pairing = {
        "one schedule": "all on one schedule",
        "by schedule": "compared within equal schedules",
        "none": "on schedules of their own (unpaired)",
    }[comparison.pairing]
    n_a, n_b = len(comparison.a), len(comparison.b)
    ends = f"each end of an interval at {comparison.confidence:.0%}"
    return f"A: {_runs(n_a)}, B: {_runs(n_b)}, {pairing}; {ends}"


def _runs(n: int) -> str:
    return f"{n} run" if n == 1 else f"{n} runs"


def row(one: ComparedMeasure) -> tuple[str, ...]:
    """The cells of one measure, in the order of `HEAD`."""
    return (
        one.measure if one.is_gated else f"({one.measure})",
        format_value(one.a, one.unit),
        format_value(one.b, one.unit),
        change(one.change, one.unit),
        interval(one),
        MARKS[one.verdict],
        chance(one.p_adjusted),
        needs(one),
    )


def change(value: float | None, unit: str) -> str:
    """`+5.2 %`, or `+0.3 points` of a share."""
    if value is None or math.isnan(value):
        return "–"
    return f"{_signed(value)} {'points' if unit == 'share' else '%'}"


def chance(p: float) -> str:
    """A p-value, `<0.001` where three digits would say never; `–` where there is none."""
    if math.isnan(p):
        return "–"
    return "<0.001" if p < 0.0005 else f"{p:.3f}"


def interval(one: ComparedMeasure) -> str:
    if one.low is None or one.high is None:
        return "[…]"
    return f"[{_signed(one.low)}, {_signed(one.high)}]"


def _signed(share: float) -> str:
    """In hundredths, with its sign: `+5.2`."""
    digits = format_number(float(f"{abs(100 * share):.2g}"))
    return f"{'-' if share < 0 else '+'}{digits}"


def needs(one: ComparedMeasure) -> str:
    """The runs a side that find a change as large as the margin (or as asked for)."""
    if one.runs_needed is None:
        return "–"
    unit = "points" if one.unit == "share" else "%"
    return f"{format_count(one.runs_needed)} for {100 * one.effect:.2g} {unit}"


def table(comparison: Comparison) -> Group:
    """One rich renderable of at most 100 columns."""
    from rich.console import Group
    from rich.text import Text

    style = _STYLES.get(comparison.verdict, "bold yellow")
    title = Text(f"{comparison.verdict.upper()}: {sentence(comparison)}", style=style)
    parts: list[Text | Table] = [title, Text(f"  {sides_line(comparison)}")]
    if comparison.measures:
        rows = grid(*HEAD)
        for one in comparison.measures:
            rows.add_row(*map(Text, row(one)))
        parts.append(rows)
        parts.append(Text("  (in brackets: shown, but not part of the verdict)"))
    parts += [Text(line, overflow="fold") for line in changed_lines(comparison)]
    parts += [Text(f"note: {note}", overflow="fold") for note in comparison.notes]
    return Group(*parts)


def changed_lines(comparison: Comparison) -> list[str]:
    """`changed target.labels.version: 0.9 → 0.10`, one line per key."""
    if not comparison.changes:
        return ["changed: no configuration key that a run records"]
    return [
        f"changed {c.key}: {'nothing' if c.a is None else c.a} → "
        f"{'nothing' if c.b is None else c.b}"
        for c in comparison.changes
    ]


def noise_rows(
    noise: Mapping[str, Noise], units: Mapping[str, str], effect: float, alpha: float
) -> list[dict[str, Any]]:
    """Per measure: what equal runs differ by, the smallest change that 3, 5 and 10 runs a side find
    with 90 % power, and the runs needed for `effect`."""
    rows = []
    for text, found in noise.items():
        is_share = units[text] == "share"
        asked = effect if is_share else math.log1p(effect)
        finds = {n: smallest_effect(found, n, alpha, POWER) for n in (3, 5, 10)}
        rows.append(
            {
                "measure": text,
                "unit": units[text],
                "sd": found.sd,
                "n_runs": round(found.df + 1),
                "finds": {n: e if is_share else math.expm1(min(e, 50)) for n, e in finds.items()},
                "runs_needed": runs_needed(found, asked, alpha, POWER),
            }
        )
    return rows


def noise_table(rows: Sequence[Mapping[str, Any]], effect: float) -> Table:
    """The noise floor for people."""
    heads = ("measure", "equal runs differ", "3 runs find", "5 find", "10 find")
    table = grid(*heads, f"runs for {100 * effect:.3g}")
    for one in rows:
        word = "points" if one["unit"] == "share" else "%"
        finds = [f"{format_number(100 * one['finds'][n])} {word}" for n in (3, 5, 10)]
        needed = "–" if one["runs_needed"] is None else format_count(one["runs_needed"])
        table.add_row(one["measure"], f"{100 * one['sd']:.2g} {word}", *finds, needed)
    return table


def grid(first: str, *columns: str) -> Table:
    """An empty table without lines; the first column is text, the others are figures."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table
