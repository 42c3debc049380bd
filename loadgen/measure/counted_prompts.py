"""Prompt lengths as the server counted them, against the plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.manifest.sections import Manifest
from loadgen.measure.per_request import Mask
from loadgen.measure.wording import format_number
from loadgen.records import Run

TOLERANCE = 0.05
TEMPLATE_TOKENS = 32  # what a chat template may add to each prompt
_ROUNDING_TOKENS = 1  # of a length that is exact
REAL_ANSWERS = 2  # least `context` of a prompt with the server's answers: dialogue.Context.real


@dataclass(frozen=True, slots=True)
class CountedPrompts:
    """The tokens of n prompts: planned, and counted by the server."""

    n: int
    planned: int
    counted: int

    @property
    def is_short(self) -> bool:
        allowed = max(TOLERANCE * self.planned, _ROUNDING_TOKENS * self.n)
        return self.planned - self.counted > allowed

    @property
    def is_long(self) -> bool:
        allowed = max(TOLERANCE * self.planned, TEMPLATE_TOKENS * self.n)
        return self.counted - self.planned > allowed


def counted_prompts(run: Run, due: Mask) -> CountedPrompts:
    """The due prompts that the server counted. A prompt planned shorter than the shortest that the
    calibration found possible has that length."""
    rows = due & (run.request_rows["input_tokens"] > 0)
    counted = int(run.request_rows["input_tokens"][rows].sum(dtype=np.int64))
    planned = int(_possible_tokens(run)[rows].sum())
    return CountedPrompts(int(np.count_nonzero(rows)), planned, counted)


def has_exact_prompts(manifest: Manifest) -> bool:
    """Whether the preflight proved that prompts have the planned length, to one token."""
    return any(line.check == "prompt_fit" and line.ok is True for line in manifest.preflight)


def why_other_prompts(run: Run, due: Mask) -> str:
    """The reason why a run cannot be met although its SLOs are: the server counted other prompts
    than were planned exactly; "" for none."""
    if not has_exact_prompts(run.manifest):
        return ""
    quotes = run.schedule_rows["context"] >= REAL_ANSWERS  # of any length
    found = counted_prompts(run, due & ~quotes)
    if not (found.is_short or found.is_long):
        return ""
    counted, planned = (format_number(n / found.n) for n in (found.counted, found.planned))
    less = "less work than planned" if found.is_short else "another workload than planned"
    return (
        f"The server counted {counted} tokens per prompt where {planned} were sent, by lengths "
        f"that the preflight proved exact: the SLOs were met with {less}."
    )


def _possible_tokens(run: Run) -> NDArray[np.int64]:
    planned = run.schedule_rows["input_tokens"].astype(np.int64)
    fit = run.manifest.target.prompt_fit
    return planned if fit is None else np.maximum(planned, int(fit[0] + fit[1]))
