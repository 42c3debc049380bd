"""Tables and sentences of a sweep, shared by the page and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.measure.catalog import METRICS, Unit
from loadgen.measure.slo import parse_measure
from loadgen.studies.modes.view import SIMULATED, value_text
from loadgen.studies.sweep.result import CellRow, SweepResult
from loadgen.units import format_duration
from reports.ending import MOST_FINDINGS, Ending, EndingRow, NextStep, Tone

COLUMNS = (
    *("p50(ttft)", "p99(ttft)", "p50(ttfat)", "p99(ttfat)", "p99(tpot)", "p99(itl)"),
    *("goodput", "attainment"),
)
"""Measures in the page's table, after those of the trade-off."""
_LOADS = {
    "arrivals.rate": "req/s",
    **dict.fromkeys(("arrivals.users", "users", "concurrency"), "users"),
}


def tables(result: SweepResult) -> Group:
    """The sweep in a terminal of 100 columns."""
    names = factor_names(result)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    for name in ("n", benefit_title(result), result.cost, "goodput", "met", "verdict", ""):
        table.add_column(name, justify="right", overflow="fold")
    for row in result.rows:
        table.add_row(
            *row.factors.values(),
            str(row.n),
            benefit_text(row),
            cost_text(row, result),
            measure_text(row, "goodput"),
            measure_text(row, "attainment"),
            verdict_text(row),
            "front" if row.is_front else "",
            style="" if row.is_front else "dim",
        )
    parts: list[RenderableType] = [Text(heading(result), style="bold"), table]
    if line := answer(result):
        parts.insert(0, Text(line.text, style="bold green" if line.is_bracketed else "bold yellow"))
    parts += [Text(f"note: {note}", style="yellow") for note in notes(result)]
    return Group(*parts)


def ending(result: SweepResult) -> Ending:
    """The sweep in about ten lines: how many cells met the SLO, a line per cell, where the SLO is
    met up to, and the best cell."""
    headline, sentences = conclusion(result)
    shown = _shown_rows(result)
    findings = notes(result)
    is_untrusted = result.n_untrusted > 0
    tone: Tone = "invalid" if is_untrusted else "unknown"
    if not is_untrusted and any(row.verdicts for row in result.rows):
        met = [row for row in result.rows if set(row.verdicts) == {"met"}]
        tone = "met" if len(met) == len(result.rows) else "unknown" if met else "missed"
    runs = f"{result.n_untrusted} of {result.n_done} runs are INVALID"
    return Ending(
        tone,
        "NOT TO BE TRUSTED" if is_untrusted else "",
        f"{runs}; {headline}" if is_untrusted else headline,
        rows=tuple(_ending_row(row, result) for row in shown),
        facts=(("sweep", heading(result)), *(("found", text) for text in sentences[:1])),
        findings=tuple(findings[:MOST_FINDINGS]),
        next=_next(result),
        n_rows=len(result.rows) - len(shown),
        n_findings=max(0, len(findings) - MOST_FINDINGS),
        noun="cell",
    )


_MOST_CELLS = 5


def _shown_rows(result: SweepResult) -> Sequence[CellRow]:
    """The cells of an ending: all, or those that meet the SLO with the most throughput, in the
    order of the sweep."""
    if len(result.rows) <= _MOST_CELLS:
        return result.rows

    def rank(row: CellRow) -> tuple[bool, bool, float]:
        return set(row.verdicts) != {"met"}, not row.is_front, -(row.benefit.value or 0.0)

    best = {row.cell for row in sorted(result.rows, key=rank)[:_MOST_CELLS]}
    return [row for row in result.rows if row.cell in best]


_MARKS = {"met": "✓", "missed": "✗"}


def _ending_row(row: CellRow, result: SweepResult) -> EndingRow:
    goodput = value_text(row.measures["goodput"], "per_s", is_short=True)
    cost = "∞" if row.cost_is_infinite else value_text(row.cost, result.cost_unit, is_short=True)
    benefit = value_text(row.benefit, "per_s", is_short=True)
    mark = _MARKS.get(next(iter(row.verdicts)), "?") if len(row.verdicts) == 1 else "?"
    facts = (
        f"{verdict_text(row)}: goodput {goodput}/s",
        f"{result.cost} {cost}",
        f"{benefit} {benefit_title(result)}",
    )
    return EndingRow(
        "" if row.failures and not row.n else mark, setting(row, result), ", ".join(facts)
    )


