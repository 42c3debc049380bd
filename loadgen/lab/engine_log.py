"""Replays of the bundled engine's log of a run: a check that it decides the same again, and the
causes of the run's missed SLOs. The replay restores each request's waits; other modes are simulated
to find what they would have met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadgen.archive import checksums
from loadgen.archive.engine_logs import NAMES
from loadgen.archive.request_names import RequestNames
from loadgen.archive.store import read_run
from loadgen.errors import UsageError
from loadgen.measure.attainment import due_rows
from loadgen.measure.slo import parse_slo
from loadgen.records import Run
from reference_engine.accounting.explain import Account
from reference_engine.attribution.attribution import Attribution, MissCause
from reference_engine.attribution.counterfactual import Case, attribute_misses
from reference_engine.step_log.log_replay import EngineLog, Replay
from reference_engine.step_log.log_replay import replay as replay_log
from reference_engine.step_log.step_files import read_log

_MOST_SIMULATED = 2_000_000  # steps, all modes together
_METRICS = ("ttft_s", "tpot_s", "e2e_s")
Limits = tuple[float | None, float | None, float | None]  # TTFT, TPOT, E2E (s)


@dataclass(frozen=True, slots=True)
class MissedRequests:
    """The missed SLOs, of `n_requests` due requests with an SLO."""

    n_requests: int
    missed: tuple[Attribution, ...]

    def by_cause(self) -> dict[MissCause, Counter[str]]:
        """For each cause: the modes or requests named most often, with the number of their
        misses."""
        by_cause: dict[MissCause, Counter[str]] = {cause: Counter() for cause in MissCause}
        for miss in self.missed:
            by_cause[miss.cause][miss.subject] += 1
        return by_cause


def replay(directory: Path | str) -> Replay:
    """Whether the engine decides the same again. Its steps and events, in a run directory or in its
    own `--log-dir`, pass through the same core and policies, with the times and tokens of the log.
    Raises UsageError for an incomplete log (`log_level=full` is complete), RunInvalid for a damaged
    one."""
    return replay_log(_verified_log(Path(directory)))


def _verified_log(directory: Path) -> EngineLog:
    checksums.check_read(directory, *NAMES)
    return read_log(directory)


def misses(directory: Path | str) -> MissedRequests:
    """The causes of a run's misses, from the engine's view (from the arrival of a request there).

    Only due requests count, as in the run's own numbers. The SLOs are those of the scenario's
    classes, and those that requests sent to the engine themselves. Raises UsageError for a run
    without a log, or if the replay differs from the log.
    """
    path = Path(directory)
    log = _verified_log(path)
    replayed = replay_log(log)
    if not replayed.is_identical:
        raise UsageError(f"{path}: the replay of the engine's log differs from it: {replayed}")
    return misses_in(log, replayed.accounts, read_run(path))


def misses_in(
    log: EngineLog, accounts: Sequence[Account], run: Run, most_steps: int = _MOST_SIMULATED
) -> MissedRequests:
    """The same for a replayed log and its accounts; other modes are simulated for at most
    `most_steps` steps in total. Requests of the run are named `<run>-<request_id>`."""
    names = RequestNames.of(run)
    due_ids = set(run.schedule_rows["request_id"][due_rows(run)].tolist())
    due = {a.request_id for a in accounts if names.request_id(a.request_id) in due_ids}
    accounts = _with_class_slos(accounts, run, names)
    attributions = attribute_misses(Case(log.setup, accounts, log.steps, most_steps))
    limits = [(a.ttft_slo_s, a.tpot_slo_s, a.deadline_s) for a in accounts if a.request_id in due]
    n_requests = sum(any(limit is not None for limit in of_request) for of_request in limits)
    missed = tuple(
        replace(
            miss,
            request_id=names.readable(miss.request_id),
            evidence=names.readable(miss.evidence),
            subject=names.readable(miss.subject),
        )
        for miss in attributions
        if miss.request_id in due
    )
    return MissedRequests(n_requests, missed)


def _with_class_slos(accounts: Sequence[Account], run: Run, names: RequestNames) -> list[Account]:
    """The accounts with the SLOs of their classes, unless the request sent its own."""
    limits = _limits(run)
    class_of = dict(
        zip(run.schedule_rows["request_id"], run.schedule_rows["class_id"], strict=True)
    )
    completed = []
    for entry in accounts:
        request_id = names.request_id(entry.request_id)
        if request_id not in class_of:
            completed.append(entry)  # a request of the preflight
            continue
        ttft_s, tpot_s, e2e_s = limits[int(class_of[request_id])]
        due_s = None if e2e_s is None else entry.arrived_s + e2e_s
        completed.append(
            entry._replace(
                ttft_slo_s=_first(entry.ttft_slo_s, ttft_s),
                tpot_slo_s=_first(entry.tpot_slo_s, tpot_s),
                deadline_s=_first(entry.deadline_s, due_s),
            )
        )
    return completed


def _limits(run: Run) -> list[Limits]:
    """By class: the tightest per-request SLOs of the class and the run."""
    limits = []
    for name in run.names.classes:
        texts = [*run.manifest.slo, *run.manifest.class_slos(name)]
        slos = [slo for slo in map(parse_slo, texts) if slo.scope == "request"]
        ttft_s, tpot_s, e2e_s = (
            min((slo.limit for slo in slos if slo.metric == metric), default=None)
            for metric in _METRICS
        )
        limits.append((ttft_s, tpot_s, e2e_s))
    return limits


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
