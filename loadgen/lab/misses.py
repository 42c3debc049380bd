"""Whose fault it is that a run of the bundled engine broke promises: the log is decided again,
which gives every request its waits back, and other modes are asked what they would have done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.drive.payloads import request_name
from loadgen.drive.store import read_run
from loadgen.errors import UsageError
from loadgen.measure.attainment import due_rows
from loadgen.measure.slo import parse_slo
from loadgen.records import Run
from reference_engine.accounting.explain import Account
from reference_engine.attribution.attribution import Attribution, MissCause
from reference_engine.attribution.counterfactual import Case, attribute_misses
from reference_engine.step_log.log_replay import EngineLog, replay
from reference_engine.step_log.step_files import read_log

_MOST_SIMULATED = 2_000_000  # steps, all modes together
_METRICS = ("ttft_s", "tpot_s", "e2e_s")
Limits = tuple[float | None, float | None, float | None]  # TTFT, TPOT, E2E (s)


@dataclass(frozen=True, slots=True)
class MissedRequests:
    """The promises that the engine did not keep, of `n_requests` that were due and had any."""

    n_requests: int
    missed: tuple[Attribution, ...]

    def by_blame(self) -> dict[MissCause, Counter[str]]:
        """Misses by whose fault they are, and for each the modes or requests most often named."""
        found: dict[MissCause, Counter[str]] = {blame: Counter() for blame in MissCause}
        for miss in self.missed:
            found[miss.cause][miss.subject] += 1
        return found


def misses(directory: Path | str) -> MissedRequests:
    """Whose fault the misses of a run are, as the engine saw them (from a request's arrival there).

    Only requests that were due count, as in the run's own numbers. Promises are those of the
    scenario's classes, and what requests asked the engine for themselves. Raises UsageError for a
    run without a log, or whose log is not decided again as it was.
    """
    path = Path(directory)
    log = read_log(path)
    again = replay(log)
    if not again.is_identical:
        raise UsageError(f"{path}: the engine's log does not decide the same again: {again}")
    return misses_in(log, again.accounts, read_run(path))


def misses_in(
    log: EngineLog, accounts: Sequence[Account], run: Run, most_steps: int = _MOST_SIMULATED
) -> MissedRequests:
    """The same of a log that was decided again, with its accounts; other modes are asked until all
    their simulations together have made `most_steps`."""
    name = request_name(run.manifest.run)
    due = {f"{name}-{row}" for row in run.schedule_rows["request_id"][due_rows(run)]}
    accounts = _promised(accounts, run, name)
    found = attribute_misses(Case(log.setup, accounts, log.steps, most_steps))
    n_requests = sum(
        any(limit is not None for limit in (one.ttft_slo_s, one.tpot_slo_s, one.deadline_s))
        for one in accounts
        if one.request_id in due
    )
    return MissedRequests(n_requests, tuple(miss for miss in found if miss.request_id in due))


def _promised(accounts: Sequence[Account], run: Run, run_name: str) -> list[Account]:
    """The accounts with the promises of their classes, where they asked for none themselves."""
    limits = _limits(run)
    class_of = dict(
        zip(run.schedule_rows["request_id"], run.schedule_rows["class_id"], strict=True)
    )
    promised = []
    for entry in accounts:
        name, _, row = entry.request_id.rpartition("-")
        if name != run_name or not row.isdecimal() or int(row) not in class_of:
            promised.append(entry)  # a preflight's
            continue
        ttft_s, tpot_s, e2e_s = limits[int(class_of[int(row)])]
        due_s = None if e2e_s is None else entry.arrived_s + e2e_s
        promised.append(
            entry._replace(
                ttft_slo_s=_first(entry.ttft_slo_s, ttft_s),
                tpot_slo_s=_first(entry.tpot_slo_s, tpot_s),
                deadline_s=_first(entry.deadline_s, due_s),
            )
        )
    return promised


def _limits(run: Run) -> list[Limits]:
    """By class; the tightest of its promises per request and the run's."""
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
