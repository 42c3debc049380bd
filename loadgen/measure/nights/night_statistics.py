"""How far tonight is from the nights before, and how sure that is.

A night shifts all its runs: another hour, another temperature, another neighbour. Five runs of one
night do not tell how much; only nights do. So a *night* is one observation, the mean of its runs,
and what equal nights differ by decides what a difference is worth. Until there are enough nights to
say, part of that is assumed (`AssumedNoise`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from loadgen.measure.comparison.contrast import Contrast, power_of_t
from loadgen.measure.statistics.intervals import Values


class AssumedNoise(NamedTuple):
    """Noise between nights that is assumed until they tell: with `df` degrees of freedom, of which
    each night after the first gives one back. Its variance is `of_runs` times that between runs of
    one night, and `of_means` times what of that is left in the mean of a night's runs."""

    df: float
    of_runs: float
    of_means: float


ALONE = AssumedNoise(4, 1.0, 0.0)
"""From the sixth night on what was measured counts alone."""
BESIDE_CONTROLS = AssumedNoise(8, 0.0, 1.0)
"""Where each run is relative to a control: what a night does to all its runs, it does to the
controls as well, and nothing is known that would be left over. In units of the night's mean, as it
is no matter then into how many runs the same hour is cut. From the tenth night on it counts alone.
"""

MAY_BE_CHANCE = 0.05
"""Nights that would look this different, or more, more often than so if they were alike may be."""
PLANNED = 0.91
"""Power that repeats are planned for; a little over the 9 of 10 that are promised."""

_POOLED_ABOVE = 0.5
_MOST_REPEATS = 1000
_ROUNDING = 1e-12  # of least squares, where all that could be left is nothing


@dataclass(frozen=True, slots=True)
class NightSample:
    """One number per run (unit of the scale it is compared on), and what schedule each run had."""

    values: Values
    schedules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NightNoise:
    """What equal runs and equal nights differ by: standard deviations and degrees of freedom.

    `run_sd` is within a night; `night_sd` is what the level of a night differs by beyond that, 0.0
    where nights differ by no more than their runs explain. `assumed_df` of `night_df` are lent.
    `alike_p` is how often nights that are alike would look this different (NaN while some is lent).
    """

    run_sd: float
    run_df: float
    night_sd: float
    night_df: float
    assumed_df: float
    alike_p: float = math.nan

    @property
    def may_be_chance(self) -> bool:
        """Whether the nights' difference is no surprise of nights that are alike."""
        return self.night_sd > 0 and self.alike_p > MAY_BE_CHANCE

    def variance(self, n_runs: float, earlier: Sequence[int]) -> float:
        """Of the mean of `n_runs` runs of one night minus that of `earlier` nights, each with so
        many runs and all weighing alike."""
        n = len(earlier)
        runs = 1 / n_runs + sum(1 / n_i for n_i in earlier) / n**2
        return self.night_sd**2 * (1 + 1 / n) + self.run_sd**2 * runs


def contrast_of_nights(
    levels: Sequence[Sequence[NightSample]], tonight: NightSample, lent: AssumedNoise = ALONE
) -> tuple[Contrast, NightNoise | None]:
    """Tonight minus the nights of the last level; the nights of earlier levels tell the noise only.
    `lent` is what is assumed of the noise between nights while they are few.

    Where tonight's schedules were all run before, only differences within equal schedules count
    (additive model, least squares). Without two runs in any night there is no noise to judge by.

    Source: one-way random effects, Searle, Casella and McCulloch 1992, §3.5; a variance lent with
    its degrees of freedom, Smyth, Stat. Appl. Genet. Mol. Biol. 3(1), 2004.
    """
    nights = [night for level in levels for night in level]
    has_both = levels and levels[-1] and len(tonight.values)
    if not has_both or not np.isfinite(tonight.values).all():
        return Contrast(math.nan, math.nan, 0.0, math.nan), None
    means, squares, run_df = _means(nights, tonight)
    last = len(levels[-1])
    difference = float(means[-1] - means[-1 - last : -1].mean())
    if abs(difference) < _ROUNDING:  # equal runs in virtual time
        difference = 0.0
    if run_df <= 0:
        return Contrast(difference, math.nan, 0.0, math.nan), None
    noise = _noise(levels, nights, means[:-1], squares / run_df, run_df, lent)
    variance = noise.variance(len(tonight.values), [len(n.values) for n in levels[-1]])
    found = Contrast(difference, math.sqrt(variance), noise.night_df, noise.run_sd)
    return found, noise


