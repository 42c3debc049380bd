"""A night as text: terminal tables, Markdown for a CI summary, CI annotations and JUnit XML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from loadgen.measure.wording import format_count, format_value
from loadgen.studies.compare.judgement import ComparedMeasure
from loadgen.studies.compare.view import TONES, change, ending_row
from loadgen.studies.compare.view import row as compared_row
from loadgen.studies.nightly.result import NightResult
from loadgen.studies.nightly.verdict import CellVerdict
from reports.ending import MOST_FINDINGS, Ending, EndingRow, NextStep
from reports.run.junit import Case, Suite, junit_xml

if TYPE_CHECKING:
    from rich.console import Group


LEAST_REPEATS = 2
_MOST_CELLS = 6  # in an ending
_SIGNS = {
    "worse": "▼",
    "better": "▲",
    "same": "=",
    "inconclusive": "?",
    "invalid": "!",
    "baseline": "",
}
HEAD = ("measure", "before", "tonight", "change", "interval", "verdict", "p (Holm)", "runs needed")
SENTENCES = {
    "worse": "At least one measure got worse.",
    "better": "At least one measure got better, and none worse.",
    "same": "The same as the nights before, within the margins.",
    "inconclusive": "Tonight's runs are too few or too noisy for a verdict.",
    "invalid": "A cell has no valid run.",
    "baseline": "No earlier night to compare with: tonight starts the baseline.",
}
NOT_ADDED = (
    "Tonight is not added to the baseline. To accept the new level: slobench nightly {file} "
    "--accept"
)
_STYLES = {"better": "bold green", "same": "bold green", "worse": "bold red", "baseline": "bold"}
_ICONS = {
    "worse": "🔴",
    "better": "🟢",
    "same": "🟢",
    "inconclusive": "🟡",
    "invalid": "⚫",
    "baseline": "⚪",
}


def row(measure: ComparedMeasure) -> tuple[str, ...]:
    """The cells of a measure, in the order of `HEAD`."""
    return (*compared_row(measure)[:-1], needs(measure))


def needs(measure: ComparedMeasure) -> str:
    """Repeats per night that detect a change as large as the margin (or `effect`) in 9 of 10
    nights."""
    unit = "points" if measure.unit == "share" else "%"
    if measure.runs_needed is None:
        return "–"
    repeats = max(LEAST_REPEATS, measure.runs_needed)  # the least that a night may have
    return f"{format_count(repeats)} for {100 * measure.effect:.2g} {unit}"


def cell_line(cell: CellVerdict) -> str:
    """`sim_chat_chunked: same, against 9 nights`."""
    if cell.verdict == "baseline":
        return f"{cell.cell}: baseline started, no comparison"
    nights = f"{cell.n_nights} {'night' if cell.n_nights == 1 else 'nights'}"
    relative = ", relative to the control" if cell.controls else ""
    line = f"{cell.cell}: {cell.verdict}"
    if cell.n_nights:
        line += f", against {nights}{relative}"
    if cell.not_excluded and cell.verdict in ("worse", "better", "same", "inconclusive"):
        line += f". Not excluded without a control: {cell.not_excluded}"
    return line


def control_lines(cell: CellVerdict) -> list[str]:
    """The control's own change in the deciding measures; empty without a control."""
    changes = [
        f"{m.measure} {format_value(own.before, m.unit)} → {format_value(own.tonight, m.unit)}"
        f" ({change(own.change, m.unit)})"
        for m in cell.measures
        if m.is_gated and (own := cell.controls.get(m.measure)) is not None
    ]
    if not changes:
        return []
    return [
        f"All changes above are relative to the control, which changed by: {', '.join(changes)}."
    ]


def lines(cells: Sequence[CellVerdict], verdict: str) -> list[str]:
    """The cells behind the night's verdict, with their measures."""
    notes = []
    for cell in cells:
        if cell.verdict != verdict or verdict in ("same", "baseline"):
            continue
        parts = [
            f"{m.measure} {change(m.change, m.unit)}"
            for m in cell.measures
            if m.is_gated and m.verdict == verdict
        ]
        notes.append(f"{cell.cell}: {', '.join(parts) or '; '.join(cell.notes) or cell.verdict}")
    return notes


def changed_lines(cell: CellVerdict) -> list[str]:
    return [f"changed {c.key}: {_or_nothing(c.a)} → {_or_nothing(c.b)}" for c in cell.changes]


def ending(night: NightResult) -> Ending:
    """The night in about ten lines: the verdict, and a line per cell, the worst first."""
    order = ("worse", "invalid", "inconclusive", "better", "same", "baseline")
    cells = sorted(night.cells, key=lambda cell: order.index(cell.verdict))
    notes = [f"{cell.cell}: {note}" for cell in cells for note in cell.notes]
    is_new_level = night.verdict in ("worse", "better")
    return Ending(
        TONES[night.verdict],
        night.verdict.upper(),
        SENTENCES[night.verdict],
        rows=tuple(_ending_row(cell) for cell in cells[:_MOST_CELLS]),
        findings=tuple(notes[:MOST_FINDINGS]),
        next=NextStep(NOT_ADDED.format(file=night.file)) if is_new_level else None,
        n_rows=max(0, len(cells) - _MOST_CELLS),
        n_findings=max(0, len(notes) - MOST_FINDINGS),
        noun="cell",
    )


