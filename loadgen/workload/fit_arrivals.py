"""Choice of the arrival process for recorded instants: constant, Poisson, gamma, batch or MMPP.

A server's load depends on the variation of counts, in short and in long windows. The criterion is
therefore the dispersion curve: I(t) = variance / mean of the counts in windows of length t, for t
of 4, 8, 16, … requests. A candidate's distance is the weighted root mean square of
ln(I_candidate/I_trace). The simplest candidate is chosen that comes within 20 % (4000 Poisson
arrivals are 5 to 15 % away from their own process), or within 1.5 times the closest distance. (The
likelihood of gaps alone fits the milliseconds and misses the minutes.)

A chosen process that is more than 20 % away does not fit, unless traces of the process itself, of
the same length, are as far away: the curve of a short trace varies by chance.

- `constant`: instants that stay close to a lattice.
- `batch`, `batch, constant`: groups of requests at Poisson instants or at equal gaps, with the
  sizes of the trace's groups, where at least a fifth of the requests follow another at once.
- `gamma`: maximum likelihood on the gaps.
- `mmpp`: two states by maximum likelihood on the sequence of gaps.
- `mmpp, by dispersion`: two states whose dispersion curve is fitted to the trace's curve; the share
  of the busy state by maximum likelihood.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.manifest.json_section import JsonObject
from loadgen.records import Times
from loadgen.units import write_duration, write_rate
from loadgen.workload.arrivals import ARRIVALS, Arrivals
from loadgen.workload.empirical import thinned
from loadgen.workload.renewal import Gamma

Gaps = NDArray[np.float64]  # seconds, each > 0, [blocks, gaps per block]
N_BLOCKS = 8
MOST_GAPS = 20_000
LEAST_WINDOWS = 24
CLOSE_ENOUGH = 0.2
GROUP_SHARE = 0.01  # of the mean gap: a request after a shorter gap belongs to the same group
LEAST_GROUPED = 0.2  # share of requests that follow another at once
N_DRAWS = 199
_RESOLUTIONS_S = (1.0, 0.1, 0.01, 1e-3)
_STARTS = (10.0, 100.0, 1000.0)  # durations of MMPP states, in gaps, where the search begins


@dataclass(frozen=True, slots=True)
class ArrivalFit:
    """The chosen process in scenario form, each candidate's distance from the trace's dispersion
    curve (0 = equal), and notes on preparation of the instants. `has_fit` is false if even the
    chosen process does not fit."""

    spec: Mapping[str, Any]
    distance: Mapping[str, float]
    notes: tuple[str, ...] = ()
    has_fit: bool = True


class Candidate(NamedTuple):
    """A process in scenario form, and its dispersion in the windows of the trace's curve."""

    spec: JsonObject
    dispersion: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DispersionCurve:
    """Variance / mean of counts in windows of `window_s`. The weight of each value is
    1/(2/n_windows + 0.01): its sampling variance plus that of an error of 10 %."""

    window_s: NDArray[np.float64]
    dispersion: NDArray[np.float64]
    weight: NDArray[np.float64]
    span_s: float = 0.0  # the length of the trace

    @property
    def n_windows(self) -> list[int]:
        """How many windows of each length the trace has."""
        return [max(2, round(self.span_s / window_s)) for window_s in self.window_s]

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
    jitter_s = _lattice_jitter_s(times_s)
    if jitter_s is not None:
        return ArrivalFit({"kind": "constant", "rate": rate_text}, {}, _jitter_note(jitter_s, rate))
    recorded_s = times_s
    times_s, notes = _unrounded(times_s)
    gaps = np.diff(times_s)
    blocks, is_part = _blocks(np.maximum(gaps, 1e-9 * gaps.mean()))
    if is_part:
        notes = (*notes, f"fitted to {blocks.size} of {gaps.size} gaps, in {N_BLOCKS} sections")
    curve = dispersion_curve(times_s, rate)
    cv = rounded(min(1 / sqrt(gamma_shape(blocks)), 100.0))
    by_likelihood = fit_mmpp(blocks)
    gamma = Gamma.model_construct(rate=rate, cv=cv)
    batches = _batches(recorded_s, rate_text)
    candidates = {
        "poisson": Candidate({"kind": "poisson", "rate": rate_text}, np.ones_like(curve.weight)),
        **_regular_batches(batches, curve, rate),
        "gamma": Candidate(
            {"kind": "gamma", "rate": rate_text, "cv": cv}, drawn_dispersion(gamma, curve, rate, n)
        ),
        **_random_batches(batches, curve),
        "mmpp": Candidate(_mmpp(rate_text, by_likelihood), by_likelihood.dispersion(curve)),
    }
    if float(curve.dispersion.max()) > 1.1:
        matched = match_dispersion(curve, rate, blocks)
        candidates["mmpp, by dispersion"] = Candidate(
            _mmpp(rate_text, matched), matched.dispersion(curve)
        )
    is_spread = times_s is not recorded_s
    # Requests of a batch are simultaneous, so batches are compared with the instants as recorded.
    recorded_curve = dispersion_curve(recorded_s, rate) if is_spread else curve
    curves = {n: recorded_curve if n.startswith("batch") else curve for n in candidates}
    distances = {name: curves[name].distance(c.dispersion) for name, c in candidates.items()}
    limit = max(CLOSE_ENOUGH, 1.5 * min(distances.values()))
    best = next(name for name, distance in distances.items() if distance <= limit)
    chosen = candidates[best]
    if is_spread and best.startswith("batch"):
        notes = notes[1:]  # of the spreading
    has_fit = distances[best] <= CLOSE_ENOUGH or _is_by_chance(
        distances[best], chosen, curves[best]
    )
    return ArrivalFit(chosen.spec, distances, notes, has_fit)


