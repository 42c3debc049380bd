"""Poisson arrivals whose rate jumps between random states: on/off sources and MMPP.

The state path is drawn first. A Poisson process of rate 1 is then mapped through the inverse
integral of the rate (time-rescaling), so no instant is rounded to a time step.

Source: W. Fischer, K. Meier-Hellstern, The Markov-modulated Poisson process (MMPP) cookbook,
Performance Evaluation 18 (1993).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from loadgen.errors import ScenarioError
from loadgen.fields import Seconds
from loadgen.records import Times
from loadgen.registry import FROM_LIST, Strict
from loadgen.workload.arrivals import StationaryArrivals, streams
from loadgen.workload.renewal import poisson_instants

MAX_STATE_CHANGES = 20_000_000
FOREVER_S = 1e15

Sojourn = Annotated[Seconds, Field(gt=0)]


class OnOff(StationaryArrivals):
    """Poisson while on, silent while off; `on` and `off` are mean durations.

    The rate while on is rate · (on + off)/on, so that the mean is `rate`. Exponential sojourns make
    an interrupted Poisson process (a two-state MMPP). Pareto sojourns have P(X > x) = (m/x)^alpha
    for x ≥ m = mean · (alpha − 1)/alpha; with alpha < 2 the counts are long-range dependent, with
    Hurst exponent H = (3 − alpha)/2.

    The window opens in state on with probability on/(on + off). The sojourn under way is a residual
    with density P(X > x)/mean: exponential again, or for Pareto, with V uniform on (0, 1),
    mean · (1 − V) if V > 1/alpha, else m · (alpha · V)^(−1/(alpha − 1)).

    Source: W. Willinger, M. S. Taqqu, R. Sherman, D. V. Wilson, IEEE/ACM Trans. Networking 5
    (1997), section II.
    """

    kind = "on_off"
    on: Sojourn
    off: Sojourn
    sojourn: Literal["exponential", "pareto"] = "exponential"
    alpha: Annotated[float, Field(ge=1.05, le=20)] | None = None

    @model_validator(mode="after")
    def _has_alpha_if_pareto(self) -> Self:
        if self.sojourn == "pareto" and self.alpha is None:
            raise ValueError("sojourn: pareto needs its tail exponent; add e.g. alpha: 1.5")
        if self.sojourn == "exponential" and self.alpha is not None:
            raise ValueError("alpha belongs to sojourn: pareto; add that, or leave alpha out")
        return self

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        path_rng, arrivals_rng = streams(rng, 2)
        period_s = self.on + self.off
        is_on_first = path_rng.random() < self.on / period_s
        means_s = np.array([self.on, self.off] if is_on_first else [self.off, self.on])
        first = self._residual(path_rng)

        def sojourns_s(begin: int, n: int) -> NDArray[np.float64]:
            drawn = self._sojourns(path_rng, n)
            drawn[: max(0, 1 - begin)] = first  # the first sojourn of all is already under way
            stays: NDArray[np.float64] = drawn * means_s[(begin + np.arange(n)) % 2]
            return stays

        edges_s = _edges(sojourns_s, period_s / 2, horizon_s)
        on_rate = self.rate * period_s / self.on
        is_on = (np.arange(len(edges_s) - 1) % 2 == 0) == is_on_first
        return _modulated(arrivals_rng, edges_s, np.where(is_on, on_rate, 0.0), horizon_s)

    def _sojourns(self, rng: np.random.Generator, n: int) -> NDArray[np.float64]:
        """n sojourns in units of their mean."""
        exponential = rng.standard_exponential(n)
        if self.alpha is None:
            return exponential
        pareto: NDArray[np.float64] = np.exp(exponential / self.alpha)
        return pareto * ((self.alpha - 1) / self.alpha)

    def _residual(self, rng: np.random.Generator) -> float:
        """The remainder of the sojourn at a random instant, in units of the mean."""
        if self.alpha is None:
            return float(rng.standard_exponential())
        alpha, v = self.alpha, 1.0 - rng.random()  # v in (0, 1]
        least = (alpha - 1) / alpha
        return 1 - v if v > 1 / alpha else float(least * (alpha * v) ** (-1 / (alpha - 1)))


class RateState(Strict):
    """A state of an MMPP: its rate relative to the other states, and its mean duration."""

    weight_rate: Annotated[float, Field(ge=0, le=1e9)]
    mean_stay: Sojourn


class Mmpp(StationaryArrivals):
    """A Markov-modulated Poisson process: in state i arrivals are Poisson with rate λ_i. The state
    lasts for an exponential time with mean `mean_stay`; the next state is any of the others with
    equal probability.

    λ_i = rate · weight_rate_i / Σ_j π_j · weight_rate_j with the stationary distribution
    π_i = mean_stay_i / Σ_j mean_stay_j (the jump chain is symmetric, so its law is uniform). The
    first state is drawn from π, so the process is stationary and its mean rate is `rate` from the
    start.

    With two states, σ_i = 1/mean_stay_i and σ = σ_1 + σ_2, the index of dispersion of counts over t
    is 1 + 2K/(σ · rate) · (1 − (1 − e^{−σt})/(σt)), K = (λ_1 − λ_2)² · σ_1 · σ_2/σ².

    Source: H. Heffes, D. M. Lucantoni, IEEE J. Sel. Areas Commun. 4 (1986), section IV; Fischer and
    Meier-Hellstern (1993), section 2.
    """

    kind = "mmpp"
    states: Annotated[tuple[RateState, ...], FROM_LIST]

    @model_validator(mode="after")
    def _has_states_and_a_rate(self) -> Self:
        if len(self.states) < 2:
            raise ValueError("states needs two or more; with a single rate use kind: poisson")
        if not any(state.weight_rate for state in self.states):
            raise ValueError("every weight_rate is 0; at least one state needs arrivals")
        return self

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        jump_rng, stay_rng, arrivals_rng = streams(rng, 3)
        stays_s = np.array([state.mean_stay for state in self.states])
        n_states = len(stays_s)
        stationary = np.cumsum(stays_s) / stays_s.sum()
        entering = int(np.searchsorted(stationary[:-1], jump_rng.random(), side="right"))
        visited: list[NDArray[np.int64]] = []

        def sojourns_s(begin: int, n: int) -> NDArray[np.float64]:
            nonlocal entering
            # 1 … n_states − 1 states further on, all alike: every other state is equally likely
            hops = 1 + (jump_rng.random(n) * (n_states - 1)).astype(np.int64)
            states = (entering + np.concatenate([[0], np.cumsum(hops)])) % n_states
            entering = int(states[-1])
            visited.append(states[:-1])
            stays: NDArray[np.float64] = stay_rng.standard_exponential(n) * stays_s[states[:-1]]
            return stays

        edges_s = _edges(sojourns_s, float(stays_s.mean()), horizon_s)
        states = np.concatenate(visited)[: len(edges_s) - 1]
        return _modulated(arrivals_rng, edges_s, self._rates_per_s()[states], horizon_s)

    def _rates_per_s(self) -> NDArray[np.float64]:
        weights = np.array([state.weight_rate for state in self.states])
        stays_s = np.array([state.mean_stay for state in self.states])
        mean_weight = weights @ stays_s / stays_s.sum()
        return np.asarray(self.rate * (weights / mean_weight))


def _edges(
    sojourns_s: Callable[[int, int], NDArray[np.float64]], mean_s: float, horizon_s: float
) -> Times:
    """Instants of the state changes, from 0 to the first at or after the horizon;
    `sojourns_s(begin, n)` draws the sojourns begin … begin + n − 1.

    Raises ScenarioError if more than 20 million changes are expected.
    """
    if horizon_s / mean_s > MAX_STATE_CHANGES:
        raise ScenarioError(
            f"arrivals: states that last {mean_s:g}s on average change {horizon_s / mean_s:.3g} "
            f"times in {horizon_s:g}s, at most {MAX_STATE_CHANGES:.0e}; lengthen them"
        )
    edges_s, n_drawn = [np.zeros(1)], 0
    while n_drawn == 0 or edges_s[-1][-1] < horizon_s:
        expected = (horizon_s - edges_s[-1][-1]) / mean_s
        n = int(expected + 6 * np.sqrt(expected)) + 16
        block = sojourns_s(n_drawn, n)
        block[0] += edges_s[-1][-1]
        edges_s.append(np.minimum(np.cumsum(block), FOREVER_S))
        n_drawn += n
    path_s = np.concatenate(edges_s)
    return path_s[: np.searchsorted(path_s, horizon_s) + 1]


def _modulated(
    rng: np.random.Generator, edges_s: Times, rates_per_s: NDArray[np.float64], horizon_s: float
) -> Times:
    """Poisson arrivals of rate rates_per_s[k] in [edges_s[k], edges_s[k + 1]).

    A unit-rate process s_1 < s_2 < … becomes t_i = Λ⁻¹(s_i), Λ the integral of the rate.
    """
    expected = np.concatenate([[0.0], np.cumsum(rates_per_s * np.diff(edges_s))])
    total = float(np.interp(horizon_s, edges_s, expected))
    # a hair more than needed: the cut is made once, below, in seconds
    unit = poisson_instants(rng, 1.0, total * (1 + 1e-9))
    instants: Times = np.interp(unit, expected, edges_s)
    return instants[: np.searchsorted(instants, horizon_s)]
