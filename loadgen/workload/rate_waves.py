"""Rates with a shape of their own: the day's sinusoid, and the crowd that comes and goes."""

from __future__ import annotations

from math import exp, log, pi, sin
from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from loadgen.records import Times
from loadgen.units import Rate, Seconds
from loadgen.workload.rate_curves import Counts, VaryingRate

NEWTON_STEPS = 6


class Diurnal(VaryingRate):
    """Poisson arrivals with λ(t) = rate · (1 + A cos(2π(t − peak_at)/period)).

    A = (r − 1)/(r + 1) with r = peak_to_trough, so that the highest rate is r times the lowest and
    the mean over whole periods is `rate`. Λ(t) = rate · (t + (period/2π) · A · (sin φ(t) −
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
        wanted = anomaly + expected * (self._angular_per_s / self.rate)
        turns = np.floor((wanted + pi) / (2 * pi))
        phase = _kepler(wanted - 2 * pi * turns, self._amplitude) + 2 * pi * turns
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
    """Poisson arrivals at `rate`, and a crowd on top: it grows exponentially to `peak` at `at` and
    then dies away.

    λ(t) = rate + C · e^{(t − at)/rise} before `at`, rate + C · e^{−(t − at)/decay} after it,
    C = peak − rate: e-fold within `rise` and `decay`. Inverting Λ gives y + ln y = v, whose
    solution is Wright's ω(v).

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
        from scipy.special import wrightomega  # 0.1 s to import, and only flash crowds need it

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

    Newton's method between the two points of a table of 1025 that enclose the solution.
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
