"""The fit of step costs: non-negative coefficients that a few slow steps cannot move.

Least squares fits the slowest steps, because their errors are the largest. Here a step's error is
relative to its predicted time, and errors beyond `_HUBER_SCALES` scales of the usual error count
less and less (Huber's M-estimate by iteratively reweighted least squares).

What the costs leave over is kept as the variation of the steps, so that a simulation is as slow on
average as the server was, and its slow steps come in spells as they did.

Source: Huber & Ronchetti, Robust Statistics (2009), sections 7.3 to 7.8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import UsageError
from loadgen.measure.statistics.ranks import mean_ranks
from loadgen.studies.calibrate.step_samples import Column, StepSamples
from reference_engine.state.cost_model import StepCost, StepShape
from reference_engine.state.step_variation import MOST_RATIO, StepVariation

LEAST_STEPS = 40
_MOST_STEPS = 40_000  # more steps are thinned out evenly
_KNEES = (0, 8, 16, 32, 64, 128, 256, 512, 1024)  # tokens up to which reading the weights dominates
_KNEE_GAIN = 0.02  # by which a knee has to lower the error of the fit
# Terms of a prompt that are left out where the steps do not need them: with a single prompt length
# no fit separates them from the time per token, which predicts other lengths best.
_LEFT_OUT = ((2, 5), (5,), (2,))  # columns of `_terms`, the simplest fit first
_PROMPT_LOSS = 0.1  # by which leaving out may increase the error of steps with a prompt
_HUBER_SCALES = 1.5
_ITERATIONS = 30
_N_BLOCKS = 40  # of consecutive steps; every fourth is held out
_SMALLEST = 1e-9
_UP_TO = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 1.0)  # shares of the steps
_N_PAUSES = 10
_LAGS = 2 ** np.arange(11)  # steps
_MEMORIES = 2.0 ** np.arange(0, 10.5, 0.5)  # steps


@dataclass(frozen=True)
class StepError:
    """The errors of predicted step times on `n` steps: `mean` and `median` of |predicted/measured −
    1|, and `bias` = Σ predicted / Σ measured − 1, the share of the time that is in no cost."""

    n: int
    mean: float
    median: float
    bias: float


@dataclass(frozen=True)
class FittedCost:
    """Fitted costs, the variation of the steps around them, the seconds of a request outside the
    steps (None: not measured), and the errors on held-out steps: in all and by kind of step
    (`decode`, `prefill`, `mixed`)."""

    cost: StepCost
    variation: StepVariation
    request_s: float | None
    n_steps: int
    held_out: StepError
    by_kind: Mapping[str, StepError]


def fit_cost(samples: StepSamples) -> FittedCost:
    """Fits the costs on three quarters of the steps and computes their errors on the rest. Blocks
    of consecutive steps are held out whole, because neighbours share their disturbances. Raises
    UsageError for fewer than 40 steps."""
    if len(samples) < LEAST_STEPS:
        raise UsageError(
            f"calibrate: {len(samples)} usable steps, at least {LEAST_STEPS} are needed; measure "
            "longer"
        )
    every = samples
    if len(samples) > _MOST_STEPS:
        samples = samples.at(np.linspace(0, len(samples) - 1, _MOST_STEPS).astype(np.int64))
    block = np.arange(len(samples)) * _N_BLOCKS // len(samples)
    is_held_out = block % 4 == 3
    train, held_out = samples.at(~is_held_out), samples.at(is_held_out)
    knee, found = _fitted(train, ())
    if train.n_prefill.any():
        error = _prompt_error(train, knee, found)
        for left_out in _LEFT_OUT:
            simpler_knee, simpler = _fitted(train, left_out)
            if _prompt_error(train, simpler_knee, simpler) <= error * (1 + _PROMPT_LOSS):
                knee, found = simpler_knee, simpler
                break
    cost, request_s = _cost(found, knee), float(found[-1])
    return FittedCost(
        cost,
        variation_of(every.seconds, np.maximum(_terms(every, knee) @ found, _SMALLEST)),
        request_s if samples.requests.any() else None,
        len(samples),
        cost_error(held_out, cost, request_s),
        _by_kind(held_out, cost, request_s),
    )


def _fitted(train: StepSamples, left_out: Sequence[int]) -> tuple[int, Column]:
    """The best knee, and the coefficients with it; those `left_out` are 0."""
    best: tuple[float, int, Column] | None = None
    for knee in _KNEES:
        terms = _terms(train, knee)
        terms[:, left_out] = 0.0
        found = solved(terms, train.seconds)
        loss = float(np.mean(np.abs(terms @ found / train.seconds - 1)))
        if best is None or loss < best[0] * (1 - _KNEE_GAIN):
            best = loss, knee, found
    assert best is not None, "there are knees"
    return best[1], best[2]


def _prompt_error(train: StepSamples, knee: int, found: Column) -> float:
    """The mean error of steps with a prompt."""
    prompts = train.at(train.n_prefill > 0)
    return float(np.mean(np.abs(_terms(prompts, knee) @ found / prompts.seconds - 1)))


def solved(terms: NDArray[np.float64], seconds: Column) -> Column:
    """Non-negative coefficients c [k] with terms [n, k] @ c ≈ seconds [n], robust against slow
    steps. A column of zeros gets 0."""
    from scipy.optimize import nnls

    scale = np.maximum(np.abs(terms).max(axis=0), _SMALLEST)
    scaled = terms / scale

    def weighted(weight: Column) -> Column:
        c: Column = nnls(scaled * weight[:, None], seconds * weight)[0]
        return c

    found = weighted(1 / seconds)
    for _ in range(_ITERATIONS):
        predicted = np.maximum(scaled @ found, _SMALLEST)
        error = np.abs(seconds / predicted - 1)
        limit = max(_HUBER_SCALES * 1.4826 * float(np.median(error)), 1e-4)
        found = weighted(np.sqrt(np.minimum(1, limit / np.maximum(error, 1e-12))) / predicted)
    coefficients: Column = found / scale
    return coefficients


def variation_of(seconds: Column, costs_s: Column) -> StepVariation:
    """The variation of the times of consecutive steps [n] around their costs [n]. The memory is
    fitted by least squares to the autocorrelation of their normal scores up to 1 024 steps. Of the
    pauses in their order, equal parts are replaced by their means."""
    from scipy.special import ndtri

    n = len(seconds)
    ratio = np.minimum(seconds / costs_s, MOST_RATIO)
    pauses_s = np.sort((seconds - MOST_RATIO * costs_s)[seconds > MOST_RATIO * costs_s])
    up_to = np.array(_UP_TO)
    edges = np.ceil(up_to * n).astype(int)
    has_steps = np.diff(edges, append=n + 1) > 0  # few steps: fewer shares
    up_to, edges = up_to[has_steps], edges[has_steps]
    scores = ndtri((mean_ranks(seconds / costs_s) - 0.5) / n)
    scores -= scores.mean()
    lags = _LAGS[n / 4 > _LAGS]
    variance = max(float(np.mean(scores**2)), _SMALLEST)
    correlation = np.array([np.mean(scores[:-k] * scores[k:]) for k in lags]) / variance

    def fitted(memory: float) -> tuple[float, float]:
        """The squared error, and the share that lasts."""
        fading = np.exp(-lags / memory)
        share = float(np.clip(correlation @ fading / (fading @ fading), 0, 1))
        return float(np.sum((correlation - share * fading) ** 2)), share

    errors = {memory: fitted(memory) for memory in _MEMORIES.tolist()}
    memory = min(errors, key=lambda memory: errors[memory][0])
    return StepVariation(
        tuple(up_to.tolist()),
        tuple(float(part.mean()) for part in np.split(np.sort(ratio), edges[:-1])),
        errors[memory][1],
        memory,
        len(pauses_s) / n,
        tuple(float(part.mean()) for part in np.array_split(pauses_s, _N_PAUSES) if len(part)),
    )


def _terms(samples: StepSamples, knee: int) -> NDArray[np.float64]:
    """What each coefficient multiplies: step, sequence, sequence with a prompt, token, token of
    context, attention of prompts, request."""
    n_tokens = samples.prefill_tokens + samples.n_decode
    sharpness = StepCost().sharpness
    return np.column_stack(
        [
            np.ones(len(samples)),
            samples.n_prefill + samples.n_decode,
            samples.n_prefill,
            (knee**sharpness + n_tokens**sharpness) ** (1 / sharpness),
            samples.context_tokens,
            samples.prefill_attention,
            samples.requests,
        ]
    )


def _cost(found: Column, knee: int) -> StepCost:
    step_s, seq_s, prefill_seq_s, token_s, context_token_s, attention_s, _ = found.tolist()
    return StepCost(
        step_s=step_s,
        seq_s=seq_s,
        prefill_seq_s=prefill_seq_s,
        token_s=token_s,
        weights_s=knee * token_s,
        context_token_s=context_token_s,
        prefill_attention_s=attention_s,
    )


def cost_error(samples: StepSamples, cost: StepCost, request_s: float = 0.0) -> StepError:
    """The errors of costs on steps [n]; `request_s` is added where a step has a request's time."""
    predicted = request_s * samples.requests + [
        cost.estimate(StepShape(n_prefill + n_decode, n_tokens, attention, n_decode, n_context))
        for n_prefill, n_tokens, attention, n_decode, n_context in zip(
            samples.n_prefill,
            samples.prefill_tokens,
            samples.prefill_attention,
            samples.n_decode,
            samples.context_tokens,
            strict=True,
        )
    ]
    error = np.abs(predicted / samples.seconds - 1)
    bias = float(predicted.sum() / samples.seconds.sum() - 1)
    return StepError(len(samples), float(error.mean()), float(np.median(error)), bias)


def _by_kind(samples: StepSamples, cost: StepCost, request_s: float) -> dict[str, StepError]:
    has_prefill, has_decode = samples.prefill_tokens > 0, samples.n_decode > 0
    kinds = {
        "decode": has_decode & ~has_prefill,
        "prefill": has_prefill & ~has_decode,
        "mixed": has_prefill & has_decode,
    }
    return {
        kind: cost_error(samples.at(rows), cost, request_s)
        for kind, rows in kinds.items()
        if rows.any()
    }
