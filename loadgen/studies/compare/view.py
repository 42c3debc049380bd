"""Tables and sentences of a comparison: verdict, a row per measure, changed settings, noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loadgen.measure.wording import format_count, format_number, format_value
from loadgen.studies.compare.contrast import Noise, runs_needed, smallest_effect
from loadgen.studies.compare.judgement import POWER, ComparedMeasure
from loadgen.studies.compare.numbers import Comparison
from reports.ending import MOST_FINDINGS, Ending, EndingRow, NextStep, Tone

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

MARKS = {"better": "▲ better", "same": "= same", "worse": "▼ worse", "inconclusive": "? uncertain"}
_STYLES = {"better": "bold green", "same": "bold green", "worse": "bold red"}
TONES: Mapping[str, Tone] = {
    "better": "met",
    "same": "met",
    "worse": "missed",
    "inconclusive": "unknown",
    "invalid": "invalid",
    "baseline": "unknown",
}
_MOST_MEASURES = 4
_AS_FACTOR = 2.0  # changes from here on (three times as much) are shown as factors
HEAD = ("measure", "A", "B", "change", "interval", "verdict", "p (Holm)", "runs needed")
_SENTENCES = {
    "worse": "B is worse than A.",
    "better": "B is better than A.",
    "same": "B and A are the same within the margins.",
    "inconclusive": "The runs are too few or too noisy for a verdict.",
    "invalid": "One side has no valid run.",
}


def sentence(comparison: Comparison) -> str:
    """The verdict as a sentence."""
    if comparison.verdict == "inconclusive" and len(comparison.a) == len(comparison.b) == 1:
        return "One run a side does not show how much equal runs differ."
    return _SENTENCES[comparison.verdict]


def lines(comparison: Comparison) -> list[str]:
    """The measures behind the verdict, with their changes."""
    deciding = [m for m in comparison.measures if m.is_gated and m.verdict == comparison.verdict]
    if comparison.verdict == "same" and deciding:
        return [f"The same: {', '.join(f'{m.measure} {within(m)}' for m in deciding)}."]
    return [
        f"{m.measure}: {format_value(m.a, m.unit)} → {format_value(m.b, m.unit)},"
        f" {change(m.change, m.unit)} {interval(m)}".rstrip()
        for m in deciding
    ]


def within(measure: ComparedMeasure) -> str:
    """`within ±2.1 %`: the margin."""
    unit = "points" if measure.unit == "share" else "%"
    return f"within ±{100 * measure.margin:.2g} {unit}"


def next_steps(comparison: Comparison) -> list[str]:
    """The steps that follow from the verdict."""
    if comparison.verdict == "invalid":
        return ["Fix the cause of the invalid runs (see the notes above) and measure again."]
    if comparison.verdict in ("worse", "better"):
        n = len(comparison.changes)
        return [
            f"{n} {'setting differs' if n == 1 else 'settings differ'} between A and B; see below."
            if n
            else "No recorded setting differs between A and B: check the machine, and changes to"
            " the server that its labels do not record."
        ]
    if comparison.verdict != "inconclusive":
        return []
    uncertain = [m for m in comparison.measures if m.is_gated and m.verdict == "inconclusive"]
    if not uncertain:
        return []
    if all(m.runs_needed is None for m in uncertain):
        return [
            "Measure three or more runs per side, in turns (slobench compare SCENARIO --target A"
            " --target B does)."
        ]
    most = max(uncertain, key=lambda m: m.runs_needed or 0)
    return [f"Measure more runs per side, in turns: {most.measure} needs {needs(most)}."]


def sides_line(comparison: Comparison) -> str:
    """Number of runs per side, their pairing and the confidence level."""
    pairing = {
        "one schedule": "all with one schedule",
        "by schedule": "paired by seed",
        "none": "unpaired (different schedules)",
    }[comparison.pairing]
    n_a, n_b = len(comparison.a), len(comparison.b)
    level = f"{comparison.confidence:.0%} confidence per bound"
    return f"A: {_runs(n_a)}, B: {_runs(n_b)}, {pairing}; {level}"


def _runs(n: int) -> str:
    return f"{n} run" if n == 1 else f"{n} runs"


def row(measure: ComparedMeasure) -> tuple[str, ...]:
    """The cells of measure measure, in the order of `HEAD`."""
    return (
        measure.measure if measure.is_gated else f"({measure.measure})",
        format_value(measure.a, measure.unit),
        format_value(measure.b, measure.unit),
        change(measure.change, measure.unit),
        interval(measure) or "–",
        mark(measure),
        chance(measure.p_adjusted),
        needs(measure),
    )


def mark(measure: ComparedMeasure) -> str:
    """The verdict of a measure with its sign."""
    if measure.is_set_aside and measure.verdict == "inconclusive":
        return "– not decidable"
    return MARKS[measure.verdict]


def change(value: float | None, unit: str) -> str:
    """`+5.2 %`, `×4.1` from a threefold value on, `from 0`, or `+0.3 points` for a share."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "from 0"
    if unit == "share":
        return f"{_signed(value)} points"
    return _times(value) if value >= _AS_FACTOR else f"{_signed(value)} %"


