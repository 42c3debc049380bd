"""A night in words: for the terminal, as Markdown for a CI summary, and as CI annotations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from loadgen.measure.comparison.judgement import ComparedMeasure
from loadgen.measure.nights.night_verdict import CellVerdict
from loadgen.measure.wording import format_count, format_value
from reports.compare.view import change
from reports.compare.view import row as compared_row

if TYPE_CHECKING:
    from rich.console import Group


LEAST_REPEATS = 2
HEAD = ("measure", "before", "tonight", "change", "interval", "verdict", "p (Holm)", "needs")
SENTENCES = {
    "worse": "Something got worse.",
    "better": "Something got better, and nothing worse.",
    "same": "The same as the nights before, to within the margins.",
    "inconclusive": "Tonight's runs cannot tell.",
    "invalid": "A cell has no run that can be trusted.",
    "baseline": "Nothing to compare with yet: the baseline was made.",
}
WAITS = (
    "It does not become part of the baseline; if this is the new level: slobench nightly {file} "
    "--accept"
)
_STYLES = {"better": "bold green", "same": "bold green", "worse": "bold red", "baseline": "bold"}
_ICONS = {"worse": "🔴", "better": "🟢", "same": "🟢", "inconclusive": "🟡", "invalid": "⚫",
          "baseline": "⚪"}  # fmt: skip


def row(one: ComparedMeasure) -> tuple[str, ...]:
    """The cells of one measure, in the order of `HEAD`."""
    return (*compared_row(one)[:-1], needs(one))


def needs(one: ComparedMeasure) -> str:
    """Repeats a night that find a change as large as the margin (or as asked for) in 9 of 10."""
    unit = "points" if one.unit == "share" else "%"
    if one.runs_needed is None:
        return "–"
    repeats = max(LEAST_REPEATS, one.runs_needed)  # fewer, a night cannot have
    return f"{format_count(repeats)} for {100 * one.effect:.2g} {unit}"


def cell_line(one: CellVerdict) -> str:
    """`sim_chat_chunked: same, against 9 nights`."""
    if one.verdict == "baseline":
        return f"{one.cell}: baseline made, nothing compared"
    nights = f"{one.n_nights} {'night' if one.n_nights == 1 else 'nights'}"
    relative = ", relative to the control" if one.controls else ""
    return f"{one.cell}: {one.verdict}" + (f", against {nights}{relative}" if one.n_nights else "")


def control_lines(one: CellVerdict) -> list[str]:
    """What the control itself did, for the deciding measures; none where there is no control."""
    told = [
        f"{row.measure} {format_value(of.before, row.unit)} → {format_value(of.tonight, row.unit)}"
        f" ({change(of.change, row.unit)})"
        for row in one.measures
        if row.is_gated and (of := one.controls.get(row.measure)) is not None
    ]
    if not told:
        return []
    return [f"The control itself, which every change above is relative to: {', '.join(told)}."]


def lines(cells: Sequence[CellVerdict], verdict: str) -> list[str]:
    """The cells that make the night what it is, with the measures that do."""
    told = []
    for one in cells:
        if one.verdict != verdict or verdict in ("same", "baseline"):
            continue
        parts = [
            f"{m.measure} {change(m.change, m.unit)}"
            for m in one.measures
            if m.is_gated and m.verdict == verdict
        ]
        told.append(f"{one.cell}: {', '.join(parts) or '; '.join(one.notes) or one.verdict}")
    return told


def changed_lines(one: CellVerdict) -> list[str]:
    return [f"changed {c.key}: {_or_nothing(c.a)} → {_or_nothing(c.b)}" for c in one.changes]


def tables(verdict: str, cells: Sequence[CellVerdict], facts: Mapping[str, Any]) -> Group:
    """One rich renderable of at most 100 columns."""
    from rich.console import Group
    from rich.text import Text

    from reports.compare.view import grid

    title = f"{verdict.upper()}: {SENTENCES[verdict]}"
    parts: list[Any] = [Text(title, style=_STYLES.get(verdict, "bold yellow"))]
    for one in cells:
        parts.append(Text(f"\n{cell_line(one)}", style=_STYLES.get(one.verdict, "bold yellow")))
        if one.measures:
            table = grid(*HEAD)
            for measured in one.measures:
                if measured.is_gated:
                    table.add_row(*map(Text, row(measured)))
            parts.append(table)
        told = [*control_lines(one), *changed_lines(one)]
        parts += [Text(line, overflow="fold") for line in told]
        parts += [Text(f"note: {note}", overflow="fold") for note in one.notes]
    if verdict in ("worse", "better"):
        parts.append(Text(f"\n{WAITS.format(file=facts['file'])}", overflow="fold"))
    return Group(*parts)


def markdown(verdict: str, cells: Sequence[CellVerdict], facts: Mapping[str, Any]) -> str:
    """For `$GITHUB_STEP_SUMMARY`: the verdict, a line per cell, and the measures that decide."""
    lines = [f"## {_ICONS[verdict]} slobench nightly: {verdict}", "", SENTENCES[verdict], ""]
    lines += ["| cell | verdict | nights before |", "|---|---|--:|"]
    lines += [
        f"| {_cell(one.cell)} | {_ICONS[one.verdict]} {one.verdict} | {one.n_nights} |"
        for one in cells
    ]
    for one in cells:
        gated = [measured for measured in one.measures if measured.is_gated]
        if not gated and not one.notes:
            continue
        lines += ["", f"### {_cell(one.cell)}", ""]
        if gated:
            lines += [f"| {' | '.join(HEAD)} |", "|---|--:|--:|--:|--:|---|--:|--:|"]
            lines += [f"| {' | '.join(map(_cell, row(measured)))} |" for measured in gated]
            lines.append("")
        told = [*control_lines(one), *changed_lines(one), *one.notes]
        lines += [f"- {_cell(line)}" for line in told]
    if verdict in ("worse", "better"):
        lines += ["", _cell(WAITS.format(file=facts["file"]))]
    lines += ["", f"Each end of an interval is good at {facts['confidence']:.0%}. p: Holm's "
              "correction over all deciding measures of all cells."]  # fmt: skip
    return "\n".join(lines) + "\n"


def github_lines(cells: Sequence[CellVerdict]) -> Iterator[str]:
    """GitHub's workflow commands: an error for what is worse, a warning for what is not known."""
    for one in cells:
        worse = [measured for measured in one.measures
                 if measured.is_gated and measured.verdict == "worse"]  # fmt: skip
        for measured in worse:
            said = (
                f"{one.cell}: {measured.measure} is worse, {change(measured.change, measured.unit)}"
            )
            yield f"::error title=slobench nightly::{_escaped(said)}"
        if one.verdict in ("inconclusive", "invalid"):
            said = " ".join([f"{one.cell}: {one.verdict}.", *one.notes])
            yield f"::warning title=slobench nightly::{_escaped(said)}"
        if one.verdict == "baseline":
            yield f"::notice title=slobench nightly::{_escaped(cell_line(one))}"


