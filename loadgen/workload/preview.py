"""Preview of a schedule: its load in figures before anything is sent, planned against generated,
and the number of requests that each SLO needs for a proven verdict."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from loadgen.manifest.json_section import JsonObject
from loadgen.measure.catalog import METRICS
from loadgen.measure.slo import Slo, own_slo, with_implied
from loadgen.measure.statistics.dependence import Dependence
from loadgen.measure.statistics.intervals import BoundTimes
from loadgen.measure.statistics.proportions import least_n, needed_n
from loadgen.measure.statistics.time_series import describe_arrivals
from loadgen.records import (
    NO_PIECES,
    OWN_SLO,
    Edges,
    Phase,
    Pieces,
    Schedule,
    schedule_sha256,
)
from loadgen.workload.agents.figures import agent_figures
from loadgen.workload.arrivals import total_rate_per_s
from loadgen.workload.dialogue import Context
from loadgen.workload.layout import RandomStreams
from loadgen.workload.lengths import TokenCounts
from loadgen.workload.planned_counts import measured_counts
from loadgen.workload.scenario import Scenario

QUEUE_TIME = 25.0
"""The autocorrelation time, in requests, that `n_needed_queued` assumes: about that of the p90
behind an M/M/1 queue at 70 % load."""

Means = NDArray[np.float64]  # tokens


def preview(
    scenario: Scenario,
    schedule: Schedule,
    edges: Edges | None = None,
    pieces: Pieces = NO_PIECES,
    confidence: float = 0.95,
) -> JsonObject:
    """The figures of a plan as JSON; None for a figure that does not exist (a gap of a single row,
    a kind without a rate, a rate of a closed loop).

    `n` and all figures of arrivals and lengths cover warm-up and measured window; `slo` covers the
    measured window only, without requests that are cancelled on purpose; each class has its own.
    Where a number of requests ends the window during the run, that number is `n_measured`, and the
    window's length is the longest possible length.
    n_needed is the smallest number of independent requests that proves an SLO about a share of
    requests if none of them misses, n_needed_queued the number behind a queue (`QUEUE_TIME`); None
    for other SLOs and for a share of 100 %.
    """
    inputs, outputs = schedule["input_tokens"], schedule["output_tokens"]
    expected_inputs, expected_outputs = expected_lengths(scenario, schedule)
    return {
        "scenario": scenario.name,
        "seed": scenario.seed,
        "schedule_sha256": schedule_sha256(schedule, edges, pieces),
        "is_closed_loop": scenario.has_closed_loop,
        **_totals(
            scenario,
            schedule,
            _with_brought(scenario, schedule),
            confidence,
            scenario.has_closed_loop,
            scenario.requests_in_flow,
        ),
        "n_withdrawn": measured_counts(schedule)[1],
        "duration_s": scenario.horizon_s,
        "window": {
            "warmup_s": scenario.phases.warmup,
            "measure_s": scenario.phases.measure,
            "drain_s": scenario.phases.drain,
            "requests": scenario.phases.requests,
            "ends_during_run": scenario.requests_in_flow is not None,
        },
        "arrivals": _arrivals(scenario, schedule),
        "input_tokens": _lengths(float(expected_inputs.mean()), inputs),
        "output_tokens": _lengths(float(expected_outputs.mean()), outputs),
        "prefix_share": float(schedule["prefix_tokens"].sum(dtype=np.float64) / inputs.sum()),
        "own_slo": _own_slos(schedule),
        "agents": _agents(scenario, schedule, pieces),
        "classes": {
            name: _totals(
                scenario,
                schedule[schedule["class_id"] == k],
                own.slos(),
                confidence,
                scenario.is_closed_loop(name),
            )
            for k, (name, own) in enumerate(scenario.classes.items())
        },
    }


def _agents(scenario: Scenario, schedule: Schedule, pieces: Pieces) -> dict[str, JsonObject]:
    """The figures of each class of agents, by class."""
    figures: dict[str, JsonObject] = {}
    for number, (name, own) in enumerate(scenario.traffic().items()):
        if own.agents is not None:
            rows = schedule[schedule["class_id"] == number]
            streams = RandomStreams(scenario.seed, (name,) if scenario.classes else ())
            is_closed_loop = scenario.is_closed_loop(name)
            figures[name] = agent_figures(own.agents, rows, pieces, streams, is_closed_loop)
    return figures


def _totals(
    scenario: Scenario,
    rows: Schedule,
    slos: tuple[Slo, ...],
    confidence: float,
    is_closed_loop: bool,
    n_wanted: int | None = None,
) -> dict[str, object]:
    """The figures of all rows, or of the rows of a class: counts, tokens per second and `slo`. A
    closed loop plans more requests than it sends, so it has no rates. `n_wanted` requests end the
    measured window during the run; None for a window of planned length, and for a class."""
    n_measured, n_withdrawn = measured_counts(rows)
    measure_s: float | None = scenario.phases.measure
    is_open_end = scenario.requests_in_flow is not None
    n = None if is_closed_loop or is_open_end else n_measured - n_withdrawn
    if n_wanted is not None:
        n_measured = n_wanted
        n = None if n_withdrawn else n_wanted  # the withdrawn of those that are sent are unknown
    if is_open_end:
        measure_s = None
    return {
        "n": len(rows),
        "n_measured": n_measured,
        **{
            f"{name}_per_s": None
            if is_closed_loop or is_open_end
            else float(rows[name].sum(dtype=np.float64)) / scenario.horizon_s
            for name in ("input_tokens", "output_tokens")
        },
        "slo": [
            {**_proof(slo, n, measure_s, confidence), "is_implied": is_implied}
            for slo, is_implied in with_implied(slos)
            if not math.isinf(slo.limit)  # a limit of the request's own: see `own_slo`
        ],
    }


def _with_brought(scenario: Scenario, schedule: Schedule) -> tuple[Slo, ...]:
    """The SLOs of all traffic, with the limits that requests bring themselves: these imply a share,
    too. With classes, each class states its own."""
    if scenario.classes:
        return scenario.slos()
    brought = [metric for metric, column in OWN_SLO.items() if (schedule[column] > 0).any()]
    return (*scenario.slos(), *map(own_slo, brought))


def _own_slos(rows: Schedule) -> list[dict[str, object]]:
    """Limits that requests of the measured window carry themselves: their number, and seconds."""
    figures = []
    for metric, column in OWN_SLO.items():
        limits_s = rows[column][(rows["phase"] == Phase.measure) & (rows[column] > 0)]
        if len(limits_s):
            p50_s = float(np.quantile(limits_s, 0.5, method="inverted_cdf"))
            ends = {"min_s": float(limits_s.min()), "p50_s": p50_s, "max_s": float(limits_s.max())}
            figures.append({"text": own_slo(metric).text, "n": len(limits_s), **ends})
    return figures


def expected_lengths(scenario: Scenario, schedule: Schedule) -> tuple[Means, Means]:
    """The expected input and output length of every row in tokens, float64 [n] each, given the
    number of turns of its session: the input of turn k has k questions and k − 1 answers. Lengths
    from a trace or a dataset are returned unchanged."""
    inputs = schedule["input_tokens"].astype(np.float64)
    outputs = schedule["output_tokens"].astype(np.float64)
    for number, own in enumerate(scenario.traffic().values()):
        rows = np.flatnonzero(schedule["class_id"] == number)
        steps = own.steps()
        turn = _turns(schedule["context"][rows])
        for place, step in enumerate(steps):
            mean_in, mean_out = step.requests.mean_lengths
            if mean_in is None or mean_out is None:
                continue
            prefix = step.requests.shared_prefix
            is_step = np.arange(len(rows)) % len(steps) == place
            inputs[rows[is_step]] = mean_in * turn[is_step] + mean_out * (turn[is_step] - 1)
            inputs[rows[is_step]] += prefix.tokens if prefix else 0
            outputs[rows[is_step]] = mean_out
    return inputs, outputs


def _turns(context: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The turn number of each row, from 1, for rows laid out session by session."""
    place = np.arange(len(context))
    first = np.maximum.accumulate(np.where(context == Context.none, place, 0))
    turns: NDArray[np.int64] = place - first + 1
    return turns


