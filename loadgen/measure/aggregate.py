"""The summary of a run: requests due, their latencies, the SLOs met or missed, and the verdict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadgen.errors import UsageError
from loadgen.measure.attainment import (
    MeasuredWindow,
    came_due,
    due_rows,
    failed_rows,
    limited_rows,
    measured_window,
    meets,
    meets_own,
    recorded_slos,
    slos_by_class,
    slos_met,
    unfinished_rows,
    warmup_rows,
    withdrawn_rows,
)
from loadgen.measure.catalog import METRICS, Metric
from loadgen.measure.drivers import drivers
from loadgen.measure.fairness import fairness
from loadgen.measure.findings import findings, token_marks, unfinished_text
from loadgen.measure.load import (
    SLOWER_BY,
    Throughput,
    falls_behind,
    inside,
    load_through,
    per_second,
    throughput,
)
from loadgen.measure.per_request import (
    Mask,
    PerRequest,
    Samples,
    Seconds,
    per_request,
    without_own,
)
from loadgen.measure.search_command import capacity_command
from loadgen.measure.server_load import backends, server_findings, server_summary
from loadgen.measure.slo import (
    Slo,
    needs_stream,
    own_slo,
    parse_slo,
    ungrounded,
    with_implied,
)
from loadgen.measure.stalls import stalls
from loadgen.measure.statistics.dependence import Dependence
from loadgen.measure.statistics.percentiles import Percentile
from loadgen.measure.statistics.population import Population
from loadgen.measure.statistics.proportions import wilson
from loadgen.measure.stimulus import stimulus
from loadgen.measure.summary import (
    NO_LIMIT,
    PERCENTILES,
    Attainment,
    ClassSummary,
    Distribution,
    Goodput,
    Summary,
    Validity,
    ValidityCheck,
)
from loadgen.measure.truncated import why_not_met
from loadgen.measure.unmeasured import counts_for, settled
from loadgen.measure.validity.checks import checks, is_disturbed, is_trusted, own_lateness
from loadgen.measure.validity.error_bound import ErrorBound, error_bound, shifted
from loadgen.measure.validity.survival import (
    error_sentence,
    imprecise,
    instrument_check,
    unsettled,
    with_error,
)
from loadgen.measure.verdict import (
    DEFAULT_CONFIDENCE,
    Bound,
    Shares,
    SloResult,
    decide,
    max_result,
    mean_result,
    percentile_result,
    request_slo_result,
    run_metric_result,
)
from loadgen.records import OWN_SLO, Run, Status

_ANY_SHARE = parse_slo("attainment >= 0%")
"""Always met: its bound is the lower bound of an attainment that no SLO is about."""


def summarize(
    run: Run,
    slo: Sequence[str] | None = None,
    confidence: float | None = None,
    min_requests: int | None = None,
) -> Summary:
    """The summary and the verdict of a run, under its own SLOs or under others.

    With `confidence` the verdict follows the bounds instead of the estimates, and an SLO that they
    leave open gives no verdict. With fewer successful requests than `min_requests` (None: as the
    run was made with) there is no verdict. Raises UsageError for invalid other SLOs, ValueError for
    a confidence outside (0.5, 1), RunInvalid for tables that do not fit together.
    """
    if confidence is not None and not 0.5 < confidence < 1:
        raise ValueError(f"expected a confidence above 50 % and below 100 %, not {confidence}")
    slos = recorded_slos(run.manifest.slo) if slo is None else _other_slos(slo)
    by_class = slos_by_class(run)
    made_under = slos_of_run(run)
    if slo is not None:
        run, by_class = without_own(run), {name: [] for name in by_class}
    if not run.manifest.target.stream and (problem := needs_stream(slos)) is not None:
        raise UsageError(f"--slo {problem}")
    window, columns, due = measured_window(run), per_request(run), due_rows(run)
    everything = [*slos, *(own for class_slos in by_class.values() for own in class_slos)]
    shared, command = tuple(slos), capacity_command(run, everything, is_own=slo is None)
    slos += _brought_to_all(run, columns, shared, by_class)
    everything += _tightest_own(columns, due)
    level = DEFAULT_CONFIDENCE if confidence is None else confidence
    load = load_through(run, columns, due, window)
    found = checks(run, columns, due, everything, load)
    lateness_s = own_lateness(run, columns)
    bound = error_bound(run, lateness_s)
    sent, addresses = stimulus(run, columns, window), tuple(backends(run, columns, due))
    met = due & meets_own(run, columns, slos, by_class)
    least = run.manifest.min_requests if min_requests is None else min_requests
    limited = limited_rows(run, columns, slos, by_class)
    by_rows = [(slo, due | True) for slo in (*slos, *_brought(columns))]
    for name, own in by_class.items():
        in_class = run.schedule_rows["class_id"] == run.names.classes.index(name)
        by_rows += [(slo, in_class) for slo in own]
    scope = _Scope(
        run, tuple(slos), due, lambda c: meets_own(run, c, slos, by_class), window, level
    )
    whole = {
        **_numbers(scope, columns, limited, bound, by_rows),
        **_rates(run, window, run.manifest.requested_rate_per_s, run.manifest.has_closed_loop),
    }
    classes = {
        name: _class_summary(
            run, name, shared, own, window, level, confidence is not None, lateness_s
        )
        for name, own in by_class.items()
    }
    overload = _overload(run, columns, due, found, whole["counts"])
    if overload:  # a longer run would look worse, not clearer
        whole["slo"] = _without_needs(whole["slo"])
        classes = {
            name: dataclasses.replace(c, slo=_without_needs(c.slo)) for name, c in classes.items()
        }
    judged = [*whole["slo"], *(_of_class(n, r) for n, c in classes.items() for r in c.slo)]
    too_large = imprecise(run, columns, bound, due, run.manifest.instrument_limits)
    open_overload = _open_overload(run, columns, bound, due, window) if overload else ""
    found.append(instrument_check(run, judged, too_large, is_disturbed(found), open_overload))
    if not is_trusted(found):
        whole["slo"] = _unproven(whole["slo"])
        classes = {
            name: dataclasses.replace(c, verdict="no_verdict", slo=_unproven(c.slo))
            for name, c in classes.items()
        }
    verdict, exit_code, reasons = decide(
        judged,
        _doubts(run, found, due),
        overload,
        level,
        is_strict=confidence is not None,
        n_ok=whole["counts"][Status.ok.name],
        min_requests=least,
    )
    if verdict == "met" and (reason := why_not_met(run, due)):
        verdict, exit_code, reasons = "no_verdict", 3, (reason,)
    return Summary(
        run=run.manifest.run,
        verdict=verdict,
        exit_code=exit_code,
        reasons=reasons,
        confidence=level,
        window=window,
        **whole,
        validity=Validity(
            is_trusted(found), tuple(found), stalls(run, columns, due), tuple(map(str, too_large))
        ),
        findings=(
            *findings(run, columns, due, window, everything, found, sent, addresses),
            *server_findings(run, columns),
        ),
        classes=classes,
        drivers=drivers(run, columns, due, level),
        fairness=fairness(run, columns, due, met, limited, window, level),
        server=server_summary(run, columns, window),
        backends=addresses,
        stimulus=sent,
        capacity_command=command,
        min_requests=least,
        made_under=made_under,
        judged_by=made_under if slo is None else tuple(parse_slo(text).text for text in slo),
        marks=token_marks(columns, run, due),
        http_statuses=_http_statuses(run, due),
        is_verified=run.is_verified,
        is_overloaded=bool(overload) and verdict == "missed",
    )


def slos_of_run(run: Run) -> tuple[str, ...]:
    """The SLOs that a run was made under: of all traffic, of requests, then `chat: …` of each
    class."""
    manifest, rows = run.manifest, run.schedule_rows
    brought = [own_slo(metric).text for metric, name in OWN_SLO.items() if (rows[name] > 0).any()]
    of_classes = [
        f"{name}: {text}" for name, section in manifest.classes.items() for text in section.slo
    ]
    return (*manifest.slo, *brought, *of_classes)


def _brought(columns: PerRequest) -> list[Slo]:
    """The SLOs that requests brought themselves."""
    return [own_slo(metric) for metric in columns.own_slo_s]


def _unproven(results: Sequence[SloResult]) -> tuple[SloResult, ...]:
    """The results of an INVALID run, which proves nothing."""
    return tuple(dataclasses.replace(r, proven=None, n_needed=None) for r in results)


def _without_needs(results: Sequence[SloResult]) -> tuple[SloResult, ...]:
    return tuple(dataclasses.replace(r, n_needed=None, seconds_needed=None) for r in results)


def _open_overload(
    run: Run, columns: PerRequest, bound: ErrorBound, due: Mask, window: MeasuredWindow
) -> str:
    """A sentence where the load generator's own delays can explain that TTFT grew; else ""."""
    slowest, fastest = (
        load_through(run, shifted(run, columns, bound, sign, has_gaps=False), due, window)
        for sign in (1, -1)
    )
    if slowest is None or fastest is None:
        return ""
    if fastest.ttft_s[-1] >= SLOWER_BY * slowest.ttft_s[0]:
        return ""
    return "the growth of TTFT over the window can be the load generator's"


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


