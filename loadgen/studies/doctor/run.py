"""The checks of `slobench doctor`: this machine, the accuracy of its timestamps, a traffic, and a
server."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from loadgen.drive.instrument import host
from loadgen.errors import MissingDependency
from loadgen.measure.wording import format_number, format_value
from loadgen.run.run_options import RunOptions
from loadgen.run.target import finish, open_server
from loadgen.studies.doctor.machine_facts import read_machine, read_pressure
from loadgen.studies.doctor.rates import Ceiling, find_ceiling, prove, proven_rate, write_ceiling
from loadgen.studies.doctor.result import CeilingRow, Checkup, Kind, TrialRow
from loadgen.studies.doctor.trial import (
    ERROR_LIMIT_S,
    OUTPUT_TOKENS,
    Trial,
    TrialSetup,
    measure_traffic,
    measure_trial,
)
from loadgen.studies.doctor.verdicts import machine_checks, other_load
from loadgen.studies.study import Study
from loadgen.workload.prompts import Prompts
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan
from loadgen.workload.texts import Synthetic
from targets.endpoint import Endpoint
from targets.extended_preflight import extended_preflight
from targets.preflight import preflight
from targets.preflight_checks import CONSEQUENCES, EXTENDED_CHECKS
from targets.preflight_result import Preflight, PreflightCheck, unchecked
from targets.truth_server import truth_program

DOCTOR = Study("doctor", "check", Checkup)
_LONGEST = (512, 128)  # prompt and output tokens, for the check of the model's length
_TIMEOUT_S = 30.0
PROOF_RATES_PER_S = (20.0, 100.0, 400.0)
_SEARCH_S = 2.0  # measured window of a search trial
_LONGEST_PROOF_S = 15.0  # per rate
_OVERHEAD_S = 3.0  # of a trial: start, last answers, decoding
_GROWTH = 1.5  # largest growth of a trial's time when the rate doubles


def checkup(
    kind: Kind,
    reasons: tuple[str, ...],
    *,
    checks: Sequence[PreflightCheck] = (),
    trials: Sequence[Trial] = (),
    ceiling: CeilingRow | None = None,
    judge: str = "",
    target: str = "",
    notes: Sequence[str] = (),
    output_tokens: int = OUTPUT_TOKENS,
) -> Checkup:
    """The result of a check on this host."""
    is_proof = kind == "proof"
    return Checkup(
        kind=kind,
        is_fit=not reasons,
        exit_code=3 if reasons else 0,
        reasons=reasons,
        notes=tuple(notes),
        host=host(),
        target=target or None,
        checks=tuple(checks),
        judge=judge or None,
        error_limit_s=ERROR_LIMIT_S,
        output_tokens=output_tokens,
        trials=tuple(map(_row, trials)),
        ceiling=ceiling,
        proven_rate_per_s=proven_rate((t.rate_per_s, t.holds) for t in trials)
        if is_proof
        else None,
    )


def check_machine(
    budget_s: float, cache_dir: Path | None, cc: str, console: Console, folder: Path | None = None
) -> Checkup:
    """Checks this machine and searches the highest rate that a worker measures accurately on it;
    stores that rate in `cache_dir` for `--workers auto`. Trials are kept in `folder`, and those
    that it has are not repeated."""
    checks = machine_checks(read_machine())
    with _trial_setup(folder, cache_dir, cc) as setup:
        clock = _Budget(budget_s, _GROWTH)
        measure = _measured(
            clock, console, lambda rate, n: measure_trial(setup, rate, _SEARCH_S, n)
        )
        ceiling = find_ceiling(measure, clock.has_time)
    best, kept_in, note = ceiling.best, None, why_not_stored(setup, checks)
    if best is not None and cache_dir is not None and not note:
        kept_in = write_ceiling(best, cache_dir)
    return checkup(
        "machine",
        () if best else why_failed(ceiling.trials[-1]),
        checks=checks,
        trials=ceiling.trials,
        ceiling=None if best is None else _ceiling_row(best, ceiling, kept_in),
        judge=setup.judge,
        notes=(note,) if note else (),
    )


def check_accuracy(
    budget_s: float, cache_dir: Path | None, cc: str, console: Console, folder: Path | None = None
) -> Checkup:
    """Compares our numbers with the truth server's log, at each rate for which there is time.
    Trials are kept in `folder`, and those that it has are not repeated. Raises MissingDependency
    without a C compiler."""
    share_s = budget_s / (len(PROOF_RATES_PER_S) + 1)  # plus a second try
    seconds = min(_LONGEST_PROOF_S, max(1.0, share_s - _OVERHEAD_S))
    busy = other_load(read_pressure())
    with _trial_setup(folder, cache_dir, cc, needs_truth=True) as setup:
        clock = _Budget(budget_s, growth=1.0)
        measure = _measured(clock, console, lambda rate, n: measure_trial(setup, rate, seconds, n))
        trials = prove(PROOF_RATES_PER_S, measure, clock.has_time)
    reasons = () if trials[0].holds else why_failed(trials[0])
    untried = [format_number(rate) for rate in PROOF_RATES_PER_S[len(trials) :]]
    notes = [f"no time left to try {', '.join(untried)} req/s"] if untried else []
    if busy.ok is False:
        notes.append(f"{busy.detail}: {busy.consequence}")
    return checkup("proof", reasons, trials=trials, judge="truth", notes=notes)


def check_traffic(
    scenario: Scenario,
    budget_s: float,
    cache_dir: Path | None,
    cc: str,
    folder: Path | None = None,
) -> Checkup:
    """Sends the traffic of a scenario to a server on this machine that logs its own timestamps, and
    checks that ours agree. The trial is kept in `folder`, and not repeated there."""
    longest = longest_lengths(scenario)
    measure_s = max(1.0, min(scenario.phases.measure, budget_s - _OVERHEAD_S))
    with _trial_setup(folder, cache_dir, cc) as setup:
        trial = measure_traffic(setup, scenario, measure_s)
    reasons = () if trial.holds else why_failed(trial, longest[1])
    return checkup("traffic", reasons, trials=(trial,), judge=setup.judge, output_tokens=longest[1])


def longest_lengths(scenario: Scenario) -> tuple[int, int]:
    """The most prompt tokens and output tokens of any request of a scenario."""
    rows = make_plan(scenario).schedule
    return int(rows["input_tokens"].max()), int(rows["output_tokens"].max())


def check_server(
    target: str,
    options: RunOptions,
    console: Console,
    longest: tuple[int, int] | None = None,
    folder: Path | None = None,
) -> Checkup:
    """Checks a server from this machine, for requests of at most `longest` prompt and output
    tokens. Logs of a server that slobench starts are kept in `folder`. Raises UsageError for an
    invalid target."""
    with _kept_folder(folder) as logs:
        url, checks, fatal = examine_target(
            target, options, secrets.token_bytes(8), logs, console, longest
        )
    reasons = (fatal,) if fatal else ()
    return checkup("target", reasons, checks=checks, target=url)


def why_not_stored(setup: TrialSetup, checks: Sequence[PreflightCheck]) -> str:
    """Why this ceiling is not stored for `--workers auto`; "" if it is."""
    if setup.judge == "mock":
        return (
            "no C compiler: trials used the mock server, which is slower than the client; the "
            "ceiling is a lower bound and is not stored for --workers auto"
        )
    if any(check.check == "other load" and check.ok is False for check in checks):
        return "other programs used this machine: the ceiling is not stored for --workers auto"
    return ""


class _Budget:
    """Wall time: a trial may begin while another trial of `growth` times the last one's duration
    fits."""

    def __init__(self, budget_s: float, growth: float) -> None:
        self._end_s, self._growth = time.monotonic() + budget_s, growth
        self._last_s = 0.0

    def note(self, wall_s: float) -> None:
        self._last_s = wall_s

    def has_time(self) -> bool:
        return time.monotonic() + self._growth * self._last_s < self._end_s


def _measured(
    clock: _Budget, console: Console, measure: Callable[[float, int], Trial]
) -> Callable[[float], Trial]:
    """Measures with numbered trials, and prints each result on a line."""
    numbers = iter(range(1 << 30))

    def measure_and_print(rate_per_s: float) -> Trial:
        trial = measure(rate_per_s, next(numbers))
        clock.note(trial.wall_s)
        error = f"p99 of the TTFT error {format_value(trial.ttft_error_s, 's')}"
        failed = ", ".join(trial.causes)
        console.print(
            f"{format_number(rate_per_s)} req/s: {error}{f'; failed: {failed}' if failed else ''}",
            soft_wrap=True,
            markup=False,
        )
        return trial

    return measure_and_print


@contextmanager
def _kept_folder(folder: Path | None) -> Iterator[Path]:
    """The folder, which need not exist, or a temporary one."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="slobench-doctor-") as temporary:
        kept = Path(temporary) / "trials"
        kept.mkdir()
        yield kept


