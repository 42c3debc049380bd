"""A shape of ours as `transformers` names it."""

from __future__ import annotations

from typing import Any

from reference_engine.state.model_config import ModelConfig

_POSITIONS = 16_384  # the longest sequence that a benchmark asks for


def llama_config(transformers: Any, config: ModelConfig) -> Any:
    """Its `LlamaConfig`. `transformers` is handed in: only some benchmarks have it."""
    return transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.d_ffn,
        rms_norm_eps=config.rms_eps,
        max_position_embeddings=_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied,
    )