@dataclass(frozen=True)
class _Scope:
    """The requests of a run, or those of a class, and their SLOs."""

    run: Run
    slos: Sequence[Slo]
    due: Mask
    meets: Callable[[PerRequest], Mask]
    """Rows that met each of their per-request limits."""
    window: MeasuredWindow
    confidence: float

    def at(self, columns: PerRequest, rates: Throughput) -> _Judged:
        """The requests with these latencies: as measured, or shifted by the instrument error."""
        met, samples = self.due & self.meets(columns), Samples(columns, self.due)
        shares = _shares(self.run, columns, self.due, met, samples, self.slos, self.window)
        return _Judged(columns, self.due, met, samples, rates, self.window, shares, self.confidence)


@dataclass(frozen=True)
class _Judged:
    """The requests of a scope with the latencies by which they are judged."""

    columns: PerRequest
    due: Mask
    met: Mask
    samples: Samples
    rates: Throughput
    window: MeasuredWindow
    shares: Shares
    confidence: float

    def results(self, slos: Sequence[Slo]) -> list[SloResult]:
        """The results of `slos`, and of the SLO that they imply."""
        return [
            dataclasses.replace(
                result, is_implied=implied, seconds_needed=self._seconds_needed(result)
            )
            for slo, implied in with_implied(slos)
            for result in [self._result(slo)]
        ]

    def _result(self, slo: Slo) -> SloResult:
        metric, confidence = METRICS[slo.metric], self.confidence
        if slo.scope == "request":
            return self._request_slo_result(slo)
        if slo.quantile is not None:
            population = self.samples.of(metric, with_failures=True)
            return percentile_result(slo, population, confidence)
        if slo.aggregate == "mean":
            return mean_result(slo, self.samples.of(metric), confidence)
        if slo.aggregate == "max":
            return max_result(slo, self.samples.of(metric, with_failures=True))
        return run_metric_result(slo, self.shares, self._rate, confidence)

    def _request_slo_result(self, slo: Slo) -> SloResult:
        own_s = self.columns.own_slo_s.get(slo.metric)
        has_own = self.due & (own_s > 0) if own_s is not None else self.due & False
        counted = has_own if math.isinf(slo.limit) else self.due
        counted = counted & counts_for(self.columns, slo.metric)
        met = counted & slos_met(self.columns, slo)
        n_met, n_counted, n_own = map(_count, (met, counted, has_own))
        dependence = self.samples.share(met, (slo.metric,))
        if n_counted < self.shares.due:
            dependence = dependence.of_run(n_counted)
        return request_slo_result(slo, n_met, n_counted, self.confidence, dependence, n_own)

    def _rate(self, metric: str) -> float:
        if metric == "goodput_output_tokens_per_s":
            return per_second(float(self.columns.streamed_tokens[self.met].sum()), self.window)
        value: float = getattr(self.rates, metric)
        return value

    def _seconds_needed(self, result: SloResult) -> float | None:
        if not result.n_needed or not result.n:
            return None
        return self.window.length_s * result.n_needed / result.n


