"""Step costs against published tables: the roofline, and bandwidths of profiled operators."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import UsageError
from reference_engine.model.hardware_file import (
    CostError,
    read_calibrated,
    read_hardware,
    simulated_model,
    write_calibrated,
)
from reference_engine.model.zoo import SHAPES, resolve
from reference_engine.policies.chunked import Chunked
from reference_engine.simulator import simulate
from reference_engine.state.cost_model import (
    CPU_COSTS,
    HARDWARE,
    MeasuredSteps,
    NotMeasured,
    Padding,
    StepCost,
    StepShape,
    decode_s,
    find_hardware,
    kv_tokens,
    model_on_hardware,
    roofline_s,
    step_cost,
)
from reference_engine.state.model_config import ModelConfig
from reference_engine.state.plan import Limits
from reference_engine.state.step_variation import StepVariation
from tests.reference_engine.engine_kit import request

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


@pytest.mark.parametrize(
    ("n_context", "prefill_attention", "attention_s"),
    [
        (40, 10.0, 0.05),  # D 0.04 s, P 0.01 s: the sum, less than 0.04 / 0.7
        (40, 30.0, 0.04 / 0.7),  # P 0.03 s: the longer, divided by the efficiency
        (40, 90.0, 0.09 / 0.7),
        (40, 0.0, 0.04),  # nothing to overlap with
        (0, 30.0, 0.03),
    ],
)
def test_fused_attention_takes_the_longer_of_the_two_kinds(
    n_context, prefill_attention, attention_s
):
    cost = StepCost(step_s=1.0, context_token_s=1e-3, prefill_attention_s=1e-3, fused_attention=0.7)
    shape = StepShape(2, 8, prefill_attention, 1, n_context)
    assert cost.estimate(shape) == pytest.approx(1.0 + attention_s)
    apart = replace(cost, fused_attention=0.0)
    assert cost.estimate(shape) <= apart.estimate(shape)
    contexts = [shape._replace(context_tokens=n_context + k) for k in range(3)]
    assert decode_s(cost, shape, 3) == [cost.estimate(one) for one in contexts]


@pytest.mark.parametrize(("fused_attention", "mixed_s"), [(0.0, 0.5), (0.9, 0.4 / 0.9), (1.0, 0.4)])
def test_fused_attention_shortens_the_steps_with_prompts_and_decodes(fused_attention, mixed_s):
    cost = StepCost(
        context_token_s=0.01, prefill_attention_s=0.002, fused_attention=fused_attention
    )
    a, b = request("a", [1] * 10, 3), request("b", [2] * 20, 1, arrived_s=0.05)
    a.token_times_s, b.token_times_s = [], []
    simulate([a, b], Chunked(), cost)
    # a's prompt: 50 pairs, 0.1 s; a's decode at 10 tokens, 0.1 s, with b's prompt: 200 pairs,
    # 0.4 s; a's decode at 11 tokens alone
    assert a.token_times_s == pytest.approx([0.1, 0.1 + mixed_s, 0.21 + mixed_s])
    assert b.token_times_s == pytest.approx([0.1 + mixed_s])


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
def test_kv_in_8_bits_is_shorter_and_read_as_fast(kv_dtype):
    """Of 128 numbers: 256 bytes in bfloat16, 132 in 8 bits with a scale of 4. The time of reading
    them was not measured on a GPU, so it does not change."""
    whole, half = (model_on_hardware(resolve("8b"), "h200", kind) for kind in ("auto", kv_dtype))
    assert half.kv_tokens / whole.kv_tokens == pytest.approx(256 / 132, rel=1e-4)
    assert half.copy_token_s / whole.copy_token_s == pytest.approx(132 / 256)
    assert half.cost == whole.cost


def test_weights_in_8_bits_are_read_in_half_the_time_and_multiplied_at_the_8_bit_rate():
    """8B: 6.98 G parameters in the blocks, 0.53 G in the output layer, which stays in bfloat16. At
    0.98 · 4.3 TB/s: 15.01 GB take 3.56 ms, 8.03 GB 1.91 ms."""
    auto, fp8 = (
        model_on_hardware(resolve("8b"), "h200", weight_dtype=kind) for kind in ("auto", "fp8")
    )
    assert auto.cost.weights_s == pytest.approx(3.56e-3, rel=2e-3)
    assert fp8.cost.weights_s == pytest.approx(1.906e-3, rel=2e-3)
    assert auto.cost.token_s / fp8.cost.token_s == pytest.approx(2)
    assert fp8.cost.head_s == auto.cost.head_s
    # 6.98 GB of memory less for the weights are 53 252 tokens of KV of 128 KiB.
    assert fp8.kv_tokens - auto.kv_tokens == pytest.approx(53_252, abs=30)


# An all-reduce among four H100s, µs by bytes: vLLM's custom kernel, launched without a graph.
# Source: the table in https://github.com/sgl-project/sglang/pull/2904.
@pytest.mark.parametrize(
    ("n_bytes", "us"), [(512, 9.1), (4096, 8.5), (32_768, 9.2), (262_144, 20.6), (524_288, 26.9)]
)
def test_a_short_all_reduce_takes_what_was_published(n_bytes, us):
    hardware = HARDWARE["h100"]
    modelled_s = hardware.short_allreduce_s + n_bytes / hardware.short_allreduce_bytes_per_s
    assert modelled_s * 1e6 == pytest.approx(us, rel=0.18)


def test_the_all_reduce_of_a_step_is_the_faster_of_the_two():
    """70B on four H200s: 160 all-reduces of 16 KiB per token. Of one token 160 · (9.5 + 0.475) µs
    = 1.6 ms, of 1024 tokens 160 · (38 + 72.9) µs = 17.7 ms."""
    model, hardware = SHAPES["70b"], find_hardware("4xh200")
    cost = step_cost(model, hardware)
    alone = step_cost(model, replace(hardware, n=1))
    fixed_s = cost.step_s - alone.step_s
    for n_tokens, ms in [(1, 1.596), (1024, 17.75)]:
        saved_s = max(0.0, cost.reduce_saved_s - cost.reduce_saved_token_s * n_tokens)
        reduce_s = fixed_s + cost.added_token_s * n_tokens - saved_s
        assert reduce_s * 1e3 == pytest.approx(ms, rel=2e-3)
    assert cost.estimate(StepShape(1, 0, 0.0, 1)) == pytest.approx(11.7e-3, rel=0.01)


def vllm_shape_tokens_per_s(step_s):
    """Output tokens/s of 1000 prompts of 256 tokens with 256 output tokens each, all at once, 8B on
    an H100 with 256 sequences."""
    hardware = replace(HARDWARE["h100"], step_s=step_s)
    model = model_on_hardware(resolve("8b"), hardware)
    requests = [request(f"r{k}", [k] * 256, 256) for k in range(1000)]
    done = simulate(
        requests, Chunked(), model.cost, limits=Limits(256, 1 << 16, 1 << 15, 1 << 18),
        n_blocks=model.kv_tokens // 16, prefix_cache=False,
    )  # fmt: skip
    return 256_000 / max(r.finished_s or 0.0 for r in done.finished)


def test_four_idle_milliseconds_a_step_separate_the_preset_from_vllm_of_2024():
    """Published: 44.4 to 46.1 requests/s (vllm-project/vllm#11078), which are 11 400 to 11 800
    tokens/s. The idle time is that of vllm-project/vllm#6854: "about 4 ms of GPU bubble" a step."""
    assert vllm_shape_tokens_per_s(0.3e-3) == pytest.approx(14_300, rel=0.02)
    assert 11_400 < vllm_shape_tokens_per_s(0.3e-3 + 4e-3) < 11_800


def test_cpu_costs_are_those_of_the_committed_fit():
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "fit_cpu_cost.json"
    shapes = json.loads(path.read_text())["shapes"]
    assert set(CPU_COSTS) == set(shapes)
    for name, fit in shapes.items():
        for key in ("step_s", "seq_s", "token_s", "context_token_s", "prefill_attention_s"):
            assert getattr(CPU_COSTS[name], key) == pytest.approx(fit[key], rel=1e-3), (name, key)


OWN = """\
name: b200
bandwidth_bytes_per_s: 8.0e12
flops_per_s: 2.25e15
flops_8bit_per_s: 4.5e15
memory_bytes: 180.0e9
step: 0.5ms
"""


def test_hardware_of_a_file_is_used_like_a_preset(tmp_path):
    path = tmp_path / "b200.yaml"
    path.write_text(OWN)
    hardware = read_hardware(path)
    assert (hardware.name, hardware.step_s, hardware.flops_8bit) == ("b200", 0.5e-3, 4.5e15)
    assert hardware.eta_bandwidth == HARDWARE["h100"].eta_bandwidth
    one, four = (simulated_model(resolve("70b"), f"{n}{path}") for n in ("", "4x"))
    # 0.9 · 180 GB − 141.1 GB are 20.9 GB, at 327 680 bytes a token
    assert one.kv_tokens == pytest.approx(20.9e9 / 327_680, rel=0.01)
    assert four.cost.weights_s == pytest.approx(one.cost.weights_s / 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OWN.replace("8.0e12", "-1"), "mine.yaml:2: bandwidth_bytes_per_s"),
        (OWN.replace("name: b200\n", ""), "name"),
        (OWN + "bandwith_share: 90%\n", "mine.yaml:7: bandwith_share"),
        (None, "mine.yaml cannot be read"),
    ],
)
def test_a_mistake_in_a_hardware_file_names_file_line_and_key(text, words, tmp_path):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError) as error:
        simulated_model(resolve("8b"), str(path))
    assert words in str(error.value)


