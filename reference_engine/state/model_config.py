"""The shape of a Llama model in numbers, read from a Hugging Face `config.json` or taken from the
zoo. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loadgen.errors import UsageError, nearest

KvDtype = Literal["auto", "fp8", "int8"]
"""The number format of KV: the model's own, e4m3, or integers."""
_SCALE_BYTES = 4  # for each token and head, of keys and of values, with KV in 8 bits


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies. All dimensionless except
    `original_context` (tokens)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The parameters of the forward pass. `head_dim` need not be `d_model / n_heads`. With
    `n_experts`, each block has as many feed-forward networks of width `d_ffn` and a router, and a
    token is computed by `experts_per_token` of them."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ffn: int
    vocab_size: int
    max_model_len: int = 4096
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_eps: float = 1e-5
    qk_norm: bool = False
    qkv_bias: bool = False
    tied: bool = False
    eos_ids: frozenset[int] = frozenset()
    n_experts: int = 0
    experts_per_token: int = 0

    @property
    def n_params(self) -> int:
        vectors = 2 * self.d_model  # of a block: its norms and biases
        if self.qkv_bias:
            vectors += self.head_dim * (self.n_heads + 2 * self.n_kv_heads)
        if self.qk_norm:
            vectors += 2 * self.head_dim
        embeddings = self.vocab_size * self.d_model * (1 if self.tied else 2)
        return self.n_matrix_params + self.n_layers * vectors + embeddings + self.d_model

    @property
    def n_matrix_params(self) -> int:
        """Parameters of the matrices of all blocks."""
        if self.n_experts:
            return self.n_shared_params + self.n_experts * self._expert_params
        return self.n_shared_params

    @property
    def n_active_params(self) -> int:
        """Parameters of the matrices of all blocks with which a token is multiplied."""
        return self.n_shared_params + self.experts_per_token * self._expert_params

    @property
    def n_shared_params(self) -> int:
        """Parameters of the matrices of all blocks with which every token is multiplied: all but
        the experts."""
        attention = self.d_model * self.head_dim * (2 * self.n_heads + 2 * self.n_kv_heads)
        dense = self.d_model * self.n_experts if self.n_experts else 3 * self.d_model * self.d_ffn
        return self.n_layers * (attention + dense)

    @property
    def _expert_params(self) -> int:
        return self.n_layers * 3 * self.d_model * self.d_ffn

    def kv_bytes_per_token(self, bytes_per_number: int = 4, kv_dtype: KvDtype = "auto") -> int:
        """Bytes of a token's KV in all layers. `bytes_per_number` applies to "auto"; numbers in
        8 bits take a byte each, and a scale with each vector."""
        own = self.head_dim * bytes_per_number
        vector_bytes = own if kv_dtype == "auto" else self.head_dim + _SCALE_BYTES
        return 2 * self.n_layers * self.n_kv_heads * vector_bytes


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model to serve: its name, its shape, and the directory of its weights (None: random)."""

    name: str
    config: ModelConfig
    directory: Path | None = None


_ARCHITECTURES: dict[str, frozenset[str]] = {  # name: what its attention adds to Llama's
    "LlamaForCausalLM": frozenset(),
    "Qwen2ForCausalLM": frozenset({"qkv_bias"}),
    "Qwen3ForCausalLM": frozenset({"qk_norm"}),
    "MixtralForCausalLM": frozenset(),
    "Qwen3MoeForCausalLM": frozenset({"qk_norm"}),
}


def read_config(path: Path) -> ModelConfig:
    """Read a local `config.json` of Hugging Face. Raises UsageError naming the file and the key."""
    try:
        return config_from(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    except KeyError as error:
        raise UsageError(
            f"{path}: key {error} is missing; expected a Llama, Mixtral, Qwen2 or Qwen3 config"
        ) from error
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def config_from(data: Mapping[str, Any]) -> ModelConfig:
    """Build a config from the keys that transformers writes, v4 (`rope_theta`, `rope_scaling`) and
    v5 (`rope_parameters`). Raises KeyError for a missing key, and UsageError for a model that this
    engine cannot compute."""
    architecture = (data.get("architectures") or ["none"])[0]
    if architecture not in _ARCHITECTURES:
        hint = nearest(architecture, _ARCHITECTURES)
        raise UsageError(f"architectures: cannot run '{architecture}'; {hint}")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if data.get(key):
            raise UsageError(f"{key}: true is not supported by this engine")
    if data.get("mlp_only_layers") or data.get("decoder_sparse_step", 1) != 1:
        raise UsageError("mlp_only_layers, decoder_sparse_step: every layer must have experts")
    experts = data.get("num_local_experts") or data.get("num_experts") or 0
    width = "moe_intermediate_size" if "moe_intermediate_size" in data else "intermediate_size"
    n_heads = int(data["num_attention_heads"])
    rope = dict(data.get("rope_parameters") or data.get("rope_scaling") or {})
    eos = data.get("eos_token_id")
    return ModelConfig(
        n_layers=int(data["num_hidden_layers"]),
        d_model=int(data["hidden_size"]),
        n_heads=n_heads,
        n_kv_heads=int(data.get("num_key_value_heads") or n_heads),
        head_dim=int(data.get("head_dim") or data["hidden_size"] // n_heads),
        d_ffn=int(data[width]),
        vocab_size=int(data["vocab_size"]),
        max_model_len=int(data.get("max_position_embeddings") or 4096),
        rope_theta=float(rope.get("rope_theta") or data.get("rope_theta") or 10_000.0),
        rope_scaling=_rope_scaling(rope),
        rms_eps=float(data.get("rms_norm_eps") or 1e-6),
        qk_norm="qk_norm" in _ARCHITECTURES[architecture],
        qkv_bias="qkv_bias" in _ARCHITECTURES[architecture],
        tied=bool(data.get("tie_word_embeddings", False)),
        eos_ids=frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos]),
        n_experts=int(experts),
        experts_per_token=int(data["num_experts_per_tok"]) if experts else 0,
    )


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise UsageError(f"rope: cannot compute type '{kind}' (known: default, llama3)")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context=int(rope["original_max_position_embeddings"]),
    )