def _numbers(
    scope: _Scope,
    columns: PerRequest,
    limited: Mask,
    bound: ErrorBound,
    by_rows: Sequence[tuple[Slo, Mask]],
) -> dict[str, Any]:
    """The fields that the summary of a run and that of a class share. `by_rows` has the SLOs with
    the rows that they apply to."""
    run, due, window, level = scope.run, scope.due, scope.window, scope.confidence
    judged = scope.at(columns, throughput(run, columns, window))
    plain, met = judged.results(scope.slos), judged.met
    meeting = judged.shares.meeting or Dependence(judged.shares.due)
    of_share = [r for r in plain if r.metric == "attainment"] or judged.results([_ANY_SHARE])
    share_bound = min(of_share, key=lambda result: result.met is not False).bound
    results = with_error(
        run,
        columns,
        bound,
        window,
        due,
        lambda moved, rates: scope.at(moved, rates).results(scope.slos),
        [slo for slo, _ in with_implied(scope.slos)],
        plain,
        [(slo, rows) for slo, rows in by_rows if slo.scope == "request"],
    )
    return {
        "counts": _counts(run, due),
        "throughput": judged.rates,
        "metrics": _distributions(judged.samples, level),
        "slo": settled(
            results, columns, due, lambda c: scope.at(c, judged.rates).results(scope.slos)
        ),
        "attainment": _attainment(due, met, limited, meeting, level, share_bound),
        "goodput": _goodput(columns, due, met, meeting, window, level),
    }


