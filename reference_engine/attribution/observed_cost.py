"""What steps really cost, from the log of an engine: a known model scaled to it, or one fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from reference_engine.state.cost_model import NO_PADDING, CostModel, Padding, StepCost, StepShape
from reference_engine.state.steps import StepRecord

Numbers = NDArray[np.float64]


def observed_cost(steps: Sequence[StepRecord], prior: CostModel | None) -> StepCost:
    """A cost model whose steps take as long in sum as those of a log, planning included. `prior`
    gives it its shape where it says that steps take time at all; else the coefficients of a step,
    a token, a token of context and prompt attention are fitted, none of them negative, to the sum
    of squares. Without steps that computed something it is the prior, or costs nothing."""
    worked = [step for step in steps if step.n_prefill_tokens or step.n_decode]
    known = prior if isinstance(prior, StepCost) else StepCost()
    if not worked:
        return known
    took_s = np.array([step.duration_s + step.plan_s for step in worked])
    said_s = sum(known.estimate(shape_of(step)) for step in worked)
    if said_s > 0:
        return scaled(known, float(took_s.sum()) / said_s)
    shapes = [shape_of(step) for step in worked]
    features = np.array(
        [
            (1.0, s.prefill_tokens + s.n_decode, s.context_tokens, s.prefill_attention)
            for s in shapes
        ]
    )
    step_s, token_s, context_s, attention_s = _non_negative(features, took_s)
    return StepCost(
        step_s=step_s,
        added_token_s=token_s,
        context_token_s=context_s,
        prefill_attention_s=attention_s,
    )


def shape_of(step: StepRecord) -> StepShape:
    """What a step's record says of its shape; where it does not name its requests (level "sizes"),
    its prompts count as one."""
    n_prompts = sum(n > 1 for _, n in step.items) if step.items else step.n_prefill_tokens > 0
    padding = NO_PADDING
    if step.padding_tokens:
        is_prompt = step.n_prefill_tokens > 0
        n = step.padding_tokens
        padding = Padding(prefill_tokens=n) if is_prompt else Padding(decode_rows=n)
    return StepShape(
        n_seqs=step.n_decode + int(n_prompts),
        prefill_tokens=step.n_prefill_tokens,
        prefill_attention=step.prefill_attention,
        n_decode=step.n_decode,
        context_tokens=step.context_tokens,
        padding=padding,
    )


def scaled(cost: StepCost, factor: float) -> StepCost:
    """Every step `factor` times as long."""
    seconds = {
        name: getattr(cost, name) * factor
        for name in StepCost.__dataclass_fields__
        if name.endswith("_s")
    }
    return replace(cost, **seconds)


def _non_negative(features: Numbers, target: Numbers) -> list[float]:
    """The least-squares coefficients among those that are not negative: the best of all subsets of
    the columns whose own solution is not, which is exact for so few of them."""
    n_columns = features.shape[1]
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)  # columns of very different sizes
    best, best_error = np.zeros(n_columns), float(target @ target)
    for n_used in range(1, n_columns + 1):
        for used in combinations(range(n_columns), n_used):
            columns = features[:, used] / scale[list(used)]
            found = np.linalg.lstsq(columns, target, rcond=None)[0]
            if (found < 0).any():
                continue
            error = float(np.square(columns @ found - target).sum())
            if error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(n_columns), error
                best[list(used)] = found / scale[list(used)]
    return [float(value) for value in best]
