"""The SLOs that judge a run: stated for all traffic or for a class, and brought by requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from loadgen.errors import UsageError
from loadgen.measure.attainment import recorded_slos, slos_by_class
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.slo import Slo, mistaken_trees, own_slo, parse_slo, ungrounded
from loadgen.records import OWN_SLO, Run


@dataclass(frozen=True, slots=True)
class JudgingSlos:
    """The SLOs that judge a run, without those that requests bring.

    `shared` are the SLOs of all traffic, `by_class` those of each class alone (empty for a run of a
    single class without SLOs of its own). `made_under` and `judged_by` are the texts of the SLOs
    that the run was made under and is judged by; `is_own`: they are the same.
    """

    shared: tuple[Slo, ...]
    by_class: Mapping[str, Sequence[Slo]]
    made_under: tuple[str, ...]
    judged_by: tuple[str, ...]
    is_own: bool

    @property
    def stated(self) -> list[Slo]:
        """The SLOs of all traffic, then those of each class."""
        return [*self.shared, *(slo for own in self.by_class.values() for slo in own)]

    def brought_to_all(self, run: Run, columns: PerRequest) -> list[Slo]:
        """SLOs that only requests brought and that the share of the whole run (stated or implied)
        covers. Excluded are metrics that have an SLO of the whole run, and those for which every
        class with such requests has an SLO on the metric or a share of its own."""
        found = []
        for metric, own_s in columns.own_slo_s.items():
            brought = own_s > 0
            for name, own in self.by_class.items():
                if _has_slo_on(own, metric) or _states_share(own):
                    brought &= run.schedule_rows["class_id"] != run.names.classes.index(name)
            if brought.any() and not _has_slo_on(self.shared, metric):
                found.append(own_slo(metric))
        return found

    def brought_to_class(self, name: str, columns: PerRequest, due: Mask) -> list[Slo]:
        """SLOs that only requests of a class brought and that the class is judged by: its own share
        covers them or, where no share is stated, the implied share. `columns` and `due` are those
        of the class."""
        own = self.by_class[name]
        if _states_share(self.shared) and not _states_share(own):
            return []
        return [
            own_slo(metric)
            for metric, own_s in columns.own_slo_s.items()
            if (due & (own_s > 0)).any() and not _has_slo_on([*self.shared, *own], metric)
        ]


def own_slos(run: Run) -> JudgingSlos:
    """The SLOs that a run was made under. Raises RunInvalid for a text that is none."""
    made_under, shared = slos_of_run(run), tuple(recorded_slos(run.manifest.slo))
    return JudgingSlos(shared, slos_by_class(run), made_under, made_under, is_own=True)


def other_slos(run: Run, texts: Sequence[str]) -> JudgingSlos:
    """SLOs of all traffic that were not part of the run, in place of every SLO that it was made
    under. Raises UsageError for a text that a scenario may not have either."""
    try:
        slos = tuple(map(parse_slo, texts))
    except ValueError as problem:
        raise UsageError(f"--slo {problem}") from None
    mistake = ungrounded(slos)
    mistake = mistake or mistaken_trees(slos, bool(run.schedule_rows["chain"].any()))
    if mistake is not None:
        raise UsageError(f"--slo {mistake}")
    judged_by = tuple(slo.text for slo in slos)
    by_class: dict[str, list[Slo]] = {name: [] for name in slos_by_class(run)}
    return JudgingSlos(slos, by_class, slos_of_run(run), judged_by, is_own=False)


def slos_of_run(run: Run) -> tuple[str, ...]:
    """The SLOs that a run was made under: of all traffic, of requests, then `chat: …` of each
    class."""
    manifest, rows = run.manifest, run.schedule_rows
    brought = [own_slo(metric).text for metric, name in OWN_SLO.items() if (rows[name] > 0).any()]
    of_classes = [
        f"{name}: {text}" for name, section in manifest.classes.items() for text in section.slo
    ]
    return (*manifest.slo, *brought, *of_classes)


def brought(columns: PerRequest) -> list[Slo]:
    """The SLOs that requests brought themselves."""
    return [own_slo(metric) for metric in columns.own_slo_s]


def tightest_brought(columns: PerRequest, due: Mask) -> list[Slo]:
    """Per metric, the strictest limit that a due request brought."""
    found = []
    for metric, own_s in columns.own_slo_s.items():
        limits_s = own_s[due & (own_s > 0)]
        if len(limits_s):
            found.append(replace(own_slo(metric), limit=float(limits_s.min())))
    return found


def _has_slo_on(slos: Sequence[Slo], metric: str) -> bool:
    return any(slo.scope == "request" and slo.metric == metric for slo in slos)


def _states_share(slos: Sequence[Slo]) -> bool:
    return any(slo.metric in ("attainment", "goodput", "tree_attainment") for slo in slos)
