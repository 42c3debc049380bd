"""The difference between two sets of runs, its significance, and the number of runs needed to find
it.

The unit of observation is the *run*: a number per run and metric (its mean, its P99). The
interval therefore includes every cause of variation between equal runs, the noise of their requests
included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.measure.statistics.intervals import Interval, Values
from loadgen.measure.statistics.robust_means import LEAST_DF, robust_fit
from loadgen.measure.statistics.student_t import student_t


@dataclass(frozen=True, slots=True)
class Noise:
    """The variation between equal runs: the standard deviation of a run's number, from `df` + 1
    runs."""

    sd: float
    df: float


@dataclass(frozen=True, slots=True)
class Contrast:
    """`difference` = B − A with its standard error on `df` degrees of freedom (Student's t).

    `noise` is the standard deviation of a run, from which the error was computed. Without any
    degree of freedom the error is NaN, and the difference cannot be judged. `upper_error` is the
    error of the upper bound if it is not that of the lower bound (queues have long tails).
    """

    difference: float
    error: float
    df: float
    noise: float
    upper_error: float | None = None

    @property
    def errors(self) -> tuple[float, float]:
        """The standard errors of the lower and of the upper bound."""
        return self.error, self.error if self.upper_error is None else self.upper_error

    @property
    def is_judged(self) -> bool:
        """Whether the difference has an error to compare it with."""
        return self.df > 0 and math.isfinite(self.error) and math.isfinite(self.difference)

    def p_value(self) -> float:
        """The two-sided p-value of no difference; NaN without an error."""
        from scipy.special import stdtr

        if not self.is_judged:
            return math.nan
        error = self.errors[self.difference < 0]  # of the bound on the side of zero
        if error == 0:
            return 1.0 if self.difference == 0 else 0.0
        return float(2 * stdtr(self.df, -abs(self.difference) / error))

    def interval(self, confidence: float) -> Interval:
        """The two-sided interval of the difference; each bound is missed with probability (1 −
        confidence) / 2."""
        if not self.is_judged:
            return Interval(self.difference)
        times = student_t((1 + confidence) / 2, self.df)
        below, above = self.errors
        return Interval(
            self.difference, self.difference - times * below, self.difference + times * above
        )

    def equivalence_p(self, low: float, high: float) -> float:
        """The p-value of two one-sided tests (TOST) that the true difference is outside (low,
        high): a small value means that the two are equal to within the margin.

        Source: Schuirmann, J. Pharmacokinet. Biopharm. 15(6), 1987.
        """
        from scipy.special import stdtr

        if not self.is_judged:
            return math.nan
        gaps = self.difference - low, high - self.difference
        return max(
            (0.0 if gap > 0 else 1.0) if error == 0 else float(stdtr(self.df, -gap / error))
            for gap, error in zip(gaps, self.errors, strict=True)
        )


def contrast(
    a: Values,
    b: Values,
    blocks: tuple[Sequence[Hashable], Sequence[Hashable]] | None = None,
    known: Noise | None = None,
    is_robust: bool = False,
) -> Contrast:
    """The contrast B − A, from a single number per run.

    `blocks` names the schedule of each run of A and of B: only differences within a block count
    (additive model, least squares). Without blocks, sides of equal size share a variance; each side
    of unequal size has its own (Welch), unless a side has a single run. `known` is noise measured
    on earlier equal runs: it is pooled by degrees of freedom, and makes single runs comparable.
    `is_robust` gives less weight to runs far from the others of their side, where sides of equal
    size have enough runs to recognise them.

    Source: Welch, Biometrika 34, 1947; two-way layout without interaction, Scheffé 1959, §4.2.
    """
    n_a, n_b = len(a), len(b)
    has_zero = bool(np.isneginf(a).any() or np.isneginf(b).any())  # as logarithms: no ratio exists
    if not n_a or not n_b or has_zero:
        return Contrast(math.nan, math.nan, 0.0, math.nan)
    if is_robust and n_a == n_b and min(n_a, 2 * n_a - LEAST_DF) >= 2:
        found = _robust(a, b, blocks, known)
        if found is not None:
            return found
    if blocks is not None and len({*blocks[0], *blocks[1]}) > 1:
        return _blocked(a, b, blocks, known)
    difference = float(b.mean() - a.mean())
    squares_a, squares_b = (float(np.square(v - v.mean()).sum()) for v in (a, b))
    if known is None and n_a != n_b and min(n_a, n_b) > 1:
        return _welch(difference, squares_a / (n_a - 1), n_a, squares_b / (n_b - 1), n_b)
    return _pooled(difference, squares_a + squares_b, n_a + n_b - 2, 1 / n_a + 1 / n_b, known)


def _robust(
    a: Values,
    b: Values,
    blocks: tuple[Sequence[Hashable], Sequence[Hashable]] | None,
    known: Noise | None,
) -> Contrast | None:
    """The contrast by a robust fit of both sides and of the schedules; None where no schedule has
    enough runs, or nothing varies."""
    side = np.r_[np.zeros(len(a)), np.ones(len(b))]
    columns = [1 - side, side]
    names = list(dict.fromkeys([*blocks[0], *blocks[1]])) if blocks is not None else []
    where = np.array([names.index(n) for pair in (blocks or ()) for n in pair])
    columns += [(where == k).astype(float) - 1 / len(names) for k in range(1, len(names))]
    design, values = np.column_stack(columns), np.r_[a, b]
    df = len(values) - int(np.linalg.matrix_rank(design))
    if df < LEAST_DF or len(values) - df < design.shape[1] or not np.isfinite(values).all():
        return None
    found = robust_fit(design, values, len(a))
    if found is None:
        return None
    effects, variance = found
    per_run = float(np.linalg.inv(design.T @ design)[:2, :2].ravel() @ [1, -1, -1, 1])
    return _pooled(float(effects[1] - effects[0]), variance * df, df, per_run, known)


def _pooled(
    difference: float, squares: float, df: float, per_run: float, known: Noise | None
) -> Contrast:
    """The contrast from `squares` on `df` degrees of freedom and those of the known noise; error² =
    s² · per_run."""
    if known is not None:
        squares, df = squares + known.df * known.sd**2, df + known.df
    if df <= 0:
        return Contrast(difference, math.nan, 0.0, math.nan)
    noise = math.sqrt(squares / df)
    return Contrast(difference, noise * math.sqrt(per_run), df, noise)


def _welch(difference: float, var_a: float, n_a: int, var_b: float, n_b: int) -> Contrast:
    part_a, part_b = var_a / n_a, var_b / n_b
    total = part_a + part_b
    noise = math.sqrt((var_a + var_b) / 2)
    if total == 0:
        return Contrast(difference, 0.0, n_a + n_b - 2, 0.0)
    df = total**2 / (part_a**2 / (n_a - 1) + part_b**2 / (n_b - 1))
    return Contrast(difference, math.sqrt(total), df, noise)


def _blocked(
    a: Values,
    b: Values,
    blocks: tuple[Sequence[Hashable], Sequence[Hashable]],
    known: Noise | None,
) -> Contrast:
    names = list(dict.fromkeys([*blocks[0], *blocks[1]]))
    where = np.array([names.index(name) for name in (*blocks[0], *blocks[1])])
    is_b = np.r_[np.zeros(len(a)), np.ones(len(b))]
    values = np.r_[a, b]
    # Within-block deviations give the same estimate as the full model (Frisch and Waugh).
    sizes = np.bincount(where)
    side = is_b - (np.bincount(where, is_b) / sizes)[where]
    rest = values - (np.bincount(where, values) / sizes)[where]
    weight = float(side @ side)
    if weight == 0:
        return Contrast(math.nan, math.nan, 0.0, math.nan)
    difference = float(side @ rest) / weight
    squares = float(np.square(rest - difference * side).sum())
    return _pooled(difference, squares, len(values) - len(names) - 1, 1 / weight, known)


def noise_of(
    values: Values, blocks: Sequence[Hashable] | None = None, is_robust: bool = False
) -> Noise | None:
    """The variation between equal runs, within blocks; None where no two runs share a block.
    `is_robust` as in `contrast`."""
    where = np.unique(list(map(str, blocks)), return_inverse=True)[1] if blocks else None
    groups = [values] if where is None else [values[where == k] for k in range(where.max() + 1)]
    df = sum(len(group) - 1 for group in groups)
    if df <= 0:
        return None
    if is_robust and df >= LEAST_DF:
        design = np.eye(len(groups))[np.repeat(np.arange(len(groups)), list(map(len, groups)))]
        found = robust_fit(design, np.concatenate(groups), len(values) / len(groups))
        if found is not None:
            return Noise(math.sqrt(found[1]), df)
    squares = sum(float(np.square(group - group.mean()).sum()) for group in groups)
    return Noise(math.sqrt(squares / df), df)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values adjusted so that, over all of them, the chance of any false p-value below α is at
    most α. p-values of 1 (no variation at all) and NaN take no part.

    Source: Holm, Scand. J. Statist. 6, 1979; leaving out the hopeless, Tarone, Biometrics 46, 1990.
    """
    taking_part = sorted((p, name) for name, p in p_values.items() if p < 1)
    adjusted = {name: p for name, p in p_values.items() if not p < 1}
    floor = 0.0
    for k, (p, name) in enumerate(taking_part):
        floor = max(floor, min(1.0, (len(taking_part) - k) * p))
        adjusted[name] = floor
    return adjusted


def power(noise: Noise, difference: float, n_runs: int, alpha: float) -> float:
    """The probability that `n_runs` runs a side find a true `difference`, two-sided at α."""
    if noise.sd == 0:
        return 1.0
    if n_runs < 2:
        return 0.0
    error = noise.sd * math.sqrt(2 / n_runs)
    return power_of_t(error, noise.df, 2 * n_runs - 2, difference, alpha)


def power_of_t(
    error: float, error_df: float, test_df: float, difference: float, alpha: float
) -> float:
    """The probability that a t test on `test_df` finds a true `difference` in its own direction,
    two-sided at α. The standard error is estimated with `error_df`.

    Power is averaged over the possible true errors, σ² = s²·ν / χ²(ν), so that few pilot runs give
    a careful figure.
    """
    from scipy.special import chdtri, nctdtr

    levels = (np.arange(64) + 0.5) / 64
    errors = error * np.sqrt(error_df / chdtri(error_df, levels))
    critical = student_t(1 - alpha / 2, test_df)
    shift = np.minimum(abs(difference) / errors, 30.0)
    powers = 1 - np.nan_to_num(nctdtr(test_df, shift, critical), nan=0.0)
    return float(powers.mean())


LEAST_ADVISED = 4  # runs a side


def runs_needed(
    noise: Noise, difference: float, alpha: float, target_power: float = 0.9, most: int = 10_000
) -> int | None:
    """The fewest runs a side, at least 4, that find a true `difference` with `target_power`, up to
    about `most`; None beyond. Fewer hardly show how runs vary."""
    if difference == 0:
        return None
    low, high = LEAST_ADVISED - 1, LEAST_ADVISED
    while power(noise, difference, high, alpha) < target_power:
        low, high = high, 2 * high
        if low > most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if power(noise, difference, middle, alpha) >= target_power:
            high = middle
        else:
            low = middle
    return high


def smallest_effect(noise: Noise, n_runs: int, alpha: float, target_power: float = 0.9) -> float:
    """The smallest true difference that `n_runs` runs a side find with `target_power`; +inf where
    none."""
    if noise.sd == 0:
        return 0.0
    return smallest_where(
        lambda difference: power(noise, difference, n_runs, alpha) >= target_power, noise.sd, 40
    )


def smallest_where(holds: Callable[[float], bool], first: float, n_halvings: int) -> float:
    """The smallest positive number at which a predicate holds that stays true from there on, by
    doubling from `first` and then bisection; +inf above 10⁶ times `first`."""
    low, high = 0.0, first
    while not holds(high):
        low, high = high, 2 * high
        if high > 1e6 * first:
            return math.inf
    for _ in range(n_halvings):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
