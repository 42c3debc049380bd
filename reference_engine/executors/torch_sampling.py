"""Sampling parameters of running requests as arrays, and tokens that need more than a temperature.

Most requests are greedy or have a temperature, which the sampling kernel handles for the whole
step. *Special* requests need truncation (top-k, top-p, min-p), banned tokens, penalties or
log-probabilities. Their tokens are chosen on the device after the step's logits, and are copied
back with the others: nothing here waits for the device. Truncated draws are those of the CPU
executor; a request that only bans tokens or has log-probabilities keeps the draw that it would have
without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from reference_engine.executors.torch_memory import Arena, aligned
from reference_engine.kernels.ops import Sample
from reference_engine.model.sampling import (
    SEED_MASK,
    TopTokens,
    TruncatedDraws,
    draw_truncated,
    keys,
    penalise,
    penalties_of,
    uniforms_of,
)
from reference_engine.state.batch import Logprob
from reference_engine.state.sequence import Request

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
        self._is_penalised = np.zeros(n_rows, bool)

    def assign(self, row: int, request: Request) -> None:
        sampling = request.sampling
        self._n_prompt[row] = request.n_prompt
        banned_until = request.min_tokens if request.stop_ids else 0
        is_always_special = sampling.logprobs or sampling.is_truncated or sampling.is_penalised
        self._special_until[row] = _ALWAYS if is_always_special else min(banned_until, _ALWAYS)
        self._temperatures[row] = np.float32(max(sampling.temperature, 0.0)).view(np.int32)
        self._seeds[row] = sampling.seed & SEED_MASK
        self._is_penalised[row] = sampling.is_penalised

    def has_penalties(self, rows: Ints) -> bool:
        """Whether the tokens of any of `rows` depend on the values of the tokens before."""
        return bool(self._is_penalised.take(rows).any())

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


class SpecialSampling(NamedTuple):
    """The special requests of a step; those with truncation come first."""

    rows: Ints  # [A], row of the logits
    banned: Ints  # [2, B], index among the A, token
    penalties: Ints  # [4, P], index among the A, token, factor (bits), difference (bits)
    truncation: Ints  # [4, C], temperature (bits), top_k, top_p (bits), min_p (bits)
    uniforms: Ints  # [2·C], float64 (bits)
    answers: tuple[int, ...]  # [A], index among the step's sampled requests
    n_top: tuple[int | None, ...]  # [A], most likely tokens to return; None without `logprobs`

    @property
    def size(self) -> int:
        """Numbers of an arena that they occupy at most."""
        return sum(aligned(part.size) for part in self[:5]) + 6 * aligned(1)

    def put(self, arena: Arena) -> SpecialOnDevice:
        """Send it to the device."""
        rows, banned, uniforms = (
            arena.put(part) for part in (self.rows, self.banned, self.uniforms)
        )
        at, tokens, factors, differences = (arena.put(part) for part in self.penalties)
        temperatures, top_ks, top_ps, min_ps = (arena.put(part) for part in self.truncation)
        arena.send()
        draws = TruncatedDraws(
            temperatures.view(torch.float32),
            top_ks,
            top_ps.view(torch.float32),
            min_ps.view(torch.float32),
            uniforms.view(torch.float64),
        )
        penalties = at, tokens, factors.view(torch.float32), differences.view(torch.float32)
        wanted = [n for n in self.n_top if n is not None]
        return SpecialOnDevice(
            rows.long(), banned.long(), penalties, draws, max(wanted, default=None)
        )

    def all_logprobs(
        self, chosen: torch.Tensor, top: TopTokens, n_answers: int
    ) -> list[Logprob | None]:
        """The log-probabilities of each of the step's sampled requests, from those of the special
        requests; None for requests without `logprobs`."""
        out: list[Logprob | None] = [None] * n_answers
        logprobs = top.logprobs_of(chosen, [n or 0 for n in self.n_top])
        for i, n, logprob in zip(self.answers, self.n_top, logprobs, strict=True):
            if n is not None:
                out[i] = logprob
        return out


class SpecialOnDevice(NamedTuple):
    rows: torch.Tensor  # [A] int64
    banned: torch.Tensor  # [2, B] int64
    penalties: tuple[torch.Tensor, ...]  # index, token (int32), factor, difference (float32); [P]
    truncated: TruncatedDraws
    n_top: int | None  # the largest of any request; None if no request has `logprobs`


def special_sampling(
    places: Sequence[int], requests: Sequence[Request], special: Sequence[int], n_vocab: int
) -> SpecialSampling:
    """The sampling of `requests[i]` for each i in `special`; its logits are in row `places[i]`."""
    order = sorted(special, key=lambda i: not requests[i].sampling.is_truncated)
    samplings = [requests[i].sampling for i in order]
    truncated = [requests[i] for i in order if requests[i].sampling.is_truncated]
    cuts = samplings[: len(truncated)]
    truncation = np.empty((4, len(truncated)), np.int32)
    truncation[0] = _bits([s.temperature for s in cuts])
    truncation[1] = [min(s.top_k or n_vocab, n_vocab) for s in cuts]
    truncation[2] = _bits([s.top_p for s in cuts])
    truncation[3] = _bits([s.min_p for s in cuts])
    penalties = penalties_of([requests[i] for i in order])
    banned = [(k, token) for k, i in enumerate(order) for token in requests[i].banned_ids()]
    return SpecialSampling(
        np.array([places[i] for i in order], np.int32),
        np.ascontiguousarray(np.array(banned, np.int32).reshape(-1, 2).T),
        np.stack([column.view(np.int32) for column in penalties]),
        truncation,
        uniforms_of(truncated).view(np.int32),
        tuple(order),
        tuple(s.top_logprobs if s.logprobs else None for s in samplings),
    )


def _bits(values: Sequence[float]) -> Ints:
    bits: Ints = np.array(values, np.float32).view(np.int32)
    return bits


class SpecialTokens(NamedTuple):
    """The tokens of the special requests, int64 [A]. `logprobs`, float32 [A], and `top` are None if
    no request has `logprobs`; they are before bans, penalties, temperature and truncation."""

    tokens: torch.Tensor
    logprobs: torch.Tensor | None = None
    top: TopTokens | None = None


def choose_special(
    logits: torch.Tensor, draws: Draws, special: SpecialOnDevice, sample: Sample
) -> SpecialTokens:
    """The tokens of the special requests, and their log-probabilities."""
    own = logits.index_select(0, special.rows)  # [A, V], a copy
    n_top = special.n_top
    before = None if n_top is None else own.log_softmax(-1)
    if special.banned.shape[1]:
        own.index_put_((special.banned[0], special.banned[1]), own.new_full((), float("-inf")))
    penalise(own, *special.penalties)
    temperatures = draws.temperatures.index_select(0, special.rows)
    tokens = sample(own, temperatures, draws.keys.index_select(0, special.rows))
    n_truncated = len(special.truncated.uniforms)
    if n_truncated:
        tokens[:n_truncated] = draw_truncated(own[:n_truncated], special.truncated)
    if before is None or n_top is None:
        return SpecialTokens(tokens)
    chosen = before.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return SpecialTokens(tokens, chosen, TopTokens(*before.topk(min(n_top, before.shape[1]))))
