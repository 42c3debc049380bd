"""The difference between tonight and the nights before, and its significance.

A night shifts all its runs: another hour, another temperature, another neighbour on the machine.
Five runs of the same night do not show how much; only several nights do. A *night*, the mean of its
runs, is therefore one observation, and the variation between equal nights decides whether a
difference is significant. While there are few nights, part of that variation is assumed
(`AssumedNoise`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from loadgen.manifest.json_section import NumberOrNull
from loadgen.measure.statistics.intervals import Values
from loadgen.measure.statistics.robust_means import LEAST_DF, LEAST_PER_GROUP, robust_fit
from loadgen.measure.statistics.student_t import student_t
from loadgen.studies.compare.contrast import Contrast, power_of_t, smallest_where


class AssumedNoise(NamedTuple):
    """Assumed noise between nights, with `df` degrees of freedom; each night after the first
    replaces one degree. Its variance is `of_runs` times the variance between runs of a night, plus
    `of_means` times the part of it that remains in the mean of a night's runs."""

    df: float
    of_runs: float
    of_means: float


ALONE = AssumedNoise(4, 1.0, 0.0)
"""For cells without a control. From the sixth night on only the measured variation counts."""
WITH_CONTROLS = AssumedNoise(8, 0.0, 1.0)
"""For cells with a control: a night's effect on all its runs cancels out, and the size of any
remainder is unknown. In units of the night's mean, so that the number of runs in the same hour does
not matter. From the tenth night on only the measured variation counts."""

MAY_BE_CHANCE = 0.05
"""If equal nights would look this different, or more, in more than this share of cases, the
difference may be chance."""
PLANNED_POWER = 0.91
"""The power that repeats are planned for: a little over the 9 of 10 that the note states."""

_POOLED_ABOVE = 0.5
_MOST_REPEATS = 1000
_ROUNDING = 1e-12  # of least squares, where the residual should be zero


@dataclass(frozen=True, slots=True)
class NightSample:
    """A number per run (on the comparison scale), and the schedule of each run."""

    values: Values
    schedules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NightNoise:
    """The variation between equal runs and between equal nights: standard deviations and degrees of
    freedom.

    `run_sd` is within a night. `night_sd` is the variation of a night's level beyond that, 0.0
    where nights differ no more than their runs explain. `assumed_df` of `night_df` are assumed.
    `alike_p` is the share of cases in which equal nights would look this different (NaN while part
    is assumed).
    """

    run_sd: NumberOrNull
    run_df: NumberOrNull
    night_sd: NumberOrNull
    night_df: NumberOrNull
    assumed_df: NumberOrNull
    alike_p: NumberOrNull = math.nan

    @property
    def may_be_chance(self) -> bool:
        """Whether equal nights could well differ this much by chance."""
        return self.night_sd > 0 and self.alike_p > MAY_BE_CHANCE

    def variance(self, n_runs: float, earlier: Sequence[int]) -> float:
        """The variance of the mean of `n_runs` runs of a night minus the mean of `earlier`
        nights, each with that many runs and all of equal weight."""
        n = len(earlier)
        runs = 1 / n_runs + sum(1 / n_i for n_i in earlier) / n**2
        return self.night_sd**2 * (1 + 1 / n) + self.run_sd**2 * runs


def contrast_of_nights(
    levels: Sequence[Sequence[NightSample]],
    tonight: NightSample,
    assumed: AssumedNoise = ALONE,
    is_robust: bool = True,
) -> tuple[Contrast, NightNoise | None]:
    """Tonight minus the nights of the last level. Nights of earlier levels only contribute to the
    noise. `assumed` is the assumed noise between nights while they are few.

    If all of tonight's schedules were run before, only differences within equal schedules count
    (additive model, least squares). Without two runs in any night there is no noise estimate, and
    the error is NaN. `is_robust` gives less weight to runs far from the others of their night,
    where there are enough runs to recognise them.

    Source: one-way random effects, Searle, Casella and McCulloch 1992, §3.5; a prior variance with
    its own degrees of freedom, Smyth, Stat. Appl. Genet. Mol. Biol. 3(1), 2004.
    """
    nights = [night for level in levels for night in level]
    has_both = levels and levels[-1] and len(tonight.values)
    if not has_both or not np.isfinite(tonight.values).all():
        return Contrast(math.nan, math.nan, 0.0, math.nan), None
    means, squares, run_df = _means(nights, tonight, is_robust)
    last = len(levels[-1])
    difference = float(means[-1] - means[-1 - last : -1].mean())
    if abs(difference) < _ROUNDING:  # equal runs in virtual time
        difference = 0.0
    if run_df <= 0:
        return Contrast(difference, math.nan, 0.0, math.nan), None
    noise = _noise(levels, nights, means[:-1], squares / run_df, run_df, assumed)
    variance = noise.variance(len(tonight.values), [len(n.values) for n in levels[-1]])
    return Contrast(difference, math.sqrt(variance), noise.night_df, noise.run_sd), noise