def chance(p: float) -> str:
    """A p-value; `<0.001` where three digits would show 0; `–` for NaN."""
    if math.isnan(p):
        return "–"
    return "<0.001" if p < 0.0005 else f"{p:.3f}"


def interval(measure: ComparedMeasure) -> str:
    if measure.low is None or measure.high is None:
        return ""
    if measure.unit != "share" and measure.change >= _AS_FACTOR:
        return f"[{_times(measure.low)}, {_times(measure.high)}]"
    ends = (
        _times(end) if measure.unit != "share" and end >= _AS_FACTOR else _signed(end)
        for end in (measure.low, measure.high)
    )
    return f"[{', '.join(ends)}]"


def _times(change: float) -> str:
    """The factor B / A of a change: `×4.1`."""
    return f"×{format_number(float(f'{1 + change:.2g}'))}"


def _signed(share: float) -> str:
    """In per cent, with its sign: `+5.2`."""
    digits = format_number(float(f"{abs(100 * share):.2g}"))
    return f"{'-' if share < 0 else '+'}{digits}"


def needs(measure: ComparedMeasure) -> str:
    """Runs per side that detect a change as large as the margin (or as `--effect`)."""
    if measure.runs_needed is None:
        return "–"
    unit = "points" if measure.unit == "share" else "%"
    return f"{format_count(measure.runs_needed)} for {100 * measure.effect:.2g} {unit}"


def ending(comparison: Comparison, *, has_page: bool = False) -> Ending:
    """The comparison in about ten lines: the verdict, and a line per deciding measure, the worst
    first. `has_page`: its page was written."""
    order = ("worse", "inconclusive", "better", "same")
    judged = [measure for measure in comparison.measures if measure.is_gated]
    judged.sort(
        key=lambda m: (m.is_set_aside and m.verdict == "inconclusive", order.index(m.verdict))
    )
    findings = [_first_sentence(note) for note in comparison.notes]
    steps = next_steps(comparison)
    if comparison.changes and comparison.verdict in ("worse", "better"):
        where = "open the page" if has_page else "add --html compare.html"
        steps = [f"See the distributions of both sides: {where}"]
    return Ending(
        TONES[comparison.verdict],
        comparison.verdict.upper(),
        sentence(comparison),
        rows=tuple(ending_row(measure) for measure in judged[:_MOST_MEASURES]),
        facts=(("sides", sides_line(comparison)), ("changed", _changed(comparison))),
        findings=tuple(findings[:MOST_FINDINGS]),
        next=NextStep(steps[0]) if steps else None,
        n_rows=max(0, len(judged) - _MOST_MEASURES),
        n_findings=max(0, len(findings) - MOST_FINDINGS),
        noun="measure",
    )


