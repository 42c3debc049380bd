"""The dependence between the requests of a run: how many independent requests they are worth.

Neighbours wait in the same queue, so n requests carry the information of n/τ independent requests.
τ = 1 + 2 Σ ρ_k is the integrated autocorrelation time, in requests, of the indicator 1{x ≤ v} over
the order of release (of the value itself for a mean). It differs from level to level: behind a
queue the tail remembers longer than the median.

The estimate of τ, and its measured coverage: benchmarks/results/dependent_coverage.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.statistics.intervals import BoundTimes, Values
from loadgen.measure.statistics.percentiles import nearest_rank
from loadgen.measure.statistics.ranks import mean_ranks
from loadgen.measure.statistics.student_t import student_t

LEAST_TIMES = 20
"""A run shorter than this many autocorrelation times gives no bound."""

SHORT_RUN_BIAS = 15.0
"""The variance estimated from a run of n/τ autocorrelation times is too small by 1 + 15 τ/n."""

UNSEEN_TIMES = 2.0
"""The most that the time of misses of which there was none is taken for, over its estimate."""

LEVELS = (0.5, 0.75, 0.9, 0.95, 0.99)
_PERCENTILES = (*LEVELS, 0.999)  # of a summary
_WHITE_LAGS = 20
_DECIMALS = 9  # values (s) that differ by less than a nanosecond are equal, and have no order
_MOST_POINTS = 1 << 15  # longer series are averaged in batches before their spectrum is computed
_LEAST_BEYOND = 20
_FEW_CLUSTERS, _MANY_CLUSTERS = 5.0, 20.0
_LEAST_PAIRS = 25  # of frequencies
_SKEWNESS = 5.0
_LOAD_Z = 1.2816  # 10 %, one-sided: a higher load makes requests slower


@dataclass(frozen=True, slots=True)
class Dependence:
    """The dependence of `n_requests` requests in order of release. `time_requests` is the
    autocorrelation time of a statistic of theirs (1: independent). `design` is the number of
    samples worth one independent sample if the requests themselves were independent (1 for a sample
    per request).
    """

    n_requests: float
    time_requests: float = 1.0
    design: float = 1.0

    @property
    def n_effective(self) -> float:
        """The number of independent requests that carry the same information."""
        return self.n_requests / self.time_requests

    def worth(self, n_samples: int) -> float:
        """The number of independent samples that n samples of these requests are worth."""
        return n_samples / (self.time_requests * self.design)

    @property
    def is_open(self) -> bool:
        """Whether the run is too short for a bound. Independent requests never are."""
        return self.time_requests > 1 and self.n_effective < LEAST_TIMES

    def bound_times(self, confidence: float) -> BoundTimes | None:
        """τ in samples for the lower and for the upper bound of a percentile, of a mean or of a
        share of *misses*; None where the run is too short.

        An estimate of τ from a run of n/τ autocorrelation times is uncertain (Student's t instead
        of the normal quantile). For the upper bound it is also too small: a short run does not show
        its longest bursts (the factor 1 + 15 τ/n), and a run with few bursts has low values and a
        short estimate of τ at the same time (1 + 5 √(τ/n)).

        Source of the asymmetry: N. J. Johnson, J. Am. Stat. Assoc. 73(363), 1978; Tafazzoli,
        Steiger, Wilson, INFORMS J. Comput. 23(1), 2011 (Skart). The constants are calibrated on
        simulated queues (`benchmarks/dependent_coverage.py`).
        """
        if self.is_open:
            return None
        if self.time_requests <= 1:
            return self.design, self.design
        lower = self.time_requests * t_inflation(self.n_effective / 3, confidence)
        upper = self.time_requests * (1 + SHORT_RUN_BIAS / self.n_effective)
        upper *= t_inflation(self.n_effective / 10, confidence)
        upper *= 1 + _SKEWNESS * math.sqrt(min(upper / self.n_requests, 0.2))
        return lower * self.design, upper * self.design

    def miss_times(self, confidence: float, n_misses: int) -> BoundTimes | None:
        """`bound_times` for a share of `n_misses` misses. Without a miss only the runs in which
        misses come count for the upper bound, at most twice as long as estimated: a variance that
        is too small does not matter."""
        times = self.bound_times(confidence)
        if times is None or n_misses or self.time_requests <= 1:
            return times
        return times[0], min(times[1], UNSEEN_TIMES * self.time_requests * self.design)

    def hit_times(self, confidence: float, n_misses: int = 1) -> BoundTimes | None:
        """`miss_times` for a share of hits: few misses are many hits, so the lower bound of the
        hits has the time of the upper bound of the misses."""
        times = self.miss_times(confidence, n_misses)
        return None if times is None else times[::-1]

    def of_run(self, n_requests: float) -> Dependence:
        """The same dependence in a run of another length."""
        return Dependence(n_requests, self.time_requests, self.design)


class Load:
    """The number of other requests in flight at the release of each, shape [n]. Series of the same
    requests share one."""

    def __init__(self, in_flight: Values) -> None:
        self._in_flight = in_flight

    @cached_property
    def ranks(self) -> Values:
        return mean_ranks(self._in_flight)

    @cached_property
    def time(self) -> float:
        return autocorrelation_time(self._in_flight)

    def of(self, rows: NDArray[np.bool_]) -> Load:
        """That of some of the requests."""
        return self if rows.all() else Load(self._in_flight[rows])


class Series:
    """The values of a metric in order of release, shape [n], +inf for a failed request, no NaN.

    Their `load` shows a dependence that the values of a short run do not show yet, because their
    rare bursts are missing: if the number in flight explains the share R² of their variance (by
    ranks), their autocorrelations are at least R² times those of the number, which are known well.
    """

    def __init__(self, values: Values, load: Load | None = None) -> None:
        self._values = np.round(values, _DECIMALS)
        self._load = load
        self._times: dict[float, float] = {}
        self._levels: dict[float, float] = {}

    def __len__(self) -> int:
        return len(self._values)

    def within(self, limit: float) -> Dependence:
        """The dependence of 1{x ≤ limit}, for the share of values within a limit."""
        return of_share(self._values <= limit, [self])

    @property
    def values(self) -> Values:
        return self._values

    def finite(self) -> Values:
        return self._values[np.isfinite(self._values)]

    @property
    def is_white(self) -> bool:
        return self._rank_tests[0]

    @property
    def share_by_load(self) -> float:
        """The share of the variance of the ranks that the number in flight explains (R²); 0 without
        a correlation."""
        return self._rank_tests[1]

    @cached_property
    def _rank_tests(self) -> tuple[bool, float]:
        """Whether the ranks are white, and the share of their variance that the load explains. Both
        are found at once, because ranks take as much memory as the values and are not kept."""
        ranks = mean_ranks(self._values)
        return is_white(ranks), 0.0 if self._load is None else _explained(ranks, self._load.ranks)

    def at(self, quantile: float) -> Dependence:
        """The dependence of 1{x ≤ v} at the percentile v."""
        n = len(self._values)
        if n == 0:
            return Dependence(n)
        if quantile < 0.5:  # the levels between the median and the percentile, mirrored
            levels = [1 - level for level in LEVELS if 1 - level > quantile]
        else:
            levels = [level for level in LEVELS if level < quantile]
        if self.time_by_load == 1 and self.is_white and self._is_level_white(quantile):
            return Dependence(n)
        return Dependence(n, _time_along([*levels, quantile], self._time_at, n, self.time_by_load))

    def _is_level_white(self, quantile: float) -> bool:
        """Whether the requests beyond the percentile come in no bursts; ranks hardly show bursts in
        a tail. Fewer than 20 such requests cannot show it."""
        if len(self._values) * min(quantile, 1 - quantile) < _LEAST_BEYOND:
            return True
        return is_white(self.indicator(quantile))

    def time_up_to(self, quantile: float) -> float:
        """The autocorrelation time at the highest of the levels up to the percentile."""
        n = len(self._values)
        if n == 0 or (self.time_by_load == 1 and self.is_white):
            return 1.0
        levels = [level for level in LEVELS if level <= max(quantile, 0.5)]
        return _time_along(levels, self._time_at, n, self.time_by_load)

    @cached_property
    def time_by_load(self) -> float:
        """1 + R² (τ of the number in flight − 1); 1 without a correlation."""
        share = self.share_by_load
        return 1.0 if self._load is None or not share else 1 + share * (self._load.time - 1)

    def _time_at(self, quantile: float) -> float:
        if quantile not in self._times:
            self._times[quantile] = autocorrelation_time(self.indicator(quantile))
        return self._times[quantile]

    def indicator(self, quantile: float) -> Values:
        """1{x ≤ v} at the percentile v, shape [n]."""
        hits: Values = (self._values <= self._level(quantile)).astype(np.float64)
        return hits

    def _level(self, quantile: float) -> float:
        """The percentile; of several at once, because a partition by six takes twice as long as a
        partition by one."""
        if quantile not in self._levels:
            quantiles = [q for q in (*_PERCENTILES, quantile) if q not in self._levels]
            places = [nearest_rank(len(self._values), q) - 1 for q in quantiles]
            parted = np.partition(self._values, sorted(set(places)))
            self._levels.update(zip(quantiles, parted[places].tolist(), strict=True))
        return self._levels[quantile]


def of_share(hits: NDArray[np.bool_], companions: Sequence[Series] = ()) -> Dependence:
    """The dependence of a share: `hits` in order of release, shape [n].

    A share near 0 or 1 hardly shows its own autocorrelation. The autocorrelation time of the
    `companions` (series of the latencies of the same requests) then counts, if it is longer. If
    latencies depend on the load, the share is not tested for whiteness.
    """
    n = len(hits)
    if n == 0:
        return Dependence(0)
    values, share = hits.astype(np.float64), float(np.mean(hits))
    times = [series.time_up_to(max(share, 1 - share)) for series in companions]
    is_loaded = any(series.time_by_load > 1 for series in companions)
    own = autocorrelation_time(values) if is_loaded else time_of(values)
    return Dependence(n, _weighted(own, max([own, *times]), n, share))


def of_values(values: Values) -> Dependence:
    """The dependence of the mean of `values`, in order of release."""
    if len(values) == 0 or is_white(mean_ranks(values)):
        return Dependence(len(values))
    return Dependence(len(values), autocorrelation_time(values))


def of_groups(time_at: Callable[[float], float], n: int, quantile: float) -> Dependence:
    """The dependence of n requests that have several samples each (the gaps of a request), without
    their design effect. `time_at(q)` is the autocorrelation time, in requests, of the sum of a
    request's indicators at the percentile."""
    levels = (*(level for level in (0.5, 0.9, 0.99) if level < quantile), quantile)
    return Dependence(n, _time_along(levels, time_at, n))


