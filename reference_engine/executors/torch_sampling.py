"""How the requests in the rows of a block table choose their tokens, as arrays.

What does not change while a request runs is looked at once, when it gets its row: to look at 256
of them again in each step takes longer than planning it.
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
from reference_engine.model.sampling import Cuts, drawn, keys, uniforms_of
from reference_engine.state.sequence import Request, Sampling

Ints = NDArray[np.int32]
_FOR_EVER = (1 << 31) - 1


class Draws(NamedTuple):
    """How each wanted token is chosen, on the device."""

    temperatures: torch.Tensor  # [S] float32
    keys: torch.Tensor  # [S, 2] int32

    @classmethod
    def of(cls, temperatures: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> Draws:
        """From the three numbers of each row as the arena has them, int32 [S]."""
        return cls(temperatures.view(torch.float32), torch.stack((low, high), 1))


class SamplingTable:
    """Of `n_rows` rows."""

    def __init__(self, n_rows: int) -> None:
        self._n_prompt = np.zeros(n_rows, np.int32)
        self._asks_until = np.zeros(n_rows, np.int32)  # this number of its output
        self._temperatures = np.zeros(n_rows, np.int32)  # bits of float32, 0 is greedy
        self._seeds = np.zeros(n_rows, np.uint64)

    def seat(self, row: int, request: Request) -> None:
        how = request.sampling
        self._n_prompt[row] = request.n_prompt
        banned_until = request.min_tokens if request.stop_ids else 0
        self._asks_until[row] = (
            _FOR_EVER if how.logprobs or is_cut(how) else min(banned_until, _FOR_EVER)
        )
        self._temperatures[row] = np.float32(max(how.temperature, 0.0)).view(np.int32)
        self._seeds[row] = how.seed & ((1 << 64) - 1)

    def n_outputs(self, rows: Ints, positions: Ints) -> Ints:
        """How many tokens of its answer each has that computes its last known one, at `positions`
        [n]."""
        outputs: Ints = positions - self._n_prompt.take(rows)
        outputs += 1
        return outputs

    def asking(self, rows: Ints, n_outputs: Ints) -> list[int]:
        """Which of them ask for more than a temperature."""
        asks = n_outputs < self._asks_until.take(rows)
        return np.flatnonzero(asks).tolist() if asks.any() else []

    def draws(self, rows: Ints, n_outputs: Ints, out: Ints) -> None:
        """Temperature bits and keys, [3, n]; zeros are greedy."""
        out[0] = self._temperatures.take(rows)
        out[1:] = 0
        if out[0].any():
            hot = np.flatnonzero(out[0])
            bits = keys(self._seeds[rows[hot]], n_outputs[hot])
            out[1:, hot] = bits.view(np.int32).reshape(-1, 2).T


def is_cut(how: Sampling) -> bool:
    """Whether some tokens cannot be drawn, however they come."""
    return how.temperature > 0 and (how.top_k > 0 or how.top_p < 1)


Ints = NDArray[np.int32]
_MASK = (1 << 64) - 1


class SamplingRequests(NamedTuple):
    """Those of a step, the ones with cuts first."""

    rows: Ints  # [A]: which of the logits
    banned: Ints  # [2, B]: which of them, token
    cuts: Ints  # [3, C]: temperature (bits), top_k, top_p (bits)
    uniforms: Ints  # [2·C]: float64 (bits)
    answers: tuple[int, ...]  # [A]: which of the answered requests
    telling: tuple[bool, ...]  # [A]: whether the log-probability is wanted

    @property
    def size(self) -> int:
        """Numbers of an arena that they take."""
        return sum(aligned(part.size) for part in self[:4]) + 2 * aligned(1)

    def told(self, logprobs: Sequence[float], n_answers: int) -> list[float]:
        """Of each answer; NaN for those that did not ask."""
        out = [nan] * n_answers
        for i, is_wanted, logprob in zip(self.answers, self.telling, logprobs, strict=True):
            if is_wanted:
                out[i] = logprob
        return out

    def put(self, arena: Arena) -> AsksOnDevice:
        """Sent to the device."""
        rows, banned, uniforms = (
            arena.put(part) for part in (self.rows, self.banned, self.uniforms)
        )
        temperatures, top_ks, top_ps = (arena.put(part) for part in self.cuts)
        arena.send()
        cuts = Cuts(
            temperatures.view(torch.float32),
            top_ks,
            top_ps.view(torch.float32),
            uniforms.view(torch.float64),
        )
        return AsksOnDevice(rows.long(), banned.long(), cuts, any(self.telling))


class AsksOnDevice(NamedTuple):
    rows: torch.Tensor
    banned: torch.Tensor
    cuts: Cuts
    is_telling: bool


def asks_of(
    places: Sequence[int], requests: Sequence[Request], asking: Sequence[int], n_vocab: int
) -> SamplingRequests:
    """What those of `requests` ask for that are `asking`, the logits of the i-th in row
    `places[i]`."""
    found = sorted(asking, key=lambda i: not is_cut(requests[i].sampling))
    cut = [requests[i] for i in found if is_cut(requests[i].sampling)]
    cuts = np.empty((3, len(cut)), np.int32)
    cuts[0] = np.array([r.sampling.temperature for r in cut], np.float32).view(np.int32)
    cuts[1] = [min(r.sampling.top_k or n_vocab, n_vocab) for r in cut]
    cuts[2] = np.array([r.sampling.top_p for r in cut], np.float32).view(np.int32)
    seeds = np.array([r.sampling.seed & _MASK for r in cut], np.uint64)
    uniforms = uniforms_of(seeds, np.array([r.n_output for r in cut], np.int32))
    banned = [(k, token) for k, i in enumerate(found) for token in requests[i].banned_ids()]
    return SamplingRequests(
        np.array([places[i] for i in found], np.int32),
        np.ascontiguousarray(np.array(banned, np.int32).reshape(-1, 2).T),
        cuts,
        uniforms.view(np.int32),
        tuple(found),
        tuple(requests[i].sampling.logprobs for i in found),
    )


def choose(
    logits: torch.Tensor, draws: Draws, asks: AsksOnDevice, sample: Sample
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens [A], int64, and the natural log-probability of each before bans, temperature and
    cuts, float32 [A], where anyone wants it."""
    own = logits.index_select(0, asks.rows)
    normaliser = own.logsumexp(-1) if asks.is_telling else None
    if asks.banned.shape[1]:
        own.index_put_((asks.banned[0], asks.banned[1]), own.new_full((), float("-inf")))
    temperatures = draws.temperatures.index_select(0, asks.rows)
    tokens = sample(own, temperatures, draws.keys.index_select(0, asks.rows))
    n_cut = len(asks.cuts.uniforms)
    if n_cut:
        tokens[:n_cut] = drawn(own[:n_cut], asks.cuts)
    if normaliser is None:
        return tokens, None
    return tokens, own.gather(1, tokens.unsqueeze(1)).squeeze(1) - normaliser