def _escaped(text: str) -> str:
    """Source: GitHub's @actions/core, escapeData."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _cell(text: str) -> str:
    """Text in Markdown, unable to be markup or to end a table's cell."""
    flat = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", flat)


def _or_nothing(value: Any) -> Any:
    return "nothing" if value is None else value


_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0 §2.2


def junit(cells: Sequence[CellVerdict]) -> str:
    """Worse is a failure, an invalid cell an error; inconclusive, and a baseline just made, are
    skipped: nothing was found out.

    Source: the schema that Jenkins' xunit plugin publishes (junit-10.xsd).
    """
    root = ET.Element("testsuites", name="slobench nightly")
    for one in cells:
        suite = ET.SubElement(root, "testsuite", name=_clean(one.cell))
        gated = [measured for measured in one.measures if measured.is_gated]
        for measured in gated:
            _case(suite, one, measured)
        if not gated:
            _case_without_measures(suite, one)
        told = [*control_lines(one), *changed_lines(one), *one.notes]
        said = "\n".join([cell_line(one), *told])
        ET.SubElement(suite, "system-out").text = _clean(said)
        cases = suite.findall("testcase")
        suite.set("tests", str(len(cases)))
        for word in ("failure", "error", "skipped"):
            n = sum(case.find(word) is not None for case in cases)
            suite.set({"failure": "failures", "error": "errors"}.get(word, word), str(n))
    ET.indent(root)
    text = ET.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _case(suite: ET.Element, one: CellVerdict, measured: ComparedMeasure) -> None:
    case = ET.SubElement(suite, "testcase", classname=_clean(one.cell), name=measured.measure)
    told = ", ".join(
        f"{name} {text}" for name, text in zip(HEAD[1:], row(measured)[1:], strict=True)
    )
    if measured.verdict == "worse":
        ET.SubElement(case, "failure", type="worse", message=_clean(told))
    elif measured.verdict == "inconclusive":
        ET.SubElement(case, "skipped", message=_clean(told))
    else:
        ET.SubElement(case, "system-out").text = _clean(told)


def _case_without_measures(suite: ET.Element, one: CellVerdict) -> None:
    case = ET.SubElement(suite, "testcase", classname=_clean(one.cell), name="comparison")
    is_invalid = one.verdict == "invalid"
    message = _clean(" ".join([cell_line(one), *one.notes]))
    ET.SubElement(case, "error" if is_invalid else "skipped", message=message)


def _clean(text: str) -> str:
    return _UNPRINTABLE.sub("\ufffd", text)
