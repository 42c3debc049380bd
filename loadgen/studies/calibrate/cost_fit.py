"""The fit of step costs: the form that predicts steps outside the fit best, and its coefficients.

Steps are weighed by kind (prompt, decode, mixed) and size, because most steps of a server are
decodes of a usual batch: costs that are right for these alone can be far off for a long prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import UsageError
from loadgen.studies.calibrate.cost_forms import (
    ADDED_TOKEN,
    ATTENTION,
    HUBER_SCALES,
    PROMPT_SEQUENCE,
    Batch,
    Form,
    request_s,
    solved,
    step_cost,
    terms,
    weighted_median,
)
from loadgen.studies.calibrate.lack_of_fit import KindError, error_by_kind, rows_by_kind, spells_of
from loadgen.studies.calibrate.step_samples import Column, StepSamples
from loadgen.studies.calibrate.variation_fit import variation_of
from reference_engine.model.hardware_file import MOST_ERROR
from reference_engine.state.cost_model import StepCost
from reference_engine.state.step_variation import StepVariation

LEAST_STEPS = 40
_MOST_PER_SIZE, _TRIED_PER_SIZE = 1_000, 250  # steps of a kind and size in the last fit; in trials
_FORMS: tuple[Batch, ...] = ("powers_of_two", "captured", "pieces")
_SHARPNESS = (2.0, 16.0)
_LEFT_OUT = ((PROMPT_SEQUENCE, ATTENTION), (ATTENTION,), (PROMPT_SEQUENCE,))  # the simplest first
_KNEE_FROM = 4.0  # tokens
_CHOSEN_AT = 2.5  # standard errors by which a form predicts better than a simpler one
_KEPT_AT = 1.0  # standard errors by which a term makes predictions better
_N_FOLDS, _N_BLOCKS = 4, 40
_TRIAL_ITERATIONS = 8
_LEAST_SCALE = 1e-3
_SMALLEST = 1e-12


@dataclass(frozen=True)
class FittedCost:
    """Fitted costs and their form, the variation of the steps around them, the seconds of a request
    outside the steps (None: not measured), and the errors of the costs by kind of step (`prompt`,
    `decode`, `mixed`)."""

    cost: StepCost
    form: Form
    variation: StepVariation
    request_s: float | None
    n_steps: int
    by_kind: Mapping[str, KindError]
    coefficients: Column

    @property
    def is_right(self) -> bool:
        """Whether no kind of step has an error above `MOST_ERROR`, and no size of a kind."""
        return all(
            max(kind.error, abs(kind.worst.error)) <= MOST_ERROR for kind in self.by_kind.values()
        )

    def predicted_s(self, samples: StepSamples) -> Column:
        """The times of steps [n], with that of a request where a sample includes it."""
        return np.maximum(terms(samples, self.form) @ self.coefficients, _SMALLEST)


def fit_cost(samples: StepSamples) -> FittedCost:
    """Fits the costs to the steps. The form is chosen, and the errors are computed, by predictions
    of each quarter of the steps from the other three: of each kind and size, blocks of consecutive
    steps, because neighbours share their disturbances. Raises UsageError for fewer than 40 steps.
    """
    if len(samples) < LEAST_STEPS:
        raise UsageError(
            f"calibrate: {len(samples)} usable steps, at least {LEAST_STEPS} are needed; measure "
            "longer"
        )
    form = _chosen_form(samples.at(_thinned(samples, _TRIED_PER_SIZE)))
    rows = _thinned(samples, _MOST_PER_SIZE)
    fitted = samples.at(rows)
    table, weights = terms(fitted, form), weights_of(fitted)
    coefficients = solved(table, fitted.seconds, weights)
    predicted = _predicted(table, fitted, weights)
    every_s = np.maximum(terms(samples, form) @ coefficients, _SMALLEST)
    spells = spells_of(samples.seconds / every_s, sizes_of(samples))
    return FittedCost(
        step_cost(form, coefficients),
        form,
        variation_of(samples.seconds, every_s),
        request_s(coefficients) if samples.requests.any() else None,
        len(samples),
        error_by_kind(fitted, predicted, rows, spells),
        coefficients,
    )


def sizes_of(samples: StepSamples) -> NDArray[np.int64]:
    """A number for each kind and size of steps [n]: octaves of prompt tokens and of the batch, two
    octaves of the context."""
    kind = 2 * (samples.prefill_tokens > 0) + (samples.n_decode > 0)
    sizes = [
        kind,
        np.log2(np.maximum(samples.prefill_tokens, 1)) + 1e-9,
        np.log2(np.maximum(samples.n_decode, 1)) + 1e-9,
        np.log2(np.maximum(samples.context_tokens, 1)) / 2,
    ]
    key = np.zeros(len(samples), dtype=np.int64)
    for size in sizes:
        key = key * 64 + np.floor(size).astype(np.int64)
    number: NDArray[np.int64] = np.unique(key, return_inverse=True)[1].ravel()
    return number


def weights_of(samples: StepSamples) -> Column:
    """Weights of the steps [n] with a sum of n. Those of a size have together the square root of
    their number, those of a kind the square root of what its sizes then have: between equal weights
    of all steps, with the least noise, and equal weights of all sizes and kinds."""
    number = sizes_of(samples)
    weights = 1 / np.sqrt(np.bincount(number)[number])
    kind = 2 * (samples.prefill_tokens > 0) + (samples.n_decode > 0)
    weights /= np.sqrt(np.bincount(kind, weights)[kind])
    weights *= len(weights) / weights.sum()
    return weights


def _thinned(samples: StepSamples, most: int) -> NDArray[np.int64]:
    """The rows of at most `most` steps of each size, evenly in time."""
    number = sizes_of(samples)
    order = np.argsort(number, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(number[order])) + 1)
    kept = [
        part if len(part) <= most else part[np.linspace(0, len(part) - 1, most).astype(np.int64)]
        for part in parts
    ]
    return np.sort(np.concatenate(kept))


def _folds(samples: StepSamples) -> NDArray[np.int64]:
    """The fold of each step [n]."""
    number = sizes_of(samples)
    fold = np.zeros(len(samples), dtype=np.int64)
    for size in range(int(number.max()) + 1):
        rows = np.flatnonzero(number == size)
        n_blocks = min(_N_BLOCKS, len(rows))
        fold[rows] = (np.arange(len(rows)) * n_blocks // len(rows) + size) % _N_FOLDS
    return fold


def _predicted(
    table: NDArray[np.float64],
    samples: StepSamples,
    weights: Column,
    n_iterations: int = 30,
) -> Column:
    """The time (s) of each step [n], predicted from the steps of the other folds."""
    fold, predicted = _folds(samples), np.empty(len(samples))
    for number in range(_N_FOLDS):
        out = fold == number
        if not out.any():
            continue
        inside = ~out
        found = solved(table[inside], samples.seconds[inside], weights[inside], n_iterations)
        predicted[out] = table[out] @ found
    return np.maximum(predicted, _SMALLEST)


def _chosen_form(samples: StepSamples) -> Form:
    trial = _Trial(samples)
    form = trial.with_knee(Form())
    if samples.n_decode.max() > 2:
        form = trial.better(form, [replace(form, batch=batch) for batch in _FORMS])
        form = trial.with_knee(form)
    if form.knee:
        form = trial.better(form, [trial.with_knee(replace(form, sharpness=p)) for p in _SHARPNESS])
        simpler = [replace(form, knee=0.0, sharpness=4.0), replace(form, left_out=(ADDED_TOKEN,))]
        form = trial.simplest(simpler, form)
    if samples.n_prefill.any():
        left_out = [form.left_out + columns for columns in _LEFT_OUT]
        form = trial.simplest([replace(form, left_out=columns) for columns in left_out], form)
    return form


class _Trial:
    """Forms compared on the same steps."""

    def __init__(self, samples: StepSamples) -> None:
        self._samples, self._weights = samples, weights_of(samples)
        self._losses: dict[Form, Column] = {}
        self._kinds = list(rows_by_kind(samples).values())
        first = Form(knee=0.0)
        error = np.abs(samples.seconds / self._held_out(first) - 1)
        self._scale = max(1.4826 * weighted_median(error, self._weights), _LEAST_SCALE)

    def with_knee(self, form: Form) -> Form:
        """The form with the knee that fits best: half octaves first, then finer."""
        most = float((self._samples.prefill_tokens + self._samples.n_decode).max())
        grid = _KNEE_FROM * 2.0 ** (np.arange(0, 2 * np.log2(max(most / _KNEE_FROM, 1))) / 2)
        losses = {0.0: self._fitted_loss(replace(form, knee=0.0))}
        for knee in grid.tolist():
            losses[knee] = self._fitted_loss(replace(form, knee=knee))
        best = min(losses, key=lambda knee: losses[knee])
        for apart in (0.25, 0.125, 0.0625):
            for knee in (best * 2**-apart, best * 2**apart) if best else ():
                losses[knee] = self._fitted_loss(replace(form, knee=knee))
            best = min(losses, key=lambda knee: losses[knee])
        return replace(form, knee=best)

    def better(self, form: Form, others: list[Form]) -> Form:
        """The best of the others where it predicts clearly better than `form`, else `form`."""
        if not others:
            return form
        best = min(others, key=lambda other: float(self._loss(other).sum()))
        gains = self._gains(form, best)
        is_better = max(gains) > max(_CHOSEN_AT, -min(gains))
        return best if is_better else form

    def simplest(self, simpler: list[Form], form: Form) -> Form:
        """The first of the simpler forms that predicts about as well as `form`, else `form`."""
        return next((f for f in simpler if max(self._gains(f, form)) <= _KEPT_AT), form)

    def _gains(self, form: Form, other: Form) -> list[float]:
        """By how many standard errors `other` predicts each kind of step better."""
        gain = self._loss(form) - self._loss(other)
        errors = [float(np.sqrt(np.sum(gain[rows] ** 2))) for rows in self._kinds]
        return [
            float(gain[rows].sum()) / error if error > 0 else 0.0
            for rows, error in zip(self._kinds, errors, strict=True)
        ]

    def _loss(self, form: Form) -> Column:
        """Huber's loss of each step, predicted from the other folds [n]."""
        if form not in self._losses:
            self._losses[form] = self._huber(self._held_out(form))
        return self._losses[form]

    def _held_out(self, form: Form) -> Column:
        table = terms(self._samples, form)
        return _predicted(table, self._samples, self._weights, _TRIAL_ITERATIONS)

    def _fitted_loss(self, form: Form) -> float:
        table = terms(self._samples, form)
        found = solved(table, self._samples.seconds, self._weights, _TRIAL_ITERATIONS)
        return float(self._huber(np.maximum(table @ found, _SMALLEST)).sum())

    def _huber(self, predicted: Column) -> Column:
        error = np.abs(self._samples.seconds / predicted - 1) / self._scale
        k = HUBER_SCALES
        loss: Column = self._weights * np.where(error <= k, error**2 / 2, k * error - k**2 / 2)
        return loss
