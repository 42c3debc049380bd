"""The forward pass on the CPU against independent oracles: `transformers`, a file of its logits,
and dense attention written out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reference_engine.state.batch import Row
from reference_engine.state.kv import KvPool
from reference_engine.state.model_config import ModelConfig
from reference_engine.state.sequence import Request
from tests.reference_engine.engine_kit import request

torch = pytest.importorskip("torch", reason="torch is not installed")
attention = pytest.importorskip("reference_engine.model.attention")
llama = pytest.importorskip("reference_engine.model.llama")
linear = pytest.importorskip("reference_engine.model.linear")
oracle = pytest.importorskip("tests.reference_engine.llama_oracle")

GOLDEN = Path(__file__).parent.parent / "golden" / "nano_logits.json"


def model_of(config: ModelConfig, state: dict[str, object]):
    return llama.Llama(config, dict(state), n_blocks=64, block_tokens=16, max_model_len=256)


def last_logits(model, pool: KvPool, req: Request, n_tokens: int):
    """Logits of the last of the next `n_tokens` of a request, which are computed."""
    assert pool.grow(req, n_tokens)
    with torch.inference_mode():
        step = attention.flatten([Row(req, req.n_computed, n_tokens, True)], model.layout)
        logits = model.forward(step)
    req.n_computed += n_tokens
    return logits[0]


def all_logits(model, prompt: list[int]):
    """Logits of every position, computed token by token."""
    pool, req = KvPool(64), request("r", prompt, 1)
    return torch.stack([last_logits(model, pool, req, 1) for _ in prompt])


@pytest.mark.parametrize("name", list(oracle.FAMILIES))
def test_logits_equal_those_of_transformers(name):
    pytest.importorskip("transformers", reason="transformers is not installed")
    state = oracle.random_state(oracle.FAMILIES[name])
    ours = all_logits(model_of(oracle.FAMILIES[name], state), oracle.PROMPT)
    expected = oracle.huggingface_logits(oracle.FAMILIES[name], state, oracle.PROMPT)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", list(oracle.FAMILIES))
def test_logits_equal_the_stored_logits_of_transformers(name):
    golden = json.loads(GOLDEN.read_text())[name]
    ours = all_logits(
        model_of(oracle.FAMILIES[name], oracle.random_state(oracle.FAMILIES[name])), oracle.PROMPT
    )
    for position, expected in golden.items():
        torch.testing.assert_close(ours[int(position)], torch.tensor(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [7, 16, 64])
def test_a_prompt_in_chunks_has_the_logits_of_the_whole_prompt(chunk):
    model, pool = model_of(oracle.NANO, oracle.random_state(oracle.NANO)), KvPool(64)
    whole = last_logits(model, pool, request("whole", oracle.PROMPT, 1), len(oracle.PROMPT))
    req = request("parts", oracle.PROMPT, 1)
    while req.n_remaining:
        logits = last_logits(model, pool, req, min(chunk, req.n_remaining))
    torch.testing.assert_close(logits, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("max_scores", "groups"),
    [(1, [1, 1, 1]), (4 * 96, [2, 1]), (4 * 335, [2, 1]), (4 * 336, [3])],  # 3, 3 and 7 blocks
)
def test_paged_attention_is_dense_attention(max_scores, groups):
    """Five requests of different lengths in a step, decoding rows in groups, their blocks
    scattered: compared with softmax(q·kᵀ)·v, written out per request and head."""
    generator = torch.Generator().manual_seed(1)
    n_q, n_kv, dim, pool = 4, 2, 16, KvPool(64, prefix_cache=False)
    cache = torch.zeros(2, n_kv, 64, 16, dim)
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
            cache[:, :, req.blocks[position // 16], position % 16] = kv
        rows.append(Row(req, start, n_tokens, True))
    step = attention.flatten(rows, attention.KvLayout(n_q, n_kv, 64, 16), max_scores)
    assert [decodes.end - decodes.begin for decodes in step.decodes] == groups
    q = torch.randn(len(step.tokens), n_q, dim, generator=generator)
    out = q.clone()
    attention.attend(out, cache, step, attention.ScratchMemory())
    at = 0
    for i in step.order:
        (_, start, n_tokens, _), kv = rows[i], dense[rows[i].request.id]
        for offset in range(n_tokens):
            context = kv[: start + offset + 1]
            for head in range(n_q):
                k, v = context[:, 0, head // 2], context[:, 1, head // 2]
                expected = torch.softmax(k @ q[at, head] / dim**0.5, 0) @ v
                torch.testing.assert_close(out[at, head], expected, atol=1e-5, rtol=1e-5)
            at += 1
    assert at == len(q)


def test_stale_memory_does_not_leak_into_a_new_request():
    model = model_of(oracle.NANO, oracle.random_state(oracle.NANO))
    fresh = last_logits(model, KvPool(64), request("a", oracle.PROMPT[:20], 1), 20)
    model._cache.fill_(1e4)
    again = last_logits(model, KvPool(64), request("b", oracle.PROMPT[:20], 1), 20)
    torch.testing.assert_close(again, fresh, atol=0, rtol=0)


@pytest.mark.parametrize("on_intel", [False, True])
@pytest.mark.parametrize("shape", [(640, 384), (384, 1024), (128, 128), (1100, 64)])
def test_a_matrix_gives_the_same_product_in_every_memory_order(shape, on_intel):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=generator)
    matrix = linear.Linear(weight, on_intel)
    for n_tokens in (1, 2, 17, 300):
        x = torch.randn(n_tokens, shape[1], generator=generator)
        expected = (x.double() @ weight.double().t()).float()
        torch.testing.assert_close(matrix(x), expected, atol=1e-3, rtol=1e-4)
        total = torch.full_like(expected, 2.0)
        matrix.add_to(total, x)
        torch.testing.assert_close(total, expected + 2, atol=1e-3, rtol=1e-4)
    every_other = torch.randn(8, 2 * shape[1], generator=generator)[:, ::2]
    torch.testing.assert_close(matrix(every_other), matrix(every_other.contiguous()))
