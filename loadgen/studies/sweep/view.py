"""Tables and sentences of a sweep, shared by the page and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.measure.catalog import METRICS, Unit
from loadgen.measure.slo import parse_measure
from loadgen.studies.modes.view import SIMULATED, value_text
from loadgen.units import format_duration

Row = Mapping[str, Any]
COLUMNS = ("p50(ttft)", "p99(ttft)", "p99(tpot)", "p99(itl)", "goodput", "attainment")
"""Measures in the page's table, after those of the trade-off."""


def tables(facts: Mapping[str, Any]) -> Group:
    """The sweep in a terminal of 100 columns."""
    names = factor_names(facts)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    for name in ("n", benefit_title(facts), facts["cost"], "goodput", "met", "verdict", ""):
        table.add_column(name, justify="right", overflow="fold")
    for row in facts["rows"]:
        table.add_row(
            *row["factors"].values(),
            str(row["n"]),
            benefit_text(row),
            cost_text(row, facts),
            measure_text(row, "goodput"),
            measure_text(row, "attainment"),
            verdict_text(row),
            "front" if row["is_front"] else "",
            style="" if row["is_front"] else "dim",
        )
    parts: list[RenderableType] = [Text(heading(facts), style="bold"), table]
    parts += [Text(f"note: {note}", style="yellow") for note in notes(facts)]
    return Group(*parts)


def heading(facts: Mapping[str, Any]) -> str:
    """Scenario, targets, varied keys and number of runs, as a line."""
    keys = " and ".join(axis["key"] for axis in facts["axes"])
    where = ", ".join(facts["targets"])
    runs = f"{facts['repeats']} runs" if facts["repeats"] > 1 else "one run"
    return f"{facts['scenario']} against {where}: {keys} varied, {runs} a cell"


def factor_names(facts: Mapping[str, Any]) -> list[str]:
    """The last part of each swept key (`rate` of `arrivals.rate`), or all of it where two keys end
    alike."""
    keys = [axis["key"] for axis in facts["axes"]]
    last = [key.rpartition(".")[2] for key in keys]
    return [name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)]


def setting(row: Row, facts: Mapping[str, Any]) -> str:
    """The values of a cell: `rate 4/s, mode chunked`."""
    values = row["factors"].values()
    return ", ".join(f"{name} {v}" for name, v in zip(factor_names(facts), values, strict=True))


def conclusion(facts: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The result of a sweep: a headline, and sentences with the best cells."""
    rows = facts["rows"]
    judged = [row for row in rows if {"met", "missed"} & set(row["verdicts"])]
    met = [row for row in judged if set(row["verdicts"]) == {"met"}]
    sentences = []
    if judged:
        headline = f"{len(met)} of {len(rows)} cells met the SLO in every run"
        sentences += _limits(facts, met) if facts["along"] else []
        if best := _largest(met, lambda row: row["measures"]["goodput"]["value"]):
            value = measure_text(best, "goodput")
            sentences.append(f"Most goodput among them: {setting(best, facts)}, {value}.")
    else:
        n_front = sum(row["is_front"] for row in rows)
        headline = f"{n_front} of {len(rows)} cells are on the Pareto front"
    if best := _largest(rows, lambda row: row["benefit"]["value"]):
        cost = f"at {facts['cost']} {cost_text(best, facts)}"
        sentences.append(
            f"Most {benefit_title(facts)} of all cells: {setting(best, facts)}, "
            f"{benefit_text(best)} {cost}."
        )
    return headline, sentences


def _limits(facts: Mapping[str, Any], met: Sequence[Row]) -> list[str]:
    """Per series, the highest load up to which every cell met the SLO, and the next load."""
    key, sentences = facts["along"], []
    for series in dict.fromkeys(row["series"] for row in facts["rows"]):
        rows = [r for r in facts["rows"] if r["series"] == series and r["along"] is not None]
        rows.sort(key=lambda row: float(row["along"]))
        n_met = next((k for k, row in enumerate(rows) if row not in met), len(rows))
        loads = [row["factors"][key] for row in rows]
        text = f"met up to {key} {loads[n_met - 1]}" if n_met else "met at no load"
        if n_met < len(rows):
            text += f", {verdict_text(rows[n_met])} at {loads[n_met]}"
        sentences.append(f"{series or 'SLO'}: {text}.")
    return sentences


def _largest(rows: Sequence[Row], value: Callable[[Row], float | None]) -> Row | None:
    """The row of the largest value; None where no row has a value."""
    return max((row for row in rows if value(row) is not None), key=lambda r: value(r) or 0.0,
               default=None)  # fmt: skip


def notes(facts: Mapping[str, Any]) -> list[str]:
    """Warnings on how far the numbers can be trusted."""
    texts, rows = [], facts["rows"]
    n_left = facts["n_runs"] - facts["n_done"] - facts["n_failed"]
    if n_left:
        texts.append(f"only {facts['n_done']} of {facts['n_runs']} runs are finished")
    for row in rows:
        texts += [f"{row['cell']}: no run: {failure['reason']}" for failure in row["failures"]]
    if facts["n_untrusted"]:
        texts.append(f"{facts['n_untrusted']} runs cannot be trusted; see their reports")
    if any(row["n"] and not row["gpus_are_declared"] for row in rows):
        texts.append(
            "per GPU: the target's labels have no number of GPUs, so it counts as 1; add "
            "labels: {gpus: …} to the target file"
        )
    if facts["repeats"] == 1:
        texts.append(
            "one run per cell: throughput has no confidence interval, chance decides near ties"
        )
    if facts["targets"] == ["sim"]:
        texts.append(SIMULATED)
    return texts


def benefit_title(facts: Mapping[str, Any]) -> str:
    words = {"output_tokens_per_s": "tokens/s", "requests_per_s": "requests/s"}
    name = parse_measure(facts["benefit"])[0].name
    return f"{words.get(name, METRICS[name].title)} per GPU"


def benefit_text(row: Row) -> str:
    return value_text(row["benefit"], "per_s")


def cost_text(row: Row, facts: Mapping[str, Any]) -> str:
    return "∞" if row["cost_is_infinite"] else value_text(row["cost"], facts["cost_unit"])


def measure_text(row: Row, text: str) -> str:
    unit: Unit = parse_measure(text)[0].unit
    return value_text(row["measures"][text], unit)


def verdict_text(row: Row) -> str:
    """`met`, or the number of runs by verdict: `2 met, 1 missed`."""
    verdicts: Mapping[str, int] = row["verdicts"]
    words = {name.replace("_", " "): n for name, n in verdicts.items()}
    if row["failures"] and not words:
        return "failed"
    text = next(iter(words)) if len(words) == 1 else ", ".join(f"{n} {w}" for w, n in words.items())
    return f"{text} (!)" if row["n_untrusted"] else text or "–"


def standing_text(row: Row) -> str:
    if row["is_front"]:
        return "front"
    return "–" if row["beaten_by"] is None else f"beaten by {row['beaten_by']}"


def shown_columns(facts: Mapping[str, Any]) -> Sequence[str]:
    """The measures of the page's table without the cost, which has a column before them."""
    return [text for text in COLUMNS if text != facts["cost"]]


def forecast_table(facts: Mapping[str, Any]) -> Group:
    """The planned runs of a sweep, and the time they take."""
    turns: Sequence[Row] = facts["turns"]
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
