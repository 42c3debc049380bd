"""Rates that vary in time along straight pieces or an exponential, followed by time-rescaling.

Where Λ(t) is the integral of the rate and s_1 < s_2 < … a process of rate 1, the arrivals are
t_i = Λ⁻¹(s_i). The expected number in [0, t) is exactly Λ(t), since s begins in equilibrium.

Source: E. Çinlar, Introduction to Stochastic Processes (1975), section 4.7; I. Gerhardt,
B. L. Nelson, INFORMS J. Computing 21 (2009), section 3 (renewal processes).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import expm1, inf, log
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, model_validator

from loadgen.records import Times
from loadgen.registry import Block
from loadgen.units import Level, Seconds
from loadgen.workload.arrivals import Arrivals
from loadgen.workload.lists import FILLED, FROM_LIST
from loadgen.workload.renewal import Cv, constant_instants, gamma_instants, poisson_instants

Counts = NDArray[np.float64]  # expected arrivals since t = 0


class VaryingRate(Arrivals, ABC):
    """An inhomogeneous process, given by the integral Λ of its rate and the inverse of that."""

    @abstractmethod
    def expected(self, horizon_s: float) -> float:
        """Λ(horizon_s): the expected number of arrivals in [0, horizon_s)."""

    @abstractmethod
    def instants(self, expected: Counts) -> Times:
        """Λ⁻¹: the seconds at which so many arrivals are expected; infinite where never."""

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        # a hair further than Λ(horizon), so that the cut is made in seconds and rounding in Λ
        # cannot make it depend on the horizon
        unit = self._unit_rate(rng, self.expected(horizon_s) * (1 + 1e-9))
        instants = np.maximum.accumulate(self.instants(unit))
        return instants[: np.searchsorted(instants, horizon_s)]

    def mean_rate_per_s(self, horizon_s: float) -> float:
        return self.expected(horizon_s) / horizon_s if horizon_s > 0 else 0.0

    def _unit_rate(self, rng: np.random.Generator, until: float) -> Counts:
        return poisson_instants(rng, 1.0, until)


class Ramp(VaryingRate):
    """Poisson arrivals whose rate goes from `from` to `to` within `over` and then stays there.

    linear: λ(t) = from + (to − from) · t/over. exponential: λ(t) = from · (to/from)^(t/over), equal
    factors in equal times; Λ(t) = from · (e^{kt} − 1)/k, k = ln(to/from)/over.
    """

    kind = "ramp"
    start: Annotated[Level, Field(alias="from")]
    to: Level
    over: Annotated[Seconds, Field(gt=0)]
    shape: Literal["linear", "exponential"] = "linear"

    @model_validator(mode="after")
    def _goes_somewhere(self) -> Self:
        if not (self.start or self.to):
            raise ValueError("from and to are both 0/s; one of them must be positive")
        if self.shape == "exponential" and not (self.start and self.to):
            raise ValueError(
                "an exponential ramp multiplies, so it can neither begin nor end at 0/s; write "
                "e.g. '0.1/s', or shape: linear"
            )
        return self

    def expected(self, horizon_s: float) -> float:
        if not self._growth_per_s:
            return self._pieces().expected(horizon_s)
        within_s, after_s = min(horizon_s, self.over), max(0.0, horizon_s - self.over)
        grown = self.start * expm1(self._growth_per_s * within_s) / self._growth_per_s
        return grown + self.to * after_s

    def instants(self, expected: Counts) -> Times:
        growth_per_s = self._growth_per_s
        if not growth_per_s:
            return self._pieces().instants(expected)
        grown = self.expected(self.over)
        within = np.log1p(np.minimum(expected, grown) * (growth_per_s / self.start)) / growth_per_s
        return np.where(expected < grown, within, self.over + (expected - grown) / self.to)

    @property
    def _growth_per_s(self) -> float:
        """k of an exponential ramp; 0 where the rate is piecewise linear."""
        return log(self.to / self.start) / self.over if self.shape == "exponential" else 0.0

    def _pieces(self) -> Pieces:
        return Pieces.through([(0.0, self.start), (self.over, self.to)])


class RateStep(Block):
    """A rate and how long it holds."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    rate: Level
    lasts: Annotated[Seconds, Field(gt=0, alias="for")]


class Steps(VaryingRate):
    """Poisson arrivals at one constant rate after another; the last one holds to the end.

    Λ(t) is piecewise linear. A level may be `0/s`.
    """

    kind = "steps"
    levels: Annotated[tuple[RateStep, ...], FROM_LIST, FILLED]

    @model_validator(mode="after")
    def _has_a_rate(self) -> Self:
        if not any(step.rate for step in self.levels):
            raise ValueError("every rate is 0/s; at least one level needs arrivals")
        return self

    def expected(self, horizon_s: float) -> float:
        return self._pieces().expected(horizon_s)

    def instants(self, expected: Counts) -> Times:
        return self._pieces().instants(expected)

    def _pieces(self) -> Pieces:
        ends_s = np.cumsum([step.lasts for step in self.levels])
        starts_s = np.concatenate([[0.0], ends_s[:-1]])
        rates = np.array([step.rate for step in self.levels])
        return Pieces(starts_s, rates, np.zeros(len(rates)))


class Point(Block):
    """A rate at an instant."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    at: Seconds
    rate: Level


class Curve(VaryingRate):
    """A rate that runs straight from point to point and is flat before the first and after the
    last; Λ is piecewise quadratic.

    `process` is what is rescaled: poisson, gamma with gap cv `cv`, or constant (evenly spaced in
    operational time: the k-th arrival where Λ passes k + U).
    """

    kind = "curve"
    points: Annotated[tuple[Point, ...], FROM_LIST, FILLED]
    process: Literal["poisson", "gamma", "constant"] = "poisson"
    cv: Cv | None = None

    @model_validator(mode="after")
    def _can_be_meant(self) -> Self:
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

    def expected(self, horizon_s: float) -> float:
        return self._pieces().expected(horizon_s)

    def instants(self, expected: Counts) -> Times:
        return self._pieces().instants(expected)

    def _unit_rate(self, rng: np.random.Generator, until: float) -> Counts:
        if self.cv is not None:
            return gamma_instants(rng, 1.0, self.cv, until)
        if self.process == "constant":
            return constant_instants(rng, 1.0, until)
        return poisson_instants(rng, 1.0, until)

    def _pieces(self) -> Pieces:
        return Pieces.through([(point.at, point.rate) for point in self.points])


@dataclass(frozen=True)
class Pieces:
    """A piecewise linear rate: rates[j] + slopes[j] · (t − starts_s[j]) from starts_s[j] = t_j to
    the next start; the last piece, of slope 0, never ends. starts_s[0] is 0."""

    starts_s: Times
    rates: NDArray[np.float64]  # per second, at the start of each piece
    slopes: NDArray[np.float64]  # per second², 0 in the last

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Self:
        """Straight from point to point (seconds, rate), flat before the first and after the
        last."""
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
        rate, slope, missing = self.rates[piece], self.slopes[piece], expected - begun[piece]
        # rate · x + slope · x²/2 = missing, in the form that does not cancel
        root = np.sqrt(np.maximum(rate**2 + 2 * slope * missing, 0.0))
        never = np.full(len(missing), inf)
        x_s = np.divide(2 * missing, rate + root, out=never, where=rate + root > 0)
        within_s: Times = np.minimum(x_s, np.append(lasts_s, inf)[piece])
        return self.starts_s[piece] + within_s
