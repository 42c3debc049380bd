"""A demonstration as rows of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadgen.measure.wording import format_value
from loadgen.studies.demo.figures import (
    RISE,
    Figures,
    disagreements,
    median,
    middle,
    rate_missed,
    shown_by,
)
from loadgen.studies.demo.peers import SLOBENCH
from loadgen.studies.demo.result import Demo, Observation, Tool

AGREES = "agrees"
STEADY_HEAD = (
    "tool", "p50 true", "reported", "p99 true", "reported", "asked", "held", "CPU", "verdict",
)  # fmt: skip
STALLS_HEAD = ("tool", "p99 ITL", "reported", "p99 TPOT", "reported", "gap", "reported", "shown by")


def headline(result: Demo) -> str:
    """`slobench: agrees with the server's log; 2 of 2 other tools agree`. Others are not counted
    where slobench has no valid result with the steady server: then the machine may have been too
    busy for any tool."""
    ours, *others = result.tools
    word, runs = verdict(ours, result), ours.of("steady")
    if not runs or any(one.invalid for one in runs):
        return f"{SLOBENCH}: {word}; no conclusion about others from these runs"
    words = "agrees with the server's log" if word == AGREES else word
    verdicts = [verdict(tool, result) for tool in others if tool.observations]
    if not verdicts:
        return f"{SLOBENCH}: {words}; no other tool ran"
    return f"{SLOBENCH}: {words}; {verdicts.count(AGREES)} of {len(verdicts)} other tools agree"


def verdict(tool: Tool, result: Demo) -> str:
    """`agrees`, or what differs from the truth with a steady server."""
    runs = tool.of("steady")
    if not runs:
        return f"failed: {tool.reason}"
    reported, truth = _middles(runs)
    held, n = median([one.held_per_s for one in runs]), median([one.reported.n for one in runs])
    n_invalid = sum(bool(one.invalid) for one in runs)
    found = [
        f"INVALID ({n_invalid} of {len(runs)} runs)" if n_invalid else "",
        *disagreements(reported, truth, result.limit_s),
        rate_missed(result.load.rate_per_s, held, int(n)),
    ]
    return ", ".join(filter(None, found)) or AGREES


def steady_rows(result: Demo) -> list[tuple[str, ...]]:
    """A row per tool that ran, in the order of STEADY_HEAD: TTFT in ms, rates per second, CPU in µs
    per token."""
    return [_steady(tool, result) for tool in result.tools if tool.of("steady")]


def _steady(tool: Tool, result: Demo) -> tuple[str, ...]:
    runs = tool.of("steady")
    reported, truth = _middles(runs)
    return (
        tool.name,
        _ms(truth.ttft_p50_s),
        _ms(reported.ttft_p50_s),
        _ms(truth.ttft_p99_s),
        _ms(reported.ttft_p99_s),
        f"{result.load.rate_per_s:.4g}",
        f"{median([one.held_per_s for one in runs]):.4g}",
        f"{median([one.cpu_us_per_token for one in runs]):.0f}",
        verdict(tool, result),
    )


def stall_rows(result: Demo) -> list[tuple[str, ...]]:
    """A row per tool that ran, in the order of STALLS_HEAD, times in ms."""
    return [_stalls(tool) for tool in result.tools if tool.of("stalls")]


def _stalls(tool: Tool) -> tuple[str, ...]:
    runs = tool.of("stalls")
    reported, truth = _middles(runs)
    steady = middle([one.truth for one in tool.of("steady")])
    pairs = [
        text
        for name in ("itl_p99_s", "tpot_p99_s", "longest_gap_s")
        for text in (_ms(getattr(truth, name)), _ms(getattr(reported, name)))
    ]
    seen = ", ".join(shown_by(reported, truth, steady)) or "none of these"
    if any(one.invalid for one in runs):
        seen = f"INVALID; {seen}"
    return (tool.name, *pairs, seen)


def absent_rows(result: Demo) -> list[tuple[str, str]]:
    """The tools that did not run, and why: (tool, reason)."""
    return [
        (tool.name, f"{tool.state}: {tool.reason}")
        for tool in result.tools
        if tool.state != "measured"
    ]


def method(result: Demo) -> list[str]:
    """How it was measured, a sentence each."""
    load = result.load
    steps = 1e3 * load.itl_s
    lateness_s = max((one.server_late_p99_s for one in _all(result)), default=0.0)
    return [
        f"Every tool sends {load.rate_per_s:g} requests/s (Poisson) for {load.seconds:g} s with "
        f"{load.input_tokens} input and {load.output_tokens} output tokens, in "
        f"{load.rounds} rounds: each time with a steady server and with one that stalls, in turns "
        "on the same machine.",
        f"The server is scripted: TTFT {1e3 * load.ttft_s:g} ms, then a token every {steps:g} ms. "
        "It logs the time at which it read each request and wrote each token; true figures are "
        f"those of its log. It was itself {format_value(lateness_s, 's')} late at most (p99 of a "
        "run).",
        f"While it stalls, one step in {load.stall_every} takes {1e3 * load.stall_s:g} ms longer, "
        "for all requests in flight; first tokens are not held back."
        + (" One gap in so many lies beyond a p99." if load.stall_every > 100 else ""),
        "The server has a core of its own, the tool has the others. CPU is of the tool's whole "
        "command, its start included, per token received.",
        "Reported figures are computed from the requests in the file that each tool writes, from "
        "where the tool itself counts: slobench from when a request was due, the others from its "
        "send. All percentiles are interpolated linearly, over the requests of a run; shown are "
        "medians of the rounds.",
        f"A tool agrees if its p50 and p99 of TTFT are within {1e3 * result.limit_s:g} ms of the "
        "true ones, and its rate within what a Poisson process does in 99 of 100 runs. A figure "
        f"shows the stalls if it and the true one are {RISE:g} times the true one of the steady "
        "server.",
    ]


def invalid_runs(result: Demo) -> list[str]:
    """The runs of slobench whose validity checks failed, and why."""
    return [
        f"INVALID: {tool.name}, round {one.round}, {one.phase}: {problem}"
        for tool in result.tools
        for one in tool.observations
        for problem in one.invalid
    ]


def tools_of(result: Demo) -> list[tuple[str, str, str, str]]:
    """Name, version, command and page of the settings, of each tool that ran."""
    return [
        (tool.name, tool.version or "version not stated", tool.command, tool.settings)
        for tool in result.tools
        if tool.observations
    ]


def lines(result: Demo) -> Iterator[str]:
    """The result for a terminal."""
    yield headline(result)
    yield ""
    yield "TTFT of a steady server (ms; requests/s; µs of CPU per token)"
    yield from _table(STEADY_HEAD, steady_rows(result))
    yield ""
    yield f"one step in {result.load.stall_every} stalls (ms), and which figures show it"
    yield from _table(STALLS_HEAD, stall_rows(result))
    below = [*invalid_runs(result), *(f"{name}: {reason}" for name, reason in absent_rows(result))]
    if below:
        yield ""
        yield from below


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    last = len(head) - 1
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if k in (0, last) else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells).rstrip()}"


def _middles(runs: Sequence[Observation]) -> tuple[Figures, Figures]:
    """The medians over runs: reported, true."""
    return middle([one.reported for one in runs]), middle([one.truth for one in runs])


def _all(result: Demo) -> list[Observation]:
    return [one for tool in result.tools for one in tool.observations]


def _ms(value_s: float) -> str:
    return "–" if value_s != value_s else f"{1e3 * value_s:.1f}"