def _noise(
    levels: Sequence[Sequence[NightSample]],
    nights: Sequence[NightSample],
    means: Values,
    run_variance: float,
    run_df: float,
    lent: AssumedNoise,
) -> NightNoise:
    per_run = float(np.mean([1 / len(night.values) for night in nights]))
    of_level = np.repeat(np.arange(len(levels)), [len(level) for level in levels])
    sizes = np.bincount(of_level, minlength=len(levels))
    centres = np.bincount(of_level, means, len(levels)) / np.maximum(sizes, 1)
    measured = float(np.square(means - centres[of_level]).sum())
    measured_df = float(np.maximum(sizes - 1, 0).sum())
    lent_df = min(max(0.0, lent.df - measured_df), run_df)
    lent_variance = run_variance * (lent.of_runs + (lent.of_means + 1) * per_run)
    alike_p = math.nan
    if not lent_df:
        alike_p = _alike_p(measured / measured_df, measured_df, run_variance * per_run, run_df)
    if alike_p > _POOLED_ABOVE:
        pooled = (measured / per_run + run_df * run_variance) / (measured_df + run_df)
        return NightNoise(math.sqrt(pooled), run_df, 0.0, measured_df + run_df, 0.0, alike_p)
    df = measured_df + lent_df
    of_night = (measured + lent_df * lent_variance) / df  # of the mean of a night
    beyond = of_night - run_variance * per_run
    beyond = beyond if beyond > _ROUNDING**2 else 0.0
    return NightNoise(math.sqrt(run_variance), run_df, math.sqrt(beyond), df, lent_df, alike_p)


def _alike_p(of_night: float, night_df: float, by_runs: float, run_df: float) -> float:
    """How often their runs alone would make nights differ by as much. Above one half, runs and
    nights are taken for one noise, with the degrees of freedom of both.

    Pooling at this level keeps a test at its significance whatever nights truly differ by (5 %
    stays below 5.5 %, simulated); at the usual 25 % it would not. Source: Bancroft, Ann. Math.
    Stat. 15, 1944.
    """
    from scipy.special import fdtrc

    return float(fdtrc(night_df, run_df, of_night / by_runs)) if by_runs > 0 else 0.0


def _means(nights: Sequence[NightSample], tonight: NightSample) -> tuple[Values, float, float]:
    """The mean of each night, tonight last, freed of its schedules where that can be done; the
    squares that are left and their degrees of freedom. That takes schedules which link every night
    with every other, directly or through nights between."""
    every = [*nights, tonight]
    values = np.concatenate([night.values for night in every])
    of_night = np.repeat(np.arange(len(every)), [len(night.values) for night in every])
    before = {name for night in nights for name in night.schedules}
    names = sorted(before) if before >= set(tonight.schedules) else []
    columns = [(of_night == k).astype(float) for k in range(len(every))]
    schedules = np.array([name for night in every for name in night.schedules])
    columns += [(schedules == name).astype(float) - 1 / len(names) for name in names[1:]]
    design = np.column_stack(columns)
    found, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    if rank < design.shape[1]:  # nights that no schedule links: what is whose cannot be told
        design = design[:, : len(every)]
        found, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    left = values - design @ found
    squares = float(np.square(left[np.abs(left) > _ROUNDING]).sum())
    return found[: len(every)], squares, float(len(values) - rank)