CALIBRATED = """\
name: box
model: nano
kv_tokens: 4096
errors: {prompt: {mean: 0.02, interval: [0.01, 0.03], worst: -0.062}}
costs:
  step: 0.8ms
  sequence: 30us
  prefill_sequence: 0.2ms
  token: 5us
  context_token: 110ns
  prefill_attention: 20ns
"""


def calibrated(path, text=CALIBRATED, shape="nano", **dtypes):
    path.write_text(text)
    return simulated_model(resolve(shape), str(path), **dtypes)


def test_a_calibrated_file_has_the_costs_and_the_memory_of_its_server(tmp_path):
    model = calibrated(tmp_path / "box.yaml")
    assert (model.kv_tokens, model.cost_error) == (4096, 0.062)
    # .8 + 3 · .03 + .2 + (64 + 2) · .005 + 500 · .00011 + 2048 · .00002 ms
    shape = StepShape(3, 64, 2048.0, 2, 500)
    assert model.cost.estimate(shape) == pytest.approx(1.51596e-3)
    # decodes alone are not rounded up to a captured graph, and have no prompt
    assert model.cost.estimate(StepShape(3, 0, 0.0, 3, 0)) == pytest.approx(0.905e-3)


@pytest.mark.parametrize(
    ("text", "shape", "dtypes", "words"),
    [
        (CALIBRATED, "tiny", {}, "costs of 'nano', not of 'tiny'; use shape=nano"),
        (CALIBRATED, "nano", {"kv_dtype": "fp8"}, "kv_dtype and weight_dtype need another"),
        (CALIBRATED.replace("0.062", "0.081"), "nano", {}, "prompt steps are wrong by 8.1%"),
        (CALIBRATED.replace("token: 5us", "token: -5us"), "nano", {}, "box.yaml:9: costs.token"),
    ],
)
def test_a_calibrated_file_is_refused_for_what_it_does_not_hold(
    text, shape, dtypes, words, tmp_path
):
    with pytest.raises(UsageError) as error:
        calibrated(tmp_path / "box.yaml", text, shape, **dtypes)
    assert words in str(error.value)


