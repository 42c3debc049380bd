"""The Llama block in float32 torch; also Qwen2's, which adds a bias to queries, keys and values,
and Qwen3's, which adds a norm on queries and keys.

    x → norm → q,k,v → rope → paged attention → o → +x → norm → silu(gate)·up → down → +x

The step's tokens are one flat list for every linear layer; only attention knows whose they are
(selective batching; source: Orca, OSDI'22, §3.2).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from reference_engine.executors.base import Copy
from reference_engine.model.attention import Desk, Paging, StepInput, paged_attention
from reference_engine.model.config import ModelConfig
from reference_engine.model.layers import Layer, fused
from reference_engine.model.linear import Linear
from reference_engine.model.weights import Weights


class Llama:
    """A model with its own paged KV memory of `n_blocks` blocks per layer."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        n_blocks: int,
        block_tokens: int,
        max_model_len: int,
    ) -> None:
        self.config, self.block_tokens = config, block_tokens
        self._embed = weights["model.embed_tokens.weight"]
        self._head = Linear(self._embed if config.tied else weights["lm_head.weight"])
        self._norm = weights["model.norm.weight"]
        self._layers = [
            fused(config, i, weights.__getitem__, Linear) for i in range(config.n_layers)
        ]
        self._cos, self._sin = rotary_tables(config, max_model_len)
        # Zeros, not empty: masked padding is multiplied by 0, and 0 · NaN would be NaN.
        self._cache = torch.zeros(
            config.n_layers, 2, config.n_kv_heads, n_blocks, block_tokens, config.head_dim
        )
        self.paging, self._desk = Paging.of(self._cache[0]), Desk()

    def host_memory(self, n_blocks: int) -> torch.Tensor:
        """Room for the KV of `n_blocks` blocks of all layers, outside the paged memory."""
        before, after = self._cache.shape[:3], self._cache.shape[4:]
        return self._cache.new_zeros((*before, n_blocks, *after))

    def copy_block(self, host: torch.Tensor, copy: Copy) -> None:
        """Move one block of all layers to `host` or back."""
        here, there = self._cache[:, :, :, copy.block], host[:, :, :, copy.host_block]
        if copy.is_out:
            there.copy_(here)
        else:
            here.copy_(there)

    def forward(self, step: StepInput) -> torch.Tensor:
        """Logits [S, vocab] float32 of the positions in `step.last`; K and V of every position
        are in the cache afterwards."""
        x = F.embedding(step.tokens, self._embed)  # [T, d]
        rotary = self._cos[step.positions].unsqueeze(1), self._sin[step.positions].unsqueeze(1)
        for layer, cache in zip(self._layers, self._cache, strict=True):
            layer.o.add_to(x, self._attend(layer, cache, x, rotary, step))
            layer.down.add_to(x, self._feed(layer, x))
        wanted = x if len(step.last) == len(x) else x.index_select(0, step.last)
        return self._head(self._rms(wanted, self._norm))

    def _attend(
        self,
        layer: Layer[Linear],
        cache: torch.Tensor,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        step: StepInput,
    ) -> torch.Tensor:
        c, n_tokens = self.config, x.shape[0]
        qkv = layer.qkv(self._rms(x, layer.norm))
        if layer.qkv_bias is not None:
            qkv.add_(layer.qkv_bias)
        n_rotated = c.n_heads + c.n_kv_heads
        qk = qkv[:, : n_rotated * c.head_dim].view(n_tokens, n_rotated, c.head_dim)
        if layer.qk_norm is not None:
            qk.copy_(self._rms(qk, layer.qk_norm))
        turned = qk.roll(c.head_dim // 2, -1)
        qk.mul_(rotary[0]).addcmul_(turned, rotary[1])
        q, kv = qkv[:, : c.n_heads * c.head_dim], qkv[:, c.n_heads * c.head_dim :]
        cache.view(-1, c.head_dim).index_copy_(0, step.slots, kv.reshape(-1, c.head_dim))
        q = q.reshape(n_tokens, c.n_heads, c.head_dim)
        return paged_attention(q, cache, step, self._desk)

    def _feed(self, layer: Layer[Linear], x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(self._rms(x, layer.ffn_norm)).chunk(2, -1)
        return F.silu(gate).mul_(up)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # F.rms_norm and mean() each cost twice this for the small batches of decoding on a CPU.
        mean = (x * x).sum(-1, keepdim=True).mul_(1.0 / x.shape[-1])
        scale = mean.add_(self.config.rms_eps).rsqrt_()
        return (x * scale).mul_(weight)


def rotary_tables(config: ModelConfig, max_model_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [positions, head_dim]; sin carries the sign of rotate-half, so that
    rope(x) = x·cos + roll(x, head_dim/2)·sin.

    Source: RoFormer (arXiv 2104.09864) §3.2, in the half-split layout of Llama's HF weights.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = _stretched(1.0 / config.rope_theta**exponents, config)
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _stretched(frequencies: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a linear blend
    between."""
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
