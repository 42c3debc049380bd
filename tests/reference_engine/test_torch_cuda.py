"""The GPU executor, run on the CPU: plain kernels, graphs called as functions.

Its tokens must be those of the CPU executor, with any batching, preemption and planning ahead.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import MissingDependency, SlobenchError, UsageError
from reference_engine.executors.base import EXECUTORS, Caps, Site
from reference_engine.model.zoo import resolve
from reference_engine.state.batch import StepBatch
from reference_engine.state.cost_model import Padding
from reference_engine.state.plan import How
from reference_engine.state.sequence import Request, Sampling
from tests.reference_engine.engine_kit import Rig, request, rig

torch = pytest.importorskip("torch", reason="torch is not installed")

from reference_engine.executors.cuda_stream import CpuStream  # noqa: E402
from reference_engine.executors.torch_cuda import (  # noqa: E402 - only with torch
    TorchCuda,
    bucket_of,
    buckets,
)
from reference_engine.executors.torch_step import RequestRows  # noqa: E402
from reference_engine.kernels.ops import PLAIN  # noqa: E402
from reference_engine.kernels.tiles import Tuning  # noqa: E402
from reference_engine.model.paged import PagedLlama  # noqa: E402
from reference_engine.model.weights import random_weights  # noqa: E402
from tests.reference_engine.wide_shapes import WIDE, greedy_shortfalls  # noqa: E402

ON_CPU = {"on": "cpu", "kernels": "plain", "dtype": "float32"}
TRUNCATED = Sampling(0.9, 0.95, 50, seed=4)


def fresh(seed: int = 5) -> list[Request]:
    """New requests in turn: greedy, truncated, with log-probabilities; one with bans, two with a
    common prefix."""
    draw = random.Random(seed)
    shared = [draw.randrange(256) for _ in range(40)]
    prompts = [[draw.randrange(256) for _ in range(n)] for n in (1, 5, 16, 17, 33, 64, 90)]
    prompts += [[*shared, 1], [*shared, 2, 3]]
    out = [
        request(
            f"r{i}", prompt, 12, sampling=(Sampling(), TRUNCATED, Sampling(logprobs=True))[i % 3]
        )
        for i, prompt in enumerate(prompts)
    ]
    out[3].stop_ids, out[3].min_tokens = frozenset(range(0, 320, 2)), 6
    return out


def answers(engine: Rig, requests: list[Request]) -> dict[str, list[int]]:
    """The outputs of requests of which one arrives each step."""
    for req in requests:
        engine.admit(req)
        engine.step()
    engine.state.is_source_closed = True
    engine.drain()
    return {req.id: req.output for req in requests}


def cuda_rig(**options) -> Rig:
    arguments = ON_CPU | options.pop("arguments", {})
    # Few sequences: on the CPU, to capture a graph is to compute its step.
    options = {"max_num_seqs": 8} | options
    return rig(executor="torch_cuda", executor_args=arguments, **options)


def executor_of(engine: Rig) -> TorchCuda:
    assert isinstance(engine.executor, TorchCuda)
    return engine.executor


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return answers(rig(executor="torch_cpu"), fresh())


SMALL = {"n_blocks": 24, "max_model_len": 144, "max_num_seqs": 6, "max_step_tokens": 100}
TIGHT = {"n_blocks": 9, "max_model_len": 144, "token_budget": 48}


@pytest.mark.parametrize(
    ("mode", "depth"), [("chunked", 0), ("static", 1), ("prefill_first", 1), ("split_fuse", 0)]
)
def test_tokens_are_those_of_the_cpu_executor_in_every_kind_of_step(expected, mode, depth):
    assert answers(cuda_rig(policy=mode, async_depth=depth, **SMALL), fresh()) == expected


@pytest.mark.parametrize(("how", "depth"), [(How.recompute, 1), (How.swap, 0), (How.swap, 1)])
def test_tokens_survive_preemption(expected, how, depth):
    engine = cuda_rig(async_depth=depth, n_host_blocks=40, how=how, **TIGHT)
    assert answers(engine, fresh()) == expected
    counters = engine.state.counters
    assert counters.preemptions > 0
    assert (counters.swaps > 0) is (how is How.swap)


def test_attention_in_a_single_launch_changes_no_token(expected):
    arguments = {"fused_attention": "on"}
    assert answers(cuda_rig(arguments=arguments, token_budget=48), fresh()) == expected


def test_graphs_change_no_token(expected):
    assert answers(cuda_rig(arguments={"graphs": False}), fresh()) == expected


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_kv_in_8_bits_changes_no_greedy_token_of_this_model(kv_dtype, expected):
    """The answers of this model hardly depend on the distant context: the error of 8 bits is tested
    with the kernels. Here every kind of step reads KV that the others wrote."""
    engine = cuda_rig(arguments={"kv_dtype": kv_dtype}, policy="chunked", token_budget=48)
    requests = fresh()
    outputs = answers(engine, requests)
    greedy = [req.id for req in requests if req.sampling.temperature == 0]
    assert {name: outputs[name] for name in greedy} == {name: expected[name] for name in greedy}


@pytest.mark.parametrize("how", [How.recompute, How.swap])
def test_8_bit_tokens_survive_preemption(how):
    arguments = {"kv_dtype": "fp8"}
    roomy = answers(cuda_rig(arguments=arguments), fresh())
    tight = cuda_rig(arguments=arguments, async_depth=1, n_host_blocks=40, how=how, **TIGHT)
    assert answers(tight, fresh()) == roomy
    counters = tight.state.counters
    assert counters.preemptions > 0
    assert (counters.swaps > 0) is (how is How.swap)


@pytest.mark.parametrize(
    ("kv_dtype", "n_blocks"),
    # 256 MiB over 4 layers · 2 · 2 heads · 16 tokens of 32 float32 numbers, or 32 bytes + a scale
    [("auto", 8192), ("int8", 29_127), ("fp8", 29_127)],
)
def test_the_number_of_kv_blocks_follows_from_their_bytes(kv_dtype, n_blocks):
    kind = EXECUTORS.build({"kind": "torch_cuda", **ON_CPU, "graphs": False, "kv_dtype": kv_dtype})
    built = kind.build(Site(resolve("tiny"), 0, 16, 256, lambda s: None, max_num_seqs=4))
    assert built.caps.n_blocks == n_blocks


@pytest.mark.parametrize("n_blocks", [10**12, 10**18])  # beyond any address, any number
@pytest.mark.parametrize("option", ["kv_blocks", "swap_blocks"])
def test_too_many_blocks_are_an_error_of_the_option_that_sets_them(option, n_blocks):
    sizes = {"kv_blocks": 8, "swap_blocks": 0} | {option: n_blocks}
    site = Site(
        resolve("nano"), sizes["kv_blocks"], 16, 64, lambda s: None, sizes["swap_blocks"], 4
    )
    with pytest.raises(UsageError) as error:
        EXECUTORS.build({"kind": "torch_cuda", **ON_CPU, "graphs": False}).build(site)
    gigabytes = {10**12: "8192000.0", 10**18: "8192000000000.0"}[n_blocks]  # 8 KiB each
    expected = (
        f"{option}: {n_blocks} blocks need {gigabytes} GB of memory, which cannot be allocated: "
    )
    assert str(error.value).startswith(expected)
    assert len(str(error.value)) > len(expected)


def test_log_probabilities_are_those_of_the_cpu_executor():
    def logprobs(engine: Rig) -> list[float]:
        """Those of the chosen token and of the two most likely tokens, six times."""
        sampling = Sampling(0.7, seed=3, top_k=9, logprobs=True, top_logprobs=2)
        special = request("special", range(20), 6, sampling=sampling)
        engine.admit(request("other", range(30, 50), 9), special)
        mine = [event.logprob for event in engine.drain() if event.request is special]
        events = [logprob for logprob in mine if logprob is not None]
        ids = [token for event in events for token, _ in event.top]
        assert len(ids) == len(set(zip(range(12), ids, strict=True))) == 12
        return [x for event in events for x in (event.chosen, *(value for _, value in event.top))]

    on_cuda = logprobs(cuda_rig(token_budget=7, async_depth=1))
    assert on_cuda == pytest.approx(logprobs(rig(executor="torch_cpu", token_budget=7)), abs=1e-5)
    assert len(on_cuda) == 18


@pytest.mark.parametrize("depth", [0, 1])
def test_penalised_tokens_are_those_of_the_cpu_executor(depth):
    """Drawn with min-p, and greedy; the answers depend on the penalties."""
    samplings = [
        Sampling(0.9, seed=4, min_p=0.02, presence_penalty=0.5, repetition_penalty=1.3),
        Sampling(presence_penalty=1.5, frequency_penalty=1.0),
        Sampling(0.9, seed=4, min_p=0.02),
        Sampling(),
    ]

    def drawn(engine: Rig) -> list[list[int]]:
        pairs = enumerate(samplings)
        engine.admit(*(out := [request(f"r{i}", b"abc", 30, sampling=s) for i, s in pairs]))
        engine.drain()
        return [req.output for req in out]

    expected = drawn(rig(executor="torch_cpu"))
    assert drawn(cuda_rig(async_depth=depth)) == expected
    assert expected[0] != expected[2]
    assert expected[1] != expected[3]


def test_a_top_k_beyond_the_vocabulary_has_no_effect():
    """HTTP requests may have any number of 63 bits."""

    def drawn(top_k: int) -> list[int]:
        engine = cuda_rig()
        sampling = Sampling(0.7, 0.9, top_k, seed=3)
        engine.admit(hot := request("hot", [1, 2, 3], 8, sampling=sampling))
        engine.drain()
        return hot.output

    assert drawn(2**63 - 1) == drawn(2**31) == drawn(320)


def test_log_probabilities_change_no_token():
    def drawn(sampling: Sampling) -> list[int]:
        engine = cuda_rig()
        engine.admit(hot := request("hot", [1, 2, 3], 8, sampling=sampling))
        engine.drain()
        return hot.output

    assert drawn(Sampling(1.0, seed=7, logprobs=True)) == drawn(Sampling(1.0, seed=7))


def test_a_draw_depends_on_seed_and_position_alone():
    def drawn(engine: Rig) -> list[int]:
        hot = request("hot", [1, 2, 3], 8, sampling=Sampling(1.0, seed=7))
        engine.admit(request("other", range(9), 8), hot)
        engine.drain()
        return hot.output

    alone = drawn(cuda_rig(max_num_seqs=1))
    assert drawn(cuda_rig(async_depth=1)) == alone
    assert (
        drawn(rig(executor="torch_cpu")) != alone
    )  # it draws by another method; greedy tokens are equal
    assert len(set(alone)) > 4


@pytest.mark.parametrize(
    "padding", [Padding(0, 3, 30), Padding(40, 0, 0), Padding(7, 2, 0), Padding(0, 200, 0)]
)
def test_padding_is_computed_and_writes_to_no_block_of_a_request(padding):
    engine = cuda_rig()
    engine.admit(a := request("a", range(20), 3))
    engine.step()
    cache = executor_of(engine)._model.cache.numbers
    before = cache[:, :-1].clone()
    engine.executor.execute(StepBatch(padding=padding))
    assert torch.equal(cache[:, :-1], before)
    assert cache[:, -1].abs().sum() > 0
    engine.drain()
    assert a.n_output == 3


@pytest.mark.parametrize("n_more", [0, 1, 2])
def test_prompts_are_right_with_padding_of_any_length(n_more):
    """A static batch pads the shorter prompt by the difference. With a single token of padding,
    rows of a single token are not all in front."""
    prompts = [range(30), range(100, 130 - n_more)]

    def outputs(**options):
        pair = [request(f"r{i}", prompt, 8) for i, prompt in enumerate(prompts)]
        engine = options.pop("engine")(policy="static", batch_size=2, **options)
        engine.admit(*pair)
        engine.state.is_source_closed = True
        engine.drain()
        return [req.output for req in pair]

    assert outputs(engine=cuda_rig) == outputs(engine=rig, executor="torch_cpu")


@pytest.mark.parametrize("graphs", [True, False])
def test_decodes_of_padding_read_different_blocks_and_write_to_the_scratch_block(graphs):
    """A block that they shared would stay in the GPU's cache, and reading it would cost nothing."""
    read: list[list[int]] = []
    written: list[int] = []

    def decode_attention(q, cache, tables, rows, contexts, work):
        for row, n_tokens in zip(rows.tolist(), contexts.tolist(), strict=True):
            read.append(tables[row, : -(-n_tokens // 16)].tolist())
        return torch.zeros_like(q)

    def rope_write(qkv, positions, slots, *others):
        written.extend((slots // 16).tolist())
        return PLAIN.rope_write(qkv, positions, slots, *others)

    spying = PLAIN._replace(decode_attention=decode_attention, rope_write=rope_write)
    config = resolve("nano").config
    model = PagedLlama(config, random_weights(config, 0), spying, 16, 144)
    site = Site(resolve("nano"), 24, 16, 144, lambda s: None, max_num_seqs=8)
    executor = TorchCuda(model, spying, site, 24, CpuStream(), graphs)
    read.clear()
    written.clear()
    executor.execute(StepBatch(padding=Padding(0, 4, 4 * 80)))
    rows = read[:4]  # of the first layer
    assert [len(blocks) for blocks in rows] == [6, 6, 6, 6]  # positions 0 to 80
    assert sorted(block for blocks in rows for block in blocks) == list(range(24))
    assert set(written) == {24}


@pytest.mark.parametrize(("rows", "sizes"), [(64, [32, 32, 32, 4]), (128, [64, 36])])
def test_the_tuning_sets_the_tiles_and_the_decoding_programs(rows, sizes):
    """Two query heads per KV head: a tile of 64 rows has 32 positions."""
    cut: list[list[int]] = []
    programs: list[int] = []

    def chunk_attention(q, cache, tables, tiles):
        cut.append(tiles.table[:, 2].tolist())
        return PLAIN.chunk_attention(q, cache, tables, tiles)

    def decode_attention(q, cache, tables, rows, contexts, work):
        programs.append(work.n_programs)
        return PLAIN.decode_attention(q, cache, tables, rows, contexts, work)

    spying = PLAIN._replace(chunk_attention=chunk_attention, decode_attention=decode_attention)
    config = resolve("nano").config
    model = PagedLlama(config, random_weights(config, 0), spying, 16, 144)
    site = Site(resolve("nano"), 24, 16, 144, lambda s: None, max_num_seqs=8)
    tuning = Tuning(chunk_rows=rows, decode_programs=4)
    executor = TorchCuda(model, spying, site, 24, CpuStream(), tuning=tuning)
    executor.execute(StepBatch(padding=Padding(100, 1, 0)))
    assert sorted(cut[-1], reverse=True) == sizes
    assert set(programs) == {4}  # 4 · 2 processors over 2 KV heads


def test_prompts_of_padding_write_to_the_scratch_block_only():
    written: list[int] = []

    def rope_write(qkv, positions, slots, *others):
        written.extend((slots // 16).tolist())
        return PLAIN.rope_write(qkv, positions, slots, *others)

    spying = PLAIN._replace(rope_write=rope_write)
    config = resolve("nano").config
    model = PagedLlama(config, random_weights(config, 0), spying, 16, 144)
    site = Site(resolve("nano"), 24, 16, 144, lambda s: None, max_num_seqs=8)
    executor = TorchCuda(model, spying, site, 24, CpuStream(), has_graphs=False)
    executor.execute(StepBatch(padding=Padding(200, 20, 0)))
    assert len(written) == 2 * 220
    assert set(written) == {24}


def test_decode_steps_are_graphs_and_others_are_not():
    class CountingStream(CpuStream):
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def capture(self, work):
            replay, result = super().capture(work)

            def counted() -> None:
                self.sizes.append(len(result))
                replay()

            return counted, result

    config, stream = resolve("nano").config, CountingStream()
    model = PagedLlama(config, random_weights(config, 0), PLAIN, 16, 1024)
    site = Site(resolve("nano"), 256, 16, 1024, lambda s: None, max_num_seqs=8)
    engine = rig()
    engine.executor = TorchCuda(model, PLAIN, site, 256, stream)
    engine.admit(*(request(f"r{i}", range(1, 30), 4 + i) for i in range(3)))
    engine.drain()
    assert stream.sizes == [
        4,
        4,
        4,
        2,
        1,
    ]  # 3 rows three times, then 2, then 1; prompts have no graph
    assert engine.executor.caps == Caps(0, 2 * 2 * 2 * 16 * 4 * 16 / 40e9, 256, has_logits=True)


@pytest.mark.parametrize("is_fused", [False, True])
def test_every_kind_of_attention_and_sampling_runs_before_the_first_request(is_fused):
    """Also with a given number of blocks, and without writing to a block of a request."""
    calls: list[str] = []

    def recording(name, operation):
        def call(*arguments):
            calls.append(name)
            return operation(*arguments)

        return call

    spying = type(PLAIN)(*(recording(name, op) for name, op in PLAIN._asdict().items()))
    config = resolve("nano").config
    model = PagedLlama(config, random_weights(config, 0), spying, 16, 144, is_fused=is_fused)
    site = Site(resolve("nano"), 24, 16, 144, lambda s: None, max_num_seqs=8)
    executor = TorchCuda(model, spying, site, 24, CpuStream())
    assert "chunk_attention" not in calls
    executor.warm_up()
    both = {"fused_attention"} if is_fused else set()
    assert {"chunk_attention", "decode_attention", "sample", *both} <= set(calls)
    assert not model.cache.numbers[:, :-1].any()
    calls.clear()
    requests = [request(f"r{i}", range(1, 30), 4) for i in range(8)]
    engine = rig(n_blocks=24, max_model_len=144, max_num_seqs=8)
    engine.executor = executor
    engine.admit(*requests)
    engine.drain()
    assert [req.n_output for req in requests] == [4] * 8


def test_a_build_logs_the_steps_that_it_compiles(caplog):
    with caplog.at_level("INFO"):
        cuda_rig()
    lines = [re.sub(r": .*", "", record.getMessage()) for record in caplog.records]
    assert lines[:6] == [
        "captured 4 graphs", "compiled prompts", "compiled prompts and a decode",
        "compiled prompts and decodes", "compiled 1 decodes", "compiled 2 decodes",
    ]  # fmt: skip


def test_strides_of_block_tables_are_multiples_of_16():
    """Triton compiles a kernel again for other strides, which depend on `max_model_len`."""
    for max_model_len in (1, 256, 257, 4100):
        rows = RequestRows.of(4, max_model_len, 16, 100)
        assert rows.tables.array.shape[1] % 16 == 0
        assert rows.tables.array.shape[1] * 16 >= max_model_len


def test_a_machine_without_a_gpu_gets_an_error_with_the_remedy():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(MissingDependency, match=r"needs an NVIDIA GPU.*device=cpu") as error:
        EXECUTORS.build({"kind": "torch_cuda"}).build(
            Site(resolve("nano"), 8, 16, 64, lambda s: None)
        )
    assert error.value.exit_code == 2


def test_unsupported_head_sizes_are_rejected():
    source = resolve("nano")
    odd = replace(source, config=replace(source.config, head_dim=24))
    with pytest.raises(UsageError, match="heads of 24 numbers"):
        EXECUTORS.build({"kind": "torch_cuda", **ON_CPU}).build(
            Site(odd, 8, 16, 64, lambda s: None)
        )


def test_a_third_launch_before_the_first_tokens_is_an_assertion_error():
    engine = cuda_rig()
    for _ in range(2):
        executor_of(engine).launch(StepBatch(padding=Padding(0, 1, 0)))
    with pytest.raises(AssertionError, match="not waited for"):
        executor_of(engine).launch(StepBatch(padding=Padding(0, 1, 0)))


def test_serve_without_a_gpu_prints_an_error_and_exits_2(capfd):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    from reference_engine.__main__ import main

    try:
        code = main(["--device", "cuda", "--shape", "nano", "--port", "0"])
    except SlobenchError as error:
        code = error.exit_code
    assert code == 2
    assert "needs an NVIDIA GPU" in capfd.readouterr().err


def test_greedy_tokens_are_the_likeliest_by_the_margin_rule(expected):
    """The rule itself: no token falls short here, but a wrong token does."""
    from tests.reference_engine.margin import shortfalls

    prompt = fresh()[6].tokens  # greedy, 90 tokens
    tokens, config = [*prompt, *expected["r6"]], resolve("nano").config
    assert max(shortfalls(config, torch.float32, tokens, len(prompt))) < 1e-4
    tokens[-1] = (tokens[-1] + 1) % 320
    assert shortfalls(config, torch.float32, tokens, len(prompt))[-1] > 1e-2


@pytest.mark.parametrize("name", ["0.6b", "8b", "qwen2"])
def test_the_rule_holds_in_bfloat16_for_every_kind_of_block(name):
    """Norms of queries and keys, biases, 2, 4 and 7 query heads per KV head, at small widths.
    Tokens of a model without the norms or the biases fall short by far."""
    wide = WIDE[name]
    config = replace(
        wide, d_model=64, n_heads=2 * wide.n_heads // wide.n_kv_heads, n_kv_heads=2, head_dim=16,
        d_ffn=176, vocab_size=2000,
    )  # fmt: skip
    short = greedy_shortfalls(config, torch.bfloat16, CpuStream(), PLAIN)
    assert len(short) == 96
    assert max(short) <= 0.1
    if config.qk_norm or config.qkv_bias:
        without = replace(config, qk_norm=False, qkv_bias=False)
        wrong = greedy_shortfalls(config, torch.bfloat16, CpuStream(), PLAIN, computed=without)
        assert max(wrong) > 1


def test_buckets_are_fine_for_small_steps():
    assert buckets(1) == (1,)
    assert buckets(40) == (1, 2, 4, 8, 16, 32, 40)
    assert buckets(256)[-3:] == (224, 240, 256)
    assert buckets(400)[-4:] == (256, 320, 384, 400)


@given(st.integers(1, 600), st.integers(1, 700))
def test_a_step_goes_to_the_smallest_bucket_that_holds_it(max_rows, n_rows):
    sizes = buckets(max_rows)
    assert list(sizes) == sorted(set(sizes))
    bucket = bucket_of(n_rows, sizes)
    if n_rows > max_rows:
        assert bucket is None
    else:
        assert bucket == next(size for size in sizes if size >= n_rows)
        assert bucket - n_rows < max(16, 64 * (n_rows > 256))
