"""Answers that begin with reasoning: how many, and the share of it in their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.wording import format_count, format_value
from loadgen.records import Run


@dataclass(frozen=True, slots=True)
class Reasoning:
    """`answers` of `of` successful due answers have reasoning; `share` of the output tokens of all
    of them is reasoning, streamed or hidden. `without_answer` ended in their reasoning, without a
    token of an answer: they have no TTFAT."""

    answers: int
    of: int
    share: float
    without_answer: int

    @property
    def text(self) -> str:
        """`40 % of them reasoning`, of output tokens."""
        return f"{format_value(self.share, 'share')} of them reasoning"


def reasoning(run: Run, columns: PerRequest, due: Mask) -> Reasoning | None:
    """The reasoning of the successful due answers; None where no answer has any."""
    answered = due & columns.is_ok & columns.has_token
    rows = run.request_rows[answered]
    tokens = float(columns.output_tokens[answered].sum())
    has_reasoning = rows["reasoning_tokens"] > 0
    if not has_reasoning.any() or not tokens:
        return None
    is_streamed = has_reasoning & np.isfinite(rows["first_token_s"])
    return Reasoning(
        answers=int(np.count_nonzero(has_reasoning)),
        of=len(rows),
        share=float(rows["reasoning_tokens"].sum(dtype=np.int64)) / tokens,
        without_answer=int(np.count_nonzero(is_streamed & np.isnan(rows["first_answer_s"]))),
    )


def without_answer(found: Reasoning | None) -> str:
    """The finding on answers that ended in their reasoning; "" for none."""
    if found is None or not found.without_answer:
        return ""
    return (
        f"{format_count(found.without_answer)} of {format_count(found.of)} answers ended in their "
        "reasoning, without a token of an answer: they have no TTFAT and miss an SLO on it. Raise "
        "output_tokens, or limit the reasoning in extra_body."
    )
