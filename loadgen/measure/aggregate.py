"""The summary of a run: requests due, their latencies, the SLOs met or missed, and the verdict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadgen.errors import UsageError
from loadgen.measure.attainment import (
    MeasuredWindow,
    due_rows,
    measured_window,
    meets,
    meets_own,
    slos_by_class,
    slos_met,
    warmup_rows,
    withdrawn_rows,
)
from loadgen.measure.catalog import METRICS, Metric
from loadgen.measure.drivers import drivers
from loadgen.measure.fairness import fairness
from loadgen.measure.findings import findings, token_marks
from loadgen.measure.load import Throughput, inside, load_through, per_second, throughput
from loadgen.measure.per_request import Mask, PerRequest, Samples, per_request, without_own
from loadgen.measure.server_load import backends, server_findings, server_summary
from loadgen.measure.slo import Slo, own_slo, parse_slo, ungrounded
from loadgen.measure.stalls import stalls
from loadgen.measure.statistics.intervals import Interval
from loadgen.measure.statistics.percentiles import Percentile
from loadgen.measure.statistics.population import Population
from loadgen.measure.statistics.proportions import wilson
from loadgen.measure.stimulus import stimulus
from loadgen.measure.summary import (
    PERCENTILES,
    Attainment,
    ClassSummary,
    Distribution,
    Goodput,
    Summary,
    Validity,
    ValidityCheck,
)
from loadgen.measure.validity.checks import checks, is_trusted
from loadgen.measure.verdict import (
    DEFAULT_CONFIDENCE,
    Shares,
    SloResult,
    decide,
    max_result,
    mean_result,
    percentile_result,
    request_slo_result,
    run_metric_result,
    slo_results,
)
from loadgen.records import Run, Status


def summarize(
    run: Run, slo: Sequence[str] | None = None, confidence: float | None = None
) -> Summary:
    """The summary and the verdict of a run, under its own SLOs or under others.

    With `confidence` the verdict follows the bounds instead of the estimates, and an SLO that they
    leave open gives no verdict. Raises UsageError for invalid other SLOs, ValueError for a
    confidence outside (0.5, 1), RunInvalid for tables that do not fit together.
    """
    if confidence is not None and not 0.5 < confidence < 1:
        raise ValueError(f"expected a confidence above 50 % and below 100 %, not {confidence}")
    slos = [parse_slo(text) for text in run.manifest.slo] if slo is None else _other_slos(slo)
    by_class = slos_by_class(run)
    if slo is not None:
        run, by_class = without_own(run), {name: [] for name in by_class}
    window, columns, due = measured_window(run), per_request(run), due_rows(run)
    everything = [*slos, *(own for class_slos in by_class.values() for own in class_slos)]
    shared = tuple(slos)
    slos += _brought_to_all(run, columns, shared, by_class)
    everything += _tightest_own(columns, due)
    level = DEFAULT_CONFIDENCE if confidence is None else confidence
    load = load_through(run, columns, due, window)
    found = checks(run, columns, due, everything, load)
    doubts = _doubts(run, found, due)
    sent, addresses = stimulus(run, columns, window), tuple(backends(run, columns, due))
    met = due & meets_own(run, columns, slos, by_class)
    whole = _numbers(run, columns, slos, due, met, window, level)
    classes = {
        name: _class_summary(run, name, shared, own, window, level, confidence is not None)
        for name, own in by_class.items()
    }
    asked = [*whole["slo"], *(_of_class(n, r) for n, c in classes.items() for r in c.slo)]
    verdict, exit_code, reasons = decide(
        asked,
        doubts,
        next((_sentence(c) for c in found if c.name == "load" and c.ok is False), ""),
        level,
        is_strict=confidence is not None,
        n_ok=whole["counts"][Status.ok.name],
    )
    return Summary(
        run=run.manifest.run,
        verdict=verdict,
        exit_code=exit_code,
        reasons=reasons,
        confidence=level,
        window=window,
        **whole,
        validity=Validity(is_trusted(found), tuple(found), stalls(run, columns, due)),
        findings=(
            *findings(run, columns, due, window, everything, found, sent, addresses),
            *server_findings(run, columns),
        ),
        classes=classes,
        drivers=drivers(run, columns, due, level),
        fairness=fairness(run, columns, due, met, window, level),
        server=server_summary(run, columns, window),
        backends=addresses,
        stimulus=sent,
        marks=token_marks(columns, run, due),
        http_statuses=_http_statuses(run, due),
    )


def _brought_to_all(
    run: Run, columns: PerRequest, shared: Sequence[Slo], by_class: Mapping[str, Sequence[Slo]]
) -> list[Slo]:
    """SLOs that only requests brought and that the share of the whole run (stated or implied)
    covers. Excluded are metrics that have an SLO of the whole run, and those for which every class
    with such requests has an SLO on the metric or a share of its own."""
    found = []
    for metric, own_s in columns.own_slo_s.items():
        brought = own_s > 0
        for name, own in by_class.items():
            if _has_slo_on(own, metric) or _states_share(own):
                brought &= run.schedule_rows["class_id"] != run.names.classes.index(name)
        if brought.any() and not _has_slo_on(shared, metric):
            found.append(own_slo(metric))
    return found


def _brought_to_class(
    columns: PerRequest, due: Mask, shared: Sequence[Slo], own: Sequence[Slo]
) -> list[Slo]:
    """SLOs that only requests of a class brought and that the class is judged by: its own share
    covers them or, where no share is stated, the implied share."""
    if _states_share(shared) and not _states_share(own):
        return []
    return [
        own_slo(metric)
        for metric, own_s in columns.own_slo_s.items()
        if (due & (own_s > 0)).any() and not _has_slo_on([*shared, *own], metric)
    ]


def _has_slo_on(slos: Sequence[Slo], metric: str) -> bool:
    return any(slo.scope == "request" and slo.metric == metric for slo in slos)


def _states_share(slos: Sequence[Slo]) -> bool:
    return any(slo.metric in ("attainment", "goodput") for slo in slos)


def _tightest_own(columns: PerRequest, due: Mask) -> list[Slo]:
    """Per metric, the strictest limit that a request brought."""
    found = []
    for metric, own_s in columns.own_slo_s.items():
        limits_s = own_s[due & (own_s > 0)]
        if len(limits_s):
            found.append(dataclasses.replace(own_slo(metric), limit=float(limits_s.min())))
    return found


def _other_slos(texts: Sequence[str]) -> list[Slo]:
    """SLOs that were not part of the run, checked like those of a scenario."""
    try:
        slos = [parse_slo(text) for text in texts]
    except ValueError as problem:
        raise UsageError(f"--slo {problem}") from None
    mistake = ungrounded(slos)
    if mistake is not None:
        raise UsageError(f"--slo {mistake}")
    return slos


def _numbers(
    run: Run,
    columns: PerRequest,
    slos: Sequence[Slo],
    due: Mask,
    met: Mask,
    window: MeasuredWindow,
    level: float,
) -> dict[str, Any]:
    """The fields that the summary of a run and that of a class share."""
    samples, rates = Samples(columns, due), throughput(run, columns, window)
    n_sent = np.count_nonzero(due & inside(run.request_rows["sent_s"], window))
    return {
        "counts": _counts(run, due),
        "offered_rate_per_s": per_second(float(np.count_nonzero(due)), window),
        "achieved_rate_per_s": per_second(float(n_sent), window),
        "throughput": rates,
        "metrics": _distributions(samples, level),
        "slo": tuple(_judge(slos, columns, due, met, samples, rates, window, level)),
        "attainment": _attainment(due, met, level),
        "goodput": _goodput(columns, due, met, window, level),
    }


def _class_summary(
    run: Run,
    name: str,
    shared: Sequence[Slo],
    own: Sequence[Slo],
    window: MeasuredWindow,
    level: float,
    is_strict: bool,
) -> ClassSummary:
    """The rows of a class, summarised like a run of their own."""
    part = _only(run, run.names.classes.index(name))
    columns, due = per_request(part), due_rows(part)
    own = [*own, *_brought_to_class(columns, due, shared, own)]
    met = due & meets(columns, [*shared, *own])
    numbers = _numbers(part, columns, own, due, met, window, level)
    stated = run.manifest.classes[name]
    return ClassSummary(
        tenant=stated.tenant,
        priority=stated.priority,
        verdict=decide(numbers["slo"], (), "", level, is_strict, numbers["counts"][Status.ok.name])[
            0
        ],
        **numbers,
    )


def _only(run: Run, class_id: int) -> Run:
    rows = run.schedule_rows["class_id"] == class_id
    ids = run.schedule_rows["request_id"][rows]
    return dataclasses.replace(
        run,
        schedule_rows=run.schedule_rows[rows],
        request_rows=run.request_rows[rows],
        chunk_rows=run.chunk_rows[np.isin(run.chunk_rows["request_id"], ids)],
    )


def _of_class(name: str, result: SloResult) -> SloResult:
    return dataclasses.replace(result, text=f"{name}: {result.text}")


def _counts(run: Run, due: Mask) -> dict[str, int]:
    by_status = np.bincount(run.request_rows["status"][due], minlength=len(Status))
    n_warmup = _count(warmup_rows(run))
    n_scheduled, n_due = len(run.schedule_rows), _count(due)
    n_withdrawn = _count(withdrawn_rows(run))
    return {
        "scheduled": n_scheduled,
        "warmup": n_warmup,
        "due": n_due,
        "withdrawn": n_withdrawn,
        "not_due": n_scheduled - n_warmup - n_due - n_withdrawn,
        **{status.name: int(by_status[status]) for status in Status},
    }


def _http_statuses(run: Run, due: Mask) -> dict[str, int]:
    rows = run.request_rows[due]
    statuses = rows["http_status"][rows["status"] == Status.http_error]
    return {str(status): int(n) for status, n in zip(*np.unique_counts(statuses), strict=True)}


def _distributions(samples: Samples, confidence: float) -> dict[str, Distribution]:
    cache: dict[int, dict[str, Percentile]] = {}  # by id(): `samples` keeps the objects alive

    def percentiles(population: Population) -> dict[str, Percentile]:
        if id(population) not in cache:
            cache[id(population)] = {
                name: population.percentile(quantile, confidence)
                for name, quantile in PERCENTILES.items()
            }
        return cache[id(population)]

    def distribution(metric: Metric) -> Distribution:
        plain = samples.of(metric)
        ordered = plain.ordered
        failures: Mapping[str, Percentile] = {}
        if metric.slo:
            failures = percentiles(samples.of(metric, with_failures=True))
        return Distribution(
            n=plain.n,
            mean=float(ordered.mean()) if len(ordered) else math.nan,
            min=float(ordered[0]) if len(ordered) else math.nan,
            max=plain.largest(),
            percentiles=percentiles(plain),
            with_failures=failures,
        )

    return {name: distribution(m) for name, m in METRICS.items() if m.scope != "run"}


def _attainment(due: Mask, met: Mask, confidence: float) -> Attainment:
    n_met, n_due = _count(met), _count(due)
    share = wilson(n_met, n_due, confidence)
    return Attainment(share.value, share.low, share.high, n_met, n_due)


def _goodput(
    columns: PerRequest, due: Mask, met: Mask, window: MeasuredWindow, confidence: float
) -> Goodput:
    share = _attainment(due, met, confidence)
    rate = per_second(float(share.due), window)
    per_s = Interval(share.value, share.low, share.high).times(rate)
    n_tokens = float(columns.output_tokens[met].sum())
    requests_per_s = dataclasses.replace(per_s, value=per_second(float(share.met), window))
    return Goodput(requests_per_s, per_second(n_tokens, window))


def _judge(
    slos: Sequence[Slo],
    columns: PerRequest,
    due: Mask,
    met: Mask,
    samples: Samples,
    rates: Throughput,
    window: MeasuredWindow,
    confidence: float,
) -> list[SloResult]:
    n_due, n_met, n_ok = (_count(m) for m in (due, met, due & columns.is_ok))
    shares = Shares(n_due, n_met, n_ok, window.length_s)

    def rate(metric: str) -> float:
        if metric == "goodput_output_tokens_per_s":
            return _goodput(columns, due, met, window, confidence).output_tokens_per_s
        value: float = getattr(rates, metric)
        return value

    def judge(slo: Slo) -> SloResult:
        metric = METRICS[slo.metric]
        if slo.scope == "request":
            own_s = columns.own_slo_s.get(slo.metric)
            has_own = due & (own_s > 0) if own_s is not None else due & False
            counted = has_own if math.isinf(slo.limit) else due
            met_slo = counted & slos_met(columns, slo)
            n_met_slo, n_counted, n_own = map(_count, (met_slo, counted, has_own))
            return request_slo_result(slo, n_met_slo, n_counted, confidence, n_own)
        if slo.quantile is not None:
            return percentile_result(slo, samples.of(metric, with_failures=True), confidence)
        if slo.aggregate == "mean":
            return mean_result(slo, samples.of(metric), confidence)
        if slo.aggregate == "max":
            return max_result(slo, samples.of(metric, with_failures=True))
        return run_metric_result(slo, shares, rate, confidence)

    return [
        dataclasses.replace(judge(slo), is_implied=implied) for slo, implied in slo_results(slos)
    ]


def _doubts(run: Run, found: Sequence[ValidityCheck], due: Mask) -> list[str]:
    """Reasons for which no verdict can be given."""
    reasons = []
    ended = run.manifest.ended
    if ended != "completed":
        why = run.manifest.end_reason.rstrip(".")
        reasons.append(f"The run was {ended}{f': {why}' if why else ''}.")
    reasons += [_sentence(check) for check in found if check.is_gate and check.ok is False]
    if not due.any():
        reasons.append("No request was due in the measured window.")
    return reasons


def _sentence(check: ValidityCheck) -> str:
    return f"{check.detail[:1].upper()}{check.detail[1:]}."


def _count(rows: Mask) -> int:
    return int(np.count_nonzero(rows))
