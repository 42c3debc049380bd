"""Two layers as wide as those of real models, on any device, checked by the margin rule.

Not collected by itself: `test_torch_cuda.py` uses it at small widths on the CPU, `tests/gpu` on a
device.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from reference_engine.executors.base import Site
from reference_engine.executors.cuda_stream import DeviceStream
from reference_engine.executors.torch_cuda import TorchCuda
from reference_engine.kernels.ops import Ops
from reference_engine.model.paged import PagedLlama
from reference_engine.model.zoo import SHAPES
from reference_engine.state.model_config import ModelConfig, ModelSource
from tests.reference_engine.engine_kit import request, rig
from tests.reference_engine.margin import Oracle, lively_weights

WIDE = {
    "0.6b": replace(SHAPES["0.6b"], n_layers=2),  # qk-norm, tied, a vocabulary of 152 k
    "8b": replace(SHAPES["8b"], n_layers=2),
    # Qwen2.5-0.5B: biases, 7 query heads for each KV head, heads of 64
    "qwen2": ModelConfig(
        2, 896, 14, 2, 64, 4864, 151_936, rope_theta=1e6, qkv_bias=True, tied=True
    ),
}
N_BLOCKS, MAX_MODEL_LEN = 64, 256


def greedy_shortfalls(
    config: ModelConfig,
    dtype: torch.dtype,
    stream: DeviceStream,
    ops: Ops,
    computed: ModelConfig | None = None,
) -> list[float]:
    """The shortfall of every token of four requests. A request arrives each step, and prompts are
    computed in pieces of 48 tokens. `computed` replaces the config that the engine computes
    with."""
    draw = random.Random(3)
    requests = [
        request(f"r{i}", [draw.randrange(config.vocab_size) for _ in range(n)], 24)
        for i, n in enumerate((1, 17, 64, 150))
    ]
    weights = lively_weights(config, dtype, stream.device)
    model = PagedLlama(computed or config, weights, ops, 16, MAX_MODEL_LEN)
    site = Site(
        ModelSource("wide", config), N_BLOCKS, 16, MAX_MODEL_LEN, lambda s: None, max_num_seqs=4
    )
    engine = rig(n_blocks=N_BLOCKS, max_model_len=MAX_MODEL_LEN, token_budget=48, max_num_seqs=4)
    engine.executor = TorchCuda(model, ops, site, N_BLOCKS, stream)
    for req in requests:
        engine.admit(req)
        engine.step()
    engine.drain()
    oracle = Oracle(config, lively_weights(config, dtype, stream.device), MAX_MODEL_LEN)
    assert [req.n_output for req in requests] == [24] * 4
    return [x for req in requests for x in oracle.shortfalls(req.tokens, req.n_prompt)]
