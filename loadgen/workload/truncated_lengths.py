"""Length distributions from continuous laws, rounded to the nearest integer and truncated to
min … max."""

from __future__ import annotations

from abc import abstractmethod
from math import erf, log, sqrt
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from loadgen.workload.lengths import Bounded, Shares, TokenCounts, Tokens

Reals = NDArray[np.float64]
LEAST_SHARE_INSIDE = 1e-3


class Truncated(Bounded):
    """A positive or real variable Y with distribution function F, rounded and *truncated* to
    min … max: values outside are drawn again. (Clamping would pile up probability at the ends.)

    P(x) = [F(x + ½) − F(x − ½)] / [F(max + ½) − F(min − ½)]. Truncation changes the mean and the
    median; `mean` and `sd` are those of the truncated law, summed over the integers.
    """

    @abstractmethod
    def _continuous(self, rng: np.random.Generator, n: int) -> Reals:
        """n draws of Y."""

    @abstractmethod
    def _below(self, y: Reals) -> Shares:
        """F(y), for y > 0."""

    def cdf(self, tokens: NDArray[np.integer]) -> Shares:
        low, high = self._ends()
        return np.asarray((self._below(tokens.astype(np.float64) + 0.5) - low) / (high - low))

    def draw(self, rng: np.random.Generator, n: int) -> TokenCounts:
        least, greatest = self.support
        lengths = np.empty(n, np.uint32)
        open_rows = np.arange(n)
        while open_rows.size:
            drawn = np.rint(self._continuous(rng, open_rows.size))
            is_inside = (drawn >= least) & (drawn <= greatest)
            lengths[open_rows[is_inside]] = drawn[is_inside]
            open_rows = open_rows[~is_inside]
        return lengths

    def _ends(self) -> tuple[float, float]:
        least, greatest = self.support
        low, high = self._below(np.array([least - 0.5, greatest + 0.5])).tolist()
        return low, high


class Normal(Truncated):
    """N(mean, sd²), rounded and truncated; `min` is 1 by default."""

    kind = "normal"
    centre: Annotated[float, Field(gt=0, alias="mean")]
    spread: Annotated[float, Field(gt=0, alias="sd")]
    min: Tokens = 1
    max: Tokens

    @model_validator(mode="after")
    def _is_reachable(self) -> Self:
        z = [(edge - self.centre) / self.spread for edge in (self.min - 0.5, self.max + 0.5)]
        _check_reachable(_normal_share(*z), self.min, self.max, f"mean {self.centre:g}", "mean")
        return self

    def _continuous(self, rng: np.random.Generator, n: int) -> Reals:
        return rng.normal(self.centre, self.spread, n)

    def _below(self, y: Reals) -> Shares:
        from scipy.special import ndtr  # 0.1 s to import; draws do not need it

        return np.asarray(ndtr((y - self.centre) / self.spread))


class Lognormal(Truncated):
    """exp(X), X normal with mean ln(median) and standard deviation sigma, rounded and truncated;
    `min` is 1 by default."""

    kind = "lognormal"
    median: Annotated[float, Field(gt=0)]
    sigma: Annotated[float, Field(gt=0, le=10)]
    min: Tokens = 1
    max: Tokens

    @model_validator(mode="after")
    def _is_reachable(self) -> Self:
        z = [log(edge / self.median) / self.sigma for edge in (self.min - 0.5, self.max + 0.5)]
        _check_reachable(_normal_share(*z), self.min, self.max, f"median {self.median:g}", "median")
        return self

    def _continuous(self, rng: np.random.Generator, n: int) -> Reals:
        return rng.lognormal(log(self.median), self.sigma, n)

    def _below(self, y: Reals) -> Shares:
        from scipy.special import ndtr

        return np.asarray(ndtr(np.log(y / self.median) / self.sigma))


class GammaLengths(Truncated):
    """Gamma with shape k = 1/cv² and scale mean · cv² (before truncation), rounded and truncated;
    `min` is 1 by default. cv 1 is exponential."""

    kind = "gamma"
    centre: Annotated[float, Field(gt=0, alias="mean")]
    cv: Annotated[float, Field(gt=0, le=20)]
    min: Tokens = 1
    max: Tokens

    @model_validator(mode="after")
    def _is_reachable(self) -> Self:
        low, high = self._ends()
        _check_reachable(high - low, self.min, self.max, f"mean {self.centre:g}", "mean")
        return self

    def _continuous(self, rng: np.random.Generator, n: int) -> Reals:
        return rng.gamma(self._shape, self.centre / self._shape, n)

    def _below(self, y: Reals) -> Shares:
        from scipy.special import gammainc

        return np.asarray(gammainc(self._shape, y * (self._shape / self.centre)))

    @property
    def _shape(self) -> float:
        return self.cv**-2


def _normal_share(low_z: float, high_z: float) -> float:
    return (erf(high_z / sqrt(2)) - erf(low_z / sqrt(2))) / 2


def _check_reachable(share: float, low: int, high: int, centre: str, key: str) -> None:
    """Raise ValueError if min … max holds so little of the law that a length takes over 1000 draws,
    which is surely a mistake in the scenario."""
    if share < LEAST_SHARE_INSIDE:
        raise ValueError(
            f"less than 0.1% of this distribution ({centre}) lies between "
            f"min {low} and max {high}; move {key} into that range"
        )
