"""Costs of models with experts: known sizes, arithmetic by hand, and a published all-to-all."""

import pytest

from loadgen.errors import UsageError
from loadgen.lab.compiled_core import NotCovered, core_settings
from loadgen.lab.sim_options import sim_options
from loadgen.lab.simulated_engine import build
from reference_engine.model.hardware_file import simulated_model
from reference_engine.model.zoo import SHAPES, resolve
from reference_engine.state.cost_model import (
    HARDWARE,
    StepCost,
    StepShape,
    model_on_hardware,
    roofline_s,
)
from reference_engine.state.model_config import config_from

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


# parameters in all and of a token, as the models are published (Mixtral of Experts, arXiv
# 2401.04088; Qwen3, arXiv 2505.09388)
@pytest.mark.parametrize(
    ("shape", "total", "active"),
    [
        ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),
        ("qwen3-235b-a22b", 235e9, 22e9),
    ],
)
def test_a_model_with_experts_has_its_published_sizes(shape, total, active):
    config = SHAPES[shape]
    embeddings = 2 * config.vocab_size * config.d_model
    assert config.n_params == pytest.approx(total, rel=0.002)
    assert config.n_active_params + embeddings == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("config", "shape"), [(MIXTRAL, "mixtral-8x7b"), (QWEN3_30B, "qwen3-30b-a3b")]
)
def test_a_config_with_experts_is_read(config, shape):
    read, known = config_from(config), SHAPES[shape]
    for name in ("n_params", "n_active_params", "n_experts", "experts_per_token", "qk_norm"):
        assert getattr(read, name) == getattr(known, name)


@pytest.mark.parametrize("change", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}])
def test_a_config_with_experts_in_some_layers_is_refused(change):
    with pytest.raises(UsageError, match="every layer must have experts"):
        config_from(QWEN3_30B | change)


def test_a_step_reads_the_experts_that_its_tokens_need():
    """Four experts of 1 s each, two of which compute a token: a token reads two, two tokens 3 of
    them on average, because the second finds each expert read with probability 1/2."""
    cost = StepCost(expert_weights_s=4.0, expert_share=0.5, sharpness=1.0)
    steps = [cost.estimate(StepShape(n, 0, 0.0, n, 0)) for n in (1, 2, 3)]
    assert steps == pytest.approx([2.0, 3.0, 3.5])
    assert cost.estimate(StepShape(1, 100, 0.0, 0, 0)) == pytest.approx(4.0)
    assert cost.estimate(StepShape()) == 0.0


def test_the_costs_of_mixtral_on_two_h200_are_those_computed_by_hand():
    """32 layers with 41.94 M parameters of attention, 32 768 of the router and 8 · 176.16 M of
    experts; an output layer of 131 M. Two H200s read at 0.98 · 8.6 TB/s and multiply at 0.9 · 1580
    TFLOP/s. A token takes part in 12.62 of 46.44 G parameters."""
    cost = model_on_hardware(resolve("mixtral-8x7b"), "2xh200").cost
    assert cost.weights_s == pytest.approx(0.3498e-3, rel=1e-3)  # 2 · 1.4743 G / 8.428e12
    assert cost.expert_weights_s == pytest.approx(10.702e-3, rel=1e-3)  # 2 · 45.097 G
    assert cost.expert_share == 0.25
    assert cost.token_s == pytest.approx(2 * 12.6175e9 / 1422e12, rel=1e-3)
    # .9 · 282 GB − 93.4 GB of weights, at 131 072 bytes a token
    n_tokens = model_on_hardware(resolve("mixtral-8x7b"), "2xh200").kv_tokens
    assert n_tokens == pytest.approx(160.4e9 / 131_072, rel=1e-3)


def test_whole_experts_on_each_device_replace_an_all_reduce_by_two_all_to_alls():
    """Per layer: 38 µs and 8 KiB / 230 GB/s less, 2 · 9.5 µs more, and per token 2 · 4096 bytes at
    127 GB/s: half of the tokens are on a device, and of 2 experts, 1 is on the other."""
    divided, whole = (
        model_on_hardware(resolve("mixtral-8x7b"), "2xh200", expert_parallel=is_whole).cost
        for is_whole in (False, True)
    )
    assert divided.step_s - whole.step_s == pytest.approx(32 * (38e-6 - 19e-6))
    more_s = whole.added_token_s - divided.added_token_s
    assert more_s == pytest.approx(32 * (2 * 4096 / 127e9 - 8192 / 230e9))
    assert whole.reduce_saved_s == pytest.approx(divided.reduce_saved_s / 2)
    assert whole.expert_weights_s == divided.expert_weights_s


def test_an_all_to_all_takes_what_was_published():
    """128 tokens of 7168 numbers in bfloat16 on each of 8 H800s, 8 experts each: a combine of 114
    µs. Source: the page of DeepEP V1, low-latency kernels."""
    hardware, sent_bytes = HARDWARE["h100"], 128 * 8 * (1 - 1 / 8) * 7168 * 2
    modelled_s = hardware.all_to_all_s + sent_bytes / hardware.all_to_all_bytes_per_s
    assert modelled_s * 1e6 == pytest.approx(114, rel=0.04)


def test_the_roofline_reads_the_experts_of_a_token_only():
    model, h200 = SHAPES["qwen3-30b-a3b"], HARDWARE["h200"]
    # 2 bytes of 2.73 G parameters of a token and 0.31 G of the output layer, at 4.3 TB/s
    assert roofline_s(model, h200, StepShape(1, 0, 0.0, 1)) == pytest.approx(1.41e-3, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "hardware"), [("8b", "2xh200"), ("mixtral-8x7b", "h200"), ("70b", "4xh200")]
)
def test_expert_parallel_needs_experts_and_devices(shape, hardware):
    with pytest.raises(UsageError, match="expert_parallel: has no effect"):
        model_on_hardware(resolve(shape), hardware, expert_parallel=True)


def test_the_rate_of_an_all_to_all_is_a_key_of_a_hardware_file(tmp_path):
    path = tmp_path / "box.yaml"
    path.write_text(
        "name: box\nbandwidth_bytes_per_s: 4.0e12\nflops_per_s: 1.0e15\nmemory_bytes: 141.0e9\n"
        "all_to_all_bytes_per_s: 254e9\n"
    )
    model = simulated_model(resolve("mixtral-8x7b"), f"2x{path}", expert_parallel=True)
    assert model.cost.added_token_s == pytest.approx(32 * (2 * 4096 / 254e9 + 8192 / 230e9))


def test_a_simulated_engine_has_experts_and_python_computes_its_steps():
    settings = {"shape": "mixtral-8x7b", "hardware": "2xh200", "expert_parallel": "true"}
    options = sim_options(settings)
    engine = build(options, is_sharing=False)
    assert "whole experts on each device" in engine.description
    with pytest.raises(NotCovered, match="experts"):
        core_settings(engine, options.cluster)
