"""The command that searches the capacity of the target of a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from loadgen.measure.catalog import METRICS
from loadgen.measure.slo import Slo, for_each_request
from loadgen.records import Run

_KEPT = (
    *("--plugin", "--set", "--seed", "--dataset", "--trace"),
    *("--rate", "--input-len", "--output-len", "--top-p"),
    *("--duration", "--run-time", "-t", "--warmup", "--max-concurrency"),
    *("--num-prompts", "--max-requests", "--request-count"),
    *("--users", "-u", "--think", "--concurrency"),
)
_SLO_FLAGS = ("--slo", "--goodput")
_TARGET_FLAGS = ("--target", "--engine", "--model", "--ca-cert")
_OF_SIMULATE = ("--mode", "--shape", "--hardware", "--replicas", "--router", "--replay")


def capacity_command(run: Run, slos: Sequence[Slo], is_own: bool) -> str:
    """`slobench capacity …` for the scenario and the target of `slobench run`, and for a simulated
    engine without settings of its own.

    `slos` are the SLOs that judge the run, of every class; `is_own`: the run was made under them. A
    search needs a limit per request. Without any, each `p99(ttft) <= 1s` becomes `ttft <= 1s`, and
    the highest percentile becomes the attainment. Agents are searched over agents. "" if the run
    was started in another way, if no SLO gives a limit, or if one is about the trees of a run that
    has other requests, too.
    """
    command, source = run.manifest.command, run.manifest.scenario.source
    is_simulated = command[1:2] == ("simulate",) and not list(_values(command, _OF_SIMULATE))
    if command[1:2] != ("run",) and not is_simulated:
        return ""
    is_of_agents = bool((run.schedule_rows["chain"] > 0).all())
    is_about_trees = any(slo.is_about_trees for slo in slos)
    if is_about_trees and not is_of_agents:
        return ""
    words = ["slobench", "capacity", *([source] if source else [])]
    words += ["--over", "agents"] if is_of_agents and len(run.schedule_rows) else []
    words += _values(command, _KEPT)
    if is_about_trees or any(slo.scope == "request" for slo in slos):
        words += (
            _values(command, _SLO_FLAGS)
            if is_own
            else [word for slo in slos for word in ("--slo", slo.text)]
        )
    else:
        limits, attainment = per_request_limits(slos)
        if not limits:
            return ""
        for text in limits:
            words += ["--slo", text]
        words += ["--attainment", f"{100 * attainment:g}%"]
    words += ["--target", "sim"] if is_simulated else []
    return shlex.join([*words, *_values(command, _TARGET_FLAGS)])


def per_request_limits(slos: Sequence[Slo]) -> tuple[list[str], float]:
    """The percentile SLOs as limits per request, and the share of requests that must meet them: the
    highest percentile. One SLO `p99(ttft) <= 1s` equals `ttft <= 1s` for 99 %; several are at most
    as strict as the result. ([], 0) without a percentile of a metric that each request has."""
    limits = [s for s in slos if s.quantile and METRICS[s.metric].scope == "request"]
    share = max((slo.quantile or 0.0 for slo in limits), default=0.0)
    return list(map(for_each_request, limits)), share


def _values(command: Sequence[str], flags: Sequence[str]) -> Iterator[str]:
    """The flags of a command line that are among `flags`, each with its value."""
    for number, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in flags and equals:
            yield from (name, value)
        elif word in flags:
            yield from command[number : number + 2]
