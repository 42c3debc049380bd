"""Lengths as they were observed: a list of values, with weights or without, inline or in a file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from loadgen.workload.length_files import read_columns
from loadgen.workload.lengths import Lengths, Shares, TokenCounts, Tokens
from loadgen.workload.lists import FILLED, FROM_LIST

Weight = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, eq=False)  # what it was read from is compared, not the arrays
class _Law:
    """The possible lengths, sorted, and P(length ≤ each)."""

    values: TokenCounts
    shares: Shares


class Empirical(Lengths):
    """One of the observed `values`, with probability proportional to its weight (equal if none are
    given); P(x) = Σ_{values = x} weight / Σ weight.

    `path` names a CSV file (a column of tokens and, optionally, one of weights; a header line may
    say `tokens,weight`) or a JSON file (a list of numbers, or {"values": […], "weights": […]}).
    """

    kind = "empirical"
    path: str | None = None
    values: Annotated[tuple[Tokens, ...], FROM_LIST, FILLED] | None = None
    weights: Annotated[tuple[Weight, ...], FROM_LIST] | None = None

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        if (self.path is None) == (self.values is None):
            raise ValueError("give either path (a file) or values (a list), not both or neither")
        if self.weights is not None and self.values is None:
            raise ValueError("weights go with values; in a file they are its second column")
        if self.weights is not None and self.values is not None:
            if len(self.weights) != len(self.values):
                raise ValueError(
                    f"{len(self.weights)} weights for {len(self.values)} values; give each its own"
                )
            if not sum(self.weights):
                raise ValueError("every weight is 0; at least one value must be possible")
        _ = self._law  # reads the file now, so that its mistakes are told with the scenario's
        return self

    @property
    def support(self) -> tuple[int, int]:
        values = self._law.values
        return int(values[0]), int(values[-1])

    def cdf(self, tokens: NDArray[np.integer]) -> Shares:
        n_below = np.searchsorted(self._law.values, tokens, side="right")
        return np.concatenate([[0.0], self._law.shares])[n_below]

    def ppf(self, shares: Shares) -> TokenCounts:
        index = np.searchsorted(self._law.shares, shares, side="right")
        return self._law.values[np.minimum(index, len(self._law.values) - 1)]

    @cached_property
    def _law(self) -> _Law:
        if self.path is not None:
            columns = read_columns(self.path, ("tokens", "weight"), n_required=1)
            tokens = columns["tokens"]
            weights = columns.get("weight", np.ones(len(tokens)))
        else:
            tokens = np.array(self.values, np.float64)
            weights = np.ones(len(tokens)) if self.weights is None else np.array(self.weights)
        values, index = np.unique(tokens.astype(np.uint32), return_inverse=True)
        totals = np.bincount(index, weights)
        is_possible = totals > 0
        cumulative = np.cumsum(totals[is_possible])
        return _Law(values[is_possible], cumulative / cumulative[-1])
