"""How long things are, in whole tokens: every kind draws from a distribution on integers ≥ 1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import erf, log, sqrt
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, model_validator

from loadgen.registry import Plugin, Registry

TokenCounts = NDArray[np.uint32]  # tokens, each ≥ 1
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]


class Lengths(Plugin, ABC):
    """A distribution on positive whole numbers of tokens."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @abstractmethod
    def draw(self, rng: np.random.Generator, n: int) -> TokenCounts:
        """n independent lengths, uint32 [n]."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """The expected length in tokens, exact: after rounding and truncation."""


def _bare_integer(spec: object) -> dict[str, object] | None:
    is_integer = isinstance(spec, int) and not isinstance(spec, bool)
    return {"kind": "fixed", "tokens": spec} if is_integer else None


LENGTHS: Registry[Lengths] = Registry("slobench.lengths", "length distribution", _bare_integer)


class Fixed(Lengths):
    """Always `tokens`; a bare integer in YAML means this kind."""

    kind = "fixed"
    tokens: Tokens

    def draw(self, rng: np.random.Generator, n: int) -> TokenCounts:
        return np.full(n, self.tokens, np.uint32)

    @property
    def mean(self) -> float:
        return float(self.tokens)


class Uniform(Lengths):
    """Every integer from `min` to `max`, both included, equally likely; mean (min + max)/2."""

    kind = "uniform"
    min: Tokens
    max: Tokens

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        _check_order(self.min, self.max)
        return self

    def draw(self, rng: np.random.Generator, n: int) -> TokenCounts:
        return rng.integers(self.min, self.max, n, np.uint32, endpoint=True)

    @property
    def mean(self) -> float:
        return (self.min + self.max) / 2


class Lognormal(Lengths):
    """exp(X) rounded to the nearest integer, X normal with mean ln(median) and deviation sigma,
    *truncated* to min … max: what falls outside is drawn again, so no probability piles up at the
    ends (as clamping would make it).

    P(x) = [Φ(z(x + ½)) − Φ(z(x − ½))] / [Φ(z(max + ½)) − Φ(z(min − ½))], z(y) = ln(y/median)/sigma,
    Φ the standard normal distribution function. Truncation moves the median and the mean; `mean` is
    the truncated one.
    """

    kind = "lognormal"
    median: Annotated[float, Field(gt=0)]
    sigma: Annotated[float, Field(gt=0, le=10)]
    min: Tokens = 1
    max: Tokens

    @model_validator(mode="after")
    def _is_reachable(self) -> Self:
        _check_order(self.min, self.max)
        if self._share_inside() < 1e-3:  # a thousand redraws per length: surely not what was meant
            raise ValueError(
                f"less than 0.1% of this distribution (median {self.median:g}) lies between "
                f"min {self.min} and max {self.max}; move median into that range"
            )
        return self

    def draw(self, rng: np.random.Generator, n: int) -> TokenCounts:
        lengths = np.empty(n, np.uint32)
        wanted = np.arange(n)
        while wanted.size:
            drawn = np.rint(rng.lognormal(log(self.median), self.sigma, wanted.size))
            is_inside = (drawn >= self.min) & (drawn <= self.max)
            lengths[wanted[is_inside]] = drawn[is_inside]
            wanted = wanted[~is_inside]
        return lengths

    @property
    def mean(self) -> float:
        from scipy.special import ndtr  # 0.1 s to import, and only `preview` asks for a mean

        lengths = np.arange(self.min, self.max + 1)
        edges = np.append(lengths - 0.5, self.max + 0.5)
        weights = np.diff(ndtr(np.log(edges / self.median) / self.sigma))
        return float(lengths @ weights / weights.sum())

    def _share_inside(self) -> float:
        low, high = (
            erf(log(edge / self.median) / self.sigma / sqrt(2))
            for edge in (self.min - 0.5, self.max + 0.5)
        )
        return (high - low) / 2


class PowerLaw(Lengths):
    """P(x) = x^−alpha / Σ_{y = min … max} y^−alpha on the integers min … max: a Zipf law with both
    ends cut.

    Drawn by inverting the exact discrete distribution function, not by rounding a Pareto variable
    (which is off by tens of per cent at small x). alpha is the exponent of the probabilities; the
    survival function falls with alpha − 1.

    Source: A. Clauset, C. R. Shalizi, M. E. J. Newman, SIAM Review 51 (2009), appendix D.
    """

    kind = "power_law"
    alpha: Annotated[float, Field(gt=0, le=50)]
    min: Tokens
    max: Tokens

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        _check_order(self.min, self.max)
        return self

    def draw(self, rng: np.random.Generator, n: int) -> TokenCounts:
        cumulative = np.cumsum(self._weights())
        drawn = np.searchsorted(cumulative, rng.random(n) * cumulative[-1], side="right")
        # the product can round up to the total itself, one past the end
        lengths: TokenCounts = np.minimum(drawn, cumulative.size - 1).astype(np.uint32) + np.uint32(
            self.min
        )
        return lengths

    @property
    def mean(self) -> float:
        weights = self._weights()
        return float(np.arange(self.min, self.max + 1) @ weights / weights.sum())

    def _weights(self) -> NDArray[np.float64]:
        """x^−alpha relative to that of min, float64 [max − min + 1] in (0, 1]."""
        weights: NDArray[np.float64] = (np.arange(self.min, self.max + 1) / self.min) ** -self.alpha
        return weights


def _check_order(low: int, high: int) -> None:
    if low > high:
        raise ValueError(f"min {low} is above max {high}")