def _noise(
    levels: Sequence[Sequence[NightSample]],
    nights: Sequence[NightSample],
    means: Values,
    run_variance: float,
    run_df: float,
    assumed: AssumedNoise,
) -> NightNoise:
    per_run = float(np.mean([1 / len(night.values) for night in nights]))
    of_level = np.repeat(np.arange(len(levels)), [len(level) for level in levels])
    sizes = np.bincount(of_level, minlength=len(levels))
    centres = np.bincount(of_level, means, len(levels)) / np.maximum(sizes, 1)
    measured = float(np.square(means - centres[of_level]).sum())
    measured_df = float(np.maximum(sizes - 1, 0).sum())
    assumed_df = min(max(0.0, assumed.df - measured_df), run_df)
    assumed_variance = run_variance * (assumed.of_runs + (assumed.of_means + 1) * per_run)
    alike_p = math.nan
    if not assumed_df:
        alike_p = _alike_p(measured / measured_df, measured_df, run_variance * per_run, run_df)
    if alike_p > _POOLED_ABOVE:
        pooled = (measured / per_run + run_df * run_variance) / (measured_df + run_df)
        return NightNoise(math.sqrt(pooled), run_df, 0.0, measured_df + run_df, 0.0, alike_p)
    df = measured_df + assumed_df
    of_night = (measured + assumed_df * assumed_variance) / df  # of the mean of a night
    beyond = of_night - run_variance * per_run
    beyond = beyond if beyond > _ROUNDING**2 else 0.0
    return NightNoise(math.sqrt(run_variance), run_df, math.sqrt(beyond), df, assumed_df, alike_p)


def _alike_p(of_night: float, night_df: float, by_runs: float, run_df: float) -> float:
    """The share of cases in which their runs alone would make nights differ this much. Above 0.5,
    runs and nights are treated as a single noise, with the degrees of freedom of both.

    Pooling at this level keeps a test at its significance for any true variation between nights (5
    % stays below 5.5 %, simulated); at the usual 25 % it would not. Source: Bancroft, Ann. Math.
    Stat. 15, 1944.
    """
    from scipy.special import fdtrc

    return float(fdtrc(night_df, run_df, of_night / by_runs)) if by_runs > 0 else 0.0


def _means(
    nights: Sequence[NightSample], tonight: NightSample, is_robust: bool
) -> tuple[Values, float, float]:
    """The mean of each night, tonight last, corrected for its schedules where possible; the
    residual sum of squares and its degrees of freedom.

    The correction needs schedules that link every night with every other, directly or through
    nights between.
    """
    every = [*nights, tonight]
    values = np.concatenate([night.values for night in every])
    of_night = np.repeat(np.arange(len(every)), [len(night.values) for night in every])
    before = {name for night in nights for name in night.schedules}
    names = sorted(before) if before >= set(tonight.schedules) else []
    columns = [(of_night == k).astype(float) for k in range(len(every))]
    schedules = np.array([name for night in every for name in night.schedules])
    columns += [(schedules == name).astype(float) - 1 / len(names) for name in names[1:]]
    design = np.column_stack(columns)
    effects, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    if rank < design.shape[1]:  # no schedule links the nights: the effects are not separable
        design = design[:, : len(every)]
        effects, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    residuals = values - design @ effects
    squares = float(np.square(residuals[np.abs(residuals) > _ROUNDING]).sum())
    sizes = [len(night.values) for night in every]
    df = float(len(values) - rank)
    if is_robust and df >= LEAST_DF and min(sizes) >= LEAST_PER_GROUP:
        found = robust_fit(design, values, float(np.mean(sizes)))
        if found is not None:
            return found[0][: len(every)], found[1] * df, df
    return effects[: len(every)], squares, float(len(values) - rank)


