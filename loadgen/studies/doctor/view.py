"""Result of `slobench doctor` in the terminal: verdict first, readable without colour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.measure.wording import format_number, format_value

_MARKS = {True: ("ok", ""), False: ("warn", "yellow"), None: ("–", "dim")}


def tables(facts: Mapping[str, Any]) -> Group:
    """The facts of `loadgen.studies.doctor.run.Checkup.to_json`."""
    parts: list[RenderableType] = [_verdict(facts)]
    parts += [Text(f"  {reason}", overflow="fold") for reason in facts["reasons"]]
    if facts["checks"]:
        parts += ["", _checks(facts["checks"])]
    if facts["trials"]:
        parts += ["", _trials(facts), _legend(facts)]
    parts += [Text(f"note: {note}", overflow="fold") for note in facts["notes"]]
    return Group(*parts)


def _verdict(facts: Mapping[str, Any]) -> Text:
    if not facts["is_fit"]:
        return Text("NOT FIT FOR MEASURING", style="bold yellow")
    return Text(_WORDS[facts["kind"]](facts), style="bold green")


def _up_to(facts: Mapping[str, Any]) -> str:
    ceiling = facts["ceiling"]
    at_least = "at least " if ceiling["is_at_least"] else ""
    return (
        f"up to {at_least}{format_number(ceiling['rate_per_s'])} req/s × {facts['output_tokens']} "
        f"tokens per core, with p99 TTFT error below {format_value(facts['error_limit_s'], 's')}"
    )


def _proven(facts: Mapping[str, Any]) -> str:
    return (
        f"accurate up to {format_number(facts['proven_rate_per_s'])} req/s × "
        f"{facts['output_tokens']} tokens, with p99 TTFT error below "
        f"{format_value(facts['error_limit_s'], 's')} against the test server's log"
    )


def _traffic(facts: Mapping[str, Any]) -> str:
    return (
        f"this machine can measure {format_number(facts['trials'][0]['rate_per_s'])} req/s × "
        f"{facts['output_tokens']} tokens, with p99 TTFT error below "
        f"{format_value(facts['error_limit_s'], 's')}"
    )


_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "machine": _up_to,
    "proof": _proven,
    "traffic": _traffic,
    "target": lambda facts: f"{facts['target']} can be measured from here",
}


def _checks(checks: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name in ("mark", "check"):
        table.add_column(name, no_wrap=True)
    table.add_column("detail", overflow="fold")
    for check in checks:
        mark, style = ("stop", "red") if check.get("is_stop") else _MARKS[check["ok"]]
        detail = Text(check["detail"], style=style)
        if check["consequence"]:
            detail.append(f"\n→ {check['consequence']}", style="")
        table.add_row(Text(mark, style=style), check["check"], detail)
    return table


_COLUMNS = ("rate", "n", "TTFT error", "TPOT error", "sent late", "server late", "CPU/token", "")
_BELOW = ("per s", "", "p50 / p99, ms", "p50 / p99, µs", "p50 / p99, ms", "p99, ms", "µs", "")


def _trials(facts: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head, below in zip(_COLUMNS, _BELOW, strict=True):
        table.add_column(
            f"{head}\n{below}", justify="right" if head else "left", no_wrap=bool(head)
        )
    for trial in facts["trials"]:
        table.add_row(
            format_number(trial["rate_per_s"]),
            str(trial["n_requests"]),
            _both(trial["ttft_error_s"], 1e3, 2),
            _both(trial["tpot_error_s"], 1e6, 1),
            _both(trial["lateness_s"], 1e3, 2),
            _p99(trial["server_lateness_s"], 1e3, 2),
            f"{trial['cpu_s_per_token'] * 1e6:.1f}",
            "accurate" if trial["holds"] else ", ".join(trial["causes"] or ["TTFT error"]),
        )
    return table


def _both(spread: Mapping[str, Any], per_s: float, digits: int) -> str:
    if spread["p50"] is None:
        return "–"
    return f"{spread['p50'] * per_s:.{digits}f} / {_p99(spread, per_s, digits)}"


def _p99(spread: Mapping[str, Any], per_s: float, digits: int) -> str:
    if spread["p99"] is None:
        return "–"
    return f"{spread['p99'] * per_s:.{digits}f}{'*' if spread['few'] else ''}"


def _legend(facts: Mapping[str, Any]) -> Text:
    log = {"truth": "test server's log", "mock": "mock server's log"}[facts["judge"]]
    of_a_search = "one worker, Poisson arrivals"
    of_a_traffic = "workers as for a run"
    load = of_a_traffic if facts["kind"] == "traffic" else of_a_search
    lines = [
        f"{load}, at most {facts['output_tokens']} tokens each; error = our",
        f"timestamp − the {log}, per request; percentiles of its magnitude",
    ]
    if any(trial["ttft_error_s"]["few"] for trial in facts["trials"]):
        lines.append("* fewer than ten samples lie beyond this percentile")
    return Text("\n".join(lines), style="dim", overflow="fold")
