"""Answers that ended cleanly but short of the requested length, where the server had accepted exact
lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from loadgen.manifest.sections import PreflightLine
from loadgen.measure.wording import format_count, format_value
from loadgen.records import IN_STREAM, Run, Status, TokenSource, is_short

if TYPE_CHECKING:
    from loadgen.measure.per_request import Mask

_MOST_MISSING = 0.05  # of the requested tokens, in a run that is met
NATURAL_ENDS = "measure with extra_body: {ignore_eos: null, min_tokens: null} in a target file"
"""How to run without exact lengths."""
REASON = "ended short of the requested tokens, which the server had accepted as exact (ignore_eos)"
"""The error of such an answer."""


def has_exact_lengths(preflight: Sequence[PreflightLine]) -> bool:
    """Whether the preflight proved that answers have exactly the requested length."""
    return any(line.check == "ignore_eos" and line.ok is True for line in preflight)


def with_truncated(run: Run) -> Run:
    """The run whose short answers have the status `truncated`; unchanged without exact lengths."""
    short = _short_rows(run)
    if not short.any():
        return run
    rows, errors = run.request_rows.copy(), run.names.errors
    if REASON not in errors:
        errors = (*errors, REASON)
    rows["status"][short] = Status.truncated
    rows["error_id"][short] = errors.index(REASON)
    return replace(run, request_rows=rows, names=replace(run.names, errors=errors))


def _short_rows(run: Run) -> Mask:
    """Successful answers short by more than 2 tokens and by more than 2 %, by the server's own
    count."""
    rows = run.request_rows
    if not has_exact_lengths(run.manifest.preflight):
        return np.zeros(len(rows), bool)
    requested = run.schedule_rows["output_tokens"].astype(np.int64)
    is_counted = rows["token_source"] == TokenSource.usage
    is_missing = is_short(requested, rows["output_tokens"])
    short: Mask = is_missing & is_counted & (rows["status"] == Status.ok)
    return short


def why_not_met(run: Run, due: Mask) -> str:
    """The reason why a run cannot be met although its SLOs are: too many of the requested tokens
    are missing; "" for none."""
    if not has_exact_lengths(run.manifest.preflight):
        return ""
    status = run.request_rows["status"]
    answered = due & ((status == Status.ok) | (status == Status.truncated))
    requested = int(run.schedule_rows["output_tokens"][answered].sum(dtype=np.int64))
    received = int(run.request_rows["output_tokens"][answered].sum(dtype=np.int64))
    if not requested or requested - received <= _MOST_MISSING * requested:
        return ""
    missing = format_value((requested - received) / requested, "share")
    return (
        f"{missing} of the {format_count(requested)} requested output tokens are missing: shorter "
        "answers are faster, so that the SLOs were met with less work than planned."
    )


def truncated_text(run: Run, due: Mask) -> str:
    """The finding on truncated answers; "" for none."""
    rows, schedule = run.request_rows[due], run.schedule_rows[due]
    short = rows["status"] == Status.truncated
    n = int(np.count_nonzero(short))
    if not n:
        return ""
    got = format_count(round(float(rows["output_tokens"][short].mean())))
    asked = format_count(round(float(schedule["output_tokens"][short].mean())))
    share = format_value(n / len(rows), "share")
    return (
        f"{format_count(n)} of {format_count(len(rows))} requests ({share}) were truncated: their "
        f"answers ended cleanly after {got} of {asked} tokens on average, although the server "
        "accepted exact lengths in the preflight. They count as failed. If these are natural ends, "
        f"which a server that ignores ignore_eos has: {NATURAL_ENDS}."
    )


def failed_midway(run: Run, due: Mask) -> str:
    """The finding on answers that failed after some tokens with an error of the server, where the
    server had accepted exact lengths in shorter answers; "" for none."""
    rows, planned = run.request_rows, run.schedule_rows["output_tokens"]
    texts = np.array([text.startswith(IN_STREAM) for text in run.names.errors])
    failed = due & (rows["status"] == Status.stream_error) & texts[rows["error_id"]]
    failed &= np.isfinite(rows["first_token_s"])
    n = int(np.count_nonzero(failed))
    if not n:
        return ""
    usual = run.names.errors[int(np.bincount(rows["error_id"][failed]).argmax())]
    got = format_count(round(float(rows["output_tokens"][failed].mean())))
    asked = format_count(round(float(planned[failed].mean())))
    text = (
        f"{format_count(n)} of {format_count(int(np.count_nonzero(due)))} requests failed after "
        f"{got} of {asked} tokens on average: {usual.removeprefix(IN_STREAM)}"
    )
    text = text if text.endswith((".", "!", "?")) else f"{text}."
    if not has_exact_lengths(run.manifest.preflight):
        return text
    return (
        f"{text} The shorter answers of the preflight succeeded. If the server cannot go on behind "
        f"the model's own end (ignore_eos): {NATURAL_ENDS}."
    )
