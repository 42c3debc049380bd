"""Logits of `transformers` with the same small random weights, an independent oracle for every
model family of the engine."""

from __future__ import annotations

from dataclasses import replace

import torch

from reference_engine.model.weights import Weights, random_weights
from reference_engine.model.zoo import SHAPES
from reference_engine.state.model_config import ModelConfig, RopeScaling

NANO = SHAPES["nano"]
FAMILIES = {
    "llama": NANO,
    "qwen3": replace(NANO, qk_norm=True, tied=True, rope_theta=1e6, rms_eps=1e-6),
    "qwen2": replace(NANO, qkv_bias=True, rope_theta=1e6, rms_eps=1e-6),
    "llama3-rope": replace(NANO, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32), max_model_len=256),
}
PROMPT = [(17 * i * i + 3 * i) % 320 for i in range(70)]


def random_state(config: ModelConfig, seed: int = 3) -> Weights:
    """Random weights with norms other than 1, so that a missing norm changes the logits."""
    state = random_weights(config, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in state.items():
        if tensor.dim() == 1:
            state[name] = 1 + 0.2 * torch.randn(tensor.shape, generator=generator)
    return state


def huggingface_logits(config: ModelConfig, state: Weights, prompt: list[int]) -> torch.Tensor:
    """Logits of every position of the prompt, [positions, vocabulary]."""
    import transformers

    family = "Qwen3" if config.qk_norm else "Qwen2" if config.qkv_bias else "Llama"
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    hf_config = getattr(transformers, f"{family}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.d_ffn,
        rms_norm_eps=config.rms_eps,
        max_position_embeddings=config.max_model_len,
        rope_parameters=rope,
        tie_word_embeddings=config.tied,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(hf_config).eval()
    missing, unexpected = model.load_state_dict(state, strict=not config.tied)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    if config.tied:
        model.tie_weights()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits
