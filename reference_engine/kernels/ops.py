"""The operations of the paged model as one value: by Triton's kernels, or by their twins."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import torch

from loadgen.errors import MissingDependency
from reference_engine.kernels import plain
from reference_engine.kernels.kv_memory import Kv
from reference_engine.kernels.tiles import Tiles

Which = Literal["triton", "plain"]


class Norm(Protocol):
    def __call__(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor: ...


class Silu(Protocol):
    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor: ...


class RopeWrite(Protocol):
    def __call__(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        qk_norm: torch.Tensor | None,
        eps: float,
        cache: Kv,
    ) -> torch.Tensor: ...


class DecodeAttention(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        cache: Kv,
        tables: torch.Tensor,
        rows: torch.Tensor,
        contexts: torch.Tensor,
        n_splits: int,
    ) -> torch.Tensor: ...


class ChunkAttention(Protocol):
    def __call__(
        self, q: torch.Tensor, cache: Kv, tables: torch.Tensor, tiles: Tiles
    ) -> torch.Tensor: ...


class FusedAttention(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        cache: Kv,
        tables: torch.Tensor,
        rows: torch.Tensor,
        contexts: torch.Tensor,
        n_splits: int,
        tiles: Tiles,
    ) -> torch.Tensor: ...


class SampleTokens(Protocol):
    def __call__(
        self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor: ...


class Ops(NamedTuple):
    """What each computes is said in `plain`."""

    add_rms_norm: Norm
    silu_mul: Silu
    rope_write: RopeWrite
    decode_attention: DecodeAttention
    chunk_attention: ChunkAttention
    fused_attention: FusedAttention
    sample: SampleTokens


PLAIN = Ops(
    plain.add_rms_norm,
    plain.silu_mul,
    plain.rope_write,
    plain.decode_attention,
    plain.chunk_attention,
    plain.fused_attention,
    plain.sample,
)


def ops(which: Which) -> Ops:
    """Raises MissingDependency when Triton is asked for and not installed."""
    if which == "plain":
        return PLAIN
    try:
        from reference_engine.kernels import (
            chunk_attention,
            decode_attention,
            fused_attention,
            norm,
            rope,
            silu,
            token_sampling,
        )
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise MissingDependency(
            "kernels=triton needs triton: pip install triton (or use kernels=plain, which is slow)"
        ) from error
    found: tuple[Any, ...] = (
        norm.add_rms_norm,
        silu.silu_mul,
        rope.rope_write,
        decode_attention.decode_attention,
        chunk_attention.chunk_attention,
        fused_attention.fused_attention,
        token_sampling.sample,
    )
    return Ops(*found)
