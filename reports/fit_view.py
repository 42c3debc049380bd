"""How well a fitted scenario looks like its trace, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.units import format_duration

_FIGURES = {
    "rate_per_s": "requests per s",
    "gap_cv": "gap cv",
    "gap_lag1": "lag-1 correlation of gaps",
    "dispersion": "dispersion, windows of 5 requests",
    "dispersion_100": "dispersion, windows of 100 requests",
    "peak_in_1s": "most in any second",
}


def tables(facts: Mapping[str, Any]) -> Group:
    """The figures of `loadgen.workload.fit.ScenarioFit.to_facts` for people."""
    parts: list[RenderableType] = [
        Text(f"{facts['source']}: {facts['n']} requests in {format_duration(facts['duration_s'])}")
    ]
    if facts["arrivals"]:
        parts += ["", _arrivals(facts), "", _distances(facts)]
    parts += ["", _lengths(facts)]
    parts += [Text(f"note: {note}", style="yellow") for note in facts["notes"]]
    return Group(*parts)


def _arrivals(facts: Mapping[str, Any]) -> Table:
    table = _table("arrivals", "trace", f"fit ({facts['chosen']})")
    both = [facts["arrivals"].get(side, {}) for side in ("trace", "fit")]
    for key, word in _FIGURES.items():
        table.add_row(word, *(_number(side.get(key)) for side in both))
    return table


def _distances(facts: Mapping[str, Any]) -> Table:
    table = _table("candidate", "distance of dispersion curves")
    for name, distance in facts["dispersion_distance"].items():
        table.add_row(name, f"{distance:.1%}")
    return table


def _lengths(facts: Mapping[str, Any]) -> Table:
    names = list(dict.fromkeys(k for found in facts["ks_distance"].values() for k in found))
    table = _table("KS distance", *names)
    for word, found in facts["ks_distance"].items():
        cells = [f"{found[name]:.1%}" if name in found else "–" for name in names]
        table.add_row(word.replace("_", " "), *cells)
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
