"""The time of a batch that runs to completion, by its size, from the cost of its steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from reference_engine.state.cost_model import CostModel, Padding, StepShape, decode_s

Lengths = tuple[int, int]
"""Prompt and output tokens of a request."""

_MOST_GROUPS = 20  # batches whose mean is the time of a size


def service_times_s(
    cost: CostModel, lengths: Sequence[Lengths], b_max: int, pad_to: Sequence[int] = ()
) -> NDArray[np.float64]:
    """[b_max] the mean time of batches of 1 … b_max of consecutive requests, as the mode `dynamic`
    runs them: prompts in a single step, padded to the longest; then a token a step of every row
    until the longest output ends. `pad_to` are sizes to which batches are filled up."""
    means = []
    for size in range(1, b_max + 1):
        n_groups = max(1, min(_MOST_GROUPS, len(lengths) // size))
        repeated = [*lengths, *lengths[:size]] * (1 + size // len(lengths))
        starts = [len(lengths) * k // n_groups for k in range(n_groups)]
        groups = [repeated[start : start + size] for start in starts]
        n_rows = next((n for n in sorted(pad_to) if n >= size), size)
        means.append(float(np.mean([_batch_s(cost, group, n_rows) for group in groups])))
    return np.array(means)


def _batch_s(cost: CostModel, batch: Sequence[Lengths], n_rows: int) -> float:
    prompts = [n_prompt for n_prompt, _ in batch]
    longest, n_padding = max(prompts), n_rows - len(batch)
    prefill = StepShape(
        n_seqs=len(batch),
        prefill_tokens=sum(prompts),
        prefill_attention=sum(n * n / 2 for n in prompts),
        padding=Padding(prefill_tokens=longest * n_rows - sum(prompts)),
    )
    # Ended rows and rows without a request are computed to the end, so all rows count as decodes.
    decode = StepShape(
        n_seqs=n_rows, n_decode=n_rows, context_tokens=sum(prompts) + n_padding * longest
    )
    n_steps = max(n_output for _, n_output in batch) - 1
    return cost.estimate(prefill) + sum(decode_s(cost, decode, n_steps))
