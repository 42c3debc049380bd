"""By how much greedy tokens fall short of the likeliest, by the plain model in float64 on the same
weights and the same context: the margin rule, under which two engines with rounding of their own
may differ only where it is a near tie."""

from __future__ import annotations

import numpy as np
import torch

from reference_engine.kernels.ops import PLAIN
from reference_engine.kernels.tiles import Piece, Tiles, cut
from reference_engine.model.config import ModelConfig
from reference_engine.model.paged import PagedLlama, PagedStep
from reference_engine.model.weights import random_weights


def shortfalls(
    config: ModelConfig, dtype: torch.dtype, tokens: list[int], n_prompt: int
) -> list[float]:
    """For each token after the prompt: largest logit − its logit, as a share of the logits'
    spread (standard deviation); 0 where it is the likeliest. Weights are rounded to `dtype`."""
    weights = {k: v.to(dtype).double() for k, v in random_weights(config, 0).items()}
    n = len(tokens)
    model = PagedLlama(config, weights, PLAIN, 16, n)
    model.cache = model.memory(-(-n // 16))
    at = torch.arange(n, dtype=torch.int32)
    group = config.n_heads // config.n_kv_heads
    step = PagedStep(
        torch.tensor(tokens, dtype=torch.int32), at, at,
        torch.arange(-(-n // 16), dtype=torch.int32).view(1, -1), 0, at[:0], at[:0],
        Tiles(torch.from_numpy(cut([Piece(0, 0, n, 0)], group))),
    )  # fmt: skip
    logits = model.forward(step, torch.empty(n, config.vocab_size, dtype=torch.float64))
    seen = logits[n_prompt - 1 : -1]
    chosen = seen.gather(1, torch.tensor(tokens[n_prompt:]).unsqueeze(1)).squeeze(1)
    short: np.ndarray = ((seen.amax(1) - chosen) / seen.std(1)).numpy()
    return [float(x) for x in short]
