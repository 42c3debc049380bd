"""The result of a check, as it is stored and printed."""

from __future__ import annotations

from typing import Literal

from loadgen.manifest.json_section import JsonSection, NumberOrNull
from loadgen.manifest.sections import HostSection
from loadgen.studies.doctor.fidelity import Spread
from targets.preflight_result import PreflightCheck

Kind = Literal["machine", "proof", "traffic", "target"]


class TrialRow(JsonSection, frozen=True, kw_only=True):
    """A trial, with its errors as `Fidelity` has them. `causes` name the problems in a few words
    each."""

    ttft_error_s: Spread
    tpot_error_s: Spread
    lateness_s: Spread
    server_lateness_s: Spread
    rate_per_s: float
    tokens_per_s: float
    n_requests: int
    cpu_s_per_token: float
    problems: tuple[str, ...]
    causes: tuple[str, ...]
    wall_s: float
    holds: bool


class CeilingRow(JsonSection, frozen=True, kw_only=True):
    """The highest rate that held. `file` is where it is stored for `--workers auto`."""

    rate_per_s: float
    tokens_per_s: float
    ttft_error_p99_s: NumberOrNull
    is_at_least: bool
    file: str | None


class Checkup(JsonSection, frozen=True, kw_only=True):
    """The result of a check; the content of doctor.json. `reasons` state why the machine or server
    is not fit for measuring; empty if it is. `exit_code`: 3 if not fit, like a run without a
    verdict."""

    kind: Kind
    is_fit: bool
    exit_code: int
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    host: HostSection
    target: str | None
    checks: tuple[PreflightCheck, ...]
    judge: str | None
    error_limit_s: float
    output_tokens: int
    trials: tuple[TrialRow, ...]
    ceiling: CeilingRow | None
    proven_rate_per_s: float | None
