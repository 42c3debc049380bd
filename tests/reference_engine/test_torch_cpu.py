"""Token identity on the CPU: the answer to a request does not depend on the batching."""

from __future__ import annotations

import random

import pytest

from loadgen.errors import UsageError
from reference_engine.policies.base import POLICIES
from reference_engine.serving.build import build
from reference_engine.serving.serve_options import ServeOptions
from reference_engine.state.cost_model import Padding
from reference_engine.state.plan import How
from reference_engine.state.sequence import Request, Sampling
from tests.reference_engine.engine_kit import Rig, request, rig

pytest.importorskip("torch", reason="torch is not installed")
padding_rows = pytest.importorskip("reference_engine.model.filler").padding_rows

MODES = sorted({POLICIES.get(name).kind for name in POLICIES.names()})
LENGTHS = [1, 5, 16, 17, 33, 64, 90]
OUTPUT = 14


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    shared = [draw.randrange(256) for _ in range(40)]
    own = [[draw.randrange(256) for _ in range(n)] for n in LENGTHS]
    return [*own, [*shared, 1], [*shared, 2, 3]]


def fresh() -> list[Request]:
    """New requests, of which every third is sampled: greedy decoding of random weights soon repeats
    itself, and would hide a wrong token further on."""
    return [
        request(
            f"r{i}",
            prompt,
            OUTPUT,
            sampling=Sampling(0.9, 0.95, 50, seed=i) if i % 3 == 2 else Sampling(),
        )
        for i, prompt in enumerate(prompts())
    ]


def answers(engine: Rig, requests: list[Request]) -> dict[str, list[int]]:
    engine.admit(*requests)
    engine.drain()
    return {req.id: req.output for req in requests}


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """The answers of requests that have an engine each, without prefix cache."""
    out: dict[str, list[int]] = {}
    for req in fresh():
        out |= answers(rig(executor="torch_cpu", prefix_cache=False), [req])
    assert all(len(tokens) == OUTPUT for tokens in out.values())
    return out


def test_batched_answers_equal_those_alone(alone):
    assert answers(rig(executor="torch_cpu"), fresh()) == alone


@pytest.mark.parametrize("token_budget", [1, 7, 16, 64])
def test_chunked_answers_equal_those_alone(alone, token_budget):
    assert answers(rig(executor="torch_cpu", token_budget=token_budget), fresh()) == alone


@pytest.mark.parametrize("mode", MODES)
def test_answers_in_every_mode_equal_those_alone(alone, mode):
    """A request arrives each step, in another order; some share a prefix."""
    requests = fresh()
    random.Random(11).shuffle(requests)
    engine = rig(
        executor="torch_cpu", policy=mode, n_blocks=24, max_model_len=144, max_num_seqs=6,
        max_step_tokens=100,
    )  # fmt: skip
    for req in requests:
        engine.admit(req)
        engine.step()
    engine.state.is_source_closed = True
    engine.drain()
    assert {req.id: req.output for req in requests} == alone


def test_preempted_answers_equal_those_alone(alone):
    engine = rig(n_blocks=9, max_model_len=144, executor="torch_cpu", token_budget=48)
    assert answers(engine, fresh()) == alone
    assert engine.state.counters.preemptions > 0


@pytest.mark.parametrize("how", list(How))
def test_swapped_answers_equal_those_alone(alone, how):
    engine = rig(
        n_blocks=9, max_model_len=144, executor="torch_cpu", token_budget=48, n_host_blocks=40,
        how=how,
    )  # fmt: skip
    assert answers(engine, fresh()) == alone
    counters = engine.state.counters
    assert counters.preemptions > 0
    assert (counters.swaps > 0) is (how is How.swap)  # auto recomputes: all costs are 0


@pytest.mark.parametrize(
    "padding",
    [Padding(), Padding(1, 0, 0), Padding(1000, 3, 100), Padding(0, 2, 0), Padding(0, 2, 64)],
)
def test_padding_is_computed_and_writes_to_the_scratch_block_only(padding):
    rows = padding_rows(padding, scratch_block=9, block_tokens=16, max_model_len=144)
    assert sum(row.n_tokens for row in rows) == padding.prefill_tokens + padding.decode_rows
    assert not any(row.samples for row in rows)
    for row in rows:
        end, blocks = row.start + row.n_tokens, row.request.blocks
        assert end <= 144
        assert len(blocks) == -(-end // 16)
        assert {blocks[at // 16] for at in range(row.start, end)} == {9}
        assert set(blocks) <= set(range(10))


def test_decodes_of_padding_read_different_blocks():
    rows = padding_rows(
        Padding(0, 3, 3 * 70), scratch_block=100, block_tokens=16, max_model_len=144
    )
    assert [row.request.blocks for row in rows] == [
        [0, 1, 2, 3, 100], [4, 5, 6, 7, 100], [8, 9, 10, 11, 100],
    ]  # fmt: skip


def test_the_order_of_arrival_does_not_matter(alone):
    for seed in range(3):
        requests = fresh()
        random.Random(seed).shuffle(requests)
        engine = rig(executor="torch_cpu", token_budget=40, max_num_seqs=4)
        for req in requests:
            engine.admit(req)
            engine.step()
        engine.drain()
        assert {req.id: req.output for req in requests} == alone


def test_a_prefix_hit_has_the_answer_of_a_miss(alone):
    engine = rig(executor="torch_cpu")
    answers(engine, fresh())
    again = fresh()
    assert answers(engine, again) == alone
    assert sum(req.n_cached for req in again) > 100


def test_equal_seeds_repeat_an_answer_and_another_seed_does_not():
    def sampled(name: str, seed: int) -> Request:
        return request(name, [1, 2, 3], 12, sampling=Sampling(1.0, seed=seed))

    out = answers(rig(executor="torch_cpu"), [sampled("a", 1), sampled("b", 1), sampled("c", 2)])
    assert out["a"] == out["b"] != out["c"]


def test_logprobs_do_not_depend_on_the_other_requests():
    """A request with logprobs, alone and with a request without; prompts are computed in pieces."""
    tokens, logprobs = [], []
    for n_others in (0, 1):
        engine = rig(executor="torch_cpu", token_budget=7)
        special = request("special", range(20), 6, sampling=Sampling(0.7, seed=3, logprobs=True))
        engine.admit(*[request("other", range(30, 50), 9)] * n_others, special)
        events = [event for event in engine.drain() if event.request is special]
        tokens.append([event.token for event in events])
        logprobs.append([event.logprob.chosen for event in events if event.logprob])
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 6
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5)
    assert max(logprobs[0]) < 0


@pytest.mark.parametrize("n_blocks", [10**12, 10**18])  # beyond any address, any number
@pytest.mark.parametrize("option", ["kv_blocks", "swap_blocks"])
def test_too_many_blocks_are_an_error_of_the_option_that_sets_them(option, n_blocks):
    with pytest.raises(UsageError) as error:
        build(ServeOptions.model_validate({"shape": "nano", option: n_blocks}))
    gigabytes = {10**12: "8192000.0", 10**18: "8192000000000.0"}[n_blocks]  # 8 KiB each
    expected = (
        f"{option}: {n_blocks} blocks need {gigabytes} GB of memory, which cannot be allocated: "
    )
    assert str(error.value).startswith(f"{expected}this machine has ")
