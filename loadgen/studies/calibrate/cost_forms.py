"""Forms of the cost of a step, and the coefficients of a form that fit measured steps best.

A form states which terms a cost has; every term is linear in its coefficient, so that a robust
non-negative fit finds them. Least squares fits the slowest steps, because their errors are the
largest. Here a step's error is relative to its predicted time, and errors beyond `_HUBER_SCALES`
scales of the usual error count less and less (Huber's M-estimate by iteratively reweighted least
squares).

Source: Huber & Ronchetti, Robust Statistics (2009), sections 7.3 to 7.8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loadgen.studies.calibrate.step_samples import Column, StepSamples
from reference_engine.state.cost_model import GRAPH_ROWS, StepCost

Batch = Literal["linear", "powers_of_two", "captured", "pieces"]
"""How the time grows with the batch: in proportion; with the decoding rows of a captured graph, of
powers of two or of the sizes of vLLM; or less and less, by pieces min(sequences, k)."""
ROWS: dict[Batch, tuple[int, ...]] = {
    "powers_of_two": tuple(2**k for k in range(11)),
    "captured": GRAPH_ROWS,
}
PIECES = (2, 4, 8, 16, 32, 64, 128)
PROMPT_SEQUENCE, ATTENTION, ADDED_TOKEN = 2, 5, 7
"""Columns of `terms` that a form can leave out."""
_REQUEST, _N_COMMON = 6, 8
HUBER_SCALES = 1.5
_LEAST_LIMIT = 1e-4  # relative errors below are those of the clock
_ITERATIONS = 30
_SMALLEST = 1e-12
_PART = 256  # rows


@dataclass(frozen=True)
class Form:
    """The form of a cost. Up to `knee` tokens, reading the weights dominates a step; `sharpness`
    is that of the transition. `left_out` are columns of `terms` whose coefficients are 0."""

    batch: Batch = "linear"
    knee: float = 0.0
    sharpness: float = 4.0
    left_out: tuple[int, ...] = ()

    def sentence(self) -> str:
        """The form in words."""
        batch = {
            "linear": "in proportion to the sequences",
            "powers_of_two": "with the decodes rounded up to a power of two",
            "captured": "with the decodes rounded up to 1, 2, 4 or a multiple of 8",
            "pieces": "with the sequences, less for each further one",
        }[self.batch]
        knee = f", weights dominate up to {self.knee:.0f} tokens" if self.knee else ""
        return f"time grows {batch}{knee}"


def terms(samples: StepSamples, form: Form) -> NDArray[np.float64]:
    """What each coefficient multiplies, [n, k]: step, sequence, sequence with a prompt, token,
    token of context, attention of prompts, request, and a token in addition to the weights; then
    the decoding rows of a graph, or the pieces."""
    n_seqs = samples.n_prefill + samples.n_decode
    n_rows = samples.n_decode
    rows = ROWS.get(form.batch)
    if rows:
        n_rows = np.where(samples.prefill_tokens > 0, n_rows, rounded_up(n_rows, rows))
    n_tokens, p = samples.prefill_tokens + n_rows, form.sharpness
    added = n_tokens if form.knee else np.zeros(len(samples))
    if form.knee:
        scaled = n_tokens / form.knee
        n_tokens = (
            form.knee
            * np.maximum(scaled, 1)
            * (1 + np.minimum(scaled, 1 / np.maximum(scaled, _SMALLEST)) ** p) ** (1 / p)
        )
    columns = [
        np.ones(len(samples)),
        n_seqs,
        samples.n_prefill,
        n_tokens,
        samples.context_tokens,
        samples.prefill_attention,
        samples.requests,
        added,
    ]
    if rows:
        columns.append(n_rows)
    if form.batch == "pieces":
        columns += [np.minimum(n_seqs, k) for k in PIECES]
    table = np.column_stack(columns)
    table[:, form.left_out] = 0.0
    return table


def rounded_up(n_rows: Column, rows: tuple[int, ...]) -> Column:
    """The least of the ascending `rows` at or above each number [n]; the number itself where it is
    0 or above all."""
    sizes = np.array(rows, dtype=np.float64)
    at = np.minimum(np.searchsorted(sizes, n_rows), len(sizes) - 1)
    rounded: Column = np.where((n_rows > 0) & (n_rows <= sizes[-1]), sizes[at], n_rows)
    return rounded


def step_cost(form: Form, coefficients: Column) -> StepCost:
    """The cost (s) of a form with the coefficients of its `terms`."""
    step_s, seq_s, prefill_seq_s, token_s, context_token_s, attention_s = coefficients[
        :_REQUEST
    ].tolist()
    own = coefficients[_N_COMMON:].tolist()
    rows = ROWS.get(form.batch, ())
    pieces = zip(PIECES, own, strict=True) if form.batch == "pieces" else ()
    return StepCost(
        step_s=step_s,
        seq_s=seq_s,
        added_token_s=float(coefficients[ADDED_TOKEN]),
        prefill_seq_s=prefill_seq_s,
        row_s=own[0] if rows else 0.0,
        token_s=token_s,
        weights_s=form.knee * token_s,
        context_token_s=context_token_s,
        prefill_attention_s=attention_s,
        sharpness=form.sharpness,
        graph_rows=rows,
        seq_pieces=tuple((k, piece_s) for k, piece_s in pieces if piece_s),
    )


def request_s(coefficients: Column) -> float:
    """The time (s) of a request outside the steps among the coefficients of `terms`."""
    return float(coefficients[_REQUEST])


def solved(
    table: NDArray[np.float64],
    seconds: Column,
    weights: Column | None = None,
    n_iterations: int = _ITERATIONS,
) -> Column:
    """Non-negative coefficients c [k] with table [n, k] @ c ≈ seconds [n], robust against slow
    steps; `weights` [n] of the steps, equal by default. A column of zeros gets 0."""
    from scipy.optimize import nnls

    scale = np.abs(table).max(axis=0)
    used = np.flatnonzero(scale > 0)
    root = np.ones(len(seconds)) if weights is None else np.sqrt(weights)
    joined = np.column_stack([table[:, used] / scale[used], seconds])

    def weighted(weight: Column) -> Column:
        small = _triangle(joined * weight[:, None])
        c: Column = nnls(small[:, :-1], small[:, -1])[0]
        return c

    scaled = joined[:, :-1]
    solution = weighted(root / seconds)
    for _ in range(n_iterations):
        predicted = np.maximum(scaled @ solution, _SMALLEST)
        error = np.abs(seconds / predicted - 1)
        limit = max(HUBER_SCALES * 1.4826 * weighted_median(error, root**2), _LEAST_LIMIT)
        shrunk = np.sqrt(np.minimum(1, limit / np.maximum(error, _SMALLEST)))
        before, solution = solution, weighted(root * shrunk / predicted)
        if np.abs(scaled @ (solution - before)).max() <= 1e-6 * predicted.max():
            break
    coefficients = np.zeros(len(scale))
    coefficients[used] = solution / scale[used]
    return coefficients


def _triangle(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """R [k, k] of the QR decomposition of a table [n, k], which has the same least squares in k
    rows. Decomposes parts of `_PART` rows, and then their results: whole columns would be handed to
    several threads, which takes 30 times as long where other programs use the cores."""
    n_columns = table.shape[1]
    while len(table) > _PART:
        padded = np.zeros((-(-len(table) // _PART) * _PART, n_columns))
        padded[: len(table)] = table
        table = np.linalg.qr(padded.reshape(-1, _PART, n_columns)).R.reshape(-1, n_columns)
    small: NDArray[np.float64] = np.linalg.qr(table).R
    return small


def weighted_median(values: Column, weights: Column) -> float:
    """The value below and above which half of the weight lies."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(total, total[-1] / 2)]])