def _lattice_jitter_s(times_s: Times) -> float | None:
    """The standard deviation of sorted instants [n] around a lattice, one instant per point; None
    if they are none.

    It is below a third of the gap, and does not build up along the trace: neighbouring gaps of a
    lattice have a correlation of −0.5, those of a process with independent gaps of 0.
    """
    k = np.arange(len(times_s))
    gaps = np.diff(times_s)
    mean_s = float(gaps.mean())
    slope, start = np.polyfit(k, times_s, 1)
    jitter_s = float((times_s - start - slope * k).std())
    if gaps.std() < 1e-3 * mean_s:
        return jitter_s
    if len(gaps) < LEAST_WINDOWS or jitter_s > mean_s / 3:
        return None
    correlation = float(np.corrcoef(gaps[:-1], gaps[1:])[0, 1])
    return jitter_s if correlation < -0.25 else None


def _jitter_note(jitter_s: float, rate_per_s: float) -> tuple[str, ...]:
    if jitter_s * rate_per_s < 1e-3:
        return ()
    return (
        f"a request every {1 / rate_per_s:.4g}s, with a jitter of {1e3 * jitter_s:.3g} ms (standard"
        " deviation) that the fit leaves out",
    )


class Batches(NamedTuple):
    """The groups of a trace: the process in scenario form, the instants and the sizes."""

    spec: JsonObject
    starts_s: Times
    sizes: NDArray[np.uint32]


def _batches(times_s: Times, rate_text: str) -> Batches | None:
    """The groups of the instants as recorded; None if few requests are in groups."""
    gaps = np.diff(times_s)
    is_new = np.concatenate([[True], gaps > GROUP_SHARE * gaps.mean()])
    if np.count_nonzero(is_new) < 3 or is_new.mean() > 1 - LEAST_GROUPED:
        return None
    sizes = np.diff(np.append(np.flatnonzero(is_new), len(times_s))).astype(np.uint32)
    size: Any = int(sizes[0]) if sizes.min() == sizes.max() else thinned(sizes)
    spec: JsonObject = {"kind": "batch", "rate": rate_text, "size": size}
    return Batches(spec, times_s[is_new], sizes)


def _regular_batches(
    batches: Batches | None, curve: DispersionCurve, rate: float
) -> dict[str, Candidate]:
    """The candidate with groups at equal gaps, if the trace's groups are on a lattice."""
    if batches is None or _lattice_jitter_s(batches.starts_s) is None:
        return {}
    spec: JsonObject = {**batches.spec, "instants": "constant"}
    n = int(batches.sizes.sum())
    drawn = drawn_dispersion(ARRIVALS.build(spec), curve, rate, n)
    return {"batch, constant": Candidate(spec, drawn)}


def _random_batches(batches: Batches | None, curve: DispersionCurve) -> dict[str, Candidate]:
    """The candidate with groups at Poisson instants: E[size²]/E[size] in every window."""
    if batches is None:
        return {}
    flat = float((batches.sizes.astype(np.float64) ** 2).mean() / batches.sizes.mean())
    return {"batch": Candidate(batches.spec, np.full_like(curve.weight, flat))}


def _is_by_chance(distance: float, chosen: Candidate, curve: DispersionCurve) -> bool:
    """Whether traces of the chosen process, of the same length, can be that far from it: `distance`
    is at most 1.5 times the largest distance of 199 drawn traces. False for more than 20 000
    requests: their curve has too little chance variation."""
    span_s = curve.span_s
    process = ARRIVALS.build(chosen.spec)
    rng = np.random.Generator(np.random.PCG64(0))
    rate_per_s = process.mean_rate_per_s(span_s)
    if rate_per_s is None or rate_per_s * span_s > MOST_GAPS:
        return False
    for _ in range(N_DRAWS):
        times_s = process.times(rng, span_s)
        values = [max(dispersion(times_s, n, span_s), 1e-3) for n in curve.n_windows]
        drawn = DispersionCurve(curve.window_s, np.array(values), curve.weight, span_s)
        if 1.5 * drawn.distance(chosen.dispersion) >= distance:
            return True
    return False


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
    return DispersionCurve(np.array(windows_s), np.array(values), np.array(weights), span_s)


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


def drawn_dispersion(
    process: Arrivals, curve: DispersionCurve, rate_per_s: float, n: int
) -> NDArray[np.float64]:
    """The dispersion of a process whose curve has no closed form, from a long simulated sequence
    with a fixed seed."""
    n_drawn = min(max(n, 100_000), 1_000_000)
    horizon_s = n_drawn / rate_per_s
    times_s = process.times(np.random.Generator(np.random.PCG64(0)), horizon_s)
    n_windows = [max(2, int(horizon_s / window_s)) for window_s in curve.window_s]
    return np.array([max(dispersion(times_s, n, horizon_s), 1e-3) for n in n_windows])


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
