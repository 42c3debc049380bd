"""What the answers say: a queue that grew, prompts that were cached, other lengths than asked."""

from __future__ import annotations

import numpy as np

from loadgen.measure.load import LoadByQuarter
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.validity.check import ValidityCheck
from loadgen.measure.wording import format_count, format_number, format_value
from loadgen.records import Run

CACHED_SLACK_TOKENS = 64  # a chat template's own tokens, in whole blocks
CACHED_REQUESTS_SHARE = 0.01
LENGTH_TOLERANCE = 0.05
TEMPLATE_TOKENS = 32  # what a chat template may add to each prompt


def grown_load(load: LoadByQuarter | None) -> ValidityCheck:
    if load is None:
        return ValidityCheck("load", None, "too few requests to tell whether a queue grew")
    first, last = load.in_flight[0], load.in_flight[-1]
    detail = (
        f"{format_number(first)} requests in flight in the first quarter of the window,"
        f" {format_number(last)} in the last; median TTFT {format_value(load.ttft_s[0], 's')}"
        f" and {format_value(load.ttft_s[-1], 's')}"
    )
    if load.is_growing:
        detail = f"offered rate above capacity: {detail}"
    return ValidityCheck("load", not load.is_growing, detail)


def cache(run: Run, due: Mask) -> ValidityCheck:
    """Cached tokens the server reports, against the declared prefix; turns keep their history."""
    rows, schedule = run.request_rows, run.schedule_rows
    first_turns = due & (schedule["n_parents"] == 0)
    cached = rows["cached_tokens"][first_turns].astype(np.int64)
    if not cached.any():
        return ValidityCheck("cache", None, "the server reported no cached prompt tokens")
    allowed = schedule["prefix_tokens"][first_turns].astype(np.int64) + CACHED_SLACK_TOKENS
    n_over, n = int(np.count_nonzero(cached > allowed)), len(cached)
    detail = (
        f"{format_count(n_over)} of {format_count(n)} prompts had more cached tokens than their "
        "declared"
        f" prefix plus {CACHED_SLACK_TOKENS}; {format_count(int(cached.sum()))} cached tokens in "
        "all"
    )
    if n_over > CACHED_REQUESTS_SHARE * n:
        return ValidityCheck("cache", False, f"contaminated: {detail}")
    return ValidityCheck("cache", True, detail)


def output_lengths(run: Run, columns: PerRequest, due: Mask) -> ValidityCheck:
    answered = due & columns.is_ok
    asked = run.schedule_rows["output_tokens"][answered].astype(np.int64)
    got = columns.output_tokens[answered]
    if not len(got) or not asked.sum():
        return ValidityCheck("output lengths", None, "no answer to measure")
    n_other = int(np.count_nonzero(got != asked))
    detail = (
        f"asked for {format_number(float(asked.mean()))} tokens on average, got"
        f" {format_number(float(got.mean()))}; {format_count(n_other)} of "
        f"{format_count(len(got))} differ"
    )
    ok = abs(got.sum() / asked.sum() - 1) <= LENGTH_TOLERANCE
    return ValidityCheck("output lengths", bool(ok), detail)


def input_lengths(run: Run, due: Mask) -> ValidityCheck:
    counted = due & (run.request_rows["input_tokens"] > 0)
    asked = run.schedule_rows["input_tokens"][counted].astype(np.int64)
    got = run.request_rows["input_tokens"][counted].astype(np.int64)
    if not len(got) or not asked.sum():
        return ValidityCheck("input lengths", None, "the server did not count prompt tokens")
    detail = (
        f"planned {format_number(float(asked.mean()))} prompt tokens on average, the server counted"
        f" {format_number(float(got.mean()))}"
    )
    apart = np.abs(got - asked)
    n_near = int(np.count_nonzero(apart <= 1))
    detail += (
        f"; {format_count(n_near)} of {format_count(len(got))} within one token, the farthest"
        f" {format_count(int(apart.max()))} off"
    )
    off = float(abs(got.sum() - asked.sum()))
    ok = off <= max(LENGTH_TOLERANCE * float(asked.sum()), TEMPLATE_TOKENS * len(got))
    return ValidityCheck("input lengths", bool(ok), detail)