def ending_row(measure: ComparedMeasure) -> EndingRow:
    """`▼ p99(ttft)  40 ms → 52 ms, +30 % [+22, +38]`."""
    sign, _, word = mark(measure).partition(" ")
    values = f"{format_value(measure.a, measure.unit)} → {format_value(measure.b, measure.unit)}"
    sides = {"A": measure.a, "B": measure.b}
    if absent := [side for side, value in sides.items() if math.isnan(value)]:
        return EndingRow(sign, measure.measure, f"{values}: no value in {' and '.join(absent)}")
    facts = f"{values}, {change(measure.change, measure.unit)} {interval(measure)}".rstrip()
    if measure.verdict in ("same", "inconclusive"):
        facts += f" ({within(measure)})" if measure.verdict == "same" else f": {word}"
    return EndingRow(sign, measure.measure, facts)


def _changed(comparison: Comparison) -> str:
    """The first setting that differs between the sides, and the number of the others."""
    first, *others = changed_lines(comparison)
    more = f"; + {len(others)} more: --full" if others else ""
    return f"{first.removeprefix('changed').lstrip(': ')}{more}"


def _first_sentence(note: str) -> str:
    first, stop, _ = note.partition(". ")
    return f"{first}." if stop else note


def table(comparison: Comparison) -> Group:
    """A rich renderable of at most 100 columns."""
    from rich.console import Group
    from rich.text import Text

    style = _STYLES.get(comparison.verdict, "bold yellow")
    title = Text(f"{comparison.verdict.upper()}: {sentence(comparison)}", style=style)
    parts: list[Text | Table] = [title, Text(f"  {sides_line(comparison)}")]
    if comparison.measures:
        rows = grid(*HEAD)
        for measure in comparison.measures:
            rows.add_row(*map(Text, row(measure)))
        parts.append(rows)
        parts.append(Text("  (measures in parentheses do not count towards the verdict)"))
    parts += [Text(line, overflow="fold") for line in changed_lines(comparison)]
    parts += [Text(f"note: {note}", overflow="fold") for note in comparison.notes]
    return Group(*parts)


def changed_lines(comparison: Comparison) -> list[str]:
    """`changed target.labels.version: 0.9 → 0.10`, a line per key."""
    if not comparison.changes:
        return ["changed: no recorded setting"]
    return [
        f"changed {c.key}: {'nothing' if c.a is None else c.a} → "
        f"{'nothing' if c.b is None else c.b}"
        for c in comparison.changes
    ]


def noise_rows(
    noise: Mapping[str, Noise], units: Mapping[str, str], effect: float, alpha: float
) -> list[dict[str, Any]]:
    """Per measure: the variation between equal runs, the smallest change that 3, 5 and 10 runs per
    side detect with 90 % power, and the runs needed for `effect`."""
    rows = []
    for text, spread in noise.items():
        is_share = units[text] == "share"
        effect_size = effect if is_share else math.log1p(effect)
        finds = {n: smallest_effect(spread, n, alpha, POWER) for n in (3, 5, 10)}
        rows.append(
            {
                "measure": text,
                "unit": units[text],
                "sd": spread.sd,
                "n_runs": round(spread.df + 1),
                "finds": {n: e if is_share else math.expm1(min(e, 50)) for n, e in finds.items()},
                "runs_needed": runs_needed(spread, effect_size, alpha, POWER),
            }
        )
    return rows


def noise_table(rows: Sequence[Mapping[str, Any]], effect: float) -> Table:
    """The noise floor, from `noise_rows`."""
    heads = ("measure", "sd between runs", "3 runs detect", "5 detect", "10 detect")
    table = grid(*heads, f"runs for {100 * effect:.3g}")
    for noise_row in rows:
        word = "points" if noise_row["unit"] == "share" else "%"
        finds = [f"{format_number(100 * noise_row['finds'][n])} {word}" for n in (3, 5, 10)]
        needed = "–" if noise_row["runs_needed"] is None else format_count(noise_row["runs_needed"])
        table.add_row(noise_row["measure"], f"{100 * noise_row['sd']:.2g} {word}", *finds, needed)
    return table


def grid(first: str, *columns: str) -> Table:
    """An empty table without lines: a column for text, the others for numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table
