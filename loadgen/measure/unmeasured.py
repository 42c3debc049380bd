"""SLOs on TPOT and ITL where some answers have neither, because all of their tokens came at
once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.slo_result import SloResult
from loadgen.measure.wording import format_count

MOST_SHARE = 0.05
"""Of the successful due requests: more without a value leave an SLO open, if they decide it."""
Judge = Callable[[PerRequest], Sequence[SloResult]]


def counts_for(columns: PerRequest, metric: str) -> Mask:
    """The rows that count in the n of a per-request SLO on a metric."""
    if metric == "tpot_s":
        return ~columns.is_unmeasured
    if metric == "max_itl_s":
        return ~columns.has_no_itl
    return np.ones(len(columns.is_ok), bool)


def one_piece(columns: PerRequest, due: Mask) -> tuple[int, int]:
    """The successful due answers that came in one piece, and all successful due answers."""
    answered = due & columns.is_ok & columns.has_token
    n = int(np.count_nonzero(answered & columns.is_unmeasured))
    return n, int(np.count_nonzero(answered))


def settled(
    results: Sequence[SloResult], columns: PerRequest, due: Mask, judge: Judge
) -> tuple[SloResult, ...]:
    """The results, without a verdict where answers without TPOT and ITL decide it: with all of them
    as hits, and with all as misses, they would differ. `judge` computes the results of columns."""
    block_reason = "" if columns.blocks is None else columns.blocks.reason
    n, n_answers = one_piece(columns, due)
    is_many = n > MOST_SHARE * n_answers
    if not is_many and not block_reason:
        return tuple(results)
    hits, misses = (judge(_filled(columns, value)) for value in (0.0, np.inf))
    reason = block_reason or (
        f"{format_count(n)} of {format_count(n_answers)} answers came in one piece and have no "
        "TPOT or ITL; as hits and as misses they lead to different verdicts"
    )
    found = []
    for result, hit, miss in zip(results, hits, misses, strict=True):
        is_itl = result.metric == "itl_s"
        is_open = is_itl or (result.scope == "run" and hit.met != miss.met)
        found.append(_open(result, reason) if is_open else result)
    return tuple(found)


def _filled(columns: PerRequest, value: float) -> PerRequest:
    """The columns with the same TPOT and max ITL for all answers that lack them."""
    return replace(
        columns,
        tpot_s=np.where(columns.is_unmeasured, value, columns.tpot_s),
        max_itl_s=np.where(columns.has_no_itl, value, columns.max_itl_s),
        is_unmeasured=columns.is_unmeasured & False,
        has_no_itl=columns.has_no_itl & False,
    )


def _open(result: SloResult, reason: str) -> SloResult:
    return replace(
        result, met=None, proven=None, survives=None, n_needed=None, note=result.note or reason
    )
