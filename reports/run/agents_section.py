"""The trees of a run's agents in tables and sentences, for the page and the terminal."""

from __future__ import annotations

import math

from loadgen.measure.agents import AgentNumbers, TreeSpread
from loadgen.measure.catalog import Unit
from loadgen.measure.statistics.intervals import Interval
from loadgen.measure.statistics.percentiles import Percentile
from loadgen.measure.wording import format_count, format_number, format_value
from reports.run.tables import TableCell, between, has_percentile, percentile_text

SPREAD_HEAD = ("of each ended tree", "n", "mean", "p50", "p90", "p99", "max")
TURN_HEAD = (
    *("turn", "requests", "TTFT p50", "TTFT p90"),
    *("new tokens", "ideal hits", "reported"),
)
_SPREADS: tuple[tuple[str, str, Unit], ...] = (
    ("task time", "task_time_s", "s"),
    ("model", "model_s", "s"),
    ("tools", "tools_s", "s"),
    ("subagents", "subagents_s", "s"),
    ("wait share", "wait_share", "share"),
)


def trees_text(found: AgentNumbers) -> str:
    """`40 trees began in the window: 30 met, 2 missed, 8 not ended; 5 began before it`."""
    n = format_count(found.due)
    text = f"{n} {'tree' if found.due == 1 else 'trees'} began in the window: "
    text += f"{format_count(found.met)} met, {format_count(found.missed)} missed, "
    text += f"{format_count(found.open)} not ended"
    others = ((found.begun_before, "began before it"), (found.not_begun, "did not begin"))
    return "; ".join((text, *(f"{format_count(n)} {words}" for n, words in others if n)))


def attainment_text(found: AgentNumbers) -> str:
    """`attainment(tree) 93.8 % [85 %, 97.5 %] of 32; 75 % to 95 % however the others end`."""
    decided = found.met + found.missed
    if not found.due:
        return "attainment(tree) n/a: no tree began in the window"
    text = f"attainment(tree) {_with_interval(found.attainment, 'share')}"
    text += f" of {format_count(decided)}"
    if not found.open:
        return text
    least, most = (
        format_value(share, "share") for share in (found.attainment_least, found.attainment_most)
    )
    return f"{text}; {least} to {most} of {format_count(found.due)}, however the others end"


def rate_text(found: AgentNumbers) -> str:
    """`tasks 42/h [38, 46], without a miss 40/h [35, 44]`."""
    rates = _per_hour(found.tasks_per_hour), _per_hour(found.goodput_tasks_per_hour)
    return f"tasks {rates[0]}, without a miss {rates[1]}"


def cache_text(found: AgentNumbers) -> str:
    """`prompt tokens cached: ideal 94.6 % […], reported 93.9 % […]; misses: …`."""
    cache = found.cache
    if not cache.requests:
        return "prompt tokens cached: n/a, no answer of an agent"
    reported = "not stated by the server"
    if cache.reported is not None:
        reported = _with_interval(cache.reported, "share")
    misses = [("first sight", cache.first_sight), ("compaction", cache.compaction)]
    if cache.lost is not None:
        misses.append(("lost by the server", cache.lost))
    shares = ", ".join(f"{format_value(share, 'share')} {word}" for word, share in misses)
    ideal = _with_interval(cache.ideal, "share")
    text = f"prompt tokens cached: ideal {ideal}, reported {reported}; not cached: {shares}"
    return f"{text}; working set at most {format_count(cache.working_set_tokens)} tokens"


def texts(found: AgentNumbers) -> list[str]:
    """The sentences, in order."""
    return [trees_text(found), attainment_text(found), rate_text(found), cache_text(found)]


def both_tables(found: AgentNumbers) -> list[tuple[tuple[str, ...], list[list[TableCell]]]]:
    """The heads and rows of the tables by part of the task time, and by turn."""
    return [(SPREAD_HEAD, spread_rows(found)), (TURN_HEAD, turn_rows(found))]


def spread_rows(found: AgentNumbers) -> list[list[TableCell]]:
    """A row for the task time and each part of it."""
    return [
        _spread_row(getattr(found, name), title, unit, f"agents.{name}")
        for title, name, unit in _SPREADS
    ]


def _spread_row(spread: TreeSpread, title: str, unit: Unit, path: str) -> list[TableCell]:
    mean = spread.mean
    return [
        TableCell(title),
        TableCell(format_count(spread.n), f"{path}.n"),
        TableCell(
            format_value(mean.value, unit), f"{path}.mean.value", unit, small=between(mean, unit)
        ),
        *(
            _percentile_cell(percentile, spread.n, key, unit, f"{path}.percentiles.{key}")
            for key, percentile in spread.percentiles.items()
        ),
        TableCell(format_value(spread.max, unit), f"{path}.max", unit),
    ]


def turn_rows(found: AgentNumbers) -> list[list[TableCell]]:
    """A row per group of turns."""
    rows = []
    for k, group in enumerate(found.turns):
        path = f"agents.turns.{k}"
        percentiles = (("p50", group.ttft_p50_s), ("p90", group.ttft_p90_s))
        shares = (("ideal", group.ideal), ("reported", group.reported))
        rows.append(
            [
                TableCell(group.turns),
                TableCell(format_count(group.requests), f"{path}.requests"),
                *(
                    _percentile_cell(value, group.requests, key, "s", f"{path}.ttft_{key}_s")
                    for key, value in percentiles
                ),
                TableCell(format_count(round(group.new_tokens_p50)), f"{path}.new_tokens_p50"),
                *(
                    TableCell("–")
                    if share is None
                    else TableCell(
                        format_value(share.value, "share"),
                        f"{path}.{key}.value",
                        "share",
                        small=between(share, "share"),
                    )
                    for key, share in shares
                ),
            ]
        )
    return rows


def _percentile_cell(found: Percentile, n: int, key: str, unit: Unit, path: str) -> TableCell:
    if not has_percentile(n, key):
        return TableCell("–", title=f"{key} needs more samples")
    text = percentile_text(found, unit)
    return TableCell(text, f"{path}.value", unit, small=between(found, unit))


def _with_interval(interval: Interval, unit: Unit) -> str:
    return f"{format_value(interval.value, unit)} {between(interval, unit)}".rstrip()


def _per_hour(rate: Interval) -> str:
    if math.isnan(rate.value):
        return "–"
    text = f"{format_number(rate.value)}/h"
    if rate.low is None or rate.high is None:
        return text
    return f"{text} [{format_number(rate.low)}, {format_number(rate.high)}]"
