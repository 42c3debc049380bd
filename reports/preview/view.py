"""What a scenario would send, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from loadgen.units import format_duration


def tables(facts: Mapping[str, Any]) -> Group:
    """The figures of `loadgen.workload.preview.preview` for people."""
    arrivals = facts["arrivals"]
    title = Text.assemble(
        (facts["scenario"], "bold"),
        f"  seed {facts['seed']}, schedule {facts['schedule_sha256'][:12]}: ",
        f"{facts['n']} requests in {format_duration(facts['duration_s'])}, ",
        f"{facts['n_measured']} of them in the measured window",
        f" ({facts['n_withdrawn']} to be cancelled on purpose)" if facts["n_withdrawn"] else "",
    )
    return Group(title, "", _arrivals(arrivals), "", _lengths(facts), "", _promises(facts))


def _arrivals(arrivals: Mapping[str, Any]) -> Table:
    asked = arrivals["asked_rate_per_s"]
    table = _table(f"arrivals ({arrivals['kind']})", "asked", "generated")
    rate = f"{asked:.4g}/s" if asked else "–"
    table.add_row("rate", rate, f"{arrivals['generated_rate_per_s']:.4g}/s")
    table.add_row("gap cv", "", _number(arrivals["gap_cv"]))
    table.add_row("lag-1 correlation of gaps", "", _number(arrivals["gap_lag1"]))
    window = arrivals["dispersion_window_s"]
    name = f"dispersion in windows of {format_duration(window)}" if window else "dispersion"
    table.add_row(name, "", _number(arrivals["dispersion"]))
    table.add_row("most in any second", "", str(arrivals["peak_in_1s"]))
    return table


def _lengths(facts: Mapping[str, Any]) -> Table:
    table = _table("tokens", "mean asked", "mean", "p50", "p90", "p99", "max", "per s")
    for name, word in (("input_tokens", "input"), ("output_tokens", "output")):
        counts = facts[name]
        table.add_row(
            word,
            *(f"{counts[q]:.4g}" for q in ("asked_mean", "mean", "p50", "p90", "p99", "max")),
            f"{facts[f'{name}_per_s']:.4g}",
        )
    if facts["prefix_share"]:
        table.add_row("shared prefix", "", f"{facts['prefix_share']:.1%}")
    return table


def _promises(facts: Mapping[str, Any]) -> Group | Table | Text:
    promises, own = facts["slo"], facts["own_slo"]
    if own:
        table = _table("promise of the trace", "requests", "min", "p50", "max")
        for one in own:
            ends = (format_duration(one[end]) for end in ("min_s", "p50_s", "max_s"))
            table.add_row(one["text"], str(one["n"]), *ends)
        return Group(table, "", _stated(promises)) if promises else table
    if not promises:
        return Text("no promise (slo) is made: the run will have no verdict", style="yellow")
    return _stated(promises)


def _stated(promises: list[Mapping[str, Any]]) -> Table:
    table = _table("promise", "requests needed to prove it", "in this window", "minutes needed")
    for promise in promises:
        needed, minutes = promise["n_needed"], promise["minutes_needed"]
        if needed is None:
            table.add_row(promise["text"], "–", "", "")
            continue
        enough = "yes" if promise["is_provable"] else "too few"
        table.add_row(promise["text"], str(needed), f"{promise['n']} ({enough})", f"{minutes:.2g}")
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
