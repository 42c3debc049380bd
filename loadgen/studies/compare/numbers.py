"""The comparison of two sides, each a set of equal runs: B is better, worse or the same as A.

Each run gives a number per measure, and the variation between equal runs decides whether a
difference is significant (`contrast`). Two single runs have no such variation. They are judged only
with noise measured on earlier equal runs, or by their own requests (--within-run; in virtual time
always), if they are longer than the memory of their queue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.errors import UsageError, nearest
from loadgen.manifest.json_section import JsonSection
from loadgen.measure.measures import Measure, Measured, measure
from loadgen.measure.summary import NO_LIMIT
from loadgen.records import Run
from loadgen.studies.compare.comparable import ConfigDifference, changes, refusal, slos_of
from loadgen.studies.compare.contrast import Noise, noise_of
from loadgen.studies.compare.judgement import (
    ComparedMeasure,
    Options,
    Overall,
    binomial_sd,
    judge,
    overall,
    scale_of,
    set_aside,
    settle,
    timed,
    undecidable_note,
)
from loadgen.studies.compare.single_pair import TOO_SHORT, judge_pair

GATED = ("p50(ttft)", "p99(ttft)", "mean(tpot)", "error_rate")
"""Measures that decide unless others are given; few, because each further measure makes all less
certain. Closed loops add `output_tokens_per_s`: there, a slower server receives less traffic."""
SHOWN = (
    *("mean(ttft)", "p90(ttft)", "p50(ttfat)", "p99(ttfat)", "p99(tpot)", "p99(itl)"),
    *("p50(e2e)", "p99(e2e)", "attainment"),
    *("goodput", "requests_per_s", "output_tokens_per_s"),
)
SHOWN_OF_AGENTS = ("attainment(tree)", "mean(task_time)", "p90(task_time)", "mean(wait_share)")
"""Measures that only runs of agents have."""
SLO_METRICS = ("attainment", "goodput", "goodput_output_tokens_per_s", "tree_attainment")


def shown(*, has_reasoning: bool, is_of_agents: bool) -> list[str]:
    """The measures of `SHOWN`, and those of agents; without reasoning TTFAT is TTFT, and left
    out."""
    texts = [text for text in SHOWN if has_reasoning or "(ttfat)" not in text]
    return [*texts, *(SHOWN_OF_AGENTS if is_of_agents else ())]


class Comparison(JsonSection, frozen=True, kw_only=True):
    """The comparison of two sides, and the content of compare.json. `verdict` follows the gated
    measures: worse if any is, else inconclusive if any is, else better if any is, else same;
    invalid where a side has no valid run."""

    schema: int = 1
    verdict: Overall
    a: tuple[str, ...]
    b: tuple[str, ...]
    measures: tuple[ComparedMeasure, ...]
    changes: tuple[ConfigDifference, ...]
    notes: tuple[str, ...]
    confidence: float
    pairing: str


OneRun = Run | Path | str
"""A run, or the path or the name of a recorded run or of a folder of runs."""


def compare(
    a: OneRun | Sequence[OneRun],
    b: OneRun | Sequence[OneRun],
    options: Options | None = None,
    **changed: Any,
) -> Comparison:
    """Runs of A against runs of B, each as objects, paths or names; `changed` are fields of
    Options.

    Raises UsageError for runs that are not comparable, naming the keys that differ, for a path
    without a run, and for invalid measures or margins.
    """
    known = [field.name for field in dataclasses.fields(Options)]
    for name in changed:
        if name not in known:
            raise UsageError(f"unknown option '{name}'; {nearest(name, known)}")
    chosen = dataclasses.replace(options or Options(), **changed)
    sides = _measured(a), _measured(b)
    return judge_sides(sides[0], sides[1], chosen)


def judge_sides(a: Sequence[Measured], b: Sequence[Measured], options: Options) -> Comparison:
    """`compare`, for runs whose columns are already computed."""
    if not a or not b:
        raise UsageError("each side of a comparison needs at least one run")
    if not 0.5 < options.confidence < 1:
        raise UsageError(f"--confidence {options.confidence}: expected above 0.5 and below 1")
    manifests = [m.run.manifest for m in a], [m.run.manifest for m in b]
    reasons = refusal(*manifests, options.vary)
    if reasons:
        raise UsageError(
            "these runs are not comparable:\n" + "\n".join(reasons) + "\n"
            "Compare runs that agree in these keys, or allow a difference: --vary KEY (scenario, "
            "target.model, …)"
        )
    trusted_a, trusted_b = ([m for m in side if m.is_comparable] for side in (a, b))
    notes = _left_out(a, trusted_a) + _left_out(b, trusted_b)
    found: list[ComparedMeasure] = []
    pairing = "none"
    if trusted_a and trusted_b:
        asked, gated, said = _measures(trusted_a + trusted_b, options.metrics)
        pairing = _pairing(trusted_a, trusted_b)
        notes += said + _pairing_notes(trusted_a, trusted_b, options)
        found = _judge_all(trusted_a, trusted_b, asked, gated, options)
        notes += _too_short_notes(found)
        if any(row.runs_needed is not None for row in found if row.is_gated):
            notes += undecidable_note(found, "with these runs", "runs a side")
    return Comparison(
        verdict=overall(found),
        a=tuple(m.name for m in a),
        b=tuple(m.name for m in b),
        measures=tuple(found),
        changes=tuple(changes(manifests[0][0], manifests[1][0])),
        notes=tuple(notes),
        confidence=options.confidence,
        pairing=pairing,
    )


def measure_noise(runs: OneRun | Sequence[OneRun], metrics: Sequence[str] = ()) -> dict[str, Noise]:
    """The variation between equal runs, per measure (A/A comparison): relative; of shares, in
    points.

    Raises UsageError for runs that differ in more than their seed, or fewer than three.
    """
    return noise_of_sides(_measured(runs), metrics)


def noise_of_sides(measured: Sequence[Measured], metrics: Sequence[str] = ()) -> dict[str, Noise]:
    """`measure_noise`, for runs whose columns are already computed."""
    manifests = [m.run.manifest for m in measured]
    reasons = refusal(manifests, manifests[:1])
    if reasons:
        raise UsageError("an A/A comparison needs equal runs:\n" + "\n".join(reasons))
    trusted = [m for m in measured if m.is_comparable]
    if len(trusted) < 3:
        raise UsageError(
            f"the noise of equal runs needs at least three valid runs; "
            f"{len(trusted)} of {len(measured)} are valid"
        )
    asked, _, _ = _measures(trusted, metrics)
    blocks = [m.schedule_sha256 for m in trusted]
    shared = blocks if len(set(blocks)) < len(blocks) else None
    found = {}
    for one in asked:
        values = np.array([m.value(one) for m in trusted])
        values = scale_of(one, values, values).of(values)
        noise = noise_of(values, shared, not one.is_share) if np.isfinite(values).all() else None
        if noise is not None and one.is_share:
            n_due = float(sum(m.n_of(one) for m in trusted))
            chance = binomial_sd(float(values.mean()) * n_due, n_due, n_due / len(trusted))
            noise = max(noise, Noise(chance, n_due), key=lambda found: found.sd)
        if noise is not None:
            found[one.text] = noise
    return found


def _measured(runs: OneRun | Sequence[OneRun]) -> list[Measured]:
    from loadgen.studies.compare.sides import read_side

    several = [runs] if isinstance(runs, (Run, Path, str)) else runs
    measured: list[Measured] = []
    for run in several:
        measured += [Measured(run)] if isinstance(run, Run) else read_side(str(run))
    return measured


def _measures(
    runs: Sequence[Measured], metrics: Sequence[str]
) -> tuple[list[Measure], set[str], list[str]]:
    """The measures to compare, the texts of the deciding measures, and notes on measures left
    out."""
    gated = list(metrics or GATED)
    if not metrics and runs[0].run.manifest.has_closed_loop:
        gated.append("output_tokens_per_s")
    is_of_agents = all(m.of_trees is not None for m in runs)
    has_reasoning = any(m.has_reasoning for m in runs)
    others = shown(has_reasoning=has_reasoning, is_of_agents=is_of_agents)
    texts = list(dict.fromkeys([*gated, *others]))
    asked, notes = [measure(text) for text in texts], []
    if len({slos_of(m.run.manifest) for m in runs}) > 1:
        asked = [one for one in asked if one.metric.name not in SLO_METRICS]
        notes.append("The runs have different SLOs, so attainment and goodput are not compared.")
    if not all(m.has_limits for m in runs):
        asked = [one for one in asked if one.metric.name != "attainment"]
        notes.append(f"Attainment is n/a: {NO_LIMIT}.")
    kept = {one.text for one in asked}
    return asked, {measure(text).text for text in gated} & kept, notes


def _pairing(a: Sequence[Measured], b: Sequence[Measured]) -> str:
    hashes = [{m.schedule_sha256 for m in side} for side in (a, b)]
    if hashes[0] != hashes[1]:
        return "none"
    return "one schedule" if len(hashes[0]) == 1 else "by schedule"


def _pairing_notes(a: Sequence[Measured], b: Sequence[Measured], options: Options) -> list[str]:
    if len(a) + len(b) > 2 or options.noise or _is_alone(a, b, options):
        return []
    return [
        "One run a side can be judged with --noise from `slobench compare --aa`; --within-run "
        "compares only these two runs."
    ]


def _too_short_notes(rows: Sequence[ComparedMeasure]) -> list[str]:
    names = [row.measure for row in rows if row.is_gated and row.how == TOO_SHORT]
    if not names:
        return []
    return [
        f"Not judged: {', '.join(names)}. The two runs are too short for the memory of their "
        "queue: neighbouring requests wait for the same requests. Measure longer, or measure three "
        "or more runs of each side."
    ]


def _is_alone(a: Sequence[Measured], b: Sequence[Measured], options: Options) -> bool:
    """Whether two single runs are judged by their own requests: with --within-run, or in virtual
    time, where runs differ by nothing else."""
    if len(a) + len(b) > 2 or options.noise:
        return False
    virtual = all(m.run.manifest.target.kind == "sim" for m in (*a, *b))
    return options.within_run or virtual


def _judge_all(
    a: Sequence[Measured],
    b: Sequence[Measured],
    asked: Sequence[Measure],
    gated: set[str],
    options: Options,
) -> list[ComparedMeasure]:
    hashes = [m.schedule_sha256 for m in a], [m.schedule_sha256 for m in b]
    blocks = hashes if _pairing(a, b) == "by schedule" else None
    rows = []
    for one in asked:
        n_due = sum(m.n_of(one) for m in a), sum(m.n_of(one) for m in b)
        if _is_alone(a, b, options):
            found, row = judge_pair(one, a[0], b[0], options)
        else:
            values = np.array([m.value(one) for m in a]), np.array([m.value(one) for m in b])
            found, row = judge(one, values, blocks, options, n_due)
        rows.append((found, dataclasses.replace(row, is_gated=one.text in gated)))
    aside = set_aside([row for _, row in rows], options)
    judged = [(found, row) for (found, _), row in zip(rows, aside, strict=True)]
    minutes = 2 * float(np.mean([_minutes(run) for run in (*a, *b)]))
    settled = _without_draws(settle(judged, options.confidence), a, b)
    return [timed(row, minutes) for row in settled]


_FOLLOW_THE_DRAW = ("goodput", "requests_per_s")


def _without_draws(
    rows: Sequence[ComparedMeasure], a: Sequence[Measured], b: Sequence[Measured]
) -> list[ComparedMeasure]:
    """The rows, with the rates of open loops that only follow the drawn schedules as the same: the
    share of the offered rate differs by less than the margin."""
    offered = [[m.summary.offered_rate_per_s for m in side] for side in (a, b)]
    rates = [[rate for rate in side if rate] for side in offered]
    if any(len(known) < len(side) for known, side in zip(rates, offered, strict=True)):
        return list(rows)  # a closed loop: the server sets the rate
    offered_change = float(np.mean(rates[1])) / float(np.mean(rates[0])) - 1
    if offered_change == 0:
        return list(rows)

    def is_draw(row: ComparedMeasure) -> bool:
        if row.measure not in _FOLLOW_THE_DRAW or row.verdict not in ("worse", "better"):
            return False
        return abs((1 + row.change) / (1 + offered_change) - 1) <= row.margin

    return [dataclasses.replace(row, verdict="same") if is_draw(row) else row for row in rows]


def _minutes(run: Measured) -> float:
    """The planned time of a run without its drain."""
    window = run.run.manifest.window
    return (window.warmup_s + window.measure_s) / 60


def _left_out(side: Sequence[Measured], trusted: Sequence[Measured]) -> list[str]:
    reasons = [(m.name, m.summary.validity.why_not_comparable) for m in side if m not in trusted]
    return [
        f"{name} is left out because the run is invalid: {'; '.join(why)}" for name, why in reasons
    ]
