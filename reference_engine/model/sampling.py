"""Choice of tokens from logits on the CPU: greedy, or temperature, top-k and top-p with a uniform
number per token.

The number is a hash of (request seed, output position). A request's tokens therefore depend on
nothing else in the batch and on no generator state, and survive a preemption unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from reference_engine.state.sequence import Request

SEED_MASK = (1 << 64) - 1
"""Seeds are integers of any size; their low 64 bits count."""


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """A token per row of `logits` [S, vocab] float32, which is overwritten."""
    for row, request in enumerate(requests):
        banned = list(request.banned_ids())
        if banned:
            logits[row, banned] = float("-inf")
    tokens: list[int] = logits.argmax(-1).tolist()
    drawn = [i for i, request in enumerate(requests) if request.sampling.temperature > 0]
    if drawn:
        draws = truncated_draws([requests[i] for i in drawn], logits.shape[1])
        drawn_tokens = draw_truncated(logits[drawn], draws).tolist()
        for i, token in zip(drawn, drawn_tokens, strict=True):
            tokens[i] = token
    return tokens


def sample_with_logprobs(
    logits: torch.Tensor, requests: Sequence[Request]
) -> tuple[list[int], list[float] | None]:
    """`sample`, and the natural log-probability of each token before temperature and truncation;
    NaN for requests without `logprobs`, None if no request has it."""
    with_logprobs = [i for i, request in enumerate(requests) if request.sampling.logprobs]
    if not with_logprobs:
        return sample(logits, requests), None
    normaliser = logits[with_logprobs].logsumexp(-1)
    tokens = sample(logits, requests)
    # `sample` has masked banned tokens in `logits`, but never a chosen token.
    chosen = logits[with_logprobs, [tokens[i] for i in with_logprobs]] - normaliser
    logprobs = [nan] * len(tokens)
    for i, logprob in zip(with_logprobs, chosen.tolist(), strict=True):
        logprobs[i] = logprob
    return tokens, logprobs


def keys(seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.uint64]:
    """64 random bits for each seed and output position, a pure function of both, [n].

    Source: splitmix64's finaliser (Steele, Lea, Flood, OOPSLA'14), applied twice.
    """
    return _mixed(_mixed(seeds) + positions.astype(np.uint64))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.float64]:
    """The upper 53 bits of each key as a number in [0, 1), [n]."""
    numbers: NDArray[np.float64] = (keys(seeds, positions) >> np.uint64(11)).astype(np.float64)
    return numbers * 2.0**-53


def uniforms_of(requests: Sequence[Request]) -> NDArray[np.float64]:
    """The uniform number of each request's next token, [n]."""
    seeds = np.array([request.sampling.seed & SEED_MASK for request in requests], np.uint64)
    return uniforms(seeds, np.array([request.n_output for request in requests], np.int32))


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


class TruncatedDraws(NamedTuple):
    """Parameters of draws with top-k and top-p truncation, on the device of the logits."""

    temperatures: torch.Tensor  # [n] float32, > 0
    top_ks: torch.Tensor  # [n] integers; the size of the vocabulary truncates nothing
    top_ps: torch.Tensor  # [n] float32
    uniforms: torch.Tensor  # [n] float64 in [0, 1)


def truncated_draws(requests: Sequence[Request], n_vocab: int) -> TruncatedDraws:
    """The draws of the next token of each request, on the CPU."""
    samplings = [request.sampling for request in requests]
    return TruncatedDraws(
        torch.tensor([s.temperature for s in samplings]),
        torch.tensor([s.top_k or n_vocab for s in samplings]),
        torch.tensor([s.top_p for s in samplings]),
        torch.from_numpy(uniforms_of(requests)),
    )


def draw_truncated(logits: torch.Tensor, draws: TruncatedDraws) -> torch.Tensor:
    """Draw a token from the truncated distribution of each row of `logits` [n, V], by inverse
    transform sampling; int64 [n]. Nothing here waits for the device.

    Top-k applies before top-p, as in vLLM. The token that crosses top-p stays in, so that the
    choice is never empty. The draw goes through the vocabulary in the order of token ids, not of
    probabilities: the last bit of a logit, which the rest of the batch may change, can swap the
    ranks of two nearly equal tokens, and a draw by rank would then return the other.
    """
    ordered, ids = (logits / draws.temperatures.unsqueeze(1)).sort(
        dim=-1, descending=True, stable=True
    )  # [n, V]
    ranks = torch.arange(logits.shape[1], device=logits.device)
    ordered.masked_fill_(ranks >= draws.top_ks.unsqueeze(1), float("-inf"))
    p = ordered.softmax(-1, dtype=torch.float64)
    before = p.cumsum(-1) - p
    p.masked_fill_(before >= draws.top_ps.unsqueeze(1), 0.0)
    by_token = torch.zeros_like(p).scatter_(1, ids, p)
    cumulative = by_token.cumsum(-1)
    targets = draws.uniforms.unsqueeze(1) * cumulative[:, -1:]
    at = torch.searchsorted(cumulative, targets, right=True)
    # Rounding may put a target at the very end: it belongs to the last token with a probability.
    last = (by_token > 0).mul(ranks).amax(-1, keepdim=True)
    return torch.minimum(at, last).squeeze(1)
