"""What an engine has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineTotals:
    """Totals since the engine started."""

    steps: int = 0
    admitted: int = 0
    preemptions: int = 0
    swaps: int = 0  # of the preemptions
    prompt_tokens: int = 0  # computed, so recomputation counts again
    output_tokens: int = 0
    cached_tokens: int = 0
    padding_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    rejected_plans: int = 0
