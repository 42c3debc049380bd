"""The margin rule for greedy tokens: engines that round differently may choose different tokens
only at near ties. The shortfall of a token is measured by the plain model in float64 with the same
weights and the same context."""

from __future__ import annotations

import torch

from reference_engine.kernels.ops import PLAIN
from reference_engine.kernels.tiles import PromptPiece, Tiles, cut_tiles
from reference_engine.model.paged import PagedLlama, PagedStep
from reference_engine.model.weights import Weights, random_weights, shapes
from reference_engine.state.model_config import ModelConfig


def shortfalls(
    config: ModelConfig, dtype: torch.dtype, tokens: list[int], n_prompt: int
) -> list[float]:
    """For each token after the prompt: largest logit − its logit, as a share of the standard
    deviation of the logits; 0 for the likeliest token. Weights are those of seed 0, rounded to
    `dtype`."""
    weights = {k: v.to(dtype) for k, v in random_weights(config, 0).items()}
    return Oracle(config, weights, len(tokens)).shortfalls(tokens, n_prompt)


class Oracle:
    """The plain model in float64, on the device of its weights."""

    def __init__(self, config: ModelConfig, weights: Weights, max_model_len: int) -> None:
        wide = {name: tensor.double() for name, tensor in weights.items()}
        self._config, self._model = config, PagedLlama(config, wide, PLAIN, 16, max_model_len)

    @torch.inference_mode()
    def shortfalls(self, tokens: list[int], n_prompt: int) -> list[float]:
        n, n_blocks, device = len(tokens), -(-len(tokens) // 16), self._model.device
        self._model.cache = self._model.memory(n_blocks)
        at = torch.arange(n, dtype=torch.int32, device=device)
        group = self._config.n_heads // self._config.n_kv_heads
        step = PagedStep(
            torch.tensor(tokens, dtype=torch.int32, device=device), at, at,
            torch.arange(n_blocks, dtype=torch.int32, device=device).view(1, -1),
            0, at[:0], at[:0],
            Tiles(torch.from_numpy(cut_tiles([PromptPiece(0, 0, n, 0)], group)).to(device)),
            torch.arange(n_prompt - 1, n - 1, device=device),
        )  # fmt: skip
        out = torch.empty(n, self._config.vocab_size, dtype=torch.float64, device=device)
        logits = self._model.forward(step, out)
        answer = torch.tensor(tokens[n_prompt:], device=device)
        chosen = logits.gather(1, answer.unsqueeze(1)).squeeze(1)
        shares: list[float] = ((logits.amax(1) - chosen) / logits.std(1)).tolist()
        return shares


def lively_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Weights:
    """Random weights, drawn on the device, with which tokens depend on every part of the model.

    Layers add more to the residual stream than the embeddings (with a tied head every token would
    otherwise be followed by itself), scores differ, norms are not 1, and biases are as large as the
    numbers that they are added to.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.randn(shape, generator=generator, device=device)
        if len(shape) == 1:
            return tensor if name.endswith(".bias") else 1 + 0.2 * tensor
        is_layers = name.startswith("model.layers")
        return tensor.mul_(1.5 * shape[1] ** -0.5 if is_layers else 0.02)

    return {name: drawn(name, shape).to(dtype) for name, shape in shapes(config).items()}
