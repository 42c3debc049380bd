"""Weights by their Hugging Face names: drawn at random, or mapped from local safetensors files.

A safetensors file is an 8-byte little-endian header length, a JSON header `{name: {dtype, shape,
data_offsets}}`, and the raw tensors. Source: github.com/huggingface/safetensors, README "Format".
"""

from __future__ import annotations

import json
import mmap
import struct
from math import prod
from pathlib import Path

import torch

from loadgen.errors import UsageError
from reference_engine.model.huge import physical_bytes
from reference_engine.state.model_config import ModelConfig, ModelSource

Weights = dict[str, torch.Tensor]

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


# Up to here random weights are the CPU's whatever the device, so that one can be checked against
# the other; more take minutes to draw there, and only the device draws them.
_DRAWN_ON_HOST = 2_000_000_000


def load(
    source: ModelSource,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Weights:
    """All weights of a model, each moved to the device as soon as it is read or drawn. Raises
    UsageError when files or tensors are missing."""
    device = torch.device(device)
    if device.type == "cpu":
        _refuse_beyond_memory(source)
    if source.directory is None:
        is_large = source.config.n_params > _DRAWN_ON_HOST
        generator = torch.Generator(device if is_large else "cpu").manual_seed(seed)
        return {
            name: _drawn(name, shape, generator).to(device, dtype)
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
            found = tuple(weights[name].shape)
            raise UsageError(f"{source.directory}: {name} is {found}, config.json says {shape}")
    for name in weights:
        weights[name] = weights[name].to(device, dtype)
    return weights


def random_weights(config: ModelConfig, seed: int) -> Weights:
    """N(0, 0.02) matrices, unit norms and no bias; equal seeds give equal weights."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _drawn(name, shape, generator) for name, shape in shapes(config).items()}


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if name.endswith(".bias"):
        return torch.zeros(shape, device=generator.device)
    if len(shape) == 1:
        return torch.ones(shape, device=generator.device)
    empty = torch.empty(shape, device=generator.device)
    return empty.normal_(0.0, 0.02, generator=generator)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by name, in drawing order."""
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


def read_safetensors(path: Path) -> Weights:
    """The tensors of one file, mapped and not copied. Raises UsageError on a damaged file or an
    unknown dtype."""
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
                f"{path}: {name}: dtype {entry['dtype']} (known: {', '.join(_DTYPES)})"
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


def _refuse_beyond_memory(source: ModelSource) -> None:
    need = source.config.n_params * 4
    have = physical_bytes()
    if need > 0.8 * have:
        raise UsageError(
            f"shape: '{source.name}' needs {need / 1e9:.1f} GB for float32 weights, this machine "
            f"has {have / 1e9:.1f} GB; choose a smaller shape"
        )
