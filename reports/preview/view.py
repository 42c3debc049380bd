"""Tables for the terminal: a scenario's planned traffic, and the fit of a scenario to a trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.units import format_duration

NO_SLO = "No SLO is stated: the run will have no verdict."
SLO_HEAD = (
    "SLO",
    "requests needed for certainty",
    "behind a queue*",
    "in this window",
    "minutes needed",
)
QUEUE_NOTE = (
    "* about, at 70 % load, where requests share the wait of their neighbours; the run itself"
    " measures how far they do."
)
ARRIVAL_HEAD = ("requested", "offered")
LENGTH_HEAD = ("tokens", "mean requested", "mean", "p50", "p90", "p99", "max", "per s")
_FIT_ROWS = {
    "rate_per_s": "requests per s",
    "gap_cv": "gap cv",
    "gap_lag1": "lag-1 correlation of gaps",
    "dispersion": "dispersion, windows of 5 requests",
    "dispersion_100": "dispersion, windows of 100 requests",
    "peak_in_1s": "most in any second",
}


def tables(facts: Mapping[str, Any]) -> Group:
    """The facts of `loadgen.workload.preview.preview`."""
    title = Text.assemble(
        (facts["scenario"], "bold"),
        f"  seed {facts['seed']}, schedule {facts['schedule_sha256'][:12]}: ",
        f"{number_of_requests(facts)}",
        f" ({facts['n_withdrawn']} to be cancelled on purpose)" if facts["n_withdrawn"] else "",
    )
    arrivals = _table(f"arrivals ({facts['arrivals']['kind']})", *ARRIVAL_HEAD)
    for cells in arrival_rows(facts["arrivals"]):
        arrivals.add_row(*cells)
    lengths = _table(*LENGTH_HEAD)
    for row in length_rows(facts):
        lengths.add_row(*row)
    if facts["prefix_share"]:
        lengths.add_row("shared prefix", "", f"{facts['prefix_share']:.1%}")
    agents = [
        part for name, figures in facts["agents"].items() for part in (_agents(name, figures), "")
    ]
    return Group(title, "", arrivals, "", lengths, "", *agents, _slos(facts))


AGENT_HEAD = ("recorded", "p50", "p90", "max")
_AGENT_ROWS = {
    "requests_per_tree": "requests per tree",
    "input_tokens": "context, tokens",
    "new_tokens": "of it new, tokens",
    "output_tokens": "answer, tokens",
    "distinct_tokens_per_tree": "distinct tokens per tree",
    "recorded_s": "length of a tree",
}


def agent_rows(figures: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(name, p50, p90, max) of the trees of a corpus of agents."""
    rows = []
    for key, name in _AGENT_ROWS.items():
        p50, p90, most = (_agent_text(key, figures[key][at]) for at in ("p50", "p90", "max"))
        rows.append((name, p50, p90, most))
    return rows


def _agent_text(key: str, value: float) -> str:
    return format_duration(round(value)) if key == "recorded_s" else f"{value:,.0f}"


def agent_lines(figures: Mapping[str, Any]) -> list[str]:
    """Sentences on a corpus of agents and on its plays in the plan."""
    planned = figures["planned"]
    chains = f"{figures['chains']} chains, at most {figures['deepest_chain']} below another"
    lines = [
        f"{figures['trees']} trees, {figures['requests']} requests, {chains}; "
        f"{figures['subagents']} subagents, {figures['background_chains']} chains that no request "
        "waits for",
        f"ideal prefix-cache hit rate: {figures['ideal_hit_rate']:.2%} as recorded, "
        f"{planned['ideal_hit_rate']:.2%} in this plan",
    ]
    if planned["plays"] is not None:
        lines.append(
            f"{planned['plays']} plays; working set at the recorded pace: at most "
            f"{planned['working_set_tokens']:,} tokens"
        )
    return lines


def _agents(name: str, figures: Mapping[str, Any]) -> Group:
    table = _table(*AGENT_HEAD)
    for row in agent_rows(figures):
        table.add_row(*row)
    return Group(f"agents ({name})", *(f"  {line}" for line in agent_lines(figures)), table)


def number_of_requests(facts: Mapping[str, Any]) -> str:
    """`303 requests in 30 s, 303 of them in the measured window`."""
    duration = format_duration(facts["duration_s"])
    if facts["window"]["ends_during_run"]:
        loop = ": a closed loop" if facts["is_closed_loop"] else ""
        return f"{facts['n_measured']} requests in the measured window, at most {duration}{loop}"
    if facts["is_closed_loop"]:
        return f"at most {facts['n']} requests in {duration}: a closed loop"
    return (
        f"{facts['n']} requests in {duration}, {facts['n_measured']} of them in the measured window"
    )