def time_of(values: Values) -> float:
    """The autocorrelation time of a series; 1 where it is white."""
    return 1.0 if is_white(mean_ranks(values)) else autocorrelation_time(values)


def _explained(values: Values, by: Values) -> float:
    """The share of the variance of `values` that a rising line through `by` explains (R², without
    its bias of 1/n), or 0 if the correlation is not significantly positive at 10 %."""
    n = len(values)
    if n == 0:
        return 0.0
    centred, driver = values - values.mean(), by - by.mean()
    total = float(np.square(centred).sum() * np.square(driver).sum())
    if total <= 0:
        return 0.0
    r = float((centred * driver).sum()) / math.sqrt(total)
    return r * r - (1 - r * r) / n if r * math.sqrt(n) > _LOAD_Z else 0.0


def _time_along(
    levels: Sequence[float], time_at: Callable[[float], float], n: int, by_load: float = 1.0
) -> float:
    """The autocorrelation time at the last of `levels`, which lie ever further in a tail: where few
    clusters of requests lie beyond a level, that of the level before it or that by the load counts,
    if it is longer."""
    time = 1.0
    for level in levels:
        own = time_at(level)
        time = _weighted(own, max(time, own, by_load), n, level)
    return time


def _weighted(own: float, longest: float, n: int, quantile: float) -> float:
    """The autocorrelation time `own` of a level if at least 20 clusters of requests lie beyond it,
    the `longest` that comes into question if at most 5 do, between them a mean on a logarithmic
    scale.
    """
    n_clusters = n * min(quantile, 1 - quantile) / longest
    weight = (n_clusters - _FEW_CLUSTERS) / (_MANY_CLUSTERS - _FEW_CLUSTERS)
    weight = min(1.0, max(0.0, weight))
    return max(1.0, math.pow(longest, 1 - weight) * math.pow(max(own, 1e-9), weight))


