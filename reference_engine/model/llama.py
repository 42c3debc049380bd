"""The Llama block on the CPU, in float32; also Qwen2's, with a bias on queries, keys and values,
and Qwen3's, with a norm on queries and keys.

    x → norm → q,k,v → rope → paged attention → o → +x → norm → silu(gate)·up → down → +x

All tokens of a step form a single flat list for the linear layers; only attention treats sequences
separately (selective batching; source: Orca, OSDI'22, §3.2).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from reference_engine.model.attention import KvLayout, ScratchMemory, StepInput, attend
from reference_engine.model.huge_pages import zeros
from reference_engine.model.linear import Linear
from reference_engine.model.weights import Layer, TakeTensor, Weights, fused_layer
from reference_engine.state.batch import Copy
from reference_engine.state.model_config import ModelConfig

# Tokens of a step that go through a layer's matrices together: intermediate results then stay in
# the core's own cache, and in memory that the process already has.
_STRIP_TOKENS = 512


class Strip(NamedTuple):
    """Views of up to `_STRIP_TOKENS` tokens of a step."""

    x: torch.Tensor  # [n, d], the residual stream
    q: torch.Tensor  # [n, Hq, hd], the queries, replaced by the output of attention
    rotations: torch.Tensor  # [n, 1, hd/2] complex
    slots: torch.Tensor  # [n, 2·Hkv]


class Llama:
    """A model with its own paged KV memory of `n_blocks` blocks per layer. It empties `weights`, so
    that no matrix is in memory twice."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        n_blocks: int,
        block_tokens: int,
        max_model_len: int,
    ) -> None:
        self.config, self.block_tokens = config, block_tokens
        self._embed = weights.pop("model.embed_tokens.weight")
        self._head = Linear(self._embed if config.tied else weights.pop("lm_head.weight"))
        self._norm = weights.pop("model.norm.weight")
        take = interleaved(weights.pop, config.head_dim)
        self._layers = [fused_layer(config, i, take, Linear) for i in range(config.n_layers)]
        weights.clear()
        self._rotations = rotations(config, max_model_len)
        self._eps = torch.tensor(config.rms_eps)
        # Zeros, not uninitialised: masked padding is multiplied by 0, and 0 · NaN is NaN.
        self._cache = zeros(
            config.n_layers, 2, config.n_kv_heads, n_blocks, block_tokens, config.head_dim
        )
        self.layout = KvLayout(config.n_heads, config.n_kv_heads, n_blocks, block_tokens)
        self._scratch = ScratchMemory()

    def host_memory(self, n_blocks: int) -> torch.Tensor:
        """Memory for swapped KV: `n_blocks` blocks of all layers, outside the paged memory."""
        before, after = self._cache.shape[:3], self._cache.shape[4:]
        return zeros(*before, n_blocks, *after)

    def copy_block(self, host: torch.Tensor, copy: Copy) -> None:
        """Copy a block of all layers to `host` or back."""
        here, there = self._cache[:, :, :, copy.block], host[:, :, :, copy.host_block]
        if copy.is_out:
            there.copy_(here)
        else:
            here.copy_(there)

    def forward(self, step: StepInput) -> torch.Tensor:
        """Logits [S, vocab] float32 of positions `step.last`; K and V of all positions go to the
        cache."""
        x = F.embedding(step.tokens, self._embed)  # [T, d]
        q = self._scratch.queries(len(x), self.config.n_heads, self.config.head_dim)
        strips = self._strips(step, x, q)
        for layer, cache in zip(self._layers, self._cache, strict=True):
            for strip in strips:
                self._project(layer, cache, strip)
            attend(q, cache, step, self._scratch)
            for strip in strips:
                layer.o.add_to(strip.x, strip.q.flatten(1))
                layer.down.add_to(strip.x, self._feed(layer, strip.x))
        sampled = x if len(step.last) == len(x) else x.index_select(0, step.last)
        return self._head(self._rms(sampled, self._norm))

    def _strips(self, step: StepInput, x: torch.Tensor, q: torch.Tensor) -> list[Strip]:
        n = -(-len(x) // _STRIP_TOKENS)
        rotations = self._rotations[step.positions].unsqueeze(1)
        whole = (x, q, rotations, step.slots.view(len(x), -1))
        return [Strip(*parts) for parts in zip(*(part.chunk(n) for part in whole), strict=True)]

    def _project(self, layer: Layer[Linear], cache: torch.Tensor, strip: Strip) -> None:
        """Write the strip's queries to `strip.q`, its keys and values to the cache."""
        c, n_tokens = self.config, len(strip.x)
        qkv = layer.qkv(self._rms(strip.x, layer.norm))  # [n, (Hq + 2·Hkv)·hd]
        if layer.qkv_bias is not None:
            qkv.add_(layer.qkv_bias)
        n_rotated = c.n_heads + c.n_kv_heads
        qk = qkv[:, : n_rotated * c.head_dim].view(n_tokens, n_rotated, c.head_dim)
        if layer.qk_norm is not None:
            qk.copy_(self._rms(qk, layer.qk_norm))
        torch.view_as_complex(qk.view(n_tokens, n_rotated, -1, 2)).mul_(strip.rotations)
        strip.q.copy_(qk[:, : c.n_heads])
        kv = qkv[:, c.n_heads * c.head_dim :].reshape(-1, c.head_dim)  # [n·2·Hkv, hd]
        cache.view(-1, c.head_dim).index_copy_(0, strip.slots.reshape(-1), kv)

    def _feed(self, layer: Layer[Linear], x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(self._rms(x, layer.ffn_norm)).chunk(2, -1)
        return F.silu(gate).mul_(up)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # F.rms_norm takes 1.5 times as long for 16 rows on a CPU.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=1.0 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight)


def rotations(config: ModelConfig, max_model_len: int) -> torch.Tensor:
    """e^(i·angle) of each pair of `interleaved` outputs, [positions, head_dim/2] complex."""
    cos, sin = rotary_tables(config, max_model_len)
    half = config.head_dim // 2
    return torch.complex(cos[:, half:], sin[:, half:])


def interleaved(take: TakeTensor, head_dim: int) -> TakeTensor:
    """`take` with the outputs of q and k reordered: the two that a rotation mixes are half a head
    apart in a checkpoint, here they are neighbours and form a complex number. q·k is unchanged."""

    def taken(name: str) -> torch.Tensor:
        tensor = take(name)
        if not name.split(".")[-2].startswith(("q_", "k_")):
            return tensor
        heads = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
        return heads.transpose(1, 2).flatten(0, 2)

    return taken


def rotary_tables(config: ModelConfig, max_model_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [positions, head_dim]; sin carries the sign of rotate-half, so that
    rope(x) = x·cos + roll(x, head_dim/2)·sin.

    Source: RoFormer (arXiv 2104.09864) §3.2, in the half-split layout of Llama's HF weights.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = _scaled(1.0 / config.rope_theta**exponents, config)
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _scaled(frequencies: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Llama 3.1's scaling: low frequencies are divided by `factor`, high frequencies are unchanged,
    and those between are a linear blend."""
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    unchanged = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (unchanged + (1 - unchanged) / scaling.factor)