def _next(result: SweepResult) -> NextStep | None:
    """A search between the last load that met the SLO and the first that missed it, where the sweep
    has a single series over rates."""
    if result.along != "arrivals.rate" or len({row.series for row in result.rows}) != 1:
        return None
    rows = sorted((r for r in result.rows if r.along is not None), key=lambda row: row.along or 0.0)
    met = [row.factors[result.along] for row in rows if set(row.verdicts) == {"met"}]
    missed = [row.factors[result.along] for row in rows if "missed" in row.verdicts]
    if met and not missed:
        return NextStep(f"Every rate met the SLO: sweep higher rates, above {met[-1]}")
    if missed and not met and len(missed) == len(rows):
        return NextStep(f"No rate met the SLO: sweep lower rates, below {missed[0]}")
    if not met or not missed:
        return None
    over = [row for row in rows if set(row.verdicts) == {"missed"}]
    if not over:
        return NextStep(
            f"{missed[0]} is met and missed: sweep higher rates, too, above {missed[-1]}"
        )
    between = f"--between {met[-1]}:{over[0].factors[result.along]}"
    return NextStep(
        f"Find the highest rate between them: slobench capacity with the same target, traffic and "
        f"SLO, {between}"
    )


def heading(result: SweepResult) -> str:
    """Scenario, targets, varied keys and number of runs, as a line."""
    keys = " and ".join(axis.key for axis in result.axes)
    where = ", ".join(result.targets)
    runs = f"{result.repeats} runs" if result.repeats > 1 else "one run"
    return f"{result.scenario} against {where}: {keys} varied, {runs} a cell"


def factor_names(result: SweepResult) -> list[str]:
    """The last part of each swept key (`rate` of `arrivals.rate`), or all of it where two keys end
    alike."""
    keys = [axis.key for axis in result.axes]
    last = [key.rpartition(".")[2] for key in keys]
    return [name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)]


def setting(row: CellRow, result: SweepResult) -> str:
    """The values of a cell: `rate 4/s, mode chunked`."""
    values = row.factors.values()
    return ", ".join(f"{name} {v}" for name, v in zip(factor_names(result), values, strict=True))


def conclusion(result: SweepResult) -> tuple[str, list[str]]:
    """The result of a sweep: a headline, and sentences with the best cells."""
    rows = result.rows
    judged = [row for row in rows if {"met", "missed"} & set(row.verdicts)]
    met = [row for row in judged if set(row.verdicts) == {"met"}]
    sentences = []
    if line := answer(result):
        headline = line.text
        if best := _largest(met, lambda row: row.measures["goodput"].value):
            value = measure_text(best, "goodput")
            sentences.append(f"Most goodput of the loads that met the SLO: {value} requests/s.")
    elif judged:
        headline = f"{len(met)} of {len(rows)} cells met the SLO in every run"
        sentences += _limits(result, met) if result.along else []
        if best := _largest(met, lambda row: row.measures["goodput"].value):
            value = measure_text(best, "goodput")
            sentences.append(
                f"Most goodput among them: {setting(best, result)}, {value} requests/s."
            )
    else:
        n_front = sum(row.is_front for row in rows)
        headline = f"{n_front} of {len(rows)} cells are on the Pareto front"
    if best := _largest(rows, lambda row: row.benefit.value):
        cost = f"at {result.cost} {cost_text(best, result)}"
        sentences.append(
            f"Most {benefit_title(result)} of all cells: {setting(best, result)}, "
            f"{benefit_text(best)} {cost}."
        )
    return headline, sentences


class Answer(NamedTuple):
    """The loads that met the SLO, as a line; whether a load above them missed it."""

    text: str
    is_bracketed: bool


def answer(result: SweepResult) -> Answer | None:
    """The answer of a sweep over rates or users alone with an SLO: `between 40 and 66 req/s;
    promise 40`, or the reason why there is none. Cells with a run that cannot be trusted do not
    count. None for another sweep."""
    unit = _LOADS.get(result.along)
    rows = [row for row in result.rows if row.along is not None]
    if unit is None or len(result.axes) > 1 or len(rows) < 2:
        return None
    trusted = sorted((r for r in rows if not r.n_untrusted), key=lambda row: row.along or 0.0)
    judged = [row for row in trusted if {"met", "missed"} & set(row.verdicts)]
    reason = next(
        (run.reasons[0] for row in rows for run in row.runs if not run.is_trusted and run.reasons),
        "",
    )
    if not judged:
        if not result.n_untrusted:
            return None
        because = reason or "the load generator was the limit"
        return Answer(f"the sweep is not to be trusted because {because}", False)
    n_met = next((k for k, row in enumerate(judged) if set(row.verdicts) != {"met"}), len(judged))
    loads = [f"{row.along:.6g}" for row in judged]
    if n_met == 0:
        return Answer(f"below {loads[0]} {unit}: the lowest load missed the SLO", False)
    if n_met < len(judged):
        low, high = loads[n_met - 1], loads[n_met]
        return Answer(f"between {low} and {high} {unit}; promise {low}", True)
    text = f"at least {loads[-1]} {unit}: every load met the SLO"
    if result.n_untrusted:
        are = "is" if result.n_untrusted == 1 else "are"
        text = f"at least {loads[-1]} {unit}; {result.n_untrusted} of the runs {are} not to be "
        text += f"trusted: {reason}" if reason else "trusted"
    return Answer(text, False)


