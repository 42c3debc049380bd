"""What the three kinds of visit find, as facts for programs and for people."""

from __future__ import annotations

import dataclasses
import math
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from loadgen.doctor.ceiling import Ceiling, find_ceiling, write_ceiling
from loadgen.doctor.machine_facts import read_machine, read_pressure
from loadgen.doctor.proof import prove, proven_rate
from loadgen.doctor.server_facts import examine_target
from loadgen.doctor.trial import ERROR_LIMIT_S, OUTPUT_TOKENS, Trial, TrialSetup, measure_trial
from loadgen.doctor.verdicts import machine_checks, other_load
from loadgen.drive.instrument import host
from loadgen.errors import MissingDependency
from loadgen.measure.wording import format_number, format_value
from loadgen.run.target import Choice
from targets.preflight_result import PreflightCheck
from targets.truth_server import truth_program

PROOF_RATES_PER_S = (20.0, 100.0, 400.0)
_SEARCH_S = 2.0  # measured window of a trial of the search
_LONGEST_PROOF_S = 15.0  # of one rate
_OVERHEAD_S = 3.0  # of a trial: starting, the last answers, decoding
_GROWTH = 1.5  # of a trial's time over the one before it, where the rate doubles


@dataclass(frozen=True)
class Facts:
    """What a visit found. `reasons` say why this is not to be measured with, empty where it is."""

    kind: Literal["machine", "proof", "target"]
    reasons: tuple[str, ...]
    checks: tuple[PreflightCheck, ...] = ()
    trials: tuple[Trial, ...] = ()
    ceiling: Ceiling | None = None
    judge: str = ""
    kept_in: Path | None = None
    target: str = ""
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """3: not to be trusted, as in a run without a verdict."""
        return 3 if self.reasons else 0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; what is not known is null."""
        best = self.ceiling.best if self.ceiling else None
        return {
            "kind": self.kind,
            "is_fit": not self.reasons,
            "exit_code": self.exit_code,
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "host": host().to_json(),
            "target": self.target or None,
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "judge": self.judge or None,
            "error_limit_s": ERROR_LIMIT_S,
            "output_tokens": OUTPUT_TOKENS,
            "trials": [_trial_json(trial) for trial in self.trials],
            "ceiling": None
            if best is None or self.ceiling is None
            else {
                "rate_per_s": best.rate_per_s,
                "tokens_per_s": best.tokens_per_s,
                "ttft_error_p99_s": best.ttft_error_s,
                "is_at_least": self.ceiling.is_open,
                "file": str(self.kept_in) if self.kept_in else None,
            },
            "proven_rate_per_s": proven_rate((t.rate_per_s, t.holds) for t in self.trials)
            if self.kind == "proof"
            else None,
        }


def visit_machine(budget_s: float, cache_dir: Path | None, cc: str, console: Console) -> Facts:
    """This machine's environment, and the highest rate one worker measures truly on it; the latter
    is kept in `cache_dir` for `--workers auto`."""
    checks = machine_checks(read_machine())
    with _bench(cache_dir, cc) as bench:
        clock = _Budget(budget_s, _GROWTH)
        measure = _told(clock, console, lambda rate, n: measure_trial(bench, rate, _SEARCH_S, n))
        ceiling = find_ceiling(measure, clock.has_time)
    best, kept_in, note = ceiling.best, None, _why_not_kept(bench, checks)
    if best is not None and cache_dir is not None and not note:
        kept_in = write_ceiling(best, cache_dir)
    return Facts(
        "machine",
        reasons=() if best else (_worst(ceiling.trials[-1]),),
        checks=tuple(checks),
        trials=ceiling.trials,
        ceiling=ceiling,
        judge=bench.judge,
        kept_in=kept_in,
        notes=(note,) if note else (),
    )


def visit_truth(budget_s: float, cache_dir: Path | None, cc: str, console: Console) -> Facts:
    """The errors of our numbers against the truth server's log, at every rate there is time for.
    Raises MissingDependency without a C compiler."""
    share_s = budget_s / (len(PROOF_RATES_PER_S) + 1)  # and one to be tried again
    seconds = min(_LONGEST_PROOF_S, max(1.0, share_s - _OVERHEAD_S))
    busy = other_load(read_pressure())
    with _bench(cache_dir, cc, needs_truth=True) as bench:
        clock = _Budget(budget_s, growth=1.0)
        measure = _told(clock, console, lambda rate, n: measure_trial(bench, rate, seconds, n))
        trials = prove(PROOF_RATES_PER_S, measure, clock.has_time)
    reasons = () if trials[0].holds else (_worst(trials[0]),)
    untried = [format_number(rate) for rate in PROOF_RATES_PER_S[len(trials) :]]
    notes = [f"not tried: {', '.join(untried)} req/s"] if untried else []
    if busy.ok is False:
        notes.append(f"{busy.detail}: {busy.consequence}")
    return Facts("proof", reasons, trials=trials, judge="truth", notes=tuple(notes))


def visit_target(choice: Choice, console: Console) -> Facts:
    """A server, examined from here. Raises UsageError for a target that cannot be meant."""
    with tempfile.TemporaryDirectory(prefix="slobench-doctor-") as folder:
        url, checks, fatal = examine_target(choice, secrets.token_bytes(8), Path(folder), console)
    reasons = (fatal,) if fatal else ()
    return Facts("target", reasons, tuple(checks), target=url)


def _why_not_kept(bench: TrialSetup, checks: Sequence[PreflightCheck]) -> str:
    """Why `--workers auto` had better not go by this ceiling; "" where it can."""
    if bench.judge == "mock":
        return (
            "without a C compiler the mock server was the judge; it is Python and slower than the "
            "client, so the ceiling is a lower bound and is not kept for --workers auto"
        )
    if any(check.check == "other load" and check.ok is False for check in checks):
        return "others were using this machine: the ceiling is not kept for --workers auto"
    return ""


class _Budget:
    """Wall time; a trial is begun while one `growth` times as long as the last still fits."""

    def __init__(self, budget_s: float, growth: float) -> None:
        self._end_s, self._growth = time.monotonic() + budget_s, growth
        self._last_s = 0.0

    def note(self, wall_s: float) -> None:
        self._last_s = wall_s

    def has_time(self) -> bool:
        return time.monotonic() + self._growth * self._last_s < self._end_s


def _told(
    clock: _Budget, console: Console, measure: Callable[[float, int], Trial]
) -> Callable[[float], Trial]:
    """Measure, numbered, and say how it went in one line."""
    numbers = iter(range(1 << 30))

    def tell(rate_per_s: float) -> Trial:
        trial = measure(rate_per_s, next(numbers))
        clock.note(trial.wall_s)
        said = f"p99 of the TTFT error {format_value(trial.ttft_error_s, 's')}"
        failed = ", ".join(problem.partition(":")[0] for problem in trial.problems)
        console.print(
            f"{format_number(rate_per_s)} req/s: "
            f"{said}{f'; not trusted: {failed}' if failed else ''}",
            soft_wrap=True,
            markup=False,
        )
        return trial

    return tell


@contextmanager
def _bench(cache_dir: Path | None, cc: str, needs_truth: bool = False) -> Iterator[TrialSetup]:
    """A folder for the trials, and the best judge that this machine can have."""
    with tempfile.TemporaryDirectory(prefix="slobench-doctor-") as folder:
        bench = TrialSetup(Path(folder), cache_dir=cache_dir, cc=cc)
        try:
            truth_program(cache_dir or bench.folder, cc)
        except MissingDependency:
            if needs_truth or cc:
                raise
            bench = replace(bench, judge="mock")
        yield bench


def _worst(trial: Trial) -> str:
    """Why the lowest rate that was tried cannot be measured here."""
    why = "; ".join(trial.problems) or (
        f"p99 of the TTFT error is {format_value(trial.ttft_error_s, 's')}, "
        f"and {format_value(ERROR_LIMIT_S, 's')} are asked"
    )
    return f"{format_number(trial.rate_per_s)} req/s × {OUTPUT_TOKENS} tokens: {why}"


def _trial_json(trial: Trial) -> dict[str, Any]:
    plain: dict[str, Any] = _known(dataclasses.asdict(trial))
    return {**plain.pop("fidelity"), **plain, "holds": trial.holds}


def _known(value: Any) -> Any:
    """NaN as None, all the way down."""
    if isinstance(value, dict):
        return {key: _known(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_known(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