def _class_summary(
    run: Run,
    name: str,
    shared: Sequence[Slo],
    own: Sequence[Slo],
    window: MeasuredWindow,
    level: float,
    is_strict: bool,
    lateness_s: Seconds,
) -> ClassSummary:
    """The rows of a class, summarised like a run of their own. `lateness_s` has an entry per row of
    the whole run, because the concurrency limit that holds rows back is that of all classes."""
    part = _only(run, run.names.classes.index(name))
    columns, due = per_request(part), due_rows(part)
    own = [*own, *_brought_to_class(columns, due, shared, own)]
    slos = [*shared, *own]
    limited = limited_rows(part, columns, shared, {name: own})
    in_class = run.schedule_rows["class_id"] == run.names.classes.index(name)
    bound = error_bound(part, lateness_s[in_class])
    scope = _Scope(part, own, due, lambda moved: meets(moved, slos), window, level)
    by_rows = [(slo, due | True) for slo in (*slos, *_brought(columns))]
    numbers = _numbers(scope, columns, limited, bound, by_rows)
    doubts = [error_sentence(result) for result in unsettled(numbers["slo"])]
    stated = run.manifest.classes[name]
    numbers |= _rates(part, window, stated.requested_rate_per_s, stated.is_closed_loop)
    return ClassSummary(
        tenant=stated.tenant,
        priority=stated.priority,
        verdict=decide(
            numbers["slo"], doubts, "", level, is_strict, numbers["counts"][Status.ok.name]
        )[0],
        **numbers,
    )


