"""The Llama block for accelerators, over paged KV and the operations of `kernels`.

It computes the arithmetic of `llama.Llama` in the dtype of the weights. K and V of a block are
neighbours in memory, and all shapes depend on the size of a step alone, so that a decode step can
be a CUDA graph. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from reference_engine.kernels.kv_memory import Kv
from reference_engine.kernels.ops import Ops
from reference_engine.kernels.tiles import DecodeWork, Tiles
from reference_engine.model.llama import rotary_tables
from reference_engine.model.weights import Weights, fused_layer
from reference_engine.state.model_config import KvDtype, ModelConfig


class PagedStep(NamedTuple):
    """T flat token positions on the device, `n_decode` decoding positions first; int32 unless
    noted. The others are cut into `tiles`."""

    tokens: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [T], block · block_tokens + offset
    tables: torch.Tensor  # [rows, width], the blocks of each sequence
    n_decode: int
    rows: torch.Tensor  # [n_decode], row of `tables`
    contexts: torch.Tensor  # [n_decode], tokens to attend to
    tiles: Tiles | None = None
    last: torch.Tensor | None = None  # [S] int64, positions whose logits are computed; None for all
    work: DecodeWork | None = None  # of `contexts`; None without any


class PagedLlama:
    """A model on the device and in the dtype of its weights. It empties `weights`, so that no
    matrix is in memory twice."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        block_tokens: int,
        max_model_len: int,
        kv_dtype: KvDtype = "auto",
        is_fused: bool = False,
    ) -> None:
        self.config, self.block_tokens, self._ops = config, block_tokens, ops
        self.kv_dtype, self._is_fused = kv_dtype, is_fused
        self._embed = weights.pop("model.embed_tokens.weight")
        self._head = self._embed if config.tied else weights.pop("lm_head.weight")
        self._norm = weights.pop("model.norm.weight")
        self._layers = [
            fused_layer(config, i, weights.pop, torch.Tensor.contiguous)
            for i in range(config.n_layers)
        ]
        weights.clear()
        cos, sin = rotary_tables(config, max_model_len)
        self._rotary = (cos.to(self.device), sin.to(self.device))
        self.cache = self.memory(0)

    @property
    def device(self) -> torch.device:
        return self._embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embed.dtype

    @property
    def block_bytes(self) -> int:
        """KV of a block in all layers."""
        return self.block_tokens * self.config.kv_bytes_per_token(
            self.dtype.itemsize, self.kv_dtype
        )

    def memory(self, n_blocks: int) -> Kv:
        """Zeroed paged memory of all layers, to be assigned to `cache`."""
        c = self.config
        shape = (c.n_layers, n_blocks, 2, c.n_kv_heads, self.block_tokens, c.head_dim)
        return Kv.zeros(shape, self.dtype, self.kv_dtype, self.device)

    def forward(self, step: PagedStep, out: torch.Tensor) -> torch.Tensor:
        """Write the logits of positions `step.last`, float32, to the first rows of `out`
        [≥ S, vocab] and return these rows [S, vocab]; K and V of all positions go to the cache."""
        c, ops = self.config, self._ops
        x = F.embedding(step.tokens, self._embed)  # [T, d], the residual stream
        delta: torch.Tensor | None = None
        for layer, cache in zip(self._layers, self.cache.layers(), strict=True):
            normed = ops.add_rms_norm(x, delta, layer.norm, c.rms_eps)
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias)  # [T, (Hq + 2·Hkv)·hd]
            q = ops.rope_write(
                qkv, step.positions, step.slots, self._rotary, layer.qk_norm, c.rms_eps, cache
            )
            attended = self._attend(q, cache, step).view(len(x), -1)  # [T, Hq·hd]
            delta = F.linear(attended, layer.o)
            normed = ops.add_rms_norm(x, delta, layer.ffn_norm, c.rms_eps)
            delta = F.linear(ops.silu_mul(F.linear(normed, layer.gate_up)), layer.down)
        if step.last is not None:
            x = x.index_select(0, step.last)
            delta = None if delta is None else delta.index_select(0, step.last)
        normed = ops.add_rms_norm(x, delta, self._norm, c.rms_eps)  # [S, d]
        return self._project(normed, out[: len(normed)])

    def _attend(self, q: torch.Tensor, cache: Kv, step: PagedStep) -> torch.Tensor:
        """[T, Hq, hd]."""
        n, ops, tiles = step.n_decode, self._ops, step.tiles
        if not n:
            assert tiles is not None, "a step without positions"
            return ops.chunk_attention(q, cache, step.tables, tiles)
        assert step.work is not None, f"{n} decoding positions without their work"
        decodes = (step.tables, step.rows, step.contexts, step.work)
        if tiles is None or not len(tiles):
            return ops.decode_attention(q[:n], cache, *decodes)
        if self._is_fused:
            return ops.fused_attention(q, cache, *decodes, tiles)
        decoded = ops.decode_attention(q[:n], cache, *decodes)
        return torch.cat((decoded, ops.chunk_attention(q[n:], cache, step.tables, tiles)))

    def _project(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        # In float32, as bfloat16 logits tie: their spacing is 2⁻⁸ of their size. The product is
        # summed in float32 anyway, but only CUDA can return the sum unrounded.
        if x.is_cuda and x.dtype.itemsize == 2:
            return torch.mm(x, self._head.t(), out_dtype=torch.float32, out=out)
        return out.copy_(x @ self._head.t())
