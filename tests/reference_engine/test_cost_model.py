"""Step costs against published tables: the roofline, and bandwidths of profiled operators."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import UsageError
from reference_engine.model.zoo import SHAPES, resolve
from reference_engine.state.cost_model import (
    HARDWARE,
    Padding,
    StepCost,
    StepShape,
    find_hardware,
    kv_tokens,
    model_on_hardware,
    roofline_s,
    step_cost,
)
from reference_engine.state.model_config import ModelConfig

H200 = HARDWARE["h200"]
QWEN3_14B = ModelConfig(40, 5120, 40, 8, 128, 17_408, 151_936)
LLAMA2_7B = ModelConfig(32, 4096, 32, 32, 128, 11_008, 32_000)
LLAMA2_70B = ModelConfig(80, 8192, 64, 8, 128, 28_672, 32_000)


def decoding(n, context=1024):
    return StepShape(n, 0, 0.0, n, n * context)


@st.composite
def shapes(draw):
    n_decode, n_prompts = draw(st.integers(0, 300)), draw(st.integers(0, 8))
    chunks = [(draw(st.integers(1, 4096)), draw(st.integers(0, 16_384))) for _ in range(n_prompts)]
    context = draw(st.integers(0, 8192)) * n_decode
    attention = sum(n * (before + n / 2) for n, before in chunks)
    padding = Padding(*(draw(st.integers(0, 4096)) for _ in range(3)))
    return StepShape(
        n_decode + n_prompts, sum(n for n, _ in chunks), attention, n_decode, context, padding
    )


# bf16 on a measured H200 (4.3 TB/s, 790 TFLOP/s), computed by hand from the shapes
@pytest.mark.parametrize(
    ("shape", "alone_ms", "batch_256_ms", "prefill_per_s"),
    [
        ("0.6b", 0.30, 7.27, 663e3),
        ("1b", 0.58, 2.57, 320e3),
        ("8b", 3.52, 11.48, 52.6e3),
    ],
)
def test_the_roofline_is_the_known_table(shape, alone_ms, batch_256_ms, prefill_per_s):
    model = SHAPES[shape]
    assert roofline_s(model, H200, decoding(1)) * 1e3 == pytest.approx(alone_ms, abs=0.006)
    assert roofline_s(model, H200, decoding(256)) * 1e3 == pytest.approx(batch_256_ms, abs=0.006)
    n = 1_000_000  # prompts of one token, every one of them sampled from
    assert n / roofline_s(model, H200, StepShape(n, n)) == pytest.approx(prefill_per_s, rel=2e-3)


@pytest.mark.parametrize(("batch", "ms"), [(32, 4.49), (64, 5.49), (128, 7.49)])
def test_the_roofline_of_8b_by_batch(batch, ms):
    assert roofline_s(SHAPES["8b"], H200, decoding(batch)) * 1e3 == pytest.approx(ms, abs=0.006)


def test_14b_does_one_step_in_6_6_ms_and_28_thousand_prompt_tokens_a_second():
    assert roofline_s(QWEN3_14B, H200, decoding(1)) * 1e3 == pytest.approx(6.6, abs=0.06)
    n = 1_000_000
    assert n / roofline_s(QWEN3_14B, H200, StepShape(n, n)) == pytest.approx(28e3, rel=0.02)


# Share of the datasheet's bandwidth at one token, linear operators only, tensor parallel 1 to 8.
# Source: fits of the operator profiles that Vidur (MLSys'24) publishes.
@pytest.mark.parametrize(
    ("model", "name", "shares"),
    [
        (LLAMA2_7B, "h100", (0.76, 0.70, 0.56, 0.42)),
        (LLAMA2_70B, "h100", (0.86, 0.84, 0.77, 0.69)),
        (SHAPES["8b"], "a100", (0.71, 0.65, 0.58, 0.47)),
        (SHAPES["70b"], "a100", (0.75, 0.73, 0.69, 0.65)),
    ],
)
def test_one_pair_of_constants_explains_the_bandwidth_of_every_shard(model, name, shares):
    hardware = HARDWARE[name]
    for n, share in zip((1, 2, 4, 8), shares, strict=True):
        layer_s = model.d_model * model.head_dim * (2 * model.n_heads + 2 * model.n_kv_heads)
        layer_s = 2 * (layer_s + 3 * model.d_model * model.d_ffn) / hardware.bandwidth / n
        modelled = layer_s / (layer_s / hardware.eta_bandwidth + hardware.layer_s)
        assert modelled == pytest.approx(share, rel=0.04)


# Linear operators of Llama-2-70B on 4 H100, ms per layer. Source: as above.
@pytest.mark.parametrize(
    ("n_tokens", "ms"),
    [(1, 0.159), (64, 0.170), (256, 0.215), (512, 0.33), (1024, 0.688), (4096, 2.37)],
)
def test_a_layer_of_70b_on_four_h100_takes_what_was_profiled(n_tokens, ms):
    hardware = find_hardware("4xh100")
    cost = step_cost(LLAMA2_70B, hardware)
    bare = StepCost(weights_s=cost.weights_s, token_s=cost.token_s)  # the output layer is 0.8 %
    layer_s = bare.estimate(StepShape(0, n_tokens)) / 80 + hardware.layer_s
    assert layer_s * 1e3 == pytest.approx(ms, rel=0.13)


@given(shapes(), st.sampled_from(sorted(SHAPES)), st.sampled_from(sorted(HARDWARE)))
def test_no_step_beats_the_roofline(shape, model, hardware):
    model, hardware = SHAPES[model], HARDWARE[hardware]
    assert step_cost(model, hardware).estimate(shape) >= roofline_s(model, hardware, shape)


@given(shapes(), st.integers(0, 4), st.integers(1, 500))
def test_more_work_never_costs_less(shape, field, more):
    cost = replace(step_cost(SHAPES["8b"], H200), graph_rows=())  # leaving a graph may save rows
    larger = shape._replace(**{shape._fields[field]: shape[field] + more})
    assert cost.estimate(larger) >= cost.estimate(shape)


@given(shapes())
def test_padding_costs_as_much_as_the_same_work_done_for_somebody(shape):
    cost = step_cost(SHAPES["8b"], H200)
    padding, bare = shape.padding, shape._replace(padding=Padding())
    as_work = bare._replace(
        n_seqs=shape.n_seqs + padding.decode_rows,
        prefill_tokens=shape.prefill_tokens + padding.prefill_tokens,
        n_decode=shape.n_decode + padding.decode_rows,
        context_tokens=shape.context_tokens + padding.decode_context_tokens,
    )
    assert cost.estimate(shape) == cost.estimate(as_work)


def test_a_linear_cost_is_the_sum_of_its_parts():
    cost = StepCost(
        step_s=1.0, seq_s=0.1, token_s=0.01, context_token_s=1e-3, prefill_attention_s=1e-4
    )
    assert cost.estimate(StepShape(3, 20, 200.0, 2, 40)) == pytest.approx(
        1 + 0.3 + 0.22 + 0.04 + 0.02
    )
    assert cost.estimate(StepShape()) == 0.0


def test_a_decoding_step_is_rounded_up_to_a_captured_graph_and_a_mixed_one_is_not():
    cost = StepCost(token_s=1.0, graph_rows=(1, 2, 4, 8, 16))
    seconds = [cost.estimate(decoding(n, 0)) for n in (1, 3, 8, 9, 16, 17)]
    assert seconds == [1, 4, 8, 16, 16, 17]
    assert cost.estimate(StepShape(10, 100, 0.0, 9)) == 109
    masked = StepShape(3, 0, 0.0, 3, 0, Padding(decode_rows=2))
    assert cost.estimate(masked) == 8


def test_the_free_lunch_of_batching_ends_where_arithmetic_takes_over():
    cost = step_cost(SHAPES["8b"], H200)
    alone, few, many = (cost.estimate(StepShape(n, 0, 0.0, n)) for n in (1, 32, 512))
    assert few < 1.06 * alone  # 32 times the tokens
    assert many > 2 * alone


def test_several_devices_are_faster_but_never_in_proportion():
    one, four = (step_cost(SHAPES["70b"], find_hardware(name)) for name in ("2xh200", "8xh200"))
    step = decoding(64)
    assert one.estimate(step) / 4 < four.estimate(step) < one.estimate(step)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_kv_in_8_bits_is_shorter_and_read_faster(kv_dtype):
    """Of 128 numbers: 256 bytes in bfloat16, 132 in 8 bits with a scale of 4."""
    whole, half = (model_on_hardware(resolve("8b"), "h200", kind) for kind in ("auto", kv_dtype))
    assert half.kv_tokens / whole.kv_tokens == pytest.approx(256 / 132, rel=1e-4)
    assert half.copy_token_s / whole.copy_token_s == pytest.approx(132 / 256)
    # 32 rows at 8 k: 0.262 M tokens of 128 KiB at 0.75 · 4.3 TB/s are 10.65 ms, or 5.49 ms.
    shape = StepShape(n_seqs=32, n_decode=32, context_tokens=32 * 8192)
    saved_s = whole.cost.estimate(shape) - half.cost.estimate(shape)
    assert saved_s == pytest.approx(5.16e-3, abs=0.01e-3)


def test_kv_in_8_bits_was_never_measured_on_a_cpu():
    with pytest.raises(UsageError, match="kv_dtype: no costs of 'fp8' were measured on a cpu"):
        model_on_hardware(resolve("nano"), "cpu", "fp8")


def test_kv_fills_what_the_weights_leave():
    # 0.9 · 141 GB − 16.06 GB of weights = 110.8 GB; 8B has 131 072 bytes of KV per token
    assert kv_tokens(SHAPES["8b"], H200) == pytest.approx(110.8e9 / 131_072, rel=1e-3)
    with pytest.raises(UsageError, match=r"141 GB of weights do not fit .*2xh100"):
        kv_tokens(SHAPES["70b"], HARDWARE["h100"])


def test_unknown_hardware_names_the_nearest():
    with pytest.raises(UsageError, match=r"unknown 'h20'; did you mean 'h200'\?"):
        find_hardware("h20")
    assert find_hardware("4xH100") == find_hardware("4xh100")
    assert find_hardware("4xh100").n == 4