def _rates(
    run: Run, window: MeasuredWindow, requested_per_s: float | None, is_closed_loop: bool
) -> dict[str, Any]:
    """The rate requested, offered and achieved, of the requests that came due; requests cancelled
    on purpose belong to the traffic, too."""
    came = came_due(run)
    is_sent = came & inside(run.request_rows["sent_s"], window)
    offered_per_s = None if is_closed_loop else per_second(float(_count(came)), window)
    if is_closed_loop:
        note = "closed loop: the server's speed sets the rate"
    elif requested_per_s is None:
        note = "requested: no mean rate was recorded"
    elif (run.schedule_rows["n_parents"] > 0).any():
        note = "requested: starts of sessions and chains"
    else:
        note = ""
    return {
        "requested_rate_per_s": requested_per_s,
        "offered_rate_per_s": offered_per_s,
        "achieved_rate_per_s": per_second(float(_count(is_sent)), window),
        "rate_note": note,
    }


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
        "failed": _count(failed_rows(run)),
        "unfinished": _count(unfinished_rows(run)),
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


def _shares(
    run: Run,
    columns: PerRequest,
    due: Mask,
    met: Mask,
    samples: Samples,
    slos: Sequence[Slo],
    window: MeasuredWindow,
) -> Shares:
    failed = failed_rows(run) & ~columns.is_ok
    meeting = samples.share(met, _judged(slos))
    n_due, n_met, n_failed = (_count(rows) for rows in (due, met, failed))
    requested = run.manifest.requested_rate_per_s if len(run.names.classes) == 1 else None
    return Shares(
        n_due, n_met, n_failed, window.length_s, meeting, samples.share(failed), requested
    )


def _judged(slos: Sequence[Slo]) -> tuple[str, ...]:
    """The metrics that have a per-request limit."""
    return tuple({slo.metric: 0 for slo in slos if slo.scope == "request"})


def _attainment(
    due: Mask,
    met: Mask,
    limited: Mask,
    dependence: Dependence,
    confidence: float,
    bound: Bound | None,
) -> Attainment:
    """The attainment; there is none where no due request has a per-request limit."""
    n_met, n_due = _count(met), _count(due)
    if n_due and not (due & limited).any():
        return Attainment(math.nan, None, None, None, n_due, NO_LIMIT)
    share = wilson(n_met, n_due, confidence, dependence.hit_times(confidence))
    reason = "" if n_due else "no request was due"
    return Attainment(
        share.value, share.low, share.high, n_met, n_due, reason, bound, dependence.n_effective
    )


def _goodput(
    columns: PerRequest,
    due: Mask,
    met: Mask,
    dependence: Dependence,
    window: MeasuredWindow,
    confidence: float,
) -> Goodput:
    n_met, n_due = _count(met), _count(due)
    share = wilson(n_met, n_due, confidence, dependence.hit_times(confidence))
    per_s = share.times(per_second(float(n_due), window))
    n_tokens = float(columns.streamed_tokens[met].sum())
    requests_per_s = dataclasses.replace(per_s, value=per_second(float(n_met), window))
    return Goodput(requests_per_s, per_second(n_tokens, window))


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


def _overload(
    run: Run,
    columns: PerRequest,
    due: Mask,
    found: Sequence[ValidityCheck],
    counts: Mapping[str, int],
) -> str:
    """The sentence on an offered rate above the server's capacity; "" for none."""
    grown = next((_sentence(c) for c in found if c.name == "load" and c.ok is False), "")
    if counts["unfinished"] and (grown or falls_behind(run, columns, due)):
        return f"Overloaded: {unfinished_text(run, counts['unfinished'], counts['due'])}."
    return grown


def _sentence(check: ValidityCheck) -> str:
    remedy = f" Remedy: {check.remedy}." if check.remedy else ""
    return f"{check.detail[:1].upper()}{check.detail[1:]}.{remedy}"


def _count(rows: Mask) -> int:
    return int(np.count_nonzero(rows))