@contextmanager
def _trial_setup(
    folder: Path | None, cache_dir: Path | None, cc: str, needs_truth: bool = False
) -> Iterator[TrialSetup]:
    """The place of the trials, and the most accurate server that this machine can run as the
    judge."""
    with _kept_folder(folder) as kept:
        setup = TrialSetup(kept, cache_dir=cache_dir, cc=cc)
        try:
            truth_program(cache_dir or setup.folder, cc)
        except MissingDependency:
            if needs_truth or cc:
                raise
            setup = replace(setup, judge="mock")
        yield setup


def why_failed(trial: Trial, output_tokens: int = OUTPUT_TOKENS) -> tuple[str, ...]:
    """Why the lowest rate in the search or proof failed: the error with the failed checks, the
    check that names a cause (else the first), and its remedy. The trial keeps all details."""
    error = (
        f"{format_number(trial.rate_per_s)} req/s × {output_tokens} tokens: p99 of the TTFT error "
        f"is {format_value(trial.ttft_error_s, 's')}, limit {format_value(ERROR_LIMIT_S, 's')}"
    )
    if not trial.problems:
        return (error,)
    main = next((problem for problem in trial.problems if problem.remedy), trial.problems[0])
    reasons = (f"{error}; failed: {', '.join(trial.causes)}", str(main))
    return (*reasons, f"next: {main.remedy}; then check again") if main.remedy else reasons


