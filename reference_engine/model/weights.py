"""Weights by their Hugging Face names, random or mapped from local safetensors files, and the
matrices of a layer made of them.

A safetensors file is an 8-byte little-endian header length, a JSON header `{name: {dtype, shape,
data_offsets}}`, and the raw tensors. Source: github.com/huggingface/safetensors, README "Format".
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Generic, TypeVar

import torch

from loadgen.errors import UsageError
from reference_engine.model.huge_pages import physical_bytes
from reference_engine.state.model_config import ModelConfig, ModelSource

Weights = dict[str, torch.Tensor]
TakeTensor = Callable[[str], torch.Tensor]  # by its name
Matrix = TypeVar("Matrix")  # in the form that a model multiplies with

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Parameters up to which random weights are drawn on the CPU for every device, so that devices can
# be compared. More take long there (37 s for the 1b shape), and are drawn on the device.
_DRAWN_ON_HOST = 200_000_000


def load(
    source: ModelSource,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Weights:
    """All weights of a model, each moved to the device as soon as it is read or drawn. Raises
    UsageError for missing files or tensors, wrong shapes, and a model larger than the CPU's
    memory."""
    device = torch.device(device)
    if device.type == "cpu":
        _check_memory(source)
    if source.directory is None:
        is_large = source.config.n_params > _DRAWN_ON_HOST
        generator = torch.Generator(device if is_large else "cpu").manual_seed(seed)
        return {
            name: _random(name, shape, generator).to(device, dtype)
            for name, shape in shapes(source.config).items()
        }
    weights = _read_directory(source.directory)
    missing = [name for name in shapes(source.config) if name not in weights]
    if missing:
        raise UsageError(
            f"{source.directory}: {len(missing)} tensors are missing, e.g. {missing[0]}"
        )
    for name, shape in shapes(source.config).items():
        if tuple(weights[name].shape) != shape:
            raise UsageError(
                f"{source.directory}: {name} has shape {tuple(weights[name].shape)}; config.json "
                f"requires {shape}"
            )
    for name in weights:
        weights[name] = weights[name].to(device, dtype)
    return weights


def random_weights(config: ModelConfig, seed: int) -> Weights:
    """Matrices from N(0, 0.02²), norms of 1 and biases of 0; equal seeds give equal weights."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(name, shape, generator) for name, shape in shapes(config).items()}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if name.endswith(".bias"):
        return torch.zeros(shape, device=generator.device)
    if len(shape) == 1:
        return torch.ones(shape, device=generator.device)
    empty = torch.empty(shape, device=generator.device)
    return empty.normal_(0.0, 0.02, generator=generator)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the model by name, in the order in which they are drawn. Raises
    UsageError for a model with experts."""
    if config.n_experts:
        raise UsageError(
            "shape: models with experts are simulated only (slobench simulate, serve --device sim)"
        )
    d, hd = config.d_model, config.head_dim
    q_width, kv_width = config.n_heads * hd, config.n_kv_heads * hd
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for i in range(config.n_layers):
        at = f"model.layers.{i}"
        out |= {
            f"{at}.input_layernorm.weight": (d,),
            f"{at}.self_attn.q_proj.weight": (q_width, d),
            f"{at}.self_attn.k_proj.weight": (kv_width, d),
            f"{at}.self_attn.v_proj.weight": (kv_width, d),
            f"{at}.self_attn.o_proj.weight": (d, q_width),
            f"{at}.post_attention_layernorm.weight": (d,),
            f"{at}.mlp.gate_proj.weight": (config.d_ffn, d),
            f"{at}.mlp.up_proj.weight": (config.d_ffn, d),
            f"{at}.mlp.down_proj.weight": (d, config.d_ffn),
        }
        if config.qkv_bias:
            widths = {"q": q_width, "k": kv_width, "v": kv_width}
            out |= {f"{at}.self_attn.{part}_proj.bias": (n,) for part, n in widths.items()}
        if config.qk_norm:
            out |= {f"{at}.self_attn.q_norm.weight": (hd,), f"{at}.self_attn.k_norm.weight": (hd,)}
    out["model.norm.weight"] = (d,)
    if not config.tied:
        out["lm_head.weight"] = (config.vocab_size, d)
    return out


@dataclass(frozen=True, slots=True)
class Layer(Generic[Matrix]):
    """A block, its matrices in a checkpoint's shape [out, in]: q, k, v are a single matrix, and
    so are gate, up."""

    norm: torch.Tensor  # [d]
    qkv: Matrix  # [(Hq + 2·Hkv)·hd, d]
    qkv_bias: torch.Tensor | None  # [(Hq + 2·Hkv)·hd]
    qk_norm: torch.Tensor | None  # [Hq + Hkv, hd]
    o: Matrix  # [d, Hq·hd]
    ffn_norm: torch.Tensor  # [d]
    gate_up: Matrix  # [2·ffn, d]
    down: Matrix  # [d, ffn]


def fused_layer(
    config: ModelConfig, i: int, take: TakeTensor, lay_out: Callable[[torch.Tensor], Matrix]
) -> Layer[Matrix]:
    """Layer `i`. `take` returns a tensor; it may also remove it from the weights, so that no matrix
    is in memory twice."""

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


def read_safetensors(path: Path) -> Weights:
    """The tensors of a file, mapped into memory and not copied. Raises UsageError for a damaged
    file or an unknown dtype."""
    with path.open("rb") as file:
        # ACCESS_COPY: torch wants writable memory; nothing is ever written back to the file.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
    except (struct.error, ValueError) as error:
        raise UsageError(f"{path}: not a safetensors file: {error}") from error
    weights: Weights = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise UsageError(
                f"{path}: {name}: dtype {entry['dtype']} (supported: {', '.join(_DTYPES)})"
            )
        begin, _end = entry["data_offsets"]
        flat = torch.frombuffer(
            data,
            dtype=_DTYPES[entry["dtype"]],
            count=prod(entry["shape"]),
            offset=8 + size + begin,
        )
        weights[name] = flat.view(entry["shape"])
    return weights


def _read_directory(directory: Path) -> Weights:
    index = directory / _INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = [_SINGLE]
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise UsageError(
            f"{directory}: {absent[0]} is missing; looked for {_INDEX} and {_SINGLE} "
            "(weights are never downloaded)"
        )
    weights: Weights = {}
    for name in names:
        weights |= read_safetensors(directory / name)
    return weights


def _check_memory(source: ModelSource) -> None:
    weights_bytes, memory_bytes = source.config.n_params * 4, physical_bytes()
    if weights_bytes > 0.8 * memory_bytes:
        raise UsageError(
            f"shape: '{source.name}' needs {weights_bytes / 1e9:.1f} GB for float32 weights, this "
            f"machine has {memory_bytes / 1e9:.1f} GB; choose a smaller shape"
        )
