"""A mixture of length distributions, for traffic with several sorts of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    SerializationInfo,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)

from loadgen.registry import FILLED, FROM_LIST, Strict
from loadgen.workload.lengths import LENGTHS, Lengths, Shares, TokenCounts


@dataclass(frozen=True)
class Component:
    """A length distribution and its weight relative to the other components."""

    weight: float
    lengths: Lengths


class _Weight(Strict):
    weight: Annotated[float, Field(gt=0)]


_LENGTHS: TypeAdapter[Lengths] = TypeAdapter(Annotated[Lengths, LENGTHS])


def _component(spec: object) -> object:
    """A Component from `{weight: 0.3, kind: …, …}`; errors keep their key path."""
    if isinstance(spec, Component):
        return spec
    if not isinstance(spec, Mapping):
        raise ValueError(f"expected {{weight: …, kind: …}}, got {spec!r}")
    parameters = dict(spec)
    weight = {"weight": parameters.pop("weight")} if "weight" in parameters else {}
    return Component(_Weight.model_validate(weight).weight, _LENGTHS.validate_python(parameters))


def _flat(component: Component, info: SerializationInfo) -> dict[str, object]:
    return {"weight": component.weight, **LENGTHS.dump(component.lengths, info)}


_ENTRY = {
    "type": "object",
    "properties": {"weight": {"type": "number", "exclusiveMinimum": 0}, "kind": {"type": "string"}},
    "required": ["weight", "kind"],
}


class Mixture(Lengths):
    """A length from component i with probability w_i/Σw: F(x) = Σ w_i F_i(x)/Σw, and the mean
    accordingly."""

    kind = "mixture"
    of: Annotated[
        tuple[
            Annotated[
                InstanceOf[Component],
                BeforeValidator(_component),
                PlainSerializer(_flat),
                WithJsonSchema(_ENTRY),
            ],
            ...,
        ],
        FROM_LIST,
        FILLED,
    ]

    @model_validator(mode="after")
    def _has_single_lengths(self) -> Self:
        if any(component.lengths.gives_pairs for component in self.of):
            raise ValueError("kind: joint draws pairs; for one length use kind: empirical")
        return self

    @property
    def support(self) -> tuple[int, int]:
        supports = [component.lengths.support for component in self.of]
        return min(low for low, _ in supports), max(high for _, high in supports)

    def cdf(self, tokens: NDArray[np.integer]) -> Shares:
        total = np.zeros(tokens.shape)
        for share, lengths in self._parts():
            low, high = lengths.support
            inside = lengths.cdf(np.clip(tokens, low, high))
            total += share * np.where(tokens < low, 0.0, inside)
        return total

    def draw(self, rng: np.random.Generator, n: int) -> TokenCounts:
        parts = self._parts()
        edges = np.cumsum([share for share, _ in parts])[:-1]
        chosen = np.searchsorted(edges, rng.random(n), side="right")
        drawn = np.empty(n, np.uint32)
        for index, (_, lengths) in enumerate(parts):
            is_this = chosen == index
            drawn[is_this] = lengths.draw(rng, int(np.count_nonzero(is_this)))
        return drawn

    @property
    def mean(self) -> float:
        return sum(share * lengths.mean for share, lengths in self._parts())

    def _parts(self) -> list[tuple[float, Lengths]]:
        """(probability, lengths) of each component."""
        total = sum(component.weight for component in self.of)
        return [(component.weight / total, component.lengths) for component in self.of]
