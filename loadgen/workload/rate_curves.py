"""Arrivals whose rate varies in time: along straight pieces or an exponential, as a daily sinusoid,
or with a crowd that comes and goes.

The arrivals are t_i = Λ⁻¹(s_i), where Λ(t) is the integral of the rate and s_1 < s_2 < … a process
of rate 1. The expected number in [0, t) is exactly Λ(t), because s begins in equilibrium.

Source: E. Çinlar, Introduction to Stochastic Processes (1975), section 4.7; I. Gerhardt,
B. L. Nelson, INFORMS J. Computing 21 (2009), section 3 (renewal processes).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, expm1, inf, log, pi, sin
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from loadgen.fields import Level, Rate, Seconds
from loadgen.records import Times
from loadgen.registry import FILLED, FROM_LIST, Strict
from loadgen.workload.arrivals import Arrivals
from loadgen.workload.renewal import Constant, Cv, Gamma, poisson_instants

Counts = NDArray[np.float64]  # expected arrivals since t = 0


class VaryingRate(Arrivals, ABC):
    """An inhomogeneous process, defined by the integral Λ of its rate and its inverse Λ⁻¹."""

    @abstractmethod
    def expected(self, horizon_s: float) -> float:
        """Λ(horizon_s): the expected number of arrivals in [0, horizon_s)."""

    @abstractmethod
    def instants(self, expected: Counts) -> Times:
        """Λ⁻¹: the instants in seconds at which so many arrivals are expected; inf for never."""

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        # a hair further than Λ(horizon): the cut is then made in seconds, and rounding in Λ cannot
        # change which arrivals a longer horizon keeps
        unit = self._unit_rate(rng, self.expected(horizon_s) * (1 + 1e-9))
        instants = np.maximum.accumulate(self.instants(unit))
        return instants[: np.searchsorted(instants, horizon_s)]

    def mean_rate_per_s(self, horizon_s: float) -> float:
        return self.expected(horizon_s) / horizon_s if horizon_s > 0 else 0.0

    def _unit_rate(self, rng: np.random.Generator, until: float) -> Counts:
        return poisson_instants(rng, 1.0, until)


class PiecewiseRate(VaryingRate):
    """A rate that is piecewise linear."""

    @abstractmethod
    def _pieces(self) -> Pieces:
        """The pieces, in order of time."""

    def expected(self, horizon_s: float) -> float:
        return self._pieces().expected(horizon_s)

    def instants(self, expected: Counts) -> Times:
        return self._pieces().instants(expected)


class Ramp(PiecewiseRate):
    """Poisson arrivals whose rate changes from `from` to `to` within `over` and then stays
    constant.

    linear: λ(t) = from + (to − from) · t/over. exponential: λ(t) = from · (to/from)^(t/over), equal
    factors in equal times; Λ(t) = from · (e^{kt} − 1)/k with k = ln(to/from)/over.
    """

    kind = "ramp"
    start: Annotated[Level, Field(alias="from")]
    to: Level
    over: Annotated[Seconds, Field(gt=0)]
    shape: Literal["linear", "exponential"] = "linear"

    @model_validator(mode="after")
    def _has_positive_rates(self) -> Self:
        if not (self.start or self.to):
            raise ValueError("from and to are both 0/s; from or to must be positive")
        if self.shape == "exponential" and not (self.start and self.to):
            raise ValueError(
                "an exponential ramp multiplies, so it can neither begin nor end at 0/s; write "
                "e.g. '0.1/s', or shape: linear"
            )
        return self

    def expected(self, horizon_s: float) -> float:
        if not self._growth_per_s:
            return super().expected(horizon_s)
        within_s, after_s = min(horizon_s, self.over), max(0.0, horizon_s - self.over)
        grown = self.start * expm1(self._growth_per_s * within_s) / self._growth_per_s
        return grown + self.to * after_s

    def instants(self, expected: Counts) -> Times:
        growth_per_s = self._growth_per_s
        if not growth_per_s:
            return super().instants(expected)
        grown = self.expected(self.over)
        within = np.log1p(np.minimum(expected, grown) * (growth_per_s / self.start)) / growth_per_s
        return np.where(expected < grown, within, self.over + (expected - grown) / self.to)

    @property
    def _growth_per_s(self) -> float:
        """k of an exponential ramp; 0 for a linear ramp."""
        return log(self.to / self.start) / self.over if self.shape == "exponential" else 0.0

    def _pieces(self) -> Pieces:
        return Pieces.through([(0.0, self.start), (self.over, self.to)])


class RateStep(Strict):
    """A rate and its duration."""

    rate: Level
    lasts: Annotated[Seconds, Field(gt=0, alias="for")]


class Steps(PiecewiseRate):
    """Poisson arrivals at a sequence of constant rates; the last rate holds to the end.

    Λ(t) is piecewise linear. A level may be `0/s`.
    """

    kind = "steps"
    levels: Annotated[tuple[RateStep, ...], FROM_LIST, FILLED]

    @model_validator(mode="after")
    def _has_a_rate(self) -> Self:
        if not any(step.rate for step in self.levels):
            raise ValueError("every rate is 0/s; at least one level needs arrivals")
        return self

    def _pieces(self) -> Pieces:
        ends_s = np.cumsum([step.lasts for step in self.levels])
        starts_s = np.concatenate([[0.0], ends_s[:-1]])
        rates = np.array([step.rate for step in self.levels])
        return Pieces(starts_s, rates, np.zeros(len(rates)))


class Point(Strict):
    """The rate at an instant."""

    at: Seconds
    rate: Level


class Curve(PiecewiseRate):
    """A rate that is interpolated linearly between points and constant before the first and after
    the last; Λ is piecewise quadratic.

    `process` is the process of rate 1 that is rescaled: poisson, gamma with gap cv `cv`, or
    constant (the k-th arrival is at Λ⁻¹(k + U), U uniform on [0, 1)).
    """

    kind = "curve"
    points: Annotated[tuple[Point, ...], FROM_LIST, FILLED]
    process: Literal["poisson", "gamma", "constant"] = "poisson"
    cv: Cv | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for before, after in zip(self.points, self.points[1:], strict=False):
            if after.at <= before.at:
                raise ValueError(
                    f"points must go forward in time, but {after.at:g}s follows {before.at:g}s; "
                    "sort them, and for a jump use kind: steps or two points 1ms apart"
                )
        if not any(point.rate for point in self.points):
            raise ValueError("every rate is 0/s; at least one point needs arrivals")
        if self.process == "gamma" and self.cv is None:
            raise ValueError("process: gamma needs the cv of its gaps; add e.g. cv: 1.8")
        if self.process != "gamma" and self.cv is not None:
            raise ValueError("cv belongs to process: gamma; add that, or leave cv out")
        return self

    def _unit_rate(self, rng: np.random.Generator, until: float) -> Counts:
        if self.cv is not None:
            return Gamma.model_construct(rate=1.0, cv=self.cv).times(rng, until)
        if self.process == "constant":
            return Constant.model_construct(rate=1.0).times(rng, until)
        return poisson_instants(rng, 1.0, until)

    def _pieces(self) -> Pieces:
        return Pieces.through([(point.at, point.rate) for point in self.points])


@dataclass(frozen=True)
class Pieces:
    """A piecewise linear rate: rates[j] + slopes[j] · (t − starts_s[j]) from starts_s[j] to the
    next start. starts_s[0] is 0; the last piece has slope 0 and no end."""

    starts_s: Times
    rates: NDArray[np.float64]  # per second, at the start of each piece
    slopes: NDArray[np.float64]  # per second², 0 in the last

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Self:
        """The linear interpolation of (seconds, rate) points, constant before the first and after
        the last."""
        if points[0][0] > 0:
            points = [(0.0, points[0][1]), *points]
        at_s, rates = (np.array(column) for column in zip(*points, strict=True))
        return cls(at_s, rates, np.append(np.diff(rates) / np.diff(at_s), 0.0))

    def expected(self, horizon_s: float) -> float:
        lasts_s = np.clip(horizon_s - self.starts_s, 0.0, np.append(np.diff(self.starts_s), inf))
        return float(np.sum((self.rates + self.slopes * lasts_s / 2) * lasts_s))

    def instants(self, expected: Counts) -> Times:
        lasts_s = np.diff(self.starts_s)
        counts = (self.rates[:-1] + self.slopes[:-1] * lasts_s / 2) * lasts_s
        begun = np.concatenate([[0.0], np.cumsum(counts)])  # Λ at the start of each piece
        piece = np.searchsorted(begun, expected, side="right") - 1
        rate, slope, rest = self.rates[piece], self.slopes[piece], expected - begun[piece]
        # rate · x + slope · x²/2 = rest, solved in the form without cancellation
        root = np.sqrt(np.maximum(rate**2 + 2 * slope * rest, 0.0))
        never = np.full(len(rest), inf)
        x_s = np.divide(2 * rest, rate + root, out=never, where=rate + root > 0)
        within_s: Times = np.minimum(x_s, np.append(lasts_s, inf)[piece])
        return self.starts_s[piece] + within_s


NEWTON_STEPS = 6


class Diurnal(VaryingRate):
    """Poisson arrivals with λ(t) = rate · (1 + A cos(2π(t − peak_at)/period)).

    A = (r − 1)/(r + 1) with r = peak_to_trough, so the highest rate is r times the lowest and the
    mean over whole periods is `rate`. Λ(t) = rate · (t + (period/2π) · A · (sin φ(t) −
    sin φ(0))), φ(t) = 2π(t − peak_at)/period; its inverse is Kepler's equation φ + A sin φ = M.
    """

    kind = "diurnal"
    rate: Rate
    peak_to_trough: Annotated[float, Field(ge=1, le=1000)]
    period: Annotated[Seconds, Field(gt=0)]
    peak_at: Seconds = 0.0

    def expected(self, horizon_s: float) -> float:
        first, last = self._phase(0.0), self._phase(horizon_s)
        swing = self._amplitude * (sin(last) - sin(first)) / self._angular_per_s
        return self.rate * (horizon_s + swing)

    def instants(self, expected: Counts) -> Times:
        first = self._phase(0.0)
        anomaly = first + self._amplitude * sin(first)  # M at t = 0
        anomalies = anomaly + expected * (self._angular_per_s / self.rate)
        turns = np.floor((anomalies + pi) / (2 * pi))
        phase = _kepler(anomalies - 2 * pi * turns, self._amplitude) + 2 * pi * turns
        return np.maximum((phase - first) / self._angular_per_s, 0.0)

    @property
    def _amplitude(self) -> float:
        return (self.peak_to_trough - 1) / (self.peak_to_trough + 1)

    @property
    def _angular_per_s(self) -> float:
        return 2 * pi / self.period

    def _phase(self, t_s: float) -> float:
        return self._angular_per_s * (t_s - self.peak_at)


class FlashCrowd(VaryingRate):
    """Poisson arrivals at `rate` plus a crowd whose rate grows exponentially until `at`, where the
    total is `peak`, and then decays exponentially.

    λ(t) = rate + C · e^{(t − at)/rise} before `at`, rate + C · e^{−(t − at)/decay} after it, with
    C = peak − rate: a factor of e within each `rise` and each `decay`. Inverting Λ leads to
    y + ln y = v, whose solution is Wright's ω(v).

    Source: R. M. Corless, D. J. Jeffrey, The Wright ω function, AISC (2002).
    """

    kind = "flash_crowd"
    rate: Rate
    peak: Rate
    at: Seconds
    rise: Annotated[Seconds, Field(gt=0)]
    decay: Annotated[Seconds, Field(gt=0)]

    @model_validator(mode="after")
    def _has_a_crowd(self) -> Self:
        if self.peak <= self.rate:
            raise ValueError(
                f"peak {self.peak:g}/s is not above rate {self.rate:g}/s, the level before and "
                "after the crowd; raise peak, or use kind: poisson"
            )
        return self

    def expected(self, horizon_s: float) -> float:
        crowd = self.peak - self.rate
        before = min(horizon_s, self.at)
        grown = self.rise * (exp((before - self.at) / self.rise) - exp(-self.at / self.rise))
        shrunk = self.decay * -np.expm1(-max(0.0, horizon_s - self.at) / self.decay)
        return float(self.rate * horizon_s + crowd * (grown + shrunk))

    def instants(self, expected: Counts) -> Times:
        at_peak = self.expected(self.at)
        before = self._while_rising(np.minimum(expected, at_peak))
        after = self._while_falling(np.maximum(expected - at_peak, 0.0))
        return np.where(expected < at_peak, np.clip(before, 0.0, self.at), self.at + after)

    def _while_rising(self, expected: Counts) -> Times:
        """x + q e^x = v with x = (t − at)/rise and q = C/rate: y = q e^x solves y + ln y =
        v + ln q."""
        from scipy.special import wrightomega  # 0.1 s to import; only flash crowds need it

        log_q = log(self.peak / self.rate - 1)
        spent = expected / self.rate - self.at
        v = spent / self.rise + exp(log_q - self.at / self.rise)
        y = wrightomega(v + log_q)
        x = np.where(y < 1, v - y, np.log(np.maximum(y, 1.0)) - log_q)
        return np.asarray(self.at + self.rise * x)

    def _while_falling(self, expected: Counts) -> Times:
        """z − q e^{−z} = v with z = (t − at)/decay: p = q e^{−z} solves p + ln p = ln q − v."""
        from scipy.special import wrightomega

        q = self.peak / self.rate - 1
        v = expected / (self.rate * self.decay) - q
        return np.asarray(self.decay * np.maximum(v + wrightomega(log(q) - v), 0.0))


def _kepler(anomaly: Counts, amplitude: float) -> Counts:
    """φ with φ + amplitude · sin φ = anomaly, for anomaly in [−π, π] and 0 ≤ amplitude < 1.

    Newton's method, confined to the interval of a 1025-point table that contains the solution.
    """
    table = np.linspace(-pi, pi, 1025)
    values = table + amplitude * np.sin(table)
    cell = np.clip(np.searchsorted(values, anomaly, side="right") - 1, 0, len(table) - 2)
    phase = np.interp(anomaly, values, table)
    low, high = table[cell], table[cell + 1]
    for _ in range(NEWTON_STEPS):
        excess = phase + amplitude * np.sin(phase) - anomaly
        phase = np.clip(phase - excess / (1 + amplitude * np.cos(phase)), low, high)
    return np.asarray(phase)
