"""Result of `slobench doctor` in the terminal: verdict first, readable without colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.measure.wording import format_number, format_value
from loadgen.studies.doctor.fidelity import Spread
from loadgen.studies.doctor.result import Checkup
from targets.preflight_result import PreflightCheck

_MARKS = {True: ("ok", ""), False: ("warn", "yellow"), None: ("–", "dim")}


def tables(checkup: Checkup) -> Group:
    """A rich renderable of at most 100 columns."""
    parts: list[RenderableType] = [_verdict(checkup)]
    parts += [Text(f"  {reason}", overflow="fold") for reason in checkup.reasons]
    if checkup.checks:
        parts += ["", _checks(checkup.checks)]
    if checkup.trials:
        parts += ["", _trials(checkup), _legend(checkup)]
    parts += [Text(f"note: {note}", overflow="fold") for note in checkup.notes]
    return Group(*parts)


def _verdict(checkup: Checkup) -> Text:
    if not checkup.is_fit:
        return Text("NOT FIT FOR MEASURING", style="bold yellow")
    return Text(_WORDS[checkup.kind](checkup), style="bold green")


def _up_to(checkup: Checkup) -> str:
    ceiling = checkup.ceiling
    assert ceiling is not None, "a machine is fit if a rate held"
    at_least = "at least " if ceiling.is_at_least else ""
    return (
        f"up to {at_least}{format_number(ceiling.rate_per_s)} req/s × {checkup.output_tokens} "
        f"tokens per core, with p99 TTFT error below {format_value(checkup.error_limit_s, 's')}"
    )


def _proven(checkup: Checkup) -> str:
    assert checkup.proven_rate_per_s is not None, "a proof is fit if the lowest rate held"
    return (
        f"accurate up to {format_number(checkup.proven_rate_per_s)} req/s × "
        f"{checkup.output_tokens} tokens, with p99 TTFT error below "
        f"{format_value(checkup.error_limit_s, 's')} against the test server's log"
    )


def _traffic(checkup: Checkup) -> str:
    return (
        f"this machine can measure {format_number(checkup.trials[0].rate_per_s)} req/s × "
        f"{checkup.output_tokens} tokens, with p99 TTFT error below "
        f"{format_value(checkup.error_limit_s, 's')}"
    )


_WORDS: dict[str, Callable[[Checkup], str]] = {
    "machine": _up_to,
    "proof": _proven,
    "traffic": _traffic,
    "target": lambda checkup: f"{checkup.target} can be measured from here",
}


def _checks(checks: Sequence[PreflightCheck]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name in ("mark", "check"):
        table.add_column(name, no_wrap=True)
    table.add_column("detail", overflow="fold")
    for check in checks:
        mark, style = ("stop", "red") if check.is_stop else _MARKS[check.ok]
        detail = Text(check.detail, style=style)
        if check.consequence:
            detail.append(f"\n→ {check.consequence}", style="")
        if check.is_checked:
            table.add_row(Text(mark, style=style), check.check, detail)
    left = [check.check for check in checks if not check.is_checked]
    if left:
        mark, style = _MARKS[None]
        table.add_row(
            Text(mark, style=style), f"{len(left)} more", Text("not checked", style=style)
        )
    return table


_COLUMNS = ("rate", "n", "TTFT error", "TPOT error", "sent late", "server late", "CPU/token", "")
_BELOW = ("per s", "", "p50 / p99, ms", "p50 / p99, µs", "p50 / p99, ms", "p99, ms", "µs", "")


def _trials(checkup: Checkup) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head, below in zip(_COLUMNS, _BELOW, strict=True):
        table.add_column(
            f"{head}\n{below}", justify="right" if head else "left", no_wrap=bool(head)
        )
    for trial in checkup.trials:
        table.add_row(
            format_number(trial.rate_per_s),
            str(trial.n_requests),
            _both(trial.ttft_error_s, 1e3, 2),
            _both(trial.tpot_error_s, 1e6, 1),
            _both(trial.lateness_s, 1e3, 2),
            _p99(trial.server_lateness_s, 1e3, 2),
            f"{trial.cpu_s_per_token * 1e6:.1f}",
            "accurate" if trial.holds else ", ".join(trial.causes or ["TTFT error"]),
        )
    return table


def _both(spread: Spread, per_s: float, digits: int) -> str:
    if math.isnan(spread.p50):
        return "–"
    return f"{spread.p50 * per_s:.{digits}f} / {_p99(spread, per_s, digits)}"


def _p99(spread: Spread, per_s: float, digits: int) -> str:
    if math.isnan(spread.p99):
        return "–"
    return f"{spread.p99 * per_s:.{digits}f}{'*' if spread.few else ''}"


def _legend(checkup: Checkup) -> Text:
    log = "mock server's log" if checkup.judge == "mock" else "test server's log"
    of_a_search = "one worker, Poisson arrivals"
    of_a_traffic = "workers as for a run"
    load = of_a_traffic if checkup.kind == "traffic" else of_a_search
    lines = [
        f"{load}, at most {checkup.output_tokens} tokens each; error = our",
        f"timestamp − the {log}, per request; percentiles of its magnitude",
    ]
    if any(trial.ttft_error_s.few for trial in checkup.trials):
        lines.append("* fewer than ten samples lie beyond this percentile")
    return Text("\n".join(lines), style="dim", overflow="fold")