def autocorrelation_time(values: Values) -> float:
    """τ of a series, at least 1: the largest of these estimates.

    - Geyer's initial monotone positive sequence: the sum of neighbouring pairs of autocorrelations
      up to the first pair that is not positive, each at most the pair before it.
    - The same over the means of batches a quarter as long as that τ: the noise of single lags does
      not end a weak, long memory.
    - The posterior mean of τ if autocorrelations are a·φ^k (weak against the noise, as behind
      processor sharing), by Whittle's likelihood over a grid of (a, φ).
    - Heidelberger and Welch's: the value at frequency 0 of a line through the logarithm of the
      spectrum. The line spans the frequencies below 1/(4 π τ), at least 50 of them, in a series of
      at least 50 π τ values: an exponential memory leaves these nearly constant.

    Sources: C. J. Geyer, Statistical Science 7(4), 1992, §3.3; P. Whittle, Arkiv för Matematik 2,
    1953; P. Heidelberger, P. D. Welch, Communications of the ACM 24(4), 1981.
    """
    n_per_batch = -(-len(values) // _MOST_POINTS)
    n_batches = len(values) // n_per_batch
    if n_batches < 4:
        return 1.0
    spread = float(np.var(values))
    if n_per_batch > 1:
        values = _batch_means(values, n_per_batch)
    return _time_of_means(values.astype(np.float64).tobytes(), n_per_batch, spread)


@lru_cache(128)  # a summary and its page need half of the times twice; at most 32 MiB of keys
def _time_of_means(means: bytes, n_per_batch: int, spread: float) -> float:
    """`autocorrelation_time` of a series with the variance `spread`, from the float64 means of its
    batches."""
    values = np.frombuffer(means)
    n_batches = len(values)
    centred = values - values.mean()
    variance = float(np.mean(np.square(centred)))
    if variance <= 0 or spread <= 0:
        return 1.0
    power = np.square(np.abs(np.fft.rfft(centred)))[1:] / (n_batches * variance)
    times = [1.0, _geyer_time(centred)]
    if n_per_batch == 1:  # batch means do not follow a·φ^k
        times.append(_whittle_time(power, n_batches))
    n_per_group = round(max(times) / 4)
    if n_per_group > 1 and n_batches >= 8 * n_per_group:
        times.append(_grouped_time(centred, n_per_group))
    if n_batches >= 2 * _LEAST_PAIRS * math.pi * max(times):
        n_pairs = max(_LEAST_PAIRS, int(n_batches / (8 * math.pi * max(times))))
        times.append(_level_at_zero(power, n_pairs))
    return max(1.0, n_per_batch * variance / spread * max(times))


def _batch_means(values: Values, n_per_batch: int) -> Values:
    n_batches = len(values) // n_per_batch
    means: Values = values[: n_batches * n_per_batch].reshape(n_batches, n_per_batch).mean(axis=1)
    return means


def is_white(values: Values) -> bool:
    """Whether Ljung and Box's test at 5 % finds no autocorrelation up to lag 20 (n/4 in a short
    series).

    Source: G. M. Ljung, G. E. P. Box, Biometrika 65(2), 1978.
    """
    n = len(values)
    n_lags = min(_WHITE_LAGS, n // 4)
    centred = values - values.mean() if n else values
    total = float(np.square(centred).sum())
    if n_lags < 1 or total <= 0:
        return True
    # the 95 % point of χ² by Wilson and Hilferty's cube, within 0.1 % for two lags and more
    point = n_lags * (1 - 2 / (9 * n_lags) + 1.6449 * math.sqrt(2 / (9 * n_lags))) ** 3
    squares = 0.0
    for k in range(1, n_lags + 1):
        # not np.dot: its threads cost more than they save
        squares += (float((centred[k:] * centred[:-k]).sum()) / total) ** 2 / (n - k)
        if n * (n + 2) * squares > point:  # further lags only add
            return False
    return True


def _geyer_time(centred: Values) -> float:
    n = len(centred)
    spectrum = np.fft.rfft(centred, 1 << (2 * n - 1).bit_length())
    covariances = np.fft.irfft(np.square(spectrum.real) + np.square(spectrum.imag))[: n // 2 * 2]
    pairs = (covariances[0::2] + covariances[1::2]) / covariances[0]
    ends = np.flatnonzero(pairs <= 0)
    pairs = pairs[: ends[0]] if len(ends) else pairs
    return float(2 * np.minimum.accumulate(pairs).sum() - 1)


def _grouped_time(centred: Values, n_per_group: int) -> float:
    """`_geyer_time` of the means of groups, in units of the single values."""
    means = _batch_means(centred, n_per_group)
    means = means - means.mean()
    ratio = float(np.mean(np.square(means)) / np.mean(np.square(centred)))
    return n_per_group * ratio * _geyer_time(means) if ratio > 0 else 0.0


def _level_at_zero(power: Values, n_pairs: int) -> float:
    """The spectrum at frequency 0, from the lowest pairs of frequencies. The logarithm of the mean
    of a pair is too small by ln 2 − ψ(2) = 0.27 on average. The estimate is right in the median,
    not in the mean. A rising line is taken for a level one."""
    pairs = (power[0 : 2 * n_pairs : 2] + power[1 : 2 * n_pairs : 2]) / 2
    logs = np.log(np.maximum(pairs, 1e-12)) + 0.27036
    distances = np.arange(n_pairs) + 0.75  # in pairs of frequencies, from frequency 0
    centred = distances - distances.mean()
    slope = min(0.0, float((centred * logs).sum() / np.square(centred).sum()))
    return math.exp(float(logs.mean()) - slope * float(distances.mean()))


_SHARES = np.array([0.04, 0.08, 0.13, 0.2, 0.3, 0.4, 0.55, 0.7, 0.85, 1.0])
_DECAYS = np.concatenate([[0.0], 1 - np.geomspace(0.98, 1 / 3000, 70)])


def _whittle_time(power: Values, n: int) -> float:
    """The posterior mean of τ = (1 − a) + a·(1 + φ)/(1 − φ), scaled to the spectrum near zero.
    `power` is the periodogram of n values with variance 1, from the first frequency on."""
    power = power[: (n - 1) // 2]
    if not len(power):
        return 1.0
    starts, counts, inverse_shapes, log_shapes, times = _whittle_grid(n)
    power = np.maximum(np.add.reduceat(power, starts) / counts, 1e-12)
    n_frequencies = counts.sum()
    variances = inverse_shapes @ (counts * power) / n_frequencies
    costs = log_shapes + n_frequencies * np.log(variances)
    weights = np.exp(costs.min() - costs)
    return float((weights * times * variances).sum() / weights.sum())


@lru_cache(4)  # the series of a run have few lengths; 0.5 MB each
def _whittle_grid(n: int) -> tuple[NDArray[np.intp], Values, Values, Values, Values]:
    """The part of `_whittle_time` that depends on the length n of a series alone: the bins of its
    frequencies (first index, number of frequencies) and, over the grid of shares and decays, the
    inverse of each shape of spectrum, Σ log(shape) over the frequencies, and τ."""
    starts, counts, cosines = _bins(n)
    decays = _DECAYS[max(0.0, 1 - 4 / n) >= _DECAYS]
    memory = (1 - decays**2)[:, None] / (1 - 2 * decays[:, None] * cosines + decays[:, None] ** 2)
    shapes = (1 - _SHARES)[:, None, None] + _SHARES[:, None, None] * memory
    times = (1 - _SHARES)[:, None] + _SHARES[:, None] * (1 + decays) / (1 - decays)
    return starts, counts, 1 / shapes, np.log(shapes) @ counts, times


def _bins(n: int) -> tuple[NDArray[np.intp], Values, Values]:
    """Frequencies of a series of length n in at most 80 bins of geometric width: the first index
    of each, the number of frequencies in it, the cosine of its mean frequency."""
    n_frequencies = (n - 1) // 2
    edges = np.unique(np.round(np.geomspace(1, n_frequencies + 1, 80)).astype(np.intp)) - 1
    if len(edges) < 2:
        edges = np.array([0, n_frequencies])
    counts = np.diff(edges).astype(np.float64)
    middles = (edges[:-1] + edges[1:] + 1) / 2
    return edges[:-1], counts, np.cos(2 * np.pi * middles / n)


def t_inflation(degrees: float, confidence: float) -> float:
    """(t / z)²: Student's quantile of a two-sided interval over the normal one."""
    level = (1 + confidence) / 2
    return (student_t(level, max(1.0, degrees)) / NormalDist().inv_cdf(level)) ** 2