def _ending_row(cell: CellVerdict) -> EndingRow:
    """`▼ chat  worse: p99(ttft) 40 ms → 52 ms, +30 % [+22, +38]`, or the number of nights."""
    deciding = [m for m in cell.measures if m.is_gated and m.verdict == cell.verdict]
    if cell.verdict in ("worse", "better") and deciding:
        parts = [f"{m.measure} {ending_row(m).value}" for m in deciding]
        return EndingRow(_SIGNS[cell.verdict], cell.cell, f"{cell.verdict}: {'; '.join(parts)}")
    return EndingRow(_SIGNS[cell.verdict], cell.cell, cell_line(cell).partition(": ")[2])


def tables(night: NightResult) -> Group:
    """A rich renderable of at most 100 columns."""
    from rich.console import Group
    from rich.text import Text

    from loadgen.studies.compare.view import grid

    title = f"{night.verdict.upper()}: {SENTENCES[night.verdict]}"
    parts: list[Any] = [Text(title, style=_STYLES.get(night.verdict, "bold yellow"))]
    for cell in night.cells:
        parts.append(Text(f"\n{cell_line(cell)}", style=_STYLES.get(cell.verdict, "bold yellow")))
        if cell.measures:
            table = grid(*HEAD)
            for measured in cell.measures:
                if measured.is_gated:
                    table.add_row(*map(Text, row(measured)))
            parts.append(table)
        notes = [*control_lines(cell), *changed_lines(cell)]
        parts += [Text(line, overflow="fold") for line in notes]
        parts += [Text(f"note: {note}", overflow="fold") for note in cell.notes]
    if night.verdict in ("worse", "better"):
        parts.append(Text(f"\n{NOT_ADDED.format(file=night.file)}", overflow="fold"))
    return Group(*parts)


def markdown(night: NightResult) -> str:
    """For `$GITHUB_STEP_SUMMARY`: the verdict, a line per cell, and the measures that decide."""
    verdict, cells = night.verdict, night.cells
    lines = [f"## {_ICONS[verdict]} slobench nightly: {verdict}", "", SENTENCES[verdict], ""]
    lines += ["| cell | verdict | nights in baseline |", "|---|---|--:|"]
    lines += [
        f"| {_cell(cell.cell)} | {_ICONS[cell.verdict]} {cell.verdict} | {cell.n_nights} |"
        for cell in cells
    ]
    for cell in cells:
        gated = [measured for measured in cell.measures if measured.is_gated]
        if not gated and not cell.notes:
            continue
        lines += ["", f"### {_cell(cell.cell)}", ""]
        if gated:
            lines += [f"| {' | '.join(HEAD)} |", "|---|--:|--:|--:|--:|---|--:|--:|"]
            lines += [f"| {' | '.join(map(_cell, row(measured)))} |" for measured in gated]
            lines.append("")
        notes = [*control_lines(cell), *changed_lines(cell), *cell.notes]
        lines += [f"- {_cell(line)}" for line in notes]
    if verdict in ("worse", "better"):
        lines += ["", _cell(NOT_ADDED.format(file=night.file))]
    lines += [
        "",
        f"Each confidence bound holds with {night.confidence:.0%}. p: Holm's "
        "correction over all deciding measures of all cells.",
    ]
    return "\n".join(lines) + "\n"


def github_lines(cells: Sequence[CellVerdict]) -> Iterator[str]:
    """GitHub's workflow commands: an error per worse measure and per invalid cell, a warning per
    inconclusive cell, a notice per new baseline."""
    for cell in cells:
        for m in cell.measures:
            if not m.is_gated or m.verdict != "worse":
                continue
            message = f"{cell.cell}: {m.measure} is worse, {change(m.change, m.unit)}"
            yield f"::error title=slobench nightly::{_escaped(message)}"
        if cell.verdict in ("inconclusive", "invalid"):
            kind = "error" if cell.verdict == "invalid" else "warning"
            message = " ".join([f"{cell.cell}: {cell.verdict}.", *cell.notes])
            yield f"::{kind} title=slobench nightly::{_escaped(message)}"
        if cell.verdict == "baseline":
            yield f"::notice title=slobench nightly::{_escaped(cell_line(cell))}"


def _escaped(text: str) -> str:
    """Source: GitHub's @actions/core, escapeData."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _cell(text: str) -> str:
    """Text escaped for Markdown: neither markup nor the end of a table cell."""
    flat = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", flat)


def _or_nothing(value: Any) -> Any:
    return "nothing" if value is None else value


def junit(cells: Sequence[CellVerdict]) -> str:
    """A night as JUnit XML: a suite per cell, a case per deciding measure. Worse is a failure, an
    invalid cell an error; inconclusive measures and new baselines are skipped."""
    return junit_xml("slobench nightly", map(_suite, cells))


def _suite(cell: CellVerdict) -> Suite:
    cases = [_case(measured) for measured in cell.measures if measured.is_gated]
    if not cases:
        outcome: Literal["error", "skipped"] = "error" if cell.verdict == "invalid" else "skipped"
        cases = [Case("comparison", outcome, " ".join([cell_line(cell), *cell.notes]))]
    notes = [*control_lines(cell), *changed_lines(cell), *cell.notes]
    return Suite(cell.cell, cases, "\n".join([cell_line(cell), *notes]))


def _case(measured: ComparedMeasure) -> Case:
    text = ", ".join(
        f"{name} {text}" for name, text in zip(HEAD[1:], row(measured)[1:], strict=True)
    )
    if measured.verdict == "worse":
        return Case(measured.measure, "failure", text, "worse")
    is_open = measured.verdict == "inconclusive"
    return Case(measured.measure, "skipped" if is_open else "passed", text)
