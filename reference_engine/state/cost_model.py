"""The cost of a step in seconds, from a few counts. Policies use it to price plans, admission to
price requests, and the simulator to advance its clock.

A step reads all weights once, however many tokens share them, and multiplies every token with them;
the longer of the two counts (a smooth maximum). Attention reads the KV of every decoding request
and multiplies each prompt token with the tokens before it. The rest is overhead.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, NamedTuple, Protocol

import numpy as np

from loadgen.errors import UsageError, nearest
from reference_engine.state.model_config import KvDtype, ModelConfig, ModelSource
from reference_engine.state.step_variation import StepVariation

WeightDtype = Literal["auto", "fp8", "int8"]

_BYTES = 2  # of a weight, and of a KV number with kv_dtype "auto": bfloat16
# of a number in the matrices of the blocks; the output layer stays in bfloat16
_WEIGHT_BYTES: Mapping[WeightDtype, int] = {"auto": _BYTES, "fp8": 1, "int8": 1}
_KV_SHARE = 0.9  # of the memory; the rest is for activations and the allocator
_BEYOND = 1.1  # sizes within a tenth of the measured are taken as measured
_SMALL_PROMPT, _SMALL_BATCH = 64, 2  # such steps cost little more than the least possible
_CPU_KV_BYTES, _CPU_KV_TOKENS = 1 << 30, 65_536  # the defaults of `serve`


class Padding(NamedTuple):
    """Computed work without a request: prompt tokens that fill a batch up to its longest row,
    decode rows of requests that are over, and the KV (tokens) that both read."""

    prefill_tokens: int = 0
    decode_rows: int = 0
    decode_context_tokens: int = 0


NO_PADDING = Padding()


class StepShape(NamedTuple):
    """The counts of a step.

    `n_seqs` requests take part. `n_decode` of them compute a single token each and read
    `context_tokens` of KV. The others compute `prefill_tokens` of their prompts, and
    `prefill_attention` is Σ n·(c + n/2) over their chunks of n tokens after c (tokens²).
    """

    n_seqs: int = 0
    prefill_tokens: int = 0
    prefill_attention: float = 0.0
    n_decode: int = 0
    context_tokens: int = 0
    padding: Padding = NO_PADDING


_QUANTITIES = {
    "prompts": ("prompts at once", "--max-batch"),
    "prompt_tokens": ("prompt tokens", "--max-input-len"),
    "prompt_attention": ("pairs of tokens in the attention of prompts", "--max-input-len"),
    "decodes": ("decoding requests", "--max-batch"),
    "context_tokens": ("tokens of context", "--max-input-len and --max-batch"),
}


class NotMeasured(UsageError):
    """A step of a size that no calibration measured; `lacking` is the quantity, its value and the
    nearest measured, or None where no step of the kind was measured."""

    def __init__(self, kind: str, lacking: tuple[str, float, float] | None) -> None:
        if lacking is None:
            missing, flag = f"no {kind} steps were measured", "--max-batch"
        else:
            name, value, nearest = lacking
            words, flag = _QUANTITIES[name]
            bound = "most" if value > nearest else "least"
            missing = (
                f"a {kind} step of {value:.6g} {words} is outside the measured sizes (at {bound} "
                f"{nearest:.6g})"
            )
        super().__init__(
            f"hardware: {missing}; costs are not extrapolated. Measure with slobench calibrate "
            f"--target URL and a larger {flag}, or calibrate from the log or run of a load with "
            "such steps; or simulate a smaller load (max_num_seqs and token_budget limit the steps)"
        )


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """The sizes, least and most, of the steps of a kind (`prompt`, `decode`, `mixed`) to which
    costs were fitted: sequences with a prompt, their tokens and attention, decodes, and tokens of
    context."""

    kind: str
    prompts: tuple[int, int] = (0, 0)
    prompt_tokens: tuple[int, int] = (0, 0)
    prompt_attention: tuple[float, float] = (0.0, 0.0)
    decodes: tuple[int, int] = (0, 0)
    context_tokens: tuple[int, int] = (0, 0)

    def lacks(self, shape: StepShape) -> tuple[str, float, float] | None:
        """The first quantity of a step that is beyond the measured sizes, with its value and the
        nearest measured; None for a step within them. A tenth more than the most is within, and so
        is less than the least, where that is small: `_SMALL_PROMPT` tokens, or two sequences."""
        n_prompts = shape.n_seqs - shape.n_decode
        for name, value, (least, most), small in (
            ("prompts", n_prompts, self.prompts, _SMALL_BATCH),
            ("prompt_tokens", shape.prefill_tokens, self.prompt_tokens, _SMALL_PROMPT),
            ("prompt_attention", shape.prefill_attention, self.prompt_attention, inf),
            ("decodes", shape.n_decode, self.decodes, _SMALL_BATCH),
            ("context_tokens", shape.context_tokens, self.context_tokens, inf),
        ):
            if value > most * _BEYOND:
                return name, value, most
            if value * _BEYOND < least and least > small:
                return name, value, least
        return None


def kind_of(shape: StepShape) -> str:
    """The kind of a step that computes something."""
    if not shape.prefill_tokens:
        return "decode"
    return "mixed" if shape.n_decode else "prompt"


class CostModel(Protocol):
    """Estimates the seconds of a step; pure: equal shapes always cost the same."""

    def estimate(self, shape: StepShape) -> float: ...


@dataclass(frozen=True, slots=True)
class StepCost:
    """A cost that is linear in the counts, except for the floor under the tokens. All coefficients
    are in seconds and ≥ 0:

    t = step_s + seq_s·n_seqs + prefill_seq_s·n_prefill + row_s·R + added_token_s·T
        + Σ c·min(n_seqs, k) over the pairs (k, c) of `seq_pieces`
        + (W^p + M^p)^(1/p)
        + context_token_s·context_tokens + prefill_attention_s·prefill_attention
        − max(0, reduce_saved_s − reduce_saved_token_s·T)
    W = weights_s + expert_weights_s·(1 − (1 − expert_share)^T)
    M = token_s·T + head_s·n_seqs

    n_prefill counts the sequences with a piece of their prompt in the step. `reduce_saved_s` is
    what a step of few tokens saves by an all-reduce for short messages. `expert_weights_s` is the
    time of reading all experts, `expert_share` the probability that a token is computed by a given
    expert: W is the time of reading the experts that T tokens, routed independently and evenly,
    are computed by on average. T counts prompt tokens,
    decoding rows and padding, R decoding rows alone; p = `sharpness`. Without `weights_s` the model
    is linear except for `seq_pieces`, with which a further sequence costs less than the one before.
    A step that only decodes is rounded up to the next of `graph_rows`, the batch sizes for which a
    graph was captured (none: no rounding). An empty step costs nothing.

    With `fused_attention` = η > 0, a kernel computes the attention of decodes and of prompts at the
    same time. The two terms D and P of a step then take min(D + P, max(D, P) / η) together.
    Source: Kamath et al., POD-Attention, ASPLOS 2025 (arXiv 2410.18038).

    `measured` are the sizes of the steps to which the costs were fitted, by kind; none for costs
    that hold for every step. `estimate` prices any step; `check_measured` refuses those outside.
    """

    step_s: float = 0.0
    seq_s: float = 0.0
    added_token_s: float = 0.0
    weights_s: float = 0.0
    token_s: float = 0.0
    head_s: float = 0.0
    context_token_s: float = 0.0
    prefill_attention_s: float = 0.0
    reduce_saved_s: float = 0.0
    reduce_saved_token_s: float = 0.0
    prefill_seq_s: float = 0.0
    row_s: float = 0.0
    sharpness: float = 4.0
    fused_attention: float = 0.0
    graph_rows: tuple[int, ...] = ()
    seq_pieces: tuple[tuple[int, float], ...] = ()
    expert_weights_s: float = 0.0
    expert_share: float = 0.0
    measured: tuple[MeasuredSteps, ...] = ()

    def check_measured(self, shape: StepShape) -> None:
        """Raises NotMeasured for a step outside the measured sizes."""
        kind = kind_of(shape)
        steps = self._measured_of(kind)
        lacking = None if steps is None else steps.lacks(shape)
        if steps is None or lacking is not None:
            raise NotMeasured(kind, lacking)

    def is_measured(self, shape: StepShape) -> bool:
        """Whether `check_measured` accepts a step."""
        steps = self._measured_of(kind_of(shape))
        return steps is not None and steps.lacks(shape) is None

    def estimate(self, shape: StepShape) -> float:
        fixed_s, n_context = self.without_context(shape)
        if self.fused_attention:
            decode_s = self.context_token_s * n_context
            prefill_s = self.prefill_attention_s * shape.prefill_attention
            fused_s = max(decode_s, prefill_s) / self.fused_attention
            return fixed_s + min(decode_s + prefill_s, fused_s)
        return (
            fixed_s
            + self.context_token_s * n_context
            + self.prefill_attention_s * shape.prefill_attention
        )

    def without_context(self, shape: StepShape) -> tuple[float, int]:
        """The part of `estimate` that does not depend on the context, and the tokens of context
        that decodes and padding read; 0 and 0 for an empty step."""
        n_seqs, n_prefill, _, n_rows, n_context, padding = shape
        if padding is not NO_PADDING:
            n_prefill += padding.prefill_tokens
            n_rows += padding.decode_rows
            n_seqs += padding.decode_rows
            n_context += padding.decode_context_tokens
        if not n_prefill:
            n_rows = self._captured(n_rows)
        n_tokens = n_prefill + n_rows
        if not n_tokens:
            return 0.0, 0
        multiplying_s = self.token_s * n_tokens + self.head_s * n_seqs
        weights_s = self.weights_s
        if self.expert_weights_s:
            weights_s += self.expert_weights_s * (1 - (1 - self.expert_share) ** n_tokens)
        if weights_s:
            p = self.sharpness
            multiplying_s = (weights_s**p + multiplying_s**p) ** (1 / p)
        if self.reduce_saved_s:
            multiplying_s -= max(0.0, self.reduce_saved_s - self.reduce_saved_token_s * n_tokens)
        if self.prefill_seq_s:
            multiplying_s += self.prefill_seq_s * max(0, n_seqs - n_rows)
        if self.row_s:
            multiplying_s += self.row_s * n_rows
        for k, piece_s in self.seq_pieces:
            multiplying_s += piece_s * min(n_seqs, k)
        fixed_s = self.step_s + self.seq_s * n_seqs + self.added_token_s * n_tokens + multiplying_s
        return fixed_s, n_context

    def _measured_of(self, kind: str) -> MeasuredSteps | None:
        return next((steps for steps in self.measured if steps.kind == kind), None)

    def _captured(self, n_rows: int) -> int:
        at = bisect_left(self.graph_rows, n_rows)
        return self.graph_rows[at] if n_rows and at < len(self.graph_rows) else n_rows


def decode_s(cost: CostModel, shape: StepShape, n: int) -> list[float]:
    """`estimate` of `n` steps of a shape, each with a token more of context for each decode."""
    n_decode, n_context = shape.n_decode, shape.context_tokens
    if not isinstance(cost, StepCost) or (cost.fused_attention and shape.prefill_attention):
        contexts = range(n_context, n_context + n * n_decode, n_decode)
        return [cost.estimate(shape._replace(context_tokens=c)) for c in contexts]
    fixed_s, n_context = cost.without_context(shape)
    token_s, attention_s = cost.context_token_s, cost.prefill_attention_s * shape.prefill_attention
    growing = n_context + n_decode * np.arange(n)
    durations_s: list[float] = (fixed_s + token_s * growing + attention_s).tolist()
    return durations_s


@dataclass(frozen=True, slots=True)
class Hardware:
    """An accelerator, or `n` of them working together (tensor parallel).

    Ceilings are per device: `bandwidth` (bytes/s), `flops` (1/s, bfloat16), `flops_8bit` (1/s; 0:
    as `flops`), `memory_bytes`. Each `eta` is the share of a ceiling that kernels reach. `layer_s`
    is spent in every layer whatever the batch, `step_s` in every step. With n > 1 an all-reduce
    takes `allreduce_s` and its message at `allreduce_bytes_per_s`, or, if that is faster, the two
    of `short_…`. An all-to-all takes `all_to_all_s` and the bytes that a device sends at
    `all_to_all_bytes_per_s`. `link_bytes_per_s` is the link to host memory.
    """

    name: str
    bandwidth: float
    flops: float
    memory_bytes: float
    eta_bandwidth: float
    eta_flops: float
    layer_s: float
    eta_decode_attention: float = 0.75
    eta_prefill_attention: float = 0.6
    step_s: float = 0.3e-3
    seq_s: float = 2e-6
    allreduce_s: float = 38e-6
    allreduce_bytes_per_s: float = 230e9
    short_allreduce_s: float = 9.5e-6
    short_allreduce_bytes_per_s: float = 34.5e9
    all_to_all_s: float = 9.5e-6
    all_to_all_bytes_per_s: float = 127e9
    flops_8bit: float = 0.0
    link_bytes_per_s: float = 50e9
    n: int = 1


# eta_bandwidth, eta_flops and layer_s come from the linear operators in Vidur's profiles
# (MLSys'24): an eta and a layer_s per device reproduce the effective bandwidth of 7B, 8B and 70B
# shards at tensor parallel 1 to 8 within 4 % (tests/reference_engine/test_cost_model.py). The
# H200's ceilings were measured (a copy, a large product). Its kernels are assumed to be as good as
# the H100's: .88 and .72 of the datasheet are .98 and .90 of the measured ceilings. The etas of
# attention, the overhead of a step and the link (PCIe 5, 4) are assumed, and so is the 8-bit rate:
# twice that of bfloat16, as in the datasheets. The all-reduce is that of four H100s: of long
# messages NCCL's in Vidur's profiles, of short messages vLLM's custom kernel as measured in
# sgl-project/sglang#2904 (512 bytes to 1 MiB). The rate of an all-to-all is that of DeepEP's
# low-latency kernels among eight H800s, whose links are slower than those of an H100; its least
# time is assumed to be that of a short all-reduce.
HARDWARE: Mapping[str, Hardware] = {
    "h200": Hardware("h200", 4.3e12, 790e12, 141e9, 0.98, 0.90, 19e-6, flops_8bit=1580e12),
    "h100": Hardware("h100", 3.35e12, 989e12, 80e9, 0.88, 0.72, 19e-6, flops_8bit=1979e12),
    "a100": Hardware(
        *("a100", 2.039e12, 312e12, 80e9, 0.766, 0.72, 22e-6),
        link_bytes_per_s=25e9,
        flops_8bit=624e12,
    ),
}
CPU = "cpu"
CPU_COSTS: Mapping[str, StepCost] = {
    "nano": StepCost(
        step_s=0.0008576,
        seq_s=2.996e-05,
        token_s=5.262e-06,
        context_token_s=1.108e-07,
        prefill_attention_s=1.967e-08,
    ),
    "tiny": StepCost(
        step_s=0.001518,
        seq_s=4.925e-05,
        token_s=2.631e-05,
        context_token_s=2.637e-07,
        prefill_attention_s=5.224e-08,
    ),
    "10m": StepCost(
        step_s=0.007235,
        seq_s=0,
        token_s=0.0002924,
        context_token_s=1.145e-06,
        prefill_attention_s=2.048e-07,
    ),
}
"""Costs of the bundled engine in float32 on 1 core: those of
`benchmarks/results/fit_cpu_cost.json`, written by `benchmarks/fit_cpu_cost.py --write`. Fit again
when `benchmarks/cpu_engine.py` measures speeds that differ by more than 10 %."""
GRAPH_ROWS = (1, 2, 4, *range(8, 513, 8))
"""Batch sizes with a captured graph, as nano-vllm and vLLM choose them."""


@dataclass(frozen=True, slots=True)
class ModelOnHardware:
    """A model on some hardware: the cost of its steps, its KV memory in tokens, and the seconds for
    copying a token's KV to host memory or back, and the bytes of that. `cost_error` is the largest
    relative error of fitted costs at a kind and size of step; None for costs that were not fitted
    to a server. `variation` is that of the steps' times around `cost`, where it was measured.
    A stage of a pipeline takes its share in `stage_shares` of a step; between two of them, the
    activations take `hop_s`, and `hop_token_s` per token."""

    cost: StepCost
    kv_tokens: int
    copy_token_s: float
    cost_error: float | None = None
    kv_token_bytes: float = 0.0
    hop_s: float = 0.0
    hop_token_s: float = 0.0
    stage_shares: tuple[float, ...] = (1.0,)
    variation: StepVariation | None = None


def model_on_hardware(
    source: ModelSource,
    hardware: str | Hardware,
    kv_dtype: KvDtype = "auto",
    weight_dtype: WeightDtype = "auto",
    pipeline: int = 1,
    expert_parallel: bool = False,
) -> ModelOnHardware:
    """A model on an accelerator (`h200`), on several (`4xh200`), or on `cpu`, with the costs
    measured for the bundled engine; its layers in the `pipeline` stages of as many of these. The
    cost is that of a step in all stages together, and the stage with the most layers limits the
    KV. Raises UsageError for unknown hardware, hardware that is too small for the model, and
    `expert_parallel` without several devices or without experts."""
    if hardware == CPU:
        if pipeline > 1:
            raise UsageError("pipeline: no costs of several stages were measured on a cpu")
        for key, dtype in (("kv_dtype", kv_dtype), ("weight_dtype", weight_dtype)):
            if dtype != "auto":
                raise UsageError(
                    f"{key}: no costs of '{dtype}' were measured on a cpu; choose an "
                    f"accelerator: {', '.join(HARDWARE)}"
                )
        return _measured(source)
    chosen = find_hardware(hardware) if isinstance(hardware, str) else hardware
    model = source.config
    kv_bytes = model.kv_bytes_per_token(_BYTES, kv_dtype)
    copy_token_s = kv_bytes / (chosen.n * chosen.link_bytes_per_s)
    if expert_parallel and not (model.n_experts and chosen.n > 1):
        raise UsageError(
            f"expert_parallel: has no effect for '{source.name}' on {chosen.n} devices; it places "
            "the experts of a model such as mixtral-8x7b on several, e.g. hardware=2xh200"
        )
    cost = step_cost(model, chosen, weight_dtype, expert_parallel)
    if pipeline > model.n_layers:
        raise UsageError(f"pipeline: {source.name} has {model.n_layers} layers for its stages")
    shares = stage_shares(model.n_layers, pipeline)
    memory_bytes = chosen.memory_bytes
    if model.n_layers % pipeline:
        memory_bytes /= pipeline * max(shares)
    stages = replace(chosen, n=chosen.n * pipeline, memory_bytes=memory_bytes)
    n_tokens = kv_tokens(model, stages, kv_dtype, weight_dtype)
    return ModelOnHardware(
        cost,
        n_tokens,
        copy_token_s,
        kv_token_bytes=kv_bytes,
        hop_s=chosen.short_allreduce_s,
        hop_token_s=_BYTES * model.d_model / chosen.allreduce_bytes_per_s,
        stage_shares=shares,
    )


def stage_shares(n_layers: int, n_stages: int) -> tuple[float, ...]:
    """The share of the layers that each stage has. Layers left over go to the stages before the
    last, one each, as in vLLM (`get_pp_indices`)."""
    least, n_more = divmod(n_layers, n_stages)
    layers = [least] * n_stages
    for stage in range(n_more):
        layers[-2 - stage] += 1
    return tuple(n / n_layers for n in layers)


def find_hardware(text: str) -> Hardware:
    """Parse `h200`, or `4xh200` for four of them. Raises UsageError with the nearest name."""
    match = re.fullmatch(r"(?:([1-9]\d*)x)?(.+)", text.strip().lower())
    name = match[2] if match else text
    if match is None or name not in HARDWARE:
        hint = nearest(name, [*HARDWARE, CPU])
        raise UsageError(
            f"hardware: unknown '{text}'; {hint}; for four of them write 4xh200, "
            "for hardware of your own the name of its .yaml file"
        )
    return replace(HARDWARE[name], n=int(match[1] or 1))


def step_cost(
    model: ModelConfig,
    hardware: Hardware,
    weight_dtype: WeightDtype = "auto",
    expert_parallel: bool = False,
) -> StepCost:
    """The cost of a model's steps on some hardware, in bfloat16. Weights in 8 bits are read in half
    the time, and multiplied at the 8-bit rate. KV in 8 bits costs as much time as in bfloat16,
    because the cost of its scales has not been measured on a GPU.

    Experts are divided among the devices like all matrices. With `expert_parallel`, a device has
    whole experts instead: in each layer an all-to-all sends the activations of every token to its
    experts, and another brings the results back, in place of the second of two all-reduces. All
    devices have equally many tokens.

    Source: the usual roofline per operator (Williams, Waterman & Patterson, CACM 52(4), 2009), with
    Vidur's split of a step.
    """
    bandwidth = hardware.n * hardware.bandwidth
    flops = hardware.n * hardware.flops
    head_flops = flops * hardware.eta_flops
    linear_flops = head_flops
    if weight_dtype != "auto" and hardware.flops_8bit:
        linear_flops = hardware.n * hardware.flops_8bit * hardware.eta_flops
    reduce_s = (1 if expert_parallel else 2) * model.n_layers if hardware.n > 1 else 0
    exchange_s = 2 * model.n_layers if expert_parallel else 0
    activation_bytes = _BYTES * model.d_model
    # of a token, by the device that has it, to experts on the others
    sent_bytes = model.experts_per_token * (1 - 1 / hardware.n) * activation_bytes / hardware.n
    byte_s = _WEIGHT_BYTES[weight_dtype] / (bandwidth * hardware.eta_bandwidth)
    attention_flops = 4 * model.n_layers * model.n_heads * model.head_dim
    return StepCost(
        step_s=hardware.step_s
        + model.n_layers * hardware.layer_s
        + reduce_s * hardware.allreduce_s
        + exchange_s * hardware.all_to_all_s,
        seq_s=hardware.seq_s,
        added_token_s=reduce_s * activation_bytes / hardware.allreduce_bytes_per_s
        + exchange_s * sent_bytes / hardware.all_to_all_bytes_per_s,
        weights_s=weight_bytes(model, weight_dtype) / (bandwidth * hardware.eta_bandwidth),
        token_s=2 * model.n_active_params / linear_flops,
        head_s=2 * _head_params(model) / head_flops,
        context_token_s=model.kv_bytes_per_token(_BYTES)
        / (bandwidth * hardware.eta_decode_attention),
        prefill_attention_s=attention_flops / (flops * hardware.eta_prefill_attention),
        reduce_saved_s=reduce_s * max(0.0, hardware.allreduce_s - hardware.short_allreduce_s),
        reduce_saved_token_s=reduce_s
        * activation_bytes
        * (1 / hardware.short_allreduce_bytes_per_s - 1 / hardware.allreduce_bytes_per_s),
        graph_rows=GRAPH_ROWS,
        expert_weights_s=(model.n_matrix_params - model.n_shared_params) * byte_s,
        expert_share=model.experts_per_token / model.n_experts if model.n_experts else 0.0,
    )


def roofline_s(model: ModelConfig, hardware: Hardware, shape: StepShape) -> float:
    """The least time (s) that a step can take: all bytes at full bandwidth, or all arithmetic at
    full rate, whichever is longer; of experts, those that a token is computed by. No overhead and
    no padding, so real steps are slower."""
    n_tokens = shape.prefill_tokens + shape.n_decode
    if not n_tokens:
        return 0.0
    expert_bytes = _BYTES * (model.n_active_params - model.n_shared_params)
    n_bytes = weight_bytes(model) + expert_bytes
    n_bytes += model.kv_bytes_per_token(_BYTES) * shape.context_tokens
    n_pairs = shape.context_tokens + shape.prefill_attention
    n_flops = (
        2 * model.n_active_params * n_tokens
        + 2 * _head_params(model) * shape.n_seqs
        + 4 * model.n_layers * model.n_heads * model.head_dim * n_pairs
    )
    return max(n_bytes / hardware.bandwidth, n_flops / hardware.flops) / hardware.n


def weight_bytes(model: ModelConfig, weight_dtype: WeightDtype = "auto") -> float:
    """Bytes of the weights that every step reads: the blocks and the output layer, but not the
    experts, of which it reads some, nor the input embedding, of which it reads a few rows."""
    return _WEIGHT_BYTES[weight_dtype] * model.n_shared_params + _BYTES * _head_params(model)


def stored_weight_bytes(model: ModelConfig, weight_dtype: WeightDtype = "auto") -> float:
    """Bytes of all weights of a model."""
    others = _BYTES * (model.n_params - model.n_matrix_params)
    return others + _WEIGHT_BYTES[weight_dtype] * model.n_matrix_params


def kv_tokens(
    model: ModelConfig,
    hardware: Hardware,
    kv_dtype: KvDtype = "auto",
    weight_dtype: WeightDtype = "auto",
) -> int:
    """Tokens of KV that fit next to the weights. Raises UsageError where the weights do not fit."""
    stored_bytes = stored_weight_bytes(model, weight_dtype)
    room = hardware.n * hardware.memory_bytes * _KV_SHARE - stored_bytes
    n_tokens = int(room // model.kv_bytes_per_token(_BYTES, kv_dtype))
    if n_tokens < 1:
        raise UsageError(
            f"hardware: {stored_bytes / 1e9:.0f} GB of weights do not fit into "
            f"{hardware.n} × {hardware.memory_bytes / 1e9:.0f} GB of {hardware.name}; "
            f"use more of them, e.g. {2 * hardware.n}x{hardware.name}"
        )
    return n_tokens


def _measured(source: ModelSource) -> ModelOnHardware:
    if source.name not in CPU_COSTS:
        raise UsageError(
            f"hardware: no costs of '{source.name}' were measured on a cpu (measured: "
            f"{', '.join(CPU_COSTS)}); choose an accelerator: {', '.join(HARDWARE)}"
        )
    token_bytes = source.config.kv_bytes_per_token()
    n_tokens = min(_CPU_KV_TOKENS, _CPU_KV_BYTES // token_bytes)
    return ModelOnHardware(CPU_COSTS[source.name], n_tokens, 0.0, kv_token_bytes=token_bytes)


def _head_params(model: ModelConfig) -> int:
    return model.vocab_size * model.d_model
