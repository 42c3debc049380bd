"""The server's options: what they build, and the one-line errors for wrong ones."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from loadgen.errors import UsageError
from reference_engine.serve import n_http_workers
from reference_engine.serving.build import build
from reference_engine.serving.serve_options import ServeOptions, choose
from reference_engine.state.cost_model import StepShape
from tests.reference_engine.engine_server import serving


def test_the_default_number_of_http_workers_is_0_except_on_a_gpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    n_workers = {
        (device, workers): n_http_workers(ServeOptions(device=device, http_workers=workers))
        for device in ("cpu", "toy", "sim", "cuda")
        for workers in (None, 1)
    }
    assert {key for key, n in n_workers.items() if n == 0} == {
        ("cpu", None),
        ("toy", None),
        ("sim", None),
    }
    assert (n_workers["cuda", None], n_workers["cuda", 1], n_workers["toy", 1]) == (4, 1, 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mode", "chunkd"], "unknown batching mode 'chunkd'; did you mean 'chunked'"),
        (["--device", "cpuu"], "unknown device 'cpuu'; did you mean 'cpu'"),
        (["--shape", "tinny"], "did you mean 'tiny'"),
        (["--token-budget", "0"], "options: token_budget"),
        (["--mode", "static", "--token-budget", "64"], "token_budget: the mode 'static' has none"),
        (["--port", "many"], "options: port"),
        (["--set", "watermark=2"], "mode 'chunked': watermark: "),
        (["--set", "mode=chunkd"], "did you mean 'chunked'"),
        (["--set", "shape=tinny"], "did you mean 'tiny'"),
        (["--set", "device=cpuu"], "unknown device 'cpuu'; did you mean 'cpu'"),
        (["--set", "mdoe=x"], "unknown engine option 'mdoe'; did you mean 'mode'?"),
        (["--set", "waterline=2"], "unknown engine option 'waterline'; did you mean 'watermark'"),
        (["--set", "tokenbudget=2"], "did you mean 'token_budget'"),
        (["--set", "watermark"], "--set: expected key=value, got 'watermark'"),
        (["--set", "watermark=[1"], "--set watermark: [1 is not JSON"),
        (["--set", "step_s=-1"], "device 'toy': step_s"),
        (["--set", "parent_pid=1"], "unknown engine option 'parent_pid'"),
        (["--api-key-env", "SLOBENCH_NOT_SET"], "SLOBENCH_NOT_SET is not set"),
        (["--max-model-len", "9999"], "max_model_len: 9999 is above the 4096 positions"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(flags, words, capsys):
    from reference_engine.__main__ import main

    before = signal.getsignal(signal.SIGTERM)
    code = main(["--device", "toy", "--port", "0", *flags])
    signal.signal(signal.SIGTERM, before)
    out, errors = capsys.readouterr()
    assert (code, out) == (2, "")
    assert errors.count("\n") == 1
    assert words in errors


@pytest.mark.parametrize(
    ("mode", "budget", "expected"),
    [("chunked", None, 2048), ("split_fuse", None, 512), ("chunked", "slo", "slo")],
)
def test_a_mode_has_its_own_token_budget_unless_the_option_is_set(mode, budget, expected):
    engine = build(ServeOptions(device="toy", shape="nano", mode=mode, token_budget=budget))
    assert engine.state.policy.model_dump()["token_budget"] == expected
    assert engine.limits.max_step_tokens >= 4096  # a whole prompt


def test_options_reach_the_policy_and_the_limits():
    engine = build(
        ServeOptions(
            device="toy",
            shape="nano",
            token_budget=64,
            max_num_seqs=5,
            kv_blocks=100,
            max_model_len=256,
            policy_args={"watermark": "0.05"},
        )
    )
    assert engine.state.policy.model_dump() == {
        "token_budget": 64,
        "max_num_seqs": 5,
        "watermark": 0.05,
        "long_prefill_tokens": 0,
        "reserve": "watermark",
        "tpot_slo": None,
        "order": "arrival",
        "starvation": 5.0,
    }
    assert (engine.limits.max_num_seqs, engine.limits.max_model_len) == (5, 256)
    assert engine.state.kv.n_blocks == 100


def test_knobs_reach_the_mode_or_the_executor_by_name():
    flags = {"device": "toy", "shape": "nano"}
    options = choose(flags, ["watermark=0.05", "step-s=0.25", "kv_blocks=100", "seed=3"])
    assert (options.policy_args, options.executor_args) == (
        {"watermark": "0.05"},
        {"step_s": "0.25"},
    )
    assert (options.kv_blocks, options.seed) == (100, 3)
    assert build(options).state.policy.model_dump()["watermark"] == 0.05
    assert choose(flags, ["mode=vllm_v1", "long_prefill_tokens=9"]).mode == "vllm_v1"
    plain = choose(flags, ["mode=sjf", "preempt=never"])  # the mode's; `swap` is the engine's
    assert (plain.policy_args, plain.preempt) == ({"preempt": "never"}, "auto")
    assert choose(flags, ["mode=sjf", "preempt=swap"]).preempt == "swap"


def test_http_workers_are_a_pair_or_a_flag_and_at_most_64():
    assert choose({"device": "toy"}, ["http_workers=3"]).http_workers == 3
    assert choose({"device": "toy", "http_workers": "2"}).http_workers == 2
    with pytest.raises(UsageError, match=r"options: http_workers: .*less than or equal to 64"):
        choose({}, ["http-workers=65"])


def test_a_simulated_device_has_the_memory_and_the_prices_of_its_hardware():
    engine = build(ServeOptions(device="sim", shape="8b", executor_args={"hardware": "h200"}))
    assert engine.limits.max_model_len == 32_768
    # 90 % of 141 GB less 16.1 GB of weights, at 131 072 bytes per token in bfloat16.
    assert 40_000 < engine.state.kv.n_blocks < 60_000
    shape = StepShape(n_seqs=1, n_decode=1, context_tokens=100)
    # One step reads 16 GB at 4.3 TB/s and little else.
    assert 3e-3 < engine.state.view().cost.estimate(shape) < 8e-3


def test_host_memory_and_planning_ahead_reach_the_engine():
    flags = {"device": "toy", "shape": "nano"}
    state = build(choose(flags, ["swap_blocks=9", "preempt=swap", "async_depth=1"])).state
    assert (state.host.n_blocks, state.preempt, state.async_depth) == (9, "swap", 1)
    assert not state.is_strict


def test_limits_that_are_not_set_are_the_modes():
    engine = build(ServeOptions(device="toy", shape="nano"))
    assert engine.state.policy.model_dump()["token_budget"] == 2048
    assert engine.limits.max_num_seqs == 256


def test_a_simulated_device_brings_its_own_memory_context_and_prices():
    engine = build(choose({"device": "sim", "shape": "8b"}, ["hardware=2xh100"]))
    assert engine.limits.max_model_len == 32_768
    # 0.9 · 160 GB − 16.06 GB of weights, at 131 072 bytes of KV per token and 16 tokens per block
    assert engine.state.kv.n_blocks == pytest.approx(127.9e9 / 131_072 / 16, rel=1e-3)
    # a decode reads 15 GB of weights at 2 · 0.88 · 3.35 TB/s, and there is some overhead
    alone_s = engine.state.view().cost.estimate(StepShape(1, n_decode=1))
    assert 2.5e-3 < alone_s < 6e-3
    with pytest.raises(UsageError, match="did you mean 'h200'"):
        build(choose({"device": "sim"}, ["hardware=h20"]))


def test_kv_in_8_bits_is_a_knob_of_the_simulated_device_and_of_a_gpus_code():
    pytest.importorskip("torch", reason="torch is not installed")
    simulated = build(choose({"device": "sim", "shape": "8b"}, ["kv_dtype=fp8"]))
    # 0.9 · 141 GB − 16.06 GB of weights, at 67 584 bytes: 2 · 32 layers · 8 heads · (128 + 4)
    assert simulated.state.kv.n_blocks == pytest.approx(110.8e9 / 67_584 / 16, rel=1e-3)
    knobs = ["kv_dtype=int8", "on=cpu", "kernels=plain", "dtype=float32", "max_num_seqs=1"]
    computed = build(choose({"device": "cuda", "shape": "tiny"}, knobs))
    assert computed.state.kv.n_blocks == 29_127  # 256 MiB at 9 216 bytes
    with pytest.raises(UsageError, match=r"kv_dtype.*'fp8' or 'int8'"):
        build(choose({"device": "cuda"}, ["kv_dtype=fp4"]))


def test_default_kv_is_a_gibibyte_at_most_and_a_full_context_at_least():
    blocks = {
        shape: build(ServeOptions(device="toy", shape=shape)).state.kv.n_blocks
        for shape in ("tiny", "110m", "8b")
    }
    # Bytes of K and V per token (float32): 2·4·2·32·4 = 2 048, 24 576 and 262 144.
    assert blocks == {"tiny": 4096, "110m": 2730, "8b": 256}


def test_an_unknown_shape_is_a_usage_error():
    with pytest.raises(UsageError, match="Models are never downloaded"):
        build(ServeOptions(device="toy", shape="llama"))


def test_the_torch_engine_repeats_a_greedy_answer():
    pytest.importorskip("torch", reason="torch is not installed")
    body = {"prompt": "abc", "max_tokens": 5, "temperature": 0}

    async def scene():
        engine = build(ServeOptions(shape="nano", kv_blocks=64))
        async with serving(engine, shape="nano", device="cpu") as server:
            return [await server.post("/v1/completions", body) for _ in range(2)]

    (status, first), (_, second) = asyncio.run(scene())
    assert status == 200
    assert first["usage"]["completion_tokens"] == 5
    assert first["choices"] == second["choices"]