def test_a_forced_file_is_used_whatever_its_error(tmp_path):
    text = CALIBRATED.replace("0.062", "0.4") + "forced: true\n"
    assert calibrated(tmp_path / "box.yaml", text).cost_error == 0.4


def test_a_calibrated_file_is_read_back_as_it_was_written(tmp_path):
    cost = StepCost(
        step_s=1.23456789e-3,
        token_s=5.262e-06,
        context_token_s=1.108e-7,
        weights_s=2e-3,
        added_token_s=1e-6,
        sharpness=16.0,
        row_s=3e-5,
        graph_rows=(1, 2, 4, 8),
        seq_pieces=((2, 1e-4), (8, 5e-5)),
        measured=(
            MeasuredSteps("prompt", (1, 1), (16, 512), (128.0, 131072.0)),
            MeasuredSteps("decode", decodes=(1, 32), context_tokens=(17, 20000)),
        ),
    )
    facts = {"name": "box", "model": "nano", "kv_tokens": 4096, "form": "linear"}
    errors = {"decode": {"mean": 0.012, "interval": [0.01, 0.02], "worst": -0.034, "at": '"8"'}}
    write_calibrated(tmp_path / "box.yaml", cost, 2e-3, facts, errors=errors)
    back = read_calibrated(tmp_path / "box.yaml")
    assert (back.request, back.kv_tokens, back.forced, back.form) == (2e-3, 4096, False, "linear")
    assert back.errors["decode"].interval == (0.01, 0.02)
    model = simulated_model(resolve("nano"), str(tmp_path / "box.yaml"))
    read = model.cost
    assert (read.measured, read.graph_rows) == (cost.measured, (1, 2, 4, 8))
    assert [k for k, _ in read.seq_pieces] == [2, 8]
    assert [piece_s for _, piece_s in read.seq_pieces] == pytest.approx([1e-4, 5e-5])
    assert (read.step_s, read.sharpness) == (1.23457e-3, 16.0)
    own_s = [read.weights_s, read.added_token_s, read.row_s, read.context_token_s]
    assert own_s == pytest.approx([2e-3, 1e-6, 3e-5, 1.108e-7])
    assert model.cost_error == 0.034
    assert model.variation is None


