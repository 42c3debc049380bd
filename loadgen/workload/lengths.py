"""Length distributions in whole tokens ≥ 1: the base class, fixed, uniform and power law.

A kind defines its range (`support`) and its distribution function (`cdf`). Draws, quantiles and
moments follow from these exactly; a kind overrides those that it can compute faster. The other
kinds are in truncated_lengths.py, empirical.py, mixture.py and pairs.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from math import sqrt
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, model_validator

from loadgen.registry import Plugin, Registry

TokenCounts = NDArray[np.uint32]  # tokens, each ≥ 1
Shares = NDArray[np.float64]  # probabilities, 0 … 1
MAX_TOKENS = 10_000_000
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
CdfFunction = Callable[[NDArray[np.int64]], Shares]
_BLOCK = 1 << 20


class Lengths(Plugin, ABC):
    """A distribution on positive whole numbers of tokens.

    `gives_pairs`: the kind draws input and output lengths together (pairs.py), so `output_tokens`
    is left out.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    gives_pairs: ClassVar[bool] = False

    @property
    @abstractmethod
    def support(self) -> tuple[int, int]:
        """(lower, upper) bound of the lengths in tokens, both inclusive; the bounds themselves may
        have probability 0."""

    @abstractmethod
    def cdf(self, tokens: NDArray[np.integer]) -> Shares:
        """P(length ≤ tokens), elementwise and exact, for integers within the support."""

    def draw(self, rng: np.random.Generator, n: int) -> TokenCounts:
        """n independent lengths, uint32 [n]."""
        return self.ppf(rng.random(n))

    def ppf(self, shares: Shares) -> TokenCounts:
        """The quantiles: the smallest length x with cdf(x) > share, for shares in [0, 1).

        Uniformly distributed shares give lengths with exactly this distribution.
        """
        low, high = self.support
        if high - low < _BLOCK:
            # without the last value: rounding may make its probability less than 1.0
            steps = self.cdf(np.arange(low, high))
            return (low + np.searchsorted(steps, shares, side="right")).astype(np.uint32)
        return _by_bisection(self.cdf, shares, low, high)

    @property
    def mean(self) -> float:
        """The expected length in tokens, exact (after rounding and truncation)."""
        return self.support[0] + sum(float(np.sum(above)) for _, above in self._survival())

    @property
    def sd(self) -> float:
        """The standard deviation in tokens, exact (after rounding and truncation)."""
        low, mean = self.support[0], self.mean
        # E[X²] = low² + Σ_{x = low … high − 1} (2x + 1) P(X > x), here about the mean
        square = (low - mean) ** 2 + sum(
            float(np.sum((2 * (tokens - mean) + 1) * above)) for tokens, above in self._survival()
        )
        return sqrt(max(0.0, square))

    def _survival(self) -> Iterator[tuple[NDArray[np.int64], Shares]]:
        """(x, P(length > x)) for x from the lower bound to just below the upper bound, in
        blocks."""
        low, high = self.support
        for begin in range(low, high, _BLOCK):
            tokens = np.arange(begin, min(begin + _BLOCK, high))
            yield tokens, 1.0 - self.cdf(tokens)


def _bare_integer(spec: object) -> dict[str, object] | None:
    is_integer = isinstance(spec, int) and not isinstance(spec, bool)
    return {"kind": "fixed", "tokens": spec} if is_integer else None


LENGTHS: Registry[Lengths] = Registry("slobench.lengths", "length distribution", _bare_integer)


class Fixed(Lengths):
    """Always `tokens`; a plain integer in YAML is this kind."""

    kind = "fixed"
    tokens: Tokens

    @property
    def support(self) -> tuple[int, int]:
        return self.tokens, self.tokens

    def cdf(self, tokens: NDArray[np.integer]) -> Shares:
        return (tokens >= self.tokens).astype(np.float64)

    def draw(self, rng: np.random.Generator, n: int) -> TokenCounts:
        return np.full(n, self.tokens, np.uint32)


class Bounded(Lengths):
    """A distribution on the integers min … max."""

    if TYPE_CHECKING:  # every kind declares these keys itself, in its own order
        min: int
        max: int

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self

    @property
    def support(self) -> tuple[int, int]:
        return self.min, self.max


class Uniform(Bounded):
    """Every integer from `min` to `max`, both included, equally likely; mean (min + max)/2."""

    kind = "uniform"
    min: Tokens
    max: Tokens

    def cdf(self, tokens: NDArray[np.integer]) -> Shares:
        return np.asarray((tokens.astype(np.int64) - self.min + 1) / self._n)

    def draw(self, rng: np.random.Generator, n: int) -> TokenCounts:
        return rng.integers(self.min, self.max, n, np.uint32, endpoint=True)

    def ppf(self, shares: Shares) -> TokenCounts:
        # the product can round up to n itself, which is past the end
        return (self.min + np.minimum(shares * self._n, self._n - 1).astype(np.int64)).astype(
            np.uint32
        )

    @property
    def mean(self) -> float:
        return (self.min + self.max) / 2

    @property
    def _n(self) -> int:
        return self.max - self.min + 1


class PowerLaw(Bounded):
    """P(x) = x^−alpha / Σ_{y = min … max} y^−alpha on the integers min … max: a Zipf law truncated
    at both ends.

    Drawn by inverting the exact discrete distribution function; rounding a Pareto variable would be
    off by tens of per cent at small x. alpha is the exponent of the probabilities; the survival
    function falls with exponent alpha − 1.

    Source: A. Clauset, C. R. Shalizi, M. E. J. Newman, SIAM Review 51 (2009), appendix D.
    """

    kind = "power_law"
    alpha: Annotated[float, Field(gt=0, le=50)]
    min: Tokens
    max: Tokens

    def cdf(self, tokens: NDArray[np.integer]) -> Shares:
        cumulative = np.cumsum(self._weights())
        return np.asarray(cumulative[tokens.astype(np.int64) - self.min] / cumulative[-1])

    def ppf(self, shares: Shares) -> TokenCounts:
        cumulative = np.cumsum(self._weights())
        index = np.searchsorted(cumulative, shares * cumulative[-1], side="right")
        # the product can round up to the total itself, which is past the end
        lengths: TokenCounts = np.minimum(index, cumulative.size - 1).astype(np.uint32) + np.uint32(
            self.min
        )
        return lengths

    @property
    def mean(self) -> float:
        weights = self._weights()
        return float(np.arange(self.min, self.max + 1) @ weights / weights.sum())

    def _weights(self) -> Shares:
        """x^−alpha relative to that of min, float64 [max − min + 1] in (0, 1]."""
        weights: Shares = (np.arange(self.min, self.max + 1) / self.min) ** -self.alpha
        return weights


def _by_bisection(cdf: CdfFunction, shares: Shares, least: int, greatest: int) -> TokenCounts:
    """The smallest x in least … greatest with cdf(x) > share, elementwise."""
    low, high = np.full(shares.shape, least), np.full(shares.shape, greatest)
    while np.any(low < high):
        middle = (low + high) // 2
        is_above = cdf(middle) > shares
        low, high = np.where(is_above, low, middle + 1), np.where(is_above, middle, high)
        low = np.minimum(low, high)
    return low.astype(np.uint32)
