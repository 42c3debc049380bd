"""Where the steady state begins: MSER-5, the cut that leaves the mean of the rest the surest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadgen.measure.statistics.stats import Values

BATCH = 5


@dataclass(frozen=True, slots=True)
class Steady:
    """The first `cut` of the values are warm-up. `is_found` is False where the best cut lies in
    their second half: then the run never settled, or is too short to tell."""

    cut: int
    is_found: bool


def mser5(values: Values) -> Steady:
    """Cut a sequence in order of time where the marginal standard error of the rest is least.

    Values are averaged by fives, Y₁…Y_k; the cut d minimises Σ_{j>d} (Y_j − Ȳ_d)² / (k − d)².
    Cuts that leave fewer than five batches are not tried (their few values may agree by chance);
    fewer than ten batches are never cut. NaN must have been left out.

    Source: White, Cobb & Spratt, Proc. Winter Simulation Conference 2000 (MSER-5).
    """
    n_batches = len(values) // BATCH
    if n_batches < 2 * BATCH:
        return Steady(0, False)
    batches = values[: n_batches * BATCH].reshape(n_batches, BATCH).mean(axis=1)
    batches = batches - batches.mean()  # keeps the sums of squares exact
    left = np.arange(n_batches, 0, -1)
    sums, squares = (np.cumsum(x[::-1])[::-1] for x in (batches, np.square(batches)))
    spread = np.maximum(squares - sums**2 / left, 0.0)[: n_batches - BATCH]
    cut = int(np.argmin(spread / np.square(left[: n_batches - BATCH])))
    return Steady(cut * BATCH, cut < n_batches / 2)