def night_power(
    noise: NightNoise, n_runs: int, earlier: Sequence[int], difference: float, alpha: float
) -> float:
    """The probability that a night of `n_runs` runs finds a true `difference` from the `earlier`
    nights, two-sided at α."""
    error = math.sqrt(noise.variance(n_runs, earlier))
    if error == 0:
        return 1.0
    return power_of_t(error, noise.night_df + noise.run_df, noise.night_df, difference, alpha)


def power_over_baselines(
    noise: NightNoise, n_runs: int, earlier: Sequence[int], difference: float, alpha: float
) -> float:
    """The probability that a night of `n_runs` runs finds a true `difference`, averaged over the
    baselines that equal nights could have given. Half of such baselines are judged by a single
    noise of runs and nights, the others by the apparent variation of their nights. Baselines that
    would not pass for equal nights (`MAY_BE_CHANCE`) are left out."""
    from scipy.special import chdtri, fdtri, ndtr

    n, levels = len(earlier), (np.arange(64) + 0.5) / 64
    by_runs = float(np.mean([1 / n_i for n_i in earlier]))
    of_runs = 1 / n_runs + sum(1 / n_i for n_i in earlier) / n**2
    is_one_noise = noise.alike_p > _POOLED_ABOVE
    night_df = noise.night_df - noise.run_df if is_one_noise else noise.night_df
    df, shares = night_df + noise.run_df, levels * (1 - MAY_BE_CHANCE)
    ratios = fdtri(night_df, noise.run_df, shares)  # variance between nights / within their runs
    beyond = np.maximum(ratios - 1, 0) * by_runs * (1 + 1 / n)
    level, one_noise = 1 - alpha / 2, (ratios * night_df + noise.run_df) / df
    as_one = student_t(level, df) * np.sqrt(one_noise * of_runs)
    apart = student_t(level, night_df) * np.sqrt(beyond + of_runs)
    critical = np.where(shares < 1 - _POOLED_ABOVE, as_one, apart) / math.sqrt(of_runs)
    run_sds = noise.run_sd * np.sqrt(noise.run_df / chdtri(noise.run_df, levels))
    shift = abs(difference) / (run_sds * math.sqrt(of_runs))
    return float(ndtr(shift[:, None] - critical).mean())


def repeats_needed(
    noise: NightNoise,
    earlier: Sequence[int],
    difference: float,
    alpha: float,
    target_power: float = PLANNED_POWER,
) -> int | None:
    """The fewest runs a night that find a true `difference` from the `earlier` nights with
    `target_power`; None where not even 1000 do.

    If the nights may be equal, the power is that over all baselines of equal nights: the variation
    of these particular nights is luck, and would call for half as many repeats or for any number.
    If they surely differ, or part of the noise is assumed, the power is that against these nights.
    """
    power = power_over_baselines if noise.alike_p > MAY_BE_CHANCE else night_power
    if difference == 0 or power(noise, _MOST_REPEATS, earlier, difference, alpha) < target_power:
        return None
    n_below = bisect_left(
        range(1, _MOST_REPEATS),
        target_power,
        key=lambda n: power(noise, n, earlier, difference, alpha),
    )
    return n_below + 1


def smallest_found(
    noise: NightNoise, n_runs: int, earlier: Sequence[int], alpha: float, target_power: float = 0.9
) -> float:
    """The smallest true difference that a night of `n_runs` runs finds with `target_power`."""
    error = math.sqrt(noise.variance(n_runs, earlier))
    if error == 0:
        return 0.0
    return smallest_where(
        lambda difference: night_power(noise, n_runs, earlier, difference, alpha) >= target_power,
        error,
        30,
    )