def _arrivals(scenario: Scenario, schedule: Schedule) -> dict[str, object]:
    """Planned and generated rate of the rows without parents, and their statistics."""
    horizon_s, classes = scenario.horizon_s, scenario.traffic().values()
    kinds = [own.arrivals or scenario.arrivals for own in classes]
    distinct = list({id(kind): kind for kind in kinds if kind is not None}.values())
    is_start = schedule["n_parents"] == 0
    for number, own in enumerate(classes):
        if own.agents is not None:  # later requests of a tree may have scheduled times, too
            is_class = schedule["class_id"] == number
            _, first = np.unique(schedule["session_id"][is_class], return_index=True)
            is_start[np.delete(np.flatnonzero(is_class), first)] = False
    times = schedule["scheduled_s"][is_start]
    has_single_starts = all(sum(not step.after for step in own.steps()) <= 1 for own in classes)
    return {
        "kind": " + ".join(kind.kind for kind in distinct),
        "asked_rate_per_s": total_rate_per_s(distinct, horizon_s) if has_single_starts else None,
        "generated_rate_per_s": None if scenario.has_closed_loop else len(times) / horizon_s,
        **describe_arrivals(np.sort(times), horizon_s),
    }


def _lengths(expected_mean: float, tokens: TokenCounts) -> dict[str, float]:
    p50, p90, p99 = np.quantile(tokens, (0.5, 0.9, 0.99), method="inverted_cdf")
    return {
        "asked_mean": expected_mean,
        "mean": float(np.mean(tokens)),
        "p50": int(p50),
        "p90": int(p90),
        "p99": int(p99),
        "max": int(tokens.max()),
    }


def _proof(
    slo: Slo, n: int | None, measure_s: float | None, confidence: float
) -> dict[str, object]:
    share = _share(slo)
    n_needed = None if share is None else least_n(0, share, confidence) or None
    n_queued = None if share is None else needed_n(0, 1, share, confidence, _queued(confidence))
    figures: dict[str, object] = {"text": slo.text, "scope": slo.scope, "n": n}
    for ending, least in (("", n_needed), ("_queued", n_queued)):
        figures |= {
            f"n_needed{ending}": least,
            f"minutes_needed{ending}": least * measure_s / n / 60
            if least and n and measure_s
            else None,
            f"is_provable{ending}": None if least is None or n is None else n >= least,
        }
    return figures


def _queued(confidence: float) -> Callable[[int], BoundTimes | None]:
    return lambda n: Dependence(n, QUEUE_TIME).miss_times(confidence, 0)


def _share(slo: Slo) -> float | None:
    """The share of requests that a run-level SLO is about; None if it is about no share, or about a
    share of the gaps within requests, which are not independent."""
    if slo.quantile is not None:
        return slo.quantile if METRICS[slo.metric].scope == "request" else None
    return {"attainment": slo.limit, "error_rate": 1 - slo.limit}.get(slo.metric)
