"""Choice of tokens from logits on the CPU: bans and penalties, then greedy, or temperature, min-p,
top-k and top-p with a uniform number per token.

The number is a hash of (request seed, output position). A request's tokens therefore depend on
nothing else in the batch and on no generator state, and survive a preemption unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from reference_engine.state.batch import Logprob
from reference_engine.state.sequence import Request

SEED_MASK = (1 << 64) - 1
"""Seeds are integers of any size; their low 64 bits count."""


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """A token per row of `logits` [S, vocab] float32, which is overwritten."""
    for row, request in enumerate(requests):
        banned = list(request.banned_ids())
        if banned:
            logits[row, banned] = float("-inf")
    penalise(logits, *penalties_of(requests).tensors())
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
) -> tuple[list[int], list[Logprob | None] | None]:
    """`sample`, and the log-probability of each token before bans, penalties, temperature and
    truncation; None for requests without `logprobs`, and a single None if no request has it."""
    with_logprobs = [i for i, request in enumerate(requests) if request.sampling.logprobs]
    if not with_logprobs:
        return sample(logits, requests), None
    before = logits[with_logprobs].log_softmax(-1)  # `sample` overwrites the logits
    tokens = sample(logits, requests)
    chosen = before.gather(1, torch.tensor([[tokens[i]] for i in with_logprobs])).squeeze(1)
    n_top = [requests[i].sampling.top_logprobs for i in with_logprobs]
    top = TopTokens(*before.topk(min(max(n_top), before.shape[1])))
    logprobs: list[Logprob | None] = [None] * len(tokens)
    for i, logprob in zip(with_logprobs, top.logprobs_of(chosen, n_top), strict=True):
        logprobs[i] = logprob
    return tokens, logprobs


class TopTokens(NamedTuple):
    """The most likely tokens of each row, in descending order."""

    logprobs: torch.Tensor  # [n, k] float32
    ids: torch.Tensor  # [n, k] int64

    def logprobs_of(self, chosen: torch.Tensor, n_top: Sequence[int]) -> list[Logprob]:
        """The log-probabilities of each row: that of the chosen token [n], and the first `n_top`
        of its most likely tokens. The tensors must be on the CPU."""
        pairs = zip(self.ids.tolist(), self.logprobs.tolist(), strict=True)
        tops = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
        return [
            Logprob(logprob, top[:n])
            for logprob, top, n in zip(chosen.tolist(), tops, n_top, strict=True)
        ]


class Penalties(NamedTuple):
    """Changes of logits by penalties: a row, a token, a factor and a difference for each token of a
    penalised request that occurs in its prompt or output."""

    rows: NDArray[np.int32]  # [n]
    tokens: NDArray[np.int32]  # [n]
    factors: NDArray[np.float32]  # [n], 1 changes nothing
    differences: NDArray[np.float32]  # [n], subtracted

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The four columns on the CPU."""
        return tuple(torch.from_numpy(column) for column in self)


def penalties_of(requests: Sequence[Request]) -> Penalties:
    """The penalties for the next token of each request; `rows` are indices of `requests`."""
    parts = [np.empty((4, 0))]
    for row, request in enumerate(requests):
        sampling = request.sampling
        if not sampling.is_penalised:
            continue
        output, counts = np.unique(np.array(request.output, np.int64), return_counts=True)
        lost = sampling.frequency_penalty * counts + sampling.presence_penalty
        tokens, differences = output, lost
        if sampling.repetition_penalty != 1:
            tokens = np.unique(np.array(request.tokens, np.int64))
            differences = np.zeros(len(tokens))
            differences[np.searchsorted(tokens, output)] = lost
        n, factor = len(tokens), sampling.repetition_penalty
        parts.append(np.stack((np.full(n, row), tokens, np.full(n, factor), differences)))
    rows, tokens, factors, differences = np.concatenate(parts, axis=1)
    return Penalties(
        rows.astype(np.int32),
        tokens.astype(np.int32),
        factors.astype(np.float32),
        differences.astype(np.float32),
    )


def penalise(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    factors: torch.Tensor,
    differences: torch.Tensor,
) -> None:
    """Apply `Penalties` to `logits` [S, V] in place. Nothing here waits for the device."""
    if len(rows) == 0:
        return
    at = rows.long(), tokens.long()
    before = logits[at]
    after = torch.where(before > 0, before / factors, before * factors) - differences
    logits.index_put_(at, after)


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
    min_ps: torch.Tensor  # [n] float32; 0 truncates nothing
    uniforms: torch.Tensor  # [n] float64 in [0, 1)


def truncated_draws(requests: Sequence[Request], n_vocab: int) -> TruncatedDraws:
    """The draws of the next token of each request, on the CPU."""
    samplings = [request.sampling for request in requests]
    return TruncatedDraws(
        torch.tensor([s.temperature for s in samplings]),
        torch.tensor([s.top_k or n_vocab for s in samplings]),
        torch.tensor([s.top_p for s in samplings]),
        torch.tensor([s.min_p for s in samplings]),
        torch.from_numpy(uniforms_of(requests)),
    )


def draw_truncated(logits: torch.Tensor, draws: TruncatedDraws) -> torch.Tensor:
    """Draw a token from the truncated distribution of each row of `logits` [n, V], by inverse
    transform sampling; int64 [n]. Nothing here waits for the device.

    Min-p and top-k apply before top-p, as in vLLM. Min-p excludes tokens less likely than its share
    of the most likely token's probability. The token that crosses top-p stays in, so that the
    choice is never empty. The draw goes through the vocabulary in the order of token ids, not of
    probabilities: the last bit of a logit, which the rest of the batch may change, can swap the
    ranks of two nearly equal tokens, and a draw by rank would then return the other.
    """
    ordered, ids = (logits / draws.temperatures.unsqueeze(1)).sort(
        dim=-1, descending=True, stable=True
    )  # [n, V]
    ranks = torch.arange(logits.shape[1], device=logits.device)
    least = ordered[:, :1] + draws.min_ps.log().unsqueeze(1)  # [n, 1], -inf truncates nothing
    is_excluded = (ranks >= draws.top_ks.unsqueeze(1)) | (ordered < least)
    ordered.masked_fill_(is_excluded, float("-inf"))
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
