"""Choice of the arrival process for recorded instants: Poisson, gamma or MMPP.

A server's load depends on the variation of counts, in short and in long windows. The criterion is
therefore the dispersion curve: I(t) = variance / mean of the counts in windows of length t, for t
of 4, 8, 16, … requests. A candidate's distance is the weighted root mean square of
ln(I_candidate/I_trace). The simplest candidate is chosen that comes within 20 % (4000 Poisson
arrivals are 5 to 15 % away from their own process), or within 1.5 times the closest distance. (The
likelihood of gaps alone fits the milliseconds and misses the minutes.)

- `gamma`: maximum likelihood on the gaps.
- `mmpp`: two states by maximum likelihood on the sequence of gaps.
- `mmpp, by dispersion`: two states whose dispersion curve is fitted to the trace's curve; the share
  of the busy state by maximum likelihood.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.manifest.json_section import JsonObject
from loadgen.records import Times
from loadgen.units import write_duration, write_rate
from loadgen.workload.renewal import Gamma

Gaps = NDArray[np.float64]  # seconds, each > 0, [blocks, gaps per block]
N_BLOCKS = 8
MOST_GAPS = 20_000
LEAST_WINDOWS = 24
CLOSE_ENOUGH = 0.2
_RESOLUTIONS_S = (1.0, 0.1, 0.01, 1e-3)
_STARTS = (10.0, 100.0, 1000.0)  # durations of MMPP states, in gaps, where the search begins


@dataclass(frozen=True, slots=True)
class ArrivalFit:
    """The chosen process in scenario form, each candidate's distance from the trace's dispersion
    curve (0 = equal), and notes on preparation of the instants."""

    spec: Mapping[str, Any]
    distance: Mapping[str, float]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DispersionCurve:
    """Variance / mean of counts in windows of `window_s`. The weight of each value is
    1/(2/n_windows + 0.01): its sampling variance plus that of an error of 10 %."""

    window_s: NDArray[np.float64]
    dispersion: NDArray[np.float64]
    weight: NDArray[np.float64]

    def distance(self, dispersion: NDArray[np.float64]) -> float:
        """Weighted root mean square of the logarithm of the ratio."""
        squares = np.log(dispersion / self.dispersion) ** 2
        return sqrt(float(np.average(squares, weights=self.weight)))


def fit_arrivals(times_s: Times) -> ArrivalFit:
    """The process for sorted instants from 0, float64 seconds [n], n ≥ 3.

    Instants that were rounded (to whole seconds, say) are first spread evenly over their interval,
    because ties would look like extreme bursts. Of more than 20 000 gaps, the likelihood uses eight
    evenly placed sections of equal length.
    """
    n, last_s = len(times_s), float(times_s[-1])
    assert n >= 3, f"{n} instants have no distribution"
    rate = (n - 1) / last_s
    rate_text = write_rate(rounded(rate))
    times_s, notes = _unrounded(times_s)
    gaps = np.diff(times_s)
    if gaps.std() < 1e-3 * gaps.mean():
        return ArrivalFit({"kind": "constant", "rate": rate_text}, {}, notes)
    blocks, is_part = _blocks(np.maximum(gaps, 1e-9 * gaps.mean()))
    if is_part:
        notes = (*notes, f"fitted to {blocks.size} of {gaps.size} gaps, in {N_BLOCKS} sections")
    curve = dispersion_curve(times_s, rate)
    cv = rounded(min(1 / sqrt(gamma_shape(blocks)), 100.0))
    by_likelihood = fit_mmpp(blocks)
    specs: dict[str, JsonObject] = {
        "poisson": {"kind": "poisson", "rate": rate_text},
        "gamma": {"kind": "gamma", "rate": rate_text, "cv": cv},
        "mmpp": _mmpp(rate_text, by_likelihood),
    }
    distances = {
        "poisson": curve.distance(np.ones_like(curve.weight)),
        "gamma": _gamma_distance(curve, rate, cv, n),
        "mmpp": curve.distance(by_likelihood.dispersion(curve)),
    }
    if float(curve.dispersion.max()) > 1.1:
        matched = match_dispersion(curve, rate, blocks)
        specs["mmpp, by dispersion"] = _mmpp(rate_text, matched)
        distances["mmpp, by dispersion"] = curve.distance(matched.dispersion(curve))
    limit = max(CLOSE_ENOUGH, 1.5 * min(distances.values()))
    best = next(name for name, distance in distances.items() if distance <= limit)
    return ArrivalFit(specs[best], distances, notes)


def dispersion_curve(times_s: Times, rate_per_s: float) -> DispersionCurve:
    """The trace's curve for windows of 4, 8, 16, … requests, while at least 24 windows fit in the
    trace; a single window length if the trace is too short for that."""
    span_s = float(times_s[-1])
    sizes = [2.0**k for k in range(2, 40) if span_s * rate_per_s / 2.0**k >= LEAST_WINDOWS]
    windows_s, values, weights = [], [], []
    for size in sizes or [max(1.0, span_s * rate_per_s / LEAST_WINDOWS)]:
        n_windows = max(2, int(span_s * rate_per_s / size))
        windows_s.append(span_s / n_windows)
        values.append(max(dispersion(times_s, n_windows, span_s), 1e-3))
        weights.append(1 / (2 / n_windows + 0.01))
    return DispersionCurve(np.array(windows_s), np.array(values), np.array(weights))


def dispersion(times_s: Times, n_windows: int, span_s: float) -> float:
    """Variance / mean of the counts in `n_windows` equal windows from 0 to `span_s`."""
    counts, _ = np.histogram(times_s, n_windows, (0.0, span_s))
    return float(np.var(counts) / np.mean(counts))


@dataclass(frozen=True, slots=True)
class TwoStates:
    """A two-state MMPP: the arrival rate in each state, the busier first, and the rate of leaving
    each state, all per second."""

    rates: tuple[float, float]
    leaving: tuple[float, float]

    def dispersion(self, curve: DispersionCurve) -> NDArray[np.float64]:
        """I(t) = 1 + 2V/(σ·m) · (1 − (1 − e^{−σt})/(σt)), m the mean rate, V the variance of the
        rate, σ = σ₁ + σ₂ (Heffes and Lucantoni 1986, section IV)."""
        (busy, calm), (leave_busy, leave_calm) = self.rates, self.leaving
        total = leave_busy + leave_calm
        share = leave_calm / total
        mean = share * busy + (1 - share) * calm
        variance = (busy - calm) ** 2 * share * (1 - share)
        return two_state_dispersion(curve.window_s, mean, variance, total)


def two_state_dispersion(
    window_s: NDArray[np.float64], mean: float, variance: float, total: float
) -> NDArray[np.float64]:
    """The dispersion of counts of a Poisson process whose rate has this mean and variance, and the
    autocorrelation e^{−total·t}."""
    exponent = total * window_s
    return np.asarray(1 + 2 * variance / (total * mean) * (1 + np.expm1(-exponent) / exponent))


def match_dispersion(curve: DispersionCurve, rate_per_s: float, gaps: Gaps) -> TwoStates:
    """The two states whose dispersion curve is nearest to the trace's. The curve determines the
    variance V of the rate, and σ. The share p of the busy state, whose rate is m + √(V(1 − p)/p),
    is chosen by likelihood among the shares with a calm rate m − √(Vp/(1 − p)) above 0."""
    from scipy.optimize import minimize, minimize_scalar

    m = rate_per_s

    def distance(x: NDArray[np.float64]) -> float:
        variance, total = np.exp(np.clip(x, -40, 40))
        return curve.distance(two_state_dispersion(curve.window_s, m, variance * m * m, total * m))

    starts = [np.log([v, s]) for v in (1.0, 10.0) for s in (0.1, 0.01, 0.001)]
    minima = (minimize(distance, x, method="Nelder-Mead") for x in starts)
    best = min(minima, key=lambda minimum: float(minimum.fun))
    relative, total = (float(v) for v in np.exp(np.clip(best.x, -40, 40)))
    relative, total = min(relative, 1e6), max(total, 1e-9)

    def states(share: float) -> TwoStates:
        busy = m * (1 + sqrt(relative * (1 - share) / share))
        calm = m * max(1 - sqrt(relative * share / (1 - share)), 1e-6)
        return TwoStates((busy, calm), (total * m * (1 - share), total * m * share))

    most = 1 / (1 + relative)
    chosen = minimize_scalar(
        lambda x: -_log_likelihood(gaps, states(exp(x))),
        bounds=(log(most) - 6, log(most) - 1e-6),
        method="bounded",
        options={"xatol": 0.02},
    )
    return states(exp(float(chosen.x)))


def gamma_shape(gaps: Gaps) -> float:
    """The maximum-likelihood shape k of gamma gaps: ln k − ψ(k) = ln mean(x) − mean(ln x), ψ the
    digamma function; cv = 1/√k. Limited to 1e-4 … 1e6.

    Source: N. L. Johnson, S. Kotz, N. Balakrishnan, Continuous Univariate Distributions 1 (1994),
    section 17.7.
    """
    from scipy.optimize import brentq
    from scipy.special import digamma

    unevenness = log(gaps.mean()) - float(np.log(gaps).mean())
    low, high = 1e-4, 1e6
    if unevenness <= log(high) - digamma(high):
        return high
    if unevenness >= log(low) - digamma(low):
        return low
    return float(brentq(lambda k: log(k) - digamma(k) - unevenness, low, high))


def fit_mmpp(gaps: Gaps) -> TwoStates:
    """Two states by maximum likelihood, with Nelder-Mead from three starting points."""
    from scipy.optimize import minimize

    mean_s = float(gaps.mean())
    scaled = gaps / mean_s  # so that every parameter is near 1
    candidates = []
    for stay in _STARTS:
        start = np.log([2.0, 0.3, 1 / stay, 0.5 / stay])
        minimum = minimize(
            lambda x: -mmpp_log_likelihood(scaled, np.exp(x)),
            start,
            method="Nelder-Mead",
            options={"maxiter": 250, "xatol": 1e-2, "fatol": 0.05},
        )
        candidates.append((float(minimum.fun), np.exp(minimum.x) / mean_s))
    parameters = min(candidates, key=lambda candidate: candidate[0])[1].tolist()
    states = sorted(zip(parameters[:2], parameters[2:], strict=True), reverse=True)
    (busy, leave_busy), (calm, leave_calm) = states
    return TwoStates((busy, calm), (leave_busy, leave_calm))


def mmpp_log_likelihood(gaps: Gaps, parameters: NDArray[np.float64]) -> float:
    """ln L of the gaps of a two-state MMPP with parameters (λ₁, λ₂, σ₁, σ₂).

    L = φ · Π exp(D₀·x_i)·Λ · 1 with Λ = diag(λ), D₀ = Q − Λ, Q the generator with leaving rates σ,
    and φ ∝ π·Λ the state just after an arrival of the stationary process. Each block of gaps is a
    sequence of its own. The 2 × 2 exponential is written out. The matrices are multiplied in pairs
    and rescaled (the logarithm of the scale is summed apart), so n gaps take log₂ n array
    operations.

    Source: T. Rydén, Stochastic Models 10 (1994), section 2.
    """
    rate_1, rate_2, leave_1, leave_2 = (float(p) for p in parameters)
    if not all(1e-9 < p < 1e9 for p in (rate_1, rate_2, leave_1, leave_2)):
        return -1e300
    down_1, down_2 = -(leave_1 + rate_1), -(leave_2 + rate_2)
    middle = (down_1 + down_2) / 2
    spread = sqrt(((down_1 - down_2) / 2) ** 2 + leave_1 * leave_2)
    decay = np.exp(-2 * spread * gaps)
    cosh, sinh = (1 + decay) / 2, (1 - decay) / (2 * spread)  # both times exp(−spread·x)
    product = np.empty((2, 2, *gaps.shape))
    product[0, 0] = (cosh + (down_1 - middle) * sinh) * rate_1
    product[0, 1] = leave_1 * sinh * rate_2
    product[1, 0] = leave_2 * sinh * rate_1
    product[1, 1] = (cosh + (down_2 - middle) * sinh) * rate_2
    log_size = float(((middle + spread) * gaps).sum())
    while product.shape[-1] > 1:
        odd = product[..., -1:] if product.shape[-1] % 2 else None
        left, right = product[..., :-1:2], product[..., 1::2]
        product = np.einsum("ijbn,jkbn->ikbn", left, right)
        size = np.maximum(product.max(axis=(0, 1)), 1e-300)
        log_size += float(np.log(size).sum())
        product = product / size
        if odd is not None:
            product = np.concatenate([product, odd], axis=-1)
    stationary = np.array([leave_2 * rate_1, leave_1 * rate_2])
    ends = np.einsum("i,ijbn->b", stationary / stationary.sum(), product)
    return log_size + float(np.log(np.maximum(ends, 1e-300)).sum())


def _log_likelihood(gaps: Gaps, states: TwoStates) -> float:
    mean_s = float(gaps.mean())
    return mmpp_log_likelihood(gaps / mean_s, mean_s * np.array([*states.rates, *states.leaving]))


def _gamma_distance(curve: DispersionCurve, rate_per_s: float, cv: float, n: int) -> float:
    """The distance of a gamma process, from a long simulated sequence with a fixed seed, because
    its curve has no closed form."""
    n_drawn = min(max(n, 100_000), 1_000_000)
    horizon_s = n_drawn / rate_per_s
    gamma = Gamma.model_construct(rate=rate_per_s, cv=cv)
    times_s = gamma.times(np.random.Generator(np.random.PCG64(0)), horizon_s)
    n_windows = [max(2, int(horizon_s / window_s)) for window_s in curve.window_s]
    values = [max(dispersion(times_s, n, horizon_s), 1e-3) for n in n_windows]
    return curve.distance(np.array(values))


def _mmpp(rate: str, states: TwoStates) -> JsonObject:
    listed = [
        {"weight_rate": rounded(r / states.rates[0]), "mean_stay": write_duration(rounded(1 / s))}
        for r, s in zip(states.rates, states.leaving, strict=True)
    ]
    return {"kind": "mmpp", "rate": rate, "states": listed}


def _blocks(gaps: NDArray[np.float64]) -> tuple[Gaps, bool]:
    """(all gaps as a block, False), or (eight evenly placed blocks, True) for over 20 000 gaps."""
    if gaps.size <= MOST_GAPS:
        return gaps[None, :], False
    length = MOST_GAPS // N_BLOCKS
    starts = np.linspace(0, gaps.size - length, N_BLOCKS).astype(np.int64)
    return np.stack([gaps[start : start + length] for start in starts]), True


def _unrounded(times_s: Times) -> tuple[Times, tuple[str, ...]]:
    """(instants, notes): rounded instants with many ties, spread over their rounding interval
    uniformly at random with a fixed seed; other instants unchanged."""
    mean_s = float(times_s[-1]) / (len(times_s) - 1)
    if np.count_nonzero(np.diff(times_s) == 0) < 0.01 * len(times_s):
        return times_s, ()
    for step_s in _RESOLUTIONS_S:
        is_multiple = np.abs(times_s - np.rint(times_s / step_s) * step_s) < 1e-6 * step_s
        if is_multiple.all():
            break
    else:
        return times_s, ()
    if mean_s > 100 * step_s:
        return times_s, ()
    within = np.random.Generator(np.random.PCG64(0)).random(len(times_s))
    spread = np.sort(times_s + within * step_s)
    note = f"instants are rounded to {step_s:g}s, with ties; spread evenly over that interval"
    return spread, (note,)


def rounded(value: float) -> float:
    return float(f"{value:.4g}")
