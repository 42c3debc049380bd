"""Model shapes that are served without a download: random weights, real arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadgen.errors import UsageError, nearest
from reference_engine.state.model_config import ModelConfig, ModelSource, read_config

EOS_ID = 257  # of the byte tokenizer, with which all shapes here are served
_EOS = frozenset({EOS_ID})

_TOP_8_OF_128: Mapping[str, Any] = {"qk_norm": True, "n_experts": 128, "experts_per_token": 8}

# name: layers, d_model, heads, kv heads, head dim, ffn, vocabulary
SHAPES = {
    "nano": ModelConfig(2, 64, 4, 2, 16, 176, 320, eos_ids=_EOS),
    "tiny": ModelConfig(4, 128, 4, 2, 32, 352, 320, eos_ids=_EOS),
    "10m": ModelConfig(6, 384, 6, 2, 64, 1024, 320, eos_ids=_EOS),
    "110m": ModelConfig(12, 768, 12, 4, 64, 2048, 32_000, eos_ids=_EOS),
    "0.6b": ModelConfig(
        28, 1024, 16, 8, 128, 3072, 151_936, rope_theta=1e6, qk_norm=True, tied=True, eos_ids=_EOS
    ),
    "1b": ModelConfig(16, 2048, 32, 8, 64, 8192, 128_256, rope_theta=5e5, tied=True, eos_ids=_EOS),
    "8b": ModelConfig(32, 4096, 32, 8, 128, 14_336, 128_256, rope_theta=5e5, eos_ids=_EOS),
    "70b": ModelConfig(80, 8192, 64, 8, 128, 28_672, 128_256, rope_theta=5e5, eos_ids=_EOS),
    # with experts: simulated only
    "mixtral-8x7b": ModelConfig(
        *(32, 4096, 32, 8, 128, 14_336, 32_000),
        rope_theta=1e6,
        eos_ids=_EOS,
        n_experts=8,
        experts_per_token=2,
    ),
    "qwen3-30b-a3b": ModelConfig(
        48, 2048, 32, 4, 128, 768, 151_936, rope_theta=1e6, eos_ids=_EOS, **_TOP_8_OF_128
    ),
    "qwen3-235b-a22b": ModelConfig(
        94, 4096, 64, 4, 128, 1536, 151_936, rope_theta=1e6, eos_ids=_EOS, **_TOP_8_OF_128
    ),
}


def resolve(shape: str) -> ModelSource:
    """The model of a shape's name or of a local directory; nothing is downloaded. Raises UsageError
    with the nearest names if it is neither."""
    if shape in SHAPES:
        return ModelSource(shape, SHAPES[shape])
    directory = Path(shape)
    config = directory / "config.json"
    if config.is_file():
        return ModelSource(directory.resolve().name, read_config(config), directory)
    if directory.is_dir():
        raise UsageError(
            f"shape: {directory} has no config.json; expected a Hugging Face directory"
        )
    raise UsageError(
        f"shape: '{shape}' is neither a shape nor a local model directory; "
        f"{nearest(shape, SHAPES)}. Models are never downloaded"
    )
