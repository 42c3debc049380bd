"""What a scenario would send, in numbers, before anything is sent: asked against generated, and how
many requests its promises need for a proven verdict."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.catalog import METRICS
from loadgen.measure.slo import Slo, own_slo
from loadgen.measure.statistics.arrival_stats import describe_arrivals
from loadgen.measure.statistics.stats import least_n
from loadgen.records import OWN_SLO, Edges, Phase, Schedule
from loadgen.workload.dialogue import Context
from loadgen.workload.lengths import TokenCounts
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import schedule_sha256

Means = NDArray[np.float64]  # tokens


def preview(
    scenario: Scenario,
    schedule: Schedule,
    edges: Edges | None = None,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """The figures of one plan as JSON; None where a number does not exist (a gap of one row, a
    kind that states no rate).

    `n` and everything about arrivals and lengths covers warm-up and measured window alike; `slo`
    counts the measured window only, without the requests to be cancelled on purpose. n_needed is
    the least number of requests that prove a promise about a share of them if not one misses; it is
    None for a promise of another kind, or of 100 %.
    """
    horizon_s, n = scenario.horizon_s, len(schedule)
    inputs, outputs = schedule["input_tokens"], schedule["output_tokens"]
    asked_inputs, asked_outputs = asked_lengths(scenario, schedule)
    classes = scenario.traffic()
    n_measured, n_withdrawn = _measured(schedule)
    return {
        "scenario": scenario.name,
        "seed": scenario.seed,
        "schedule_sha256": schedule_sha256(schedule, edges),
        "n": n,
        "n_measured": n_measured,
        "n_withdrawn": n_withdrawn,
        "duration_s": horizon_s,
        "window": {
            "warmup_s": scenario.phases.warmup,
            "measure_s": scenario.phases.measure,
            "drain_s": scenario.phases.drain,
        },
        "arrivals": _arrivals(scenario, schedule),
        "input_tokens": _lengths(float(asked_inputs.mean()), inputs),
        "output_tokens": _lengths(float(asked_outputs.mean()), outputs),
        "input_tokens_per_s": float(inputs.sum(dtype=np.float64)) / horizon_s,
        "output_tokens_per_s": float(outputs.sum(dtype=np.float64)) / horizon_s,
        "prefix_share": float(schedule["prefix_tokens"].sum(dtype=np.float64) / inputs.sum()),
        "slo": [
            _proof(slo, n_measured - n_withdrawn, scenario.phases.measure, confidence)
            for slo in scenario.slos()
        ],
        "own_slo": _own_promises(schedule),
        "classes": {
            name: _class(name, schedule[schedule["class_id"] == number], scenario, confidence)
            for number, name in enumerate(classes)
            if scenario.classes
        },
    }


def _own_promises(rows: Schedule) -> list[dict[str, Any]]:
    """What requests of the measured window brought themselves: how many, and limits in seconds."""
    found = []
    for metric, column in OWN_SLO.items():
        limits_s = rows[column][(rows["phase"] == Phase.measure) & (rows[column] > 0)]
        if len(limits_s):
            p50_s = float(np.quantile(limits_s, 0.5, method="inverted_cdf"))
            ends = {"min_s": float(limits_s.min()), "p50_s": p50_s, "max_s": float(limits_s.max())}
            found.append({"text": own_slo(metric).text, "n": len(limits_s), **ends})
    return found


def _measured(rows: Schedule) -> tuple[int, int]:
    """Rows of the measured window, and those of them that are to be cancelled on purpose."""
    measured = rows[rows["phase"] == Phase.measure]
    return len(measured), int(np.count_nonzero(measured["cancel_after_s"]))


def asked_lengths(scenario: Scenario, schedule: Schedule) -> tuple[Means, Means]:
    """The expected input and output length of every row in tokens, float64 [n] each, given how many
    turns its session has: turn k of a session holds k questions and k − 1 answers. Where a trace or
    a dataset states the lengths, those are the ones asked."""
    inputs = schedule["input_tokens"].astype(np.float64)
    outputs = schedule["output_tokens"].astype(np.float64)
    for number, asked in enumerate(scenario.traffic().values()):
        rows = np.flatnonzero(schedule["class_id"] == number)
        steps = asked.steps()
        turn = _turns(schedule["context"][rows])
        for place, step in enumerate(steps):
            if not step.requests.has_lengths:
                continue
            mean_in, mean_out = step.requests.mean_lengths
            assert mean_in is not None, f"step {step.name} states its lengths"
            assert mean_out is not None, f"step {step.name} states its lengths"
            prefix = step.requests.shared_prefix
            mine = np.arange(len(rows)) % len(steps) == place
            inputs[rows[mine]] = mean_in * turn[mine] + mean_out * (turn[mine] - 1)
            inputs[rows[mine]] += prefix.tokens if prefix else 0
            outputs[rows[mine]] = mean_out
    return inputs, outputs


def _turns(context: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The number of each row's turn, from 1, in rows laid out session by session."""
    place = np.arange(len(context))
    first = np.maximum.accumulate(np.where(context == Context.none, place, 0))
    turns: NDArray[np.int64] = place - first + 1
    return turns


