"""From logits to tokens: greedy, or temperature / top-k / top-p with one uniform number per token.

The number is a hash of (request seed, output position), so a request's tokens depend on nothing
else in the batch, on no generator state, and survive a preemption unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from reference_engine.state.sequence import Request, Sampling

_MASK = (1 << 64) - 1


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """One token per row of `logits` [S, vocab] float32, which is overwritten."""
    for row, request in enumerate(requests):
        banned = list(request.banned_ids())
        if banned:
            logits[row, banned] = float("-inf")
    tokens: list[int] = logits.argmax(-1).tolist()
    hot = [i for i, request in enumerate(requests) if request.sampling.temperature > 0]
    n_vocab = logits.shape[1]
    if hot:
        how = [requests[i].sampling for i in hot]
        chosen = drawn(logits[hot], cuts_of(how, [requests[i].n_output for i in hot], n_vocab))
        for i, token in zip(hot, chosen.tolist(), strict=True):
            tokens[i] = token
    return tokens


def sample_with_logprobs(
    logits: torch.Tensor, requests: Sequence[Request]
) -> tuple[list[int], list[float] | None]:
    """`sample`, and the natural log-probability of each chosen token before temperature and cuts;
    NaN for requests that did not ask, None when none did."""
    asked = [i for i, request in enumerate(requests) if request.sampling.logprobs]
    if not asked:
        return sample(logits, requests), None
    normaliser = logits[asked].logsumexp(-1)
    tokens = sample(logits, requests)
    chosen = logits[asked, [tokens[i] for i in asked]] - normaliser  # a chosen one is not masked
    logprobs = [nan] * len(tokens)
    for i, logprob in zip(asked, chosen.tolist(), strict=True):
        logprobs[i] = logprob
    return tokens, logprobs


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of its arguments.

    Source: splitmix64's finaliser (Steele, Lea, Flood, OOPSLA'14), applied twice.
    """
    return (key(seed, position) >> 11) * 2.0**-53


def key(seed: int, position: int) -> int:
    """The 64 bits behind it."""
    return _mix(_mix(seed & _MASK) + position)


def keys(seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.uint64]:
    """`key` of each, [n]."""
    return _mixed(_mixed(seeds) + positions.astype(np.uint64))


def uniforms_of(seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.float64]:
    """`uniform` of each, [n]."""
    uniforms: NDArray[np.float64] = (keys(seeds, positions) >> np.uint64(11)).astype(np.float64)
    return uniforms * 2.0**-53


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class Cuts(NamedTuple):
    """How each of n rows is drawn: [n] each, on the device of the logits."""

    temperatures: torch.Tensor  # float32, > 0
    top_ks: torch.Tensor  # integers; the vocabulary's size cuts nothing
    top_ps: torch.Tensor  # float32
    uniforms: torch.Tensor  # float64 in [0, 1)


def cuts_of(how: Sequence[Sampling], positions: Sequence[int], n_vocab: int) -> Cuts:
    """For the tokens at these output positions; on the CPU."""
    return Cuts(
        torch.tensor([s.temperature for s in how]),
        torch.tensor([s.top_k or n_vocab for s in how]),
        torch.tensor([s.top_p for s in how]),
        torch.tensor(
            [uniform(s.seed, at) for s, at in zip(how, positions, strict=True)],
            dtype=torch.float64,
        ),
    )


def drawn(logits: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """Inverse transform sampling on the cut distribution of each row of `logits` [n, V]; int64
    [n]. Top-k is applied before top-p, as vLLM does; the token that crosses top-p stays in, so one
    always does. Nothing in it waits for the device.

    What is left is laid out in the order of the vocabulary and not of the probabilities: two tokens
    nearly as probable as each other change places there with the last bit of their logits, which
    the rest of the batch may turn, and the draw would fall on the other."""
    ordered, ids = (logits / cuts.temperatures.unsqueeze(1)).sort(
        dim=-1, descending=True, stable=True
    )
    ranks = torch.arange(logits.shape[1], device=logits.device)
    ordered.masked_fill_(ranks >= cuts.top_ks.unsqueeze(1), float("-inf"))
    p = ordered.softmax(-1, dtype=torch.float64)
    before = p.cumsum(-1) - p
    p.masked_fill_(before >= cuts.top_ps.unsqueeze(1), 0.0)
    by_token = torch.zeros_like(p).scatter_(1, ids, p)
    cumulative = by_token.cumsum(-1)
    targets = cuts.uniforms.unsqueeze(1) * cumulative[:, -1:]
    at = torch.searchsorted(cumulative, targets, right=True)
    # Rounding may put a target on the very end; the last token with any mass is then meant.
    last = (by_token > 0).mul(ranks).amax(-1, keepdim=True)
    return torch.minimum(at, last).squeeze(1)
