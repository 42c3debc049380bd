"""The error of costs: how far predicted times are from the middle of the measured times of equal
steps, by kind of step and by size, with intervals.

Equal steps of a server differ, by jitter, in spells and by pauses. That is no error of the costs
(it is their variation), but it makes the middle of a few steps uncertain. The errors at the sizes
of a kind are taken as draws from a normal distribution with mean 0 and unknown width, measured with
known standard errors (a hierarchical model); their posterior gives estimates that the jitter does
not inflate, and intervals.

Source: Gelman et al., Bayesian Data Analysis, 3rd ed. (2013), sections 5.4 and 5.5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.studies.calibrate.step_samples import Column, StepSamples

KINDS = ("prompt", "decode", "mixed")
_LEAST = 6  # steps of a size; fewer are joined with the next size
_TIMES, _LEAST_TIMED = 6, 60  # equal parts of the time, of kinds with so many steps
_SHRINK = 8.0  # steps by which the variance of a kind counts in that of a size
_LAGS = 2 ** np.arange(9)  # steps
_MEMORIES = 2.0 ** np.arange(0, 8.5, 0.5)  # steps
_HUBER_SCALES = 1.5
_LEAST_ERROR = 1e-4
_WIDTHS = np.geomspace(5e-4, 2.0, 80)
_USUAL_WIDTH = 0.05
_N_DRAWS = 4_000


@dataclass(frozen=True)
class Spells:
    """The correlation of the times of two steps that are k apart: `share`·exp(−k/`memory`)."""

    share: float = 0.0
    memory: float = 1.0

    def mean_correlation(self, at: NDArray[np.int64]) -> float:
        """The mean correlation of all pairs of the steps at the ascending places [n], each with
        itself included."""
        total, others, before = 0.0, 0.0, -math.inf
        for place in at.tolist():
            others = (others + 1) * math.exp((before - place) / self.memory)
            total += others
            before = place
        n = len(at)
        return (n + 2 * self.share * total) / n**2


@dataclass(frozen=True)
class SizeError:
    """The relative error of the costs at a size of `by` (`prompt_tokens`, `sequences`, `context`
    per sequence, or `time` in shares of the steps), from `least` to `most`, over `n` steps. The
    interval from `low` to `high` holds the error with 95 %."""

    by: str
    least: float
    most: float
    n: int
    error: float
    low: float
    high: float


@dataclass(frozen=True)
class KindError:
    """The errors of the costs of a kind of step: `error` is the mean |predicted / middle of the
    measured − 1| over sizes, with its 95 % interval; `worst` the size with the largest. `scatter`
    is the median |measured / predicted − 1| of single steps, `bias` is Σ predicted / Σ measured −
    1, the share of the time that is in no cost."""

    n: int
    error: float
    low: float
    high: float
    worst: SizeError
    scatter: float
    bias: float


def error_by_kind(
    samples: StepSamples, predicted: Column, at: NDArray[np.int64], spells: Spells
) -> dict[str, KindError]:
    """The errors of predicted times (s) [n], by kind of step; kinds without steps are left out.
    `at` are the places of the steps [n] among all, of which some may be left out."""
    return {
        kind: _kind_error(samples.at(rows), predicted[rows], at[rows], spells)
        for kind, rows in rows_by_kind(samples).items()
    }


def spells_of(ratio: Column, sizes: NDArray[np.int64]) -> Spells:
    """The correlation of the measured/predicted times of consecutive steps [n] around their middle
    at each size [n], so that an error of the costs at a size is no spell. Fitted by least squares
    up to 256 steps."""
    _, influence = middle_of(ratio)
    influence = influence - (np.bincount(sizes, influence) / np.bincount(sizes))[sizes]
    variance = float(np.mean(influence**2))
    lags = _LAGS[len(ratio) / 4 > _LAGS]
    if variance <= _LEAST_ERROR**2 or not len(lags):
        return Spells()
    correlation = np.array([np.mean(influence[:-k] * influence[k:]) for k in lags]) / variance
    best = (math.inf, Spells())
    for memory in _MEMORIES.tolist():
        fading = np.exp(-lags / memory)
        share = float(np.clip(correlation @ fading / (fading @ fading), 0, 1))
        error = float(np.sum((correlation - share * fading) ** 2))
        if error < best[0]:
            best = error, Spells(share, memory)
    return best[1]


def rows_by_kind(samples: StepSamples) -> dict[str, NDArray[np.bool_]]:
    """The rows of each kind of step, masks [n]; kinds without steps are left out."""
    has_prompt, has_decode = samples.prefill_tokens > 0, samples.n_decode > 0
    masks = (has_prompt & ~has_decode, has_decode & ~has_prompt, has_prompt & has_decode)
    return {kind: rows for kind, rows in zip(KINDS, masks, strict=True) if rows.any()}


def bins_of(samples: StepSamples) -> Iterator[tuple[str, Column, list[NDArray[np.int64]]]]:
    """The sizes of steps of a kind: their quantity, its values [n], and the rows of each size."""
    n = len(samples)
    if samples.prefill_tokens.any():
        yield "prompt_tokens", samples.prefill_tokens, _octaves(samples.prefill_tokens)
    if samples.n_decode.any():
        yield "sequences", samples.n_decode, _octaves(samples.n_decode)
        context = samples.context_tokens / np.maximum(samples.n_decode, 1)
        yield "context", context, _octaves(context)
    if n >= _LEAST_TIMED:
        yield "time", np.arange(n) / n, np.array_split(np.arange(n), _TIMES)


def _octaves(values: Column) -> list[NDArray[np.int64]]:
    """The rows of each octave of values, in the order of time; octaves of few rows are joined."""
    octave = np.floor(np.log2(np.maximum(values, 1)) + 1e-9)
    parts: list[NDArray[np.int64]] = []
    for size in np.unique(octave):
        rows = np.flatnonzero(octave == size)
        if parts and (len(rows) < _LEAST or len(parts[-1]) < _LEAST):
            parts[-1] = np.sort(np.concatenate([parts[-1], rows]))
        else:
            parts.append(rows)
    return parts


def _kind_error(
    samples: StepSamples, predicted: Column, places: NDArray[np.int64], spells: Spells
) -> KindError:
    ratio = samples.seconds / predicted
    whole: tuple[float, float, float] | None = None
    worst: SizeError | None = None
    for by, values, parts in bins_of(samples):
        draws, errors = _posterior(ratio, parts, places, spells)
        means = np.abs(draws).mean(axis=1)
        middle = float(np.median(means))
        if whole is None or middle > whole[0]:
            low, high = np.quantile(means, (0.025, 0.975)).tolist()
            whole = middle, low, high
        sizes = np.median(np.abs(draws), axis=0)
        at = int(sizes.argmax())
        if worst is None or sizes[at] > abs(worst.error):
            low, high = np.quantile(draws[:, at], (0.025, 0.975)).tolist()
            rows, sign = parts[at], float(np.sign(errors[at])) or 1.0
            least, most = float(values[rows].min()), float(values[rows].max())
            error = sign * float(sizes[at])
            worst = SizeError(by, least, most, len(rows), error, low, high)
    assert whole is not None, "a kind has steps"
    assert worst is not None, "a kind has sizes"
    bias = float(predicted.sum() / samples.seconds.sum() - 1)
    scatter = float(np.median(np.abs(ratio - 1)))
    return KindError(len(samples), *whole, worst, scatter, bias)


def _posterior(
    ratio: Column, parts: list[NDArray[np.int64]], places: NDArray[np.int64], spells: Spells
) -> tuple[NDArray[np.float64], Column]:
    """Draws [d, k] of the errors at the k sizes, and their direct estimates [k]."""
    influences, middles = [], []
    for rows in parts:
        middle, influence = middle_of(ratio[rows])
        middles.append(middle)
        influences.append(influence)
    pooled = float(np.mean(np.concatenate(influences) ** 2))
    deviations = np.array(
        [
            _standard_error(own, pooled, spells.mean_correlation(places[rows]))
            for own, rows in zip(influences, parts, strict=True)
        ]
    )
    centres = np.array(middles)
    errors: Column = 1 / centres - 1
    deviations = np.maximum(deviations / centres**2, _LEAST_ERROR)
    rng = np.random.default_rng(0)
    variance = _WIDTHS[:, None] ** 2 + deviations**2  # [w, k]
    log_density = -0.5 * np.sum(errors**2 / variance + np.log(variance), axis=1)
    log_density += np.log(_WIDTHS / (1 + (_WIDTHS / _USUAL_WIDTH) ** 2))
    density = np.exp(log_density - log_density.max())
    width = rng.choice(_WIDTHS, _N_DRAWS, p=density / density.sum())[:, None]
    kept = width**2 / (width**2 + deviations**2)
    draws = kept * errors + np.sqrt(kept) * deviations * rng.standard_normal(kept.shape)
    return draws, errors


def middle_of(ratio: Column) -> tuple[float, Column]:
    """Huber's estimate of the middle of ratios [n], and the influence of each on it."""
    middle = float(np.median(ratio))
    scale = max(1.4826 * float(np.median(np.abs(ratio - middle))), _LEAST_ERROR)
    limit = _HUBER_SCALES * scale
    for _ in range(10):
        middle += float(np.clip(ratio - middle, -limit, limit).mean())
    clipped = np.clip(ratio - middle, -limit, limit)
    share = max(float(np.mean(np.abs(ratio - middle) <= limit)), 0.5)
    influence: Column = clipped / share
    return middle, influence


def _standard_error(influence: Column, pooled: float, mean_correlation: float) -> float:
    """The standard error of a middle; `pooled` is the variance of single steps of the kind."""
    n = len(influence)
    variance = (float(np.sum(influence**2)) + _SHRINK * pooled) / (n + _SHRINK)
    return math.sqrt(variance * mean_correlation)