def night_power(
    noise: NightNoise, n_runs: int, earlier: Sequence[int], difference: float, alpha: float
) -> float:
    """How often a night of `n_runs` runs would find a true `difference` from the `earlier` ones,
    two-sided at α."""
    error = math.sqrt(noise.variance(n_runs, earlier))
    if error == 0:
        return 1.0
    return power_of_t(error, noise.night_df + noise.run_df, noise.night_df, difference, alpha)


def power_over_baselines(
    noise: NightNoise, n_runs: int, earlier: Sequence[int], difference: float, alpha: float
) -> float:
    """How often a night of `n_runs` runs would find a true `difference` over all that nights which
    are alike happen to look like: half of such baselines are judged by one noise of runs and
    nights, the others by what their nights seem to differ by. Those that would not be taken for
    alike (`MAY_BE_CHANCE`) are left out.
    """
    from scipy.special import chdtri, fdtri, ndtr, stdtrit

    n, levels = len(earlier), (np.arange(64) + 0.5) / 64
    by_runs = float(np.mean([1 / n_i for n_i in earlier]))
    of_runs = 1 / n_runs + sum(1 / n_i for n_i in earlier) / n**2
    is_one_noise = noise.alike_p > _POOLED_ABOVE
    night_df = noise.night_df - noise.run_df if is_one_noise else noise.night_df
    df, shares = night_df + noise.run_df, levels * (1 - MAY_BE_CHANCE)
    seen = fdtri(night_df, noise.run_df, shares)  # between nights, over what their runs explain
    beyond = np.maximum(seen - 1, 0) * by_runs * (1 + 1 / n)
    as_one = stdtrit(df, 1 - alpha / 2) * np.sqrt((seen * night_df + noise.run_df) / df * of_runs)
    apart = stdtrit(night_df, 1 - alpha / 2) * np.sqrt(beyond + of_runs)
    critical = np.where(shares < 1 - _POOLED_ABOVE, as_one, apart) / math.sqrt(of_runs)
    run_sds = noise.run_sd * np.sqrt(noise.run_df / chdtri(noise.run_df, levels))
    shift = abs(difference) / (run_sds * math.sqrt(of_runs))
    return float(ndtr(shift[:, None] - critical).mean())


def repeats_needed(
    noise: NightNoise,
    earlier: Sequence[int],
    difference: float,
    alpha: float,
    asked: float = PLANNED,
) -> int | None:
    """The fewest runs a night that find a true `difference` from the `earlier` nights with `asked`
    power; None where not even 1000 do.

    Where nights may be alike, it is that over all baselines of such nights: what these ones happen
    to differ by is luck, and would call for half as many repeats or for any number. Where they
    surely differ, or part of it is lent, it is that against these nights.
    """
    power = power_over_baselines if noise.alike_p > MAY_BE_CHANCE else night_power
    if difference == 0 or power(noise, _MOST_REPEATS, earlier, difference, alpha) < asked:
        return None
    return bisect_left(
        range(1, _MOST_REPEATS),
        asked,
        key=lambda n: power(noise, n, earlier, difference, alpha),
    ) + 1  # fmt: skip


def smallest_found(
    noise: NightNoise, n_runs: int, earlier: Sequence[int], alpha: float, asked: float = 0.9
) -> float:
    """The smallest true difference that a night of `n_runs` runs finds with `asked` power."""
    error = math.sqrt(noise.variance(n_runs, earlier))
    low, high = 0.0, error
    while error and night_power(noise, n_runs, earlier, high, alpha) < asked:
        low, high = high, 2 * high
        if high > 1e6 * error:
            return math.inf
    for _ in range(30):
        middle = (low + high) / 2
        enough = night_power(noise, n_runs, earlier, middle, alpha) >= asked
        low, high = (low, middle) if enough else (middle, high)
    return high
