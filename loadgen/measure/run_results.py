"""The results of a run: the numbers of all its traffic, and the summary of each class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from loadgen.measure.evidence import Evidence
from loadgen.measure.scope import Scope
from loadgen.measure.scope_numbers import ScopeNumbers, scope_numbers
from loadgen.measure.slo_result import Certainty, SloResult
from loadgen.measure.summary import ClassSummary
from loadgen.measure.validity.survival import error_sentence, unsettled
from loadgen.measure.verdict import Reason, decide
from loadgen.records import Status


@dataclass(frozen=True, slots=True)
class RunResults:
    """The numbers of all traffic, and the summary of each class."""

    whole: ScopeNumbers
    classes: Mapping[str, ClassSummary]

    @property
    def judged(self) -> list[SloResult]:
        """The SLOs of all traffic, then those of each class under its name: `chat: ttft …`."""
        of_classes = [_named(name, r) for name, found in self.classes.items() for r in found.slo]
        return [*self.whole.slo, *of_classes]

    def without_needs(self, why: str = "") -> RunResults:
        """The results of a run that a longer run would not make more certain: of an overloaded run
        they would look worse, and load that changed, for the reason `why`, would change again."""

        def without(result: SloResult) -> SloResult:
            no_length = why if result.n_needed else ""
            return replace(result, n_needed=None, seconds_needed=None, no_length=no_length)

        return self._with_each(without)

    def unproven(self) -> RunResults:
        """The results of an INVALID run, which proves nothing."""
        found = self._with_each(lambda r: replace(r, proven=None, n_needed=None, margin=None))
        open_: dict[str, ClassSummary] = {
            name: replace(of_class, verdict="no_verdict")
            for name, of_class in found.classes.items()
        }
        return RunResults(found.whole, open_)

    def _with_each(self, change: Callable[[SloResult], SloResult]) -> RunResults:
        return RunResults(
            replace(self.whole, slo=tuple(map(change, self.whole.slo))),
            {
                name: replace(found, slo=tuple(map(change, found.slo)))
                for name, found in self.classes.items()
            },
        )


def run_results(evidence: Evidence, scope: Scope, required: Certainty | None) -> RunResults:
    """The results of a run, of which `scope` is all traffic; `required`: as `decide` has it."""
    manifest = evidence.run.manifest
    return RunResults(
        scope_numbers(scope, manifest.requested_rate_per_s, manifest.has_closed_loop),
        {
            name: _class_summary(evidence, name, scope.confidence, required)
            for name in evidence.slos.by_class
        },
    )


def _class_summary(
    evidence: Evidence, name: str, confidence: float, required: Certainty | None
) -> ClassSummary:
    """The rows of a class, summarised like a run of their own."""
    stated = evidence.run.manifest.classes[name]
    scope = evidence.of_class(name, confidence)
    found = scope_numbers(scope, stated.requested_rate_per_s, stated.is_closed_loop)
    doubts = [Reason("invalid", error_sentence(result)) for result in unsettled(found.slo)]
    n_ok = found.counts[Status.ok.name]
    return ClassSummary(
        tenant=stated.tenant,
        priority=stated.priority,
        verdict=decide(found.slo, doubts, None, confidence, required, n_ok).verdict,
        counts=found.counts,
        requested_rate_per_s=found.rates.requested_per_s,
        offered_rate_per_s=found.rates.offered_per_s,
        achieved_rate_per_s=found.rates.achieved_per_s,
        rate_note=found.rates.note,
        throughput=found.throughput,
        metrics=found.metrics,
        slo=found.slo,
        attainment=found.attainment,
        goodput=found.goodput,
    )


def _named(name: str, result: SloResult) -> SloResult:
    return replace(result, slo=replace(result.slo, text=f"{name}: {result.text}"))
