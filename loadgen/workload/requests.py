"""Requests: lengths in tokens, shared prefixes, temperature and cancellation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, model_validator

from loadgen.fields import Share
from loadgen.manifest.json_section import JsonObject
from loadgen.registry import Plugin, Registry, Strict, bare_word
from loadgen.workload.durations import DURATIONS, Durations
from loadgen.workload.lengths import LENGTHS, Lengths, TokenCounts, Tokens
from loadgen.workload.pairs import MISPLACED, Joint, correlated

SOONEST_CANCEL_S = 1e-6  # 0 in the schedule means never


class Popularity(Plugin, ABC):
    """The distribution of requests over groups."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @abstractmethod
    def shares(self, groups: int) -> NDArray[np.float64]:
        """The probability of each group, float64 [groups], summing to 1."""


POPULARITIES: Registry[Popularity] = Registry(
    "slobench.popularities", "popularity of shared prefixes", bare_word
)


class UniformPopularity(Popularity):
    """Equal probability for every group."""

    kind = "uniform"

    def shares(self, groups: int) -> NDArray[np.float64]:
        return np.full(groups, 1 / groups)


class ZipfPopularity(Popularity):
    """Group k of K with probability k^−exponent / Σ_{j=1…K} j^−exponent: a few groups get most of
    the requests.

    Source: L. Breslau et al., Web Caching and Zipf-like Distributions, INFOCOM 1999 (exponents of
    0.64 to 0.83 for web pages).
    """

    kind = "zipf"
    exponent: Annotated[float, Field(gt=0, le=10)] = 1.0

    def shares(self, groups: int) -> NDArray[np.float64]:
        weights = np.arange(1, groups + 1, dtype=np.float64) ** -self.exponent
        shares: NDArray[np.float64] = weights / weights.sum()
        return shares


class SharedPrefix(Strict):
    """A text of `tokens` tokens in front of every prompt, identical within each of `groups` groups
    (a system prompt, a document). Its length is added to `input_tokens`.

    `hit_rate`: the share of requests that begin with a group's text; each other request begins with
    a unique text of the same length. An unlimited prefix cache then hits that share, except for the
    first request of each group.
    """

    tokens: Tokens
    groups: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    popularity: Annotated[Popularity, POPULARITIES] = UniformPopularity()
    hit_rate: Share = 1.0

    def draw_ids(self, rng: np.random.Generator, n: int) -> NDArray[np.uint32]:
        """The prefix of each of n requests, uint32 [n]: 1 … groups, or, with probability
        1 − hit_rate, a unique id above."""
        if self.popularity.kind == "uniform":
            ids = rng.integers(1, self.groups, n, endpoint=True)
        else:
            cumulative = np.cumsum(self.popularity.shares(self.groups))
            drawn = np.searchsorted(cumulative, rng.random(n) * cumulative[-1], side="right")
            ids = np.minimum(drawn, self.groups - 1) + 1
        if self.hit_rate < 1:
            is_unique = rng.random(n) >= self.hit_rate
            ids = np.where(is_unique, self.groups + np.cumsum(is_unique), ids)
        return ids.astype(np.uint32)


class Cancel(Strict):
    """Clients that disconnect: each request is cancelled with probability `share`, independently,
    `after` it was sent, unless it has ended by then."""

    share: Annotated[Share, Field(gt=0)]
    after: Annotated[Durations, DURATIONS]

    def draw_s(self, rng: np.random.Generator, n: int) -> NDArray[np.float64]:
        """Seconds from sending to cancellation of n requests, float64 [n]; 0 for a request that is
        not cancelled."""
        is_cancelled = rng.random(n) < self.share
        return np.where(is_cancelled, np.maximum(self.after.draw(rng, n), SOONEST_CANCEL_S), 0.0)


class SamplingFields(Strict):
    """Sampling parameters under the names by which servers know them; None is not sent, so that the
    server's default applies."""

    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None

    def body(self) -> JsonObject:
        """The fields of a request's body."""
        return self.model_dump(exclude_none=True)


class Requests(Strict):
    """The content of requests: lengths in tokens, sampling temperature and cancellation.

    Lengths are two distributions, optionally with the `correlation` of a Gaussian copula, or
    `kind: joint` with pairs at `input_tokens`. They may be left out if the arrivals (a trace) or
    the prompts (a dataset) state them.
    """

    input_tokens: Annotated[Lengths, LENGTHS] | None = None
    output_tokens: Annotated[Lengths, LENGTHS] | None = None
    correlation: Annotated[float, Field(ge=-1, le=1)] = 0.0
    shared_prefix: SharedPrefix | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    cancel: Cancel | None = None

    @model_validator(mode="after")
    def _states_lengths_once(self) -> Self:
        inputs, outputs = self.input_tokens, self.output_tokens
        if outputs is not None and outputs.gives_pairs:
            raise ValueError(MISPLACED)
        if inputs is not None and inputs.gives_pairs and (outputs is not None or self.correlation):
            raise ValueError(MISPLACED)
        if self.correlation and (inputs is None or outputs is None):
            raise ValueError(
                "correlation ties input_tokens to output_tokens; name both, or leave it out"
            )
        return self

    @property
    def has_lengths(self) -> bool:
        """Whether both input and output lengths are stated."""
        inputs, outputs = self.input_tokens, self.output_tokens
        return inputs is not None and (outputs is not None or inputs.gives_pairs)

    @property
    def mean_lengths(self) -> tuple[float | None, float | None]:
        """The expected input and output length in tokens, exact; None for a length not stated."""
        inputs, outputs = self.input_tokens, self.output_tokens
        if isinstance(inputs, Joint):
            return inputs.means
        return (None if inputs is None else inputs.mean, None if outputs is None else outputs.mean)

    def draw_lengths(
        self, input_rng: np.random.Generator, output_rng: np.random.Generator, n: int
    ) -> tuple[TokenCounts, TokenCounts]:
        """n input and n output lengths, uint32 [n] each; 1 for a length not stated.

        Pairs and correlated lengths are drawn from `input_rng` alone.
        """
        inputs, outputs = self.input_tokens, self.output_tokens
        if isinstance(inputs, Joint):
            return inputs.draw_pairs(input_rng, n)
        if self.correlation and inputs is not None and outputs is not None:
            return correlated(inputs, outputs, self.correlation, input_rng, n)
        ones = np.ones(n, np.uint32)
        return (
            ones if inputs is None else inputs.draw(input_rng, n),
            ones if outputs is None else outputs.draw(output_rng, n),
        )
