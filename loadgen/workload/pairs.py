"""Input and output lengths drawn together: observed pairs, or two laws tied by a correlation.

`requests` names its lengths in one of two ways: `tokens: {kind: joint, …}`, or `input_tokens` and
`output_tokens`, with a `correlation` between them or without.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from math import sqrt
from typing import Annotated, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, model_validator

from loadgen.registry import Plugin, Registry
from loadgen.workload.length_files import read_columns
from loadgen.workload.lengths import Lengths, TokenCounts, Tokens

COLUMNS = ("input_tokens", "output_tokens", "weight")


class Pairs(Plugin, ABC):
    """A distribution on pairs (input tokens, output tokens)."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @abstractmethod
    def draw(self, rng: np.random.Generator, n: int) -> tuple[TokenCounts, TokenCounts]:
        """n independent pairs: inputs and outputs, uint32 [n] each."""

    @property
    @abstractmethod
    def means(self) -> tuple[float, float]:
        """The expected input and output length in tokens, exact."""


PAIRS: Registry[Pairs] = Registry("slobench.pairs", "distribution of length pairs")


class Joint(Pairs):
    """One of the observed `pairs` [input, output], kept together, equally likely or by weight.

    `path` names a CSV file (columns input_tokens, output_tokens and, optionally, weight; without a
    header in this order) or a JSON file (a list of [input, output], or of mappings with these
    names).
    """

    kind = "joint"
    path: str | None = None
    pairs: (
        Annotated[
            tuple[Annotated[tuple[Tokens, Tokens], Field(strict=False)], ...],
            Field(strict=False, min_length=1),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        if (self.path is None) == (self.pairs is None):
            raise ValueError("give either path (a file) or pairs (a list), not both or neither")
        _ = self._law  # reads the file now, so that its mistakes are told with the scenario's
        return self

    def draw(self, rng: np.random.Generator, n: int) -> tuple[TokenCounts, TokenCounts]:
        inputs, outputs, shares = self._law
        edges = np.cumsum(shares)[:-1]
        chosen = np.searchsorted(edges, rng.random(n), side="right")
        return inputs[chosen], outputs[chosen]

    @property
    def means(self) -> tuple[float, float]:
        inputs, outputs, shares = self._law
        return float(inputs @ shares), float(outputs @ shares)

    @cached_property
    def _law(self) -> tuple[TokenCounts, TokenCounts, NDArray[np.float64]]:
        """Inputs, outputs and the probability of each pair."""
        if self.path is not None:
            columns = read_columns(self.path, COLUMNS, n_required=2)
            inputs, outputs = columns["input_tokens"], columns["output_tokens"]
            weights = columns.get("weight", np.ones(len(inputs)))
        else:
            inputs, outputs = np.array(self.pairs, np.float64).T
            weights = np.ones(len(inputs))
        return inputs.astype(np.uint32), outputs.astype(np.uint32), weights / weights.sum()


class Asked(Protocol):
    """What `requests` says about lengths."""

    @property
    def input_tokens(self) -> Lengths | None: ...
    @property
    def output_tokens(self) -> Lengths | None: ...
    @property
    def tokens(self) -> Pairs | None: ...
    @property
    def correlation(self) -> float: ...


def check_asked(asked: Asked) -> None:
    """Raises ValueError unless lengths are named in exactly one way."""
    if asked.tokens is not None:
        for key in ("input_tokens", "output_tokens"):
            if getattr(asked, key) is not None:
                raise ValueError(f"tokens draws pairs; leave {key} or tokens out")
        if asked.correlation:
            raise ValueError("tokens draws pairs, which have their own correlation; leave it out")
    for key in ("input_tokens", "output_tokens"):
        if asked.tokens is None and getattr(asked, key) is None:
            raise ValueError(f"{key} is required (or tokens: {{kind: joint, …}} for pairs)")


def draw_pair(
    asked: Asked,
    rng: np.random.Generator,
    n: int,
    output_rng: np.random.Generator | None = None,
) -> tuple[TokenCounts, TokenCounts]:
    """n input and n output lengths, uint32 [n] each, as `requests` asks for them.

    Independent lengths are drawn from `rng` and `output_rng` (`rng` again where it is None); what
    is tied together comes from `rng` alone. `asked` has passed `check_asked`.
    """
    if asked.tokens is not None:
        return asked.tokens.draw(rng, n)
    inputs, outputs = asked.input_tokens, asked.output_tokens
    assert inputs is not None, "requests without input_tokens"
    assert outputs is not None, "requests without output_tokens"
    if asked.correlation:
        return correlated(inputs, outputs, asked.correlation, rng, n)
    return inputs.draw(rng, n), outputs.draw(output_rng or rng, n)


def mean_pair(asked: Asked) -> tuple[float, float]:
    """The expected input and output length in tokens, exact. `asked` has passed `check_asked`."""
    if asked.tokens is not None:
        return asked.tokens.means
    assert asked.input_tokens is not None, "requests without input_tokens"
    assert asked.output_tokens is not None, "requests without output_tokens"
    return asked.input_tokens.mean, asked.output_tokens.mean


def correlated(
    inputs: Lengths, outputs: Lengths, correlation: float, rng: np.random.Generator, n: int
) -> tuple[TokenCounts, TokenCounts]:
    """Lengths tied by a Gaussian copula: each keeps its own law exactly.

    With Z_1, Z_2 standard normal of correlation ρ, the lengths are F_1⁻¹(Φ(Z_1)) and F_2⁻¹(Φ(Z_2)).
    ρ is `correlation`; for lengths with many values, Kendall's τ is (2/π) asin ρ and Spearman's
    rank correlation (6/π) asin(ρ/2). Pearson's correlation of the token counts is smaller in size
    and depends on the two laws.

    Source: R. B. Nelsen, An Introduction to Copulas (2nd ed. 2006), sections 2.3 and 5.1.
    """
    from scipy.special import ndtr  # 0.1 s to import, and only tied lengths need it

    normal = rng.standard_normal((n, 2))
    second = correlation * normal[:, 0] + sqrt(1 - correlation**2) * normal[:, 1]
    below_one = np.nextafter(1.0, 0.0)
    return (
        inputs.ppf(np.minimum(ndtr(normal[:, 0]), below_one)),
        outputs.ppf(np.minimum(ndtr(second), below_one)),
    )
