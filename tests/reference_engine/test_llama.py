"""The forward pass against independent oracles: transformers, a frozen file of its logits, and
dense attention written out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from reference_engine.executors.base import Row
from reference_engine.kv import KvPool
from reference_engine.model.config import ModelConfig, RopeScaling
from reference_engine.model.zoo import SHAPES
from reference_engine.sequence import Request
from tests.reference_engine.engine_kit import request

torch = pytest.importorskip("torch", reason="torch is not installed")
attention = pytest.importorskip("reference_engine.model.attention")
llama = pytest.importorskip("reference_engine.model.llama")
weights = pytest.importorskip("reference_engine.model.weights")

GOLDEN = Path(__file__).parent.parent / "golden" / "nano_logits.json"
NANO = SHAPES["nano"]
QWEN = replace(NANO, qk_norm=True, tied=True, rope_theta=1e6, rms_eps=1e-6)
STRETCHED = replace(NANO, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32), max_model_len=256)
PROMPT = [(17 * i * i + 3 * i) % 320 for i in range(70)]


def model_of(config: ModelConfig, state: dict[str, object]):
    return llama.Llama(config, state, n_blocks=64, block_tokens=16, max_model_len=256)


def last_logits(model, pool: KvPool, req: Request, n_tokens: int):
    """Compute the next `n_tokens` of a request and return the logits of the last."""
    assert pool.grow(req, n_tokens)
    with torch.inference_mode():
        step = attention.flatten([Row(req, req.n_computed, n_tokens, True)], 16)
        logits = model.forward(step)
    req.n_computed += n_tokens
    return logits[0]


def all_logits(model, prompt: list[int]):
    """Logits of every position, one token at a time."""
    pool, req = KvPool(64), request("r", prompt, 1)
    return torch.stack([last_logits(model, pool, req, 1) for _ in prompt])


def drawn(config: ModelConfig, seed: int = 3):
    """Random weights whose norms are not all ones, so that a missing one shows."""
    state = weights.random_weights(config, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in state.items():
        if tensor.dim() == 1:
            state[name] = 1 + 0.2 * torch.randn(tensor.shape, generator=generator)
    return state


def huggingface_logits(config: ModelConfig, state, prompt: list[int]):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    family = "Qwen3" if config.qk_norm else "Llama"
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
        return model(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("config", [NANO, QWEN, STRETCHED], ids=["llama", "qwen3", "llama3-rope"])
def test_logits_equal_those_of_transformers(config):
    state = drawn(config)
    ours = all_logits(model_of(config, state), PROMPT)
    torch.testing.assert_close(ours, huggingface_logits(config, state, PROMPT), atol=1e-4, rtol=0)


def test_logits_equal_the_frozen_ones_of_transformers():
    golden = json.loads(GOLDEN.read_text())
    ours = all_logits(model_of(NANO, weights.random_weights(NANO, 0)), golden["prompt"])
    for position, expected in golden["logits"].items():
        torch.testing.assert_close(ours[int(position)], torch.tensor(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [7, 16, 64])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(chunk):
    model, pool = model_of(NANO, drawn(NANO)), KvPool(64)
    whole = last_logits(model, pool, request("whole", PROMPT, 1), len(PROMPT))
    req = request("parts", PROMPT, 1)
    while req.n_remaining:
        logits = last_logits(model, pool, req, min(chunk, req.n_remaining))
    torch.testing.assert_close(logits, whole, atol=1e-5, rtol=0)


def test_paged_attention_is_dense_attention():
    """Five requests of different lengths in one step, their blocks scattered by churn, against
    softmax(q·kᵀ)·v written out per request and head."""
    generator = torch.Generator().manual_seed(1)
    n_q, n_kv, dim, pool = 4, 2, 16, KvPool(64, prefix_cache=False)
    cache = torch.zeros(64, 16, 2, n_kv, dim)
    shape = {"a": (0, 30), "b": (40, 1), "c": (100, 1), "d": (33, 20), "e": (44, 1)}
    rows, dense = [], {}
    for i, (name, (start, n_tokens)) in enumerate(shape.items()):
        pool.free(scrap := request("scrap", range(i * 32, i * 32 + 50), 1))
        assert pool.admit(scrap, 17 * (i % 3) + 1)
        req = request(name, range(start + n_tokens), 1)
        assert pool.admit(req, start + n_tokens)
        pool.free(scrap)
        dense[name] = torch.randn(start + n_tokens, 2, n_kv, dim, generator=generator)
        for position, kv in enumerate(dense[name]):
            cache[req.blocks[position // 16], position % 16] = kv
        rows.append(Row(req, start, n_tokens, True))
    step = attention.flatten(rows, 16)
    q = torch.randn(len(step.tokens), n_q, dim, generator=generator)
    out = attention.paged_attention(q, cache, step)
    at = 0
    for i in step.order:
        (_, start, n_tokens, _), kv = rows[i], dense[rows[i].request.id]
        for offset in range(n_tokens):
            context = kv[: start + offset + 1]
            for head in range(n_q):
                k, v = context[:, 0, head // 2], context[:, 1, head // 2]
                expected = torch.softmax(k @ q[at, head] / dim**0.5, 0) @ v
                got = out[at, head * dim : (head + 1) * dim]
                torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
            at += 1
    assert at == len(q)


def test_stale_memory_does_not_leak_into_a_new_request():
    model = model_of(NANO, drawn(NANO))
    fresh = last_logits(model, KvPool(64), request("a", PROMPT[:20], 1), 20)
    model._cache.fill_(1e4)
    again = last_logits(model, KvPool(64), request("b", PROMPT[:20], 1), 20)
    torch.testing.assert_close(again, fresh, atol=0, rtol=0)
