"""The Llama block over paged KV with the operations of `kernels`, for accelerators.

The same arithmetic as `llama.Llama`, in the model's own dtype, with K and V of a head together in
memory, and with shapes that depend on the size of a step alone, so that a decode step can be a CUDA
graph. Nothing in it waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from reference_engine.kernels.kv_memory import Kv
from reference_engine.kernels.ops import Ops
from reference_engine.kernels.tiles import Tiles
from reference_engine.model.layers import fused
from reference_engine.model.llama import rotary_tables
from reference_engine.model.weights import Weights
from reference_engine.state.model_config import KvDtype, ModelConfig


class PagedStep(NamedTuple):
    """T flat token positions, `n_decode` decoding ones first, on the device (int32). `rows` and
    `contexts` [n_decode] say which row of `tables` each decoding one reads and how far; `tiles` the
    rest; `last` [S] int64 the positions whose logits are wanted, None for all."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    n_decode: int
    rows: torch.Tensor
    contexts: torch.Tensor
    tiles: Tiles | None = None
    last: torch.Tensor | None = None
    n_splits: int = 1


class PagedLlama:
    """A model on the device and in the dtype of its weights, which it takes over: `weights` is
    empty afterwards, so that no matrix is in memory twice."""

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
            fused(config, i, weights.pop, torch.Tensor.contiguous) for i in range(config.n_layers)
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
        """KV of one block in all layers."""
        return self.block_tokens * self.config.kv_bytes_per_token(
            self.dtype.itemsize, self.kv_dtype
        )

    def memory(self, n_blocks: int) -> Kv:
        """Zeroed paged memory of all layers; to be set as `cache`."""
        c = self.config
        shape = (c.n_layers, n_blocks, 2, c.n_kv_heads, self.block_tokens, c.head_dim)
        return Kv.zeros(shape, self.dtype, self.kv_dtype, self.device)

    def forward(self, step: PagedStep, out: torch.Tensor) -> torch.Tensor:
        """Logits of the wanted positions, float32, in the first rows of `out` [≥ S, vocab]; K and V
        of every position are in the cache afterwards."""
        c, ops = self.config, self._ops
        x = F.embedding(step.tokens, self._embed)  # [T, d], the residual stream
        delta: torch.Tensor | None = None
        for layer, cache in zip(self._layers, self.cache.layers(), strict=True):
            normed = ops.add_rms_norm(x, delta, layer.norm, c.rms_eps)
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
            q = ops.rope_write(
                qkv, step.positions, step.slots, self._rotary, layer.qk_norm, c.rms_eps, cache
            )
            attended = self._attend(q, cache, step).view(len(x), -1)
            delta = F.linear(attended, layer.o)
            normed = ops.add_rms_norm(x, delta, layer.ffn_norm, c.rms_eps)
            delta = F.linear(ops.silu_mul(F.linear(normed, layer.gate_up)), layer.down)
        if step.last is not None:
            x = x.index_select(0, step.last)
            delta = None if delta is None else delta.index_select(0, step.last)
        wanted = ops.add_rms_norm(x, delta, self._norm, c.rms_eps)
        return self._project(wanted, out[: len(wanted)])

    def _attend(self, q: torch.Tensor, cache: Kv, step: PagedStep) -> torch.Tensor:
        n, outs = step.n_decode, []
        has_tiles = step.tiles is not None and len(step.tiles) > 0
        if self._is_fused and n and has_tiles:
            assert step.tiles is not None
            return self._ops.fused_attention(
                q, cache, step.tables, step.rows, step.contexts, step.n_splits, step.tiles
            )
        if n:
            outs.append(
                self._ops.decode_attention(
                    q[:n], cache, step.tables, step.rows, step.contexts, step.n_splits
                )
            )
        if step.tiles is not None and len(step.tiles):
            outs.append(self._ops.chunk_attention(q[n:], cache, step.tables, step.tiles))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _project(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        # bfloat16 logits tie: their spacing is 2⁻⁸ of their size. The product is summed in float32
        # anyway; only CUDA can also hand it out so.
        if x.is_cuda and x.dtype.itemsize == 2:
            return torch.mm(x, self._head.t(), out_dtype=torch.float32, out=out)
        return out.copy_(x @ self._head.t())