def _row(trial: Trial) -> TrialRow:
    errors = trial.fidelity
    return TrialRow(
        ttft_error_s=errors.ttft_error_s,
        tpot_error_s=errors.tpot_error_s,
        lateness_s=errors.lateness_s,
        server_lateness_s=errors.server_lateness_s,
        rate_per_s=trial.rate_per_s,
        tokens_per_s=trial.tokens_per_s,
        n_requests=trial.n_requests,
        cpu_s_per_token=trial.cpu_s_per_token,
        problems=tuple(map(str, trial.problems)),
        causes=tuple(trial.causes),
        wall_s=trial.wall_s,
        holds=trial.holds,
    )


def _ceiling_row(best: Trial, ceiling: Ceiling, kept_in: Path | None) -> CeilingRow:
    return CeilingRow(
        rate_per_s=best.rate_per_s,
        tokens_per_s=best.tokens_per_s,
        ttft_error_p99_s=best.ttft_error_s,
        is_at_least=ceiling.is_open,
        file=str(kept_in) if kept_in else None,
    )


def examine_target(
    target: str,
    options: RunOptions,
    salt: bytes,
    log_dir: Path,
    console: Console,
    longest: tuple[int, int] | None = None,
) -> tuple[str, list[PreflightCheck], str | None]:
    """(URL, all checks, reason why the server cannot be measured or None). `salt` makes the prompts
    new to the server, so that a cache hit differs from a first request. `longest`: the lengths of
    the traffic, None where it is not chosen yet.

    Raises UsageError for an invalid target.
    """
    with open_server(target, options, log_dir, console) as server:
        preflight_result, examined = finish(
            _preflight(server.endpoint, options.model, salt, longest or _LONGEST)
        )
        checks = [
            _with_consequence(
                check, preflight_result.max_model_len, has_lengths=longest is not None
            )
            for check in preflight_result.checks
            if check.check != "run_requests"  # there is no run
        ]
        if preflight_result.fatal is not None:
            skipped = map(unchecked, EXTENDED_CHECKS)
            return server.endpoint.shown_url, [*checks, *skipped], preflight_result.fatal
        return server.endpoint.shown_url, [*checks, *examined], None


async def _preflight(
    endpoint: Endpoint, model: str, salt: bytes, longest: tuple[int, int]
) -> tuple[Preflight, tuple[PreflightCheck, ...]]:
    def text_of(n_chars: int, number: int) -> str:
        return Prompts(Synthetic(), 0, salt + number.to_bytes(4, "little")).sample(n_chars)

    result = await preflight(
        endpoint,
        endpoint.adapter(**({"model": model} if model else {})),
        max_input_tokens=longest[0],
        max_output_tokens=longest[1],
        timeout_s=_TIMEOUT_S,
        text_of=lambda n_chars: text_of(n_chars, 0),
    )
    if result.fatal is not None:
        return result, ()
    return result, await extended_preflight(endpoint, result, text_of, _TIMEOUT_S)


def _with_consequence(
    check: PreflightCheck, max_model_len: int | None, *, has_lengths: bool
) -> PreflightCheck:
    """The check with its consequence. Without lengths of a traffic none of them can be too long."""
    if check.check == "max_model_len" and check.is_checked and not has_lengths:
        stated = f"{max_model_len} tokens" if max_model_len else "not stated"
        check = replace(check, detail=stated)
    if check.ok or not check.is_checked:
        return check
    return replace(check, consequence=CONSEQUENCES[check.check])