def test_pieces_cost_less_for_each_further_sequence_and_rows_are_those_of_the_graph():
    pieces = StepCost(seq_pieces=((2, 1e-3), (4, 0.5e-3)))
    per_batch = [pieces.estimate(StepShape(n, 0, 0.0, n, 0)) for n in (1, 2, 3, 4, 5)]
    assert per_batch == pytest.approx([1.5e-3, 3e-3, 3.5e-3, 4e-3, 4e-3])
    rows = StepCost(row_s=1e-3, graph_rows=(1, 2, 4))
    assert rows.estimate(StepShape(3, 0, 0.0, 3, 0)) == pytest.approx(4e-3)
    assert rows.estimate(StepShape(4, 10, 50.0, 3, 0)) == pytest.approx(3e-3)  # no graph: mixed


MEASURED = (
    MeasuredSteps("prompt", (1, 1), (128, 2048), (8192.0, 2097152.0)),
    MeasuredSteps("decode", decodes=(1, 32), context_tokens=(17, 20000)),
)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (StepShape(1, 2048, 2097152.0, 0, 0), None),
        (StepShape(1, 2200, 2097152.0, 0, 0), None),  # within a tenth
        (StepShape(32, 0, 0.0, 32, 20000), None),
        (StepShape(1, 0, 0.0, 1, 2), None),
        (StepShape(1, 2300, 2097152.0, 0, 0), "2300 prompt tokens .*at most 2048.*max-input-len"),
        (StepShape(1, 64, 2048.0, 0, 0), "64 prompt tokens .*at least 128"),
        (StepShape(36, 0, 0.0, 36, 20000), "36 decoding requests .*at most 32.*--max-batch"),
        (StepShape(32, 0, 0.0, 32, 40000), "40000 tokens of context .*at most 20000"),
        (StepShape(3, 128, 8192.0, 2, 100), "no mixed steps were measured"),
    ],
)
def test_a_step_outside_the_measured_sizes_is_refused_with_the_way_to_measure_it(shape, words):
    cost = StepCost(step_s=1e-3, measured=MEASURED)
    if words is None:
        cost.check_measured(shape)
        return
    with pytest.raises(NotMeasured, match=words):
        cost.check_measured(shape)


def test_the_variation_of_a_calibrated_file_is_read_back_as_it_was_written(tmp_path):
    facts = {"name": "box", "model": "nano", "kv_tokens": 4096}
    variation = StepVariation((0.25, 1.0), (0.9, 1.23456), 0.5, 32.0, 0.01, (1.5e-3, 2e-2))
    write_calibrated(tmp_path / "box.yaml", StepCost(step_s=1e-3), None, facts, variation)
    model = simulated_model(resolve("nano"), str(tmp_path / "box.yaml"))
    assert model.variation == replace(variation, ratio=(0.9, 1.235))


VARIED = (
    CALIBRATED
    + """\
variation:
  up_to: [0.5, 1]
  ratio: [0.9, 1.2]
  lasting: 0.5
  memory: 8
"""
)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[0.5, 1]", "[0.5, 0.9]", "box.yaml:13: variation.up_to: the shares must rise"),
        ("[0.9, 1.2]", "[0.9]", "variation: 1 ratios for 2 shares"),
        ("memory: 8", "memory: 0", "box.yaml:16: variation.memory"),
        ("memory: 8", "memory: 8\n  pauses: [1]", "variation.pauses"),
    ],
)
def test_a_mistake_in_a_variation_is_named(old, new, words, tmp_path):
    assert calibrated(tmp_path / "box.yaml", VARIED).variation.ratio == (0.9, 1.2)
    with pytest.raises(UsageError) as error:
        calibrated(tmp_path / "box.yaml", VARIED.replace(old, new))
    assert words in str(error.value)


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


def test_an_error_of_more_than_100_per_cent_can_be_stated():
    stated = {"mean": 0.9, "interval": [0.5, 1.09], "worst": -1.5}
    assert CostError.model_validate(stated).interval == (0.5, 1.09)