def _arrivals(scenario: Scenario, schedule: Schedule) -> dict[str, Any]:
    """Asked and generated rate of the rows that wait for nothing, and their statistics."""
    horizon_s = scenario.horizon_s
    kinds = [c.arrivals or scenario.arrivals for c in scenario.traffic().values()]
    distinct = list({id(kind): kind for kind in kinds if kind is not None}.values())
    rates = [kind.mean_rate_per_s(horizon_s) for kind in distinct]
    times = schedule["scheduled_s"][schedule["n_parents"] == 0]
    known = [rate for rate in rates if rate is not None]
    starts = sum(max(1, sum(not s.after for s in c.steps())) for c in scenario.traffic().values())
    is_one_each = starts == len(scenario.traffic())
    return {
        "kind": " + ".join(kind.kind for kind in distinct),
        "asked_rate_per_s": sum(known) if len(known) == len(rates) and is_one_each else None,
        "generated_rate_per_s": len(times) / horizon_s,
        **describe_arrivals(np.sort(times), horizon_s),
    }


def _class(name: str, rows: Schedule, scenario: Scenario, confidence: float) -> dict[str, Any]:
    """The part of one class: how much of it there is, and what its own promises need."""
    n_measured, n_withdrawn = _measured(rows)
    measure_s = scenario.phases.measure
    return {
        "n": len(rows),
        "n_measured": n_measured,
        "input_tokens_per_s": float(rows["input_tokens"].sum(dtype=np.float64))
        / scenario.horizon_s,
        "output_tokens_per_s": float(rows["output_tokens"].sum(dtype=np.float64))
        / scenario.horizon_s,
        "slo": [
            _proof(slo, n_measured - n_withdrawn, measure_s, confidence)
            for slo in scenario.classes[name].slos()
        ],
    }


def _lengths(asked_mean: float, tokens: TokenCounts) -> dict[str, float]:
    p50, p90, p99 = np.quantile(tokens, (0.5, 0.9, 0.99), method="inverted_cdf")
    return {
        "asked_mean": asked_mean,
        "mean": float(np.mean(tokens)),
        "p50": int(p50),
        "p90": int(p90),
        "p99": int(p99),
        "max": int(tokens.max()),
    }


def _proof(slo: Slo, n: int, measure_s: float, confidence: float) -> dict[str, Any]:
    share = _promised_share(slo)
    n_needed = None if share is None else least_n(0, share, confidence) or None
    minutes = None if n_needed is None or not n else n_needed * measure_s / n / 60
    return {
        "text": slo.text,
        "n_needed": n_needed,
        "n": n,
        "minutes_needed": minutes,
        "is_provable": None if n_needed is None else n >= n_needed,
    }


def _promised_share(slo: Slo) -> float | None:
    """The share of requests that a run-level promise speaks of; None where it is not a share, or
    one of the gaps within requests, which are not independent."""
    if slo.quantile is not None:
        return slo.quantile if METRICS[slo.metric].scope == "request" else None
    return {"attainment": slo.limit, "error_rate": 1 - slo.limit}.get(slo.metric)
