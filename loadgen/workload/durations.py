"""Duration distributions in seconds ≥ 0, for the pauses of people and tools between requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import exp, log
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, model_validator

from loadgen.fields import Seconds
from loadgen.registry import Plugin, Registry

Pauses = NDArray[np.float64]  # seconds, each ≥ 0


class Durations(Plugin, ABC):
    """A distribution on durations."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @abstractmethod
    def draw(self, rng: np.random.Generator, n: int) -> Pauses:
        """n independent durations, float64 seconds [n]."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """The expected duration in seconds, exact."""


def _bare_duration(spec: object) -> dict[str, object] | None:
    # a bare number is accepted here, so that the error message asks for its unit
    is_scalar = isinstance(spec, str | int | float)
    return {"kind": "fixed", "duration": spec} if is_scalar else None


DURATIONS: Registry[Durations] = Registry(
    "slobench.durations", "duration distribution", _bare_duration
)


class FixedDuration(Durations):
    """Always `duration`; a plain duration in YAML (`think: 5s`) is this kind."""

    kind = "fixed"
    duration: Seconds

    def draw(self, rng: np.random.Generator, n: int) -> Pauses:
        return np.full(n, self.duration)

    @property
    def mean(self) -> float:
        return self.duration


class UniformDuration(Durations):
    """Every duration from `min` to `max` equally likely; mean (min + max)/2."""

    kind = "uniform"
    min: Seconds
    max: Seconds

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min:g}s is above max {self.max:g}s")
        return self

    def draw(self, rng: np.random.Generator, n: int) -> Pauses:
        return rng.uniform(self.min, self.max, n)

    @property
    def mean(self) -> float:
        return (self.min + self.max) / 2


class ExponentialDuration(Durations):
    """Exponential with the given mean: the think time of the classical interactive-user model.

    Source: E. D. Lazowska et al., Quantitative System Performance (1984), section 4.2 (think time).
    """

    kind = "exponential"
    mean_duration: Annotated[Seconds, Field(gt=0, alias="mean")]

    def draw(self, rng: np.random.Generator, n: int) -> Pauses:
        return rng.exponential(self.mean_duration, n)

    @property
    def mean(self) -> float:
        return self.mean_duration


class LognormalDuration(Durations):
    """exp(N(ln median, sigma²)): most are short, a few very long; the mean is
    median · exp(sigma²/2)."""

    kind = "lognormal"
    median: Annotated[Seconds, Field(gt=0)]
    sigma: Annotated[float, Field(gt=0, le=5)]

    def draw(self, rng: np.random.Generator, n: int) -> Pauses:
        return rng.lognormal(log(self.median), self.sigma, n)

    @property
    def mean(self) -> float:
        return self.median * exp(self.sigma**2 / 2)
