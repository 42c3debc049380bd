"""The summary of a run: requests due, their latencies, the SLOs met or missed, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadgen.errors import RunInvalid, UsageError
from loadgen.manifest.sections import Manifest
from loadgen.measure.agents import AgentNumbers, agent_numbers
from loadgen.measure.answers import why_canned
from loadgen.measure.canary import canary_text, wrong_answers
from loadgen.measure.cause import Cause, find_cause
from loadgen.measure.counted_prompts import why_other_prompts
from loadgen.measure.doubts import doubts, open_overload, overload
from loadgen.measure.drivers import drivers
from loadgen.measure.evidence import Evidence, recorded_evidence
from loadgen.measure.fairness import fairness
from loadgen.measure.findings import findings, token_marks
from loadgen.measure.in_flight import in_flight
from loadgen.measure.judging_slos import other_slos, own_slos
from loadgen.measure.load import change_through
from loadgen.measure.per_request import Mask, without_own
from loadgen.measure.reasoning import reasoning
from loadgen.measure.run_results import RunResults, run_results
from loadgen.measure.scope import Scope
from loadgen.measure.search_command import capacity_command
from loadgen.measure.server_load import Backend, backends, server_findings, server_summary
from loadgen.measure.slo import needs_stream
from loadgen.measure.slo_result import Certainty
from loadgen.measure.stalls import stalls
from loadgen.measure.stimulus import stimulus
from loadgen.measure.summary import ERROR_GATE, Summary, Validity, ValidityCheck, gate
from loadgen.measure.truncated import why_not_met
from loadgen.measure.validity.checks import is_disturbed, is_trusted
from loadgen.measure.validity.imported_checks import needs_gaps, unknown_error
from loadgen.measure.validity.survival import Imprecise, imprecise, instrument_check
from loadgen.measure.verdict import DEFAULT_CONFIDENCE, Decision, Reason, certainty_of, decide
from loadgen.records import Run, Status


def summarize(
    run: Run,
    slo: Sequence[str] | None = None,
    confidence: float | None = None,
    min_requests: int | None = None,
    clear: bool = False,
) -> Summary:
    """The summary and the verdict of a run, under its own SLOs or under others.

    With `confidence` the verdict follows the bounds instead of the estimates, and an SLO that they
    leave open gives no verdict; with `clear` also an SLO that is neither proven nor clear of its
    limit. With fewer successful requests than `min_requests` (None: as the
    run was made with) there is no verdict. Raises UsageError for invalid other SLOs, ValueError for
    a confidence outside (0.5, 1), RunInvalid for tables that do not fit together.
    """
    if confidence is not None and not 0.5 < confidence < 1:
        raise ValueError(f"expected a confidence above 50 % and below 100 %, not {confidence}")
    least = min_requests
    required: Certainty | None = "clear" if clear else None
    if confidence is not None:
        required = "proven"
    if least is None:
        least = run.manifest.min_requests
    if slo is None:
        slos = own_slos(run)
    else:
        run, slos = without_own(run), other_slos(run, slo)
    if not run.manifest.target.stream and (problem := needs_stream(slos.stated)) is not None:
        raise UsageError(f"--slo {problem}")
    if problem := needs_gaps(run, slos.stated):
        raise UsageError(f"--slo {problem}")
    level = confidence or DEFAULT_CONFIDENCE
    evidence = recorded_evidence(run, slos, level)
    scope = evidence.whole(level)
    proof = _proof(evidence, scope, run_results(evidence, scope, required))
    decision = decide(
        proof.results.judged,
        doubts(run, proof.checks, evidence.due),
        _breakdown(proof),
        scope.confidence,
        required,
        n_ok=proof.results.whole.counts[Status.ok.name],
        min_requests=least,
    )
    if decision.verdict == "met" and (other := _other_work(evidence, proof)):
        decision = Decision("no_verdict", RunInvalid.exit_code, other)
    decision = _with_cause(decision, proof.cause, run.manifest)
    decision = _with_origin(decision, run)
    return _summary(evidence, scope, proof, decision, least)


def _breakdown(proof: _Proof) -> Reason | None:
    """What makes a run missed whatever its SLOs: a server that stopped answering, or an
    overload."""
    if proof.cause is not None and proof.cause.kind == "stopped_answering":
        return Reason("cause", proof.cause.sentence)
    return Reason("overloaded", proof.overload) if proof.overload else None


def _with_cause(decision: Decision, cause: Cause | None, manifest: Manifest) -> Decision:
    """The decision with the cause as its first reason, or as its last where something else ended
    the run; without it where the SLOs are met, the run is INVALID, or the cause is there."""
    sentences = [reason.sentence for reason in decision.reasons]
    if cause is None or decision.verdict == "met" or cause.sentence in sentences:
        return decision
    kinds = {reason.kind for reason in decision.reasons}
    if "invalid" in kinds:
        return decision
    found = Reason("cause", cause.sentence)
    is_last = "ended_early" in kinds and manifest.end_kind == "other"
    reasons = (*decision.reasons, found) if is_last else (found, *decision.reasons)
    return replace(decision, reasons=reasons)


def _with_origin(decision: Decision, run: Run) -> Decision:
    """The decision; of a run that another tool measured with what its verdict rests on."""
    origin = run.manifest.imported
    if origin is None or decision.verdict == "no_verdict":
        return decision
    text = f"The times are those of {origin.tool_text}; its own delays are not known."
    return replace(decision, reasons=(*decision.reasons, Reason("imported", text)))


def _other_work(evidence: Evidence, proof: _Proof) -> tuple[Reason, ...]:
    """The reasons why a run that met its SLOs is not the run that was planned."""
    run, due = evidence.run, evidence.due
    found = (
        Reason("tokens_missing", why_not_met(run, due)),
        Reason("other_prompts", proof.other_prompts),
        Reason("wrong_answers", wrong_answers(run.manifest)),
        Reason("wrong_answers", why_canned(run, evidence.columns, due)),
    )
    return tuple(reason for reason in found if reason.sentence)


@dataclass(frozen=True, slots=True)
class _Proof:
    """What the results of a run prove: less than they state if the run was overloaded (a sentence,
    "" for none), nothing if a gate of the `checks` failed. `imprecise` are the percentiles that the
    load generator's own delays may have moved too far. `cause` is that of most misses,
    `other_prompts` why the server read other prompts than were planned ("" if it did not)."""

    results: RunResults
    checks: tuple[ValidityCheck, ...]
    overload: str
    imprecise: Sequence[Imprecise]
    addresses: tuple[Backend, ...]
    cause: Cause | None
    other_prompts: str


def _proof(evidence: Evidence, scope: Scope, results: RunResults) -> _Proof:
    run, columns, due, error = evidence.run, evidence.columns, evidence.due, evidence.error
    excess = overload(run, columns, due, evidence.checks, results.whole.counts)
    addresses = tuple(backends(run, columns, due))
    cause = find_cause(
        run,
        columns,
        due,
        due & ~scope.meets(columns),
        evidence.window,
        addresses,
        excess,
        is_missed=any(result.met is False for result in results.judged),
    )
    has_stopped = cause is not None and cause.kind == "stopped_answering"
    unsure = ""
    if excess or has_stopped:
        results = results.without_needs()
        unsure = open_overload(run, columns, error, due, evidence.window)
    elif why := change_through(run, columns, due, evidence.window):
        results = results.without_needs(why)
    too_large = imprecise(run, columns, error, due, run.manifest.instrument_limits)
    is_late = is_disturbed(evidence.checks)
    if run.manifest.imported is not None:
        own_error = unknown_error(run.manifest.imported)
    elif has_stopped:  # the SLOs do not decide
        own_error = gate(ERROR_GATE, True, "no delay of the load generator silences a server")
    else:
        own_error = instrument_check(run, results.judged, too_large, is_late, unsure)
    checks = (*evidence.checks, own_error)
    results = results if is_trusted(checks) else results.unproven()
    other_prompts = why_other_prompts(run, due)
    return _Proof(results, checks, excess, too_large, addresses, cause, other_prompts)


def _summary(
    evidence: Evidence, scope: Scope, proof: _Proof, decision: Decision, min_requests: int
) -> Summary:
    run, columns, due, window = evidence.run, evidence.columns, evidence.due, evidence.window
    whole, met = proof.results.whole, due & scope.meets(columns)
    sent, addresses, cause = stimulus(run, columns, window), proof.addresses, proof.cause
    helps = cause is None or cause.is_about_load
    noted = (cause.sentence,) if cause is not None and decision.verdict == "met" else ()
    sentences = tuple(reason.sentence for reason in decision.reasons)
    notes = findings(
        run, columns, due, window, evidence.limits, proof.checks, sent, addresses, evidence.loop
    )
    return Summary(
        run=run.manifest.run,
        verdict=decision.verdict,
        exit_code=decision.exit_code,
        reasons=sentences,
        reason_kinds=tuple(reason.kind for reason in decision.reasons),
        confidence=scope.confidence,
        window=window,
        counts=whole.counts,
        requested_rate_per_s=whole.rates.requested_per_s,
        offered_rate_per_s=whole.rates.offered_per_s,
        achieved_rate_per_s=whole.rates.achieved_per_s,
        rate_note=whole.rates.note,
        throughput=whole.throughput,
        metrics=whole.metrics,
        slo=whole.slo,
        attainment=whole.attainment,
        goodput=whole.goodput,
        validity=Validity(
            is_trusted(proof.checks),
            proof.checks,
            stalls(run, columns, due),
            tuple(map(str, proof.imprecise)),
            proof.other_prompts,
        ),
        findings=(
            *noted,
            *(note for note in notes if note not in (*sentences, *noted)),
            *_unless_stated(wrong_answers(run.manifest), sentences),
            *server_findings(run, columns),
        ),
        classes=proof.results.classes,
        drivers=drivers(run, columns, due, scope.confidence),
        fairness=fairness(run, columns, due, met, scope.limited, window, scope.confidence),
        server=server_summary(run, columns, window),
        backends=addresses,
        stimulus=sent,
        is_simulated=run.manifest.clock == "virtual",
        measured_by="" if run.manifest.imported is None else run.manifest.imported.tool,
        capacity_command=(
            capacity_command(run, evidence.slos.stated, is_own=evidence.slos.is_own)
            if helps
            else ""
        ),
        min_requests=min_requests,
        made_under=evidence.slos.made_under,
        judged_by=evidence.slos.judged_by,
        marks=token_marks(columns, run, due),
        http_statuses=_http_statuses(run, due),
        certainty=certainty_of(decision.verdict, proof.results.judged),
        is_overloaded=any(reason.kind == "overloaded" for reason in decision.reasons),
        cause=cause,
        closed_loop=evidence.loop,
        in_flight=in_flight(run, window),
        agents=_agents(evidence, scope),
        results=run.manifest.target.results,
        reasoning=reasoning(run, columns, due),
        canaries=canary_text(run.manifest),
    )


def _unless_stated(text: str, sentences: Sequence[str]) -> tuple[str, ...]:
    return (text,) if text and text not in sentences else ()


def _agents(evidence: Evidence, scope: Scope) -> AgentNumbers | None:
    """The numbers of the trees of agents; None without agents."""
    trees, outcomes = evidence.trees, scope.outcomes(evidence.columns)
    if trees is None or outcomes is None:
        return None
    run, columns, due, window = evidence.run, evidence.columns, evidence.due, evidence.window
    return agent_numbers(run, columns, due, trees, outcomes, window, scope.confidence)


def _http_statuses(run: Run, due: Mask) -> dict[str, int]:
    rows = run.request_rows[due]
    statuses = rows["http_status"][rows["status"] == Status.http_error]
    return {str(status): int(n) for status, n in zip(*np.unique_counts(statuses), strict=True)}
