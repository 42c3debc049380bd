"""The matrices of a Llama block as both models multiply them: q, k, v and gate, up as one each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from reference_engine.state.model_config import ModelConfig

Take = Callable[[str], torch.Tensor]
Matrix = TypeVar("Matrix")  # as a model multiplies with it


@dataclass(frozen=True, slots=True)
class Layer(Generic[Matrix]):
    """One block; shapes of matrices are a checkpoint's, [out, in]."""

    norm: torch.Tensor  # [d]
    qkv: Matrix  # [(Hq + 2·Hkv)·hd, d]
    qkv_bias: torch.Tensor | None  # [(Hq + 2·Hkv)·hd]
    qk_norm: torch.Tensor | None  # [Hq + Hkv, hd]
    o: Matrix  # [d, Hq·hd]
    ffn_norm: torch.Tensor  # [d]
    gate_up: Matrix  # [2·ffn, d]
    down: Matrix  # [d, ffn]


def fused(
    config: ModelConfig, i: int, take: Take, lay_out: Callable[[torch.Tensor], Matrix]
) -> Layer[Matrix]:
    """Layer `i`; `take` reads a tensor by its Hugging Face name, or takes it away, so that no
    matrix is in memory twice."""

    def taken(name: str) -> torch.Tensor:
        return take(f"model.layers.{i}.{name}")

    qkv = lay_out(torch.cat([taken(f"self_attn.{part}_proj.weight") for part in "qkv"]))
    bias = qk_norm = None
    if config.qkv_bias:
        bias = torch.cat([taken(f"self_attn.{part}_proj.bias") for part in "qkv"])
    if config.qk_norm:
        q_norm, k_norm = taken("self_attn.q_norm.weight"), taken("self_attn.k_norm.weight")
        qk_norm = torch.cat(
            (q_norm.expand(config.n_heads, -1), k_norm.expand(config.n_kv_heads, -1))
        )
    return Layer(
        norm=taken("input_layernorm.weight"),
        qkv=qkv,
        qkv_bias=bias,
        qk_norm=qk_norm,
        o=lay_out(taken("self_attn.o_proj.weight")),
        ffn_norm=taken("post_attention_layernorm.weight"),
        gate_up=lay_out(torch.cat((taken("mlp.gate_proj.weight"), taken("mlp.up_proj.weight")))),
        down=lay_out(taken("mlp.down_proj.weight")),
    )