def _limits(result: SweepResult, met: Sequence[CellRow]) -> list[str]:
    """Per series, the highest load up to which every cell met the SLO, and the next load."""
    key, sentences = result.along, []
    for series in dict.fromkeys(row.series for row in result.rows):
        rows = [r for r in result.rows if r.series == series and r.along is not None]
        rows.sort(key=lambda row: row.along or 0.0)
        n_met = next((k for k, row in enumerate(rows) if row not in met), len(rows))
        loads = [row.factors[key] for row in rows]
        text = f"met up to {key} {loads[n_met - 1]}" if n_met else "met at no load"
        if n_met < len(rows):
            text += f", {verdict_text(rows[n_met])} at {loads[n_met]}"
        sentences.append(f"{series or 'SLO'}: {text}.")
    return sentences


def _largest(rows: Sequence[CellRow], value: Callable[[CellRow], float | None]) -> CellRow | None:
    """The row of the largest value; None where no row has a value."""
    return max(
        (row for row in rows if value(row) is not None), key=lambda r: value(r) or 0.0, default=None
    )


def notes(result: SweepResult) -> list[str]:
    """Warnings on how far the numbers can be trusted."""
    texts, rows = [], result.rows
    n_left = result.n_runs - result.n_done - result.n_failed
    if n_left:
        texts.append(f"only {result.n_done} of {result.n_runs} runs are finished")
    for row in rows:
        texts += [f"{row.cell}: no run: {failure.reason}" for failure in row.failures]
    if result.n_untrusted:
        texts.append(f"{result.n_untrusted} runs cannot be trusted; see their reports")
    texts += [f"{row.cell}: no valid run" for row in rows if row.n and row.n == row.n_untrusted]
    if any(row.n and not row.gpus_are_declared for row in rows):
        texts.append(
            "per GPU: the target's labels have no number of GPUs, so it counts as 1; add "
            "labels: {gpus: …} to the target file"
        )
    if result.repeats == 1:
        texts.append(
            "one run per cell: throughput has no confidence interval, chance decides near ties"
        )
    if result.targets == ["sim"]:
        texts.append(SIMULATED)
    return texts


def benefit_title(result: SweepResult) -> str:
    words = {"output_tokens_per_s": "tokens/s", "requests_per_s": "requests/s"}
    name = parse_measure(result.benefit)[0].name
    return f"{words.get(name, METRICS[name].title)} per GPU"


def benefit_text(row: CellRow) -> str:
    return value_text(row.benefit, "per_s")


def cost_text(row: CellRow, result: SweepResult) -> str:
    return "∞" if row.cost_is_infinite else value_text(row.cost, result.cost_unit)


def measure_text(row: CellRow, text: str) -> str:
    unit: Unit = parse_measure(text)[0].unit
    return value_text(row.measures[text], unit)


def verdict_text(row: CellRow) -> str:
    """`met`, or the number of runs by verdict: `2 met, 1 missed`."""
    words = {name.replace("_", " "): n for name, n in row.verdicts.items()}
    if row.failures and not words:
        return "failed"
    text = next(iter(words)) if len(words) == 1 else ", ".join(f"{n} {w}" for w, n in words.items())
    return f"{text} (!)" if row.n_untrusted else text or "–"


def standing_text(row: CellRow) -> str:
    if row.is_front:
        return "front"
    return "–" if row.beaten_by is None else f"beaten by {row.beaten_by}"


def shown_columns(result: SweepResult) -> Sequence[str]:
    """The measures of the page's table without the cost, which has a column before them, and
    without TTFAT where it is TTFT in every cell: no answer has reasoning."""
    has_reasoning = any(
        row.measures[f"{aggregate}(ttfat)"].value != row.measures[f"{aggregate}(ttft)"].value
        for row in result.rows
        for aggregate in ("p50", "p99")
    )
    return [
        text for text in COLUMNS if text != result.cost and (has_reasoning or "(ttfat)" not in text)
    ]


def forecast_table(facts: Mapping[str, Any]) -> Group:
    """The planned runs of a sweep, and the time they take."""
    turns: Sequence[Mapping[str, Any]] = facts["turns"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for name in ("turn", "cell", "repeat", ""):
        table.add_column(name, overflow="fold", justify="right" if name == "turn" else "left")
    for k, turn in enumerate(turns, start=1):
        done = "measured already" if turn["is_done"] else ""
        table.add_row(str(k), turn["cell"], f"r{turn['repeat']}", done)
    n_todo = sum(not turn["is_done"] for turn in turns)
    n_cells = len({turn["cell"] for turn in turns})
    sentence = f"{n_cells} cells, {len(turns)} runs, {n_todo} still to measure"
    if facts["arrivals_s"]:
        arrivals, drain = (format_duration(facts[key]) for key in ("arrivals_s", "drain_s"))
        starts = facts["n_starts"]
        sentence += (
            f": {arrivals} of arrivals, up to {drain} more for the last answers, "
            f"and {starts} server{'' if starts == 1 else 's'} to be reached or started"
        )
    elif n_todo:
        sentence += ": in virtual time, as fast as this machine computes"
    return Group(table, Text(f"{sentence}. Results go to {facts['directory']}"))
