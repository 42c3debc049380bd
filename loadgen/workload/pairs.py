"""Input and output lengths drawn together: observed pairs, or two laws with a correlation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Annotated, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from loadgen.errors import ScenarioError
from loadgen.registry import FILLED, FROM_LIST
from loadgen.workload.empirical import read_columns
from loadgen.workload.lengths import Lengths, Shares, TokenCounts, Tokens

Pair = Annotated[tuple[Tokens, Tokens], FROM_LIST]


@dataclass(frozen=True, eq=False)  # comparisons use the kind's fields, not these arrays
class _PairLaw:
    """The observed pairs, and the probability of each."""

    inputs: TokenCounts
    outputs: TokenCounts
    shares: Shares


class Joint(Lengths):
    """An observed pair [input, output] of `pairs`, drawn with equal probability or by weight. It is
    written at `input_tokens`; `output_tokens` is left out.

    `path` names a CSV file (columns input_tokens, output_tokens and, optionally, weight; in this
    order if there is no header) or a JSON file (a list of [input, output], or of mappings with
    these names). `support`, `cdf` and the moments are those of the inputs.
    """

    kind = "joint"
    gives_pairs: ClassVar[bool] = True
    path: str | None = None
    pairs: Annotated[tuple[Pair, ...], FROM_LIST, FILLED] | None = None

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.path is None) == (self.pairs is None):
            raise ValueError("give either path (a file) or pairs (a list), not both or neither")
        _ = self._law  # reads the file now, so that its errors are reported with the scenario's
        return self

    def draw_pairs(self, rng: np.random.Generator, n: int) -> tuple[TokenCounts, TokenCounts]:
        """n independent pairs: inputs and outputs, uint32 [n] each."""
        law = self._law
        chosen = np.searchsorted(np.cumsum(law.shares)[:-1], rng.random(n), side="right")
        return law.inputs[chosen], law.outputs[chosen]

    @property
    def means(self) -> tuple[float, float]:
        """The expected input and output length in tokens, exact."""
        law = self._law
        return float(law.inputs @ law.shares), float(law.outputs @ law.shares)

    @property
    def support(self) -> tuple[int, int]:
        return int(self._law.inputs.min()), int(self._law.inputs.max())

    def cdf(self, tokens: NDArray[np.integer]) -> Shares:
        order = np.argsort(self._law.inputs, kind="stable")
        below = np.concatenate([[0.0], np.cumsum(self._law.shares[order])])
        n_below = np.searchsorted(self._law.inputs[order], tokens, side="right")
        return np.asarray(np.minimum(below[n_below], 1.0))

    def draw(self, rng: np.random.Generator, n: int) -> TokenCounts:
        raise ScenarioError(MISPLACED)

    def ppf(self, shares: Shares) -> TokenCounts:
        raise ScenarioError(MISPLACED)

    @cached_property
    def _law(self) -> _PairLaw:
        if self.path is not None:
            columns = read_columns(self.path, "input_tokens", "output_tokens")
            inputs, outputs = columns["input_tokens"], columns["output_tokens"]
            weights = columns.get("weight", np.ones(len(inputs)))
        else:
            inputs, outputs = np.array(self.pairs, np.float64).T
            weights = np.ones(len(inputs))
        return _PairLaw(
            inputs.astype(np.uint32), outputs.astype(np.uint32), weights / weights.sum()
        )


MISPLACED = (
    "kind: joint draws input and output lengths together: it belongs at "
    "requests.input_tokens, with output_tokens and correlation left out; for one length "
    "alone use kind: empirical"
)


def correlated(
    inputs: Lengths, outputs: Lengths, correlation: float, rng: np.random.Generator, n: int
) -> tuple[TokenCounts, TokenCounts]:
    """Lengths with a Gaussian copula: each keeps its own distribution exactly.

    With Z_1, Z_2 standard normal of correlation ρ, the lengths are F_1⁻¹(Φ(Z_1)) and F_2⁻¹(Φ(Z_2)).
    ρ is `correlation`; for lengths with many values, Kendall's τ is (2/π) asin ρ and Spearman's
    rank correlation (6/π) asin(ρ/2). Pearson's correlation of the token counts is smaller in
    absolute value and depends on the two laws.

    Source: R. B. Nelsen, An Introduction to Copulas (2nd ed. 2006), sections 2.3 and 5.1.
    """
    from scipy.special import ndtr  # 0.1 s to import; only correlated lengths need it

    normal = rng.standard_normal((n, 2))
    second = correlation * normal[:, 0] + sqrt(1 - correlation**2) * normal[:, 1]
    below_one = np.nextafter(1.0, 0.0)
    return (
        inputs.ppf(np.minimum(ndtr(normal[:, 0]), below_one)),
        outputs.ppf(np.minimum(ndtr(second), below_one)),
    )