def arrival_rows(arrivals: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(name, requested, offered: the draw of the schedule)"""
    requested, window_s = arrivals["asked_rate_per_s"], arrivals["dispersion_window_s"]
    name = f"dispersion in windows of {format_duration(window_s)}" if window_s else "dispersion"
    return [
        (
            "rate per s",
            _rate_text(requested or None),
            _rate_text(arrivals["generated_rate_per_s"]),
        ),
        ("gap cv", "", number_text(arrivals["gap_cv"])),
        ("lag-1 correlation of gaps", "", number_text(arrivals["gap_lag1"])),
        (name, "", number_text(arrivals["dispersion"])),
        ("most in any second", "", str(arrivals["peak_in_1s"])),
    ]


def _rate_text(rate_per_s: float | None) -> str:
    return "n/a" if rate_per_s is None else number_text(rate_per_s)


def length_rows(facts: Mapping[str, Any]) -> list[list[str]]:
    """A row for prompts and a row for answers, in the order of `LENGTH_HEAD`."""
    quantities = ("asked_mean", "mean", "p50", "p90", "p99", "max")
    return [
        [
            word,
            *(number_text(facts[f"{word}_tokens"][quantity]) for quantity in quantities),
            number_text(facts[f"{word}_tokens_per_s"]),
        ]
        for word in ("input", "output")
    ]


def slo_rows(facts: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """A row for each SLO of all traffic, then for those of each class, in the order of
    `SLO_HEAD`."""
    rows = [_slo_row(slo, "") for slo in facts["slo"]]
    for name, of_class in facts["classes"].items():
        rows += [_slo_row(slo, f"{name}: ") for slo in of_class["slo"]]
    return rows


def _slo_row(slo: Mapping[str, Any], prefix: str) -> tuple[str, str, str, str, str]:
    text = f"{prefix}{slo['text']}{' (default)' if slo['is_implied'] else ''}"
    if slo["scope"] == "request":
        return text, "–", "–", "counted in attainment", ""
    if slo["n_needed"] is None:
        return text, "–", "–", "", ""
    needed = str(slo["n_needed"]), str(slo["n_needed_queued"])
    if slo["n"] is None:
        return text, *needed, "n/a: closed loop", ""
    enough = "enough" if slo["is_provable_queued"] else "enough without a queue"
    window = f"{slo['n']} ({enough if slo['is_provable'] else 'too few'})"
    if slo["minutes_needed"] is None:
        return text, *needed, window, ""
    minutes = (number_text(slo[f"minutes_needed{ending}"]) for ending in ("", "_queued"))
    return text, *needed, window, " to ".join(minutes)


def _slos(facts: Mapping[str, Any]) -> Group | Table | Text:
    rows, own = slo_rows(facts), facts["own_slo"]
    if not rows and not own:
        return Text(NO_SLO, style="yellow")
    stated = _table(*SLO_HEAD)
    for cells in rows:
        stated.add_row(*cells)
    noted = Group(stated, Text(QUEUE_NOTE, style="dim"))
    if not own:
        return noted
    table = _table("SLO in the trace", "requests", "min", "p50", "max")
    for slo in own:
        limits = (format_duration(slo[key]) for key in ("min_s", "p50_s", "max_s"))
        table.add_row(slo["text"], str(slo["n"]), *limits)
    return Group(table, "", noted) if rows else table


def fit_tables(facts: Mapping[str, Any]) -> Group:
    """The facts of `loadgen.workload.fit.ScenarioFit.to_facts`: a trace against its fit."""
    parts: list[RenderableType] = [
        Text(f"{facts['source']}: {facts['n']} requests in {format_duration(facts['duration_s'])}")
    ]
    if facts["arrivals"]:
        arrivals = _table("arrivals", "trace", f"fit ({facts['chosen']})")
        sides = [facts["arrivals"].get(side, {}) for side in ("trace", "fit")]
        for key, name in _FIT_ROWS.items():
            arrivals.add_row(name, *(number_text(side.get(key), 3) for side in sides))
        distances = _table("candidate", "distance of dispersion curves")
        for name, distance in facts["dispersion_distance"].items():
            distances.add_row(name, f"{distance:.1%}")
        parts += ["", arrivals, "", distances]
    parts += ["", _ks_distances(facts["ks_distance"])]
    parts += [Text(f"note: {note}", style="yellow") for note in facts["notes"]]
    return Group(*parts)


def _ks_distances(distances: Mapping[str, Mapping[str, float]]) -> Table:
    """Kolmogorov–Smirnov distances of the fitted lengths, a column per candidate."""
    names = list(dict.fromkeys(name for by_name in distances.values() for name in by_name))
    table = _table("KS distance", *names)
    for quantity, by_name in distances.items():
        cells = [f"{by_name[name]:.1%}" if name in by_name else "–" for name in names]
        table.add_row(quantity.replace("_", " "), *cells)
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def number_text(value: float | None, digits: int = 4) -> str:
    """The value with so many significant digits; – for None."""
    return "–" if value is None else f"{value:.{digits}g}"
