"""Sampling parameters of running requests as arrays, and tokens that need more than a temperature.

Most requests are greedy or have a temperature, which the sampling kernel handles for the whole
step. *Special* requests need truncation (top-k, top-p), banned tokens or log-probabilities. Their
tokens are chosen on the device after the step's logits, and are copied back with the others:
nothing here waits for the device. Truncated draws are those of the CPU executor; a request that
only bans tokens or has log-probabilities keeps the draw that it would have without.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from reference_engine.executors.torch_memory import Arena, aligned
from reference_engine.kernels.ops import Sample
from reference_engine.model.sampling import (
    SEED_MASK,
    TruncatedDraws,
    draw_truncated,
    keys,
    uniforms_of,
)
from reference_engine.state.sequence import Request, Sampling

Ints = NDArray[np.int32]
_ALWAYS = (1 << 31) - 1


class Draws(NamedTuple):
    """Parameters of the sampling kernel for each sampled row, on the device."""

    temperatures: torch.Tensor  # [S] float32
    keys: torch.Tensor  # [S, 2] int32

    @classmethod
    def of(cls, temperatures: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> Draws:
        """From the three numbers of each row in the arena, int32 [S]."""
        return cls(temperatures.view(torch.float32), torch.stack((low, high), 1))


class SamplingTable:
    """The sampling parameters of the requests in the rows of a block table.

    They do not change while a request runs, and are read once, when it gets its row: to read those
    of 256 requests in each step takes longer than to plan it.
    """

    def __init__(self, n_rows: int) -> None:
        self._n_prompt = np.zeros(n_rows, np.int32)
        self._special_until = np.zeros(n_rows, np.int32)  # number of output tokens
        self._temperatures = np.zeros(n_rows, np.int32)  # bits of float32, 0 is greedy
        self._seeds = np.zeros(n_rows, np.uint64)

    def assign(self, row: int, request: Request) -> None:
        sampling = request.sampling
        self._n_prompt[row] = request.n_prompt
        banned_until = request.min_tokens if request.stop_ids else 0
        is_always_special = sampling.logprobs or is_truncated(sampling)
        self._special_until[row] = _ALWAYS if is_always_special else min(banned_until, _ALWAYS)
        self._temperatures[row] = np.float32(max(sampling.temperature, 0.0)).view(np.int32)
        self._seeds[row] = sampling.seed & SEED_MASK

    def n_outputs(self, rows: Ints, positions: Ints) -> Ints:
        """The number of output tokens so far of requests that compute their last token, at
        `positions` [n]."""
        outputs: Ints = positions - self._n_prompt.take(rows)
        outputs += 1
        return outputs

    def special(self, rows: Ints, n_outputs: Ints) -> list[int]:
        """Indices of the special requests among `rows`."""
        is_special = n_outputs < self._special_until.take(rows)
        return np.flatnonzero(is_special).tolist() if is_special.any() else []

    def write_draws(self, rows: Ints, n_outputs: Ints, out: Ints) -> None:
        """Write temperature bits, key low and key high to `out` [3, n]; greedy rows are zeros."""
        out[0] = self._temperatures.take(rows)
        out[1:] = 0
        if out[0].any():
            drawn = np.flatnonzero(out[0])
            bits = keys(self._seeds[rows[drawn]], n_outputs[drawn])
            out[1:, drawn] = bits.view(np.int32).reshape(-1, 2).T


def is_truncated(sampling: Sampling) -> bool:
    """Whether top-k or top-p excludes tokens from the draw."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


class SpecialSampling(NamedTuple):
    """The special requests of a step; those with truncation come first."""

    rows: Ints  # [A], row of the logits
    banned: Ints  # [2, B], index among the A, token
    truncation: Ints  # [3, C], temperature (bits), top_k, top_p (bits)
    uniforms: Ints  # [2·C], float64 (bits)
    answers: tuple[int, ...]  # [A], index among the step's sampled requests
    has_logprobs: tuple[bool, ...]  # [A]

    @property
    def size(self) -> int:
        """Numbers of an arena that they occupy at most."""
        return sum(aligned(part.size) for part in self[:4]) + 2 * aligned(1)

    def put(self, arena: Arena) -> SpecialOnDevice:
        """Send it to the device."""
        rows, banned, uniforms = (
            arena.put(part) for part in (self.rows, self.banned, self.uniforms)
        )
        temperatures, top_ks, top_ps = (arena.put(part) for part in self.truncation)
        arena.send()
        draws = TruncatedDraws(
            temperatures.view(torch.float32),
            top_ks,
            top_ps.view(torch.float32),
            uniforms.view(torch.float64),
        )
        return SpecialOnDevice(rows.long(), banned.long(), draws, any(self.has_logprobs))

    def all_logprobs(self, logprobs: Sequence[float], n_answers: int) -> list[float]:
        """The log-probability of each of the step's sampled requests; NaN for requests without
        `logprobs`."""
        out = [nan] * n_answers
        for i, is_wanted, logprob in zip(self.answers, self.has_logprobs, logprobs, strict=True):
            if is_wanted:
                out[i] = logprob
        return out


class SpecialOnDevice(NamedTuple):
    rows: torch.Tensor  # [A] int64
    banned: torch.Tensor  # [2, B] int64
    truncated: TruncatedDraws
    has_logprobs: bool


def special_sampling(
    places: Sequence[int], requests: Sequence[Request], special: Sequence[int], n_vocab: int
) -> SpecialSampling:
    """The sampling of `requests[i]` for each i in `special`; its logits are in row `places[i]`."""
    order = sorted(special, key=lambda i: not is_truncated(requests[i].sampling))
    truncated = [requests[i] for i in order if is_truncated(requests[i].sampling)]
    truncation = np.empty((3, len(truncated)), np.int32)
    truncation[0] = np.array([r.sampling.temperature for r in truncated], np.float32).view(np.int32)
    truncation[1] = [min(r.sampling.top_k or n_vocab, n_vocab) for r in truncated]
    truncation[2] = np.array([r.sampling.top_p for r in truncated], np.float32).view(np.int32)
    banned = [(k, token) for k, i in enumerate(order) for token in requests[i].banned_ids()]
    return SpecialSampling(
        np.array([places[i] for i in order], np.int32),
        np.ascontiguousarray(np.array(banned, np.int32).reshape(-1, 2).T),
        truncation,
        uniforms_of(truncated).view(np.int32),
        tuple(order),
        tuple(requests[i].sampling.logprobs for i in order),
    )


def choose_special(
    logits: torch.Tensor, draws: Draws, special: SpecialOnDevice, sample: Sample
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens [A], int64, and the natural log-probability of each before bans, temperature and
    truncation, float32 [A]; None if no request has `logprobs`."""
    own = logits.index_select(0, special.rows)  # [A, V], a copy
    normaliser = own.logsumexp(-1) if special.has_logprobs else None
    if special.banned.shape[1]:
        own.index_put_((special.banned[0], special.banned[1]), own.new_full((), float("-inf")))
    temperatures = draws.temperatures.index_select(0, special.rows)
    tokens = sample(own, temperatures, draws.keys.index_select(0, special.rows))
    n_truncated = len(special.truncated.uniforms)
    if n_truncated:
        tokens[:n_truncated] = draw_truncated(own[:n_truncated], special.truncated)
    if normaliser is None:
        return tokens, None
    return tokens, own.gather(1, tokens.unsqueeze(1)).squeeze(1) - normaliser
