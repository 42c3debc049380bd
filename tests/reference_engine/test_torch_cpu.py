"""Token identity: what a request answers does not depend on how it was batched."""

from __future__ import annotations

import random

import pytest

from reference_engine.sequence import Request, Sampling
from tests.reference_engine.engine_kit import Rig, request, rig

pytest.importorskip("torch", reason="torch is not installed")

LENGTHS = [1, 5, 16, 17, 33, 64, 90]
OUTPUT = 24


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    shared = [draw.randrange(256) for _ in range(40)]
    own = [[draw.randrange(256) for _ in range(n)] for n in LENGTHS]
    return [*own, [*shared, 1], [*shared, 2, 3]]


def fresh() -> list[Request]:
    """Every third request is sampled: greedy decoding of random weights soon repeats itself, and
    would hide a wrong token further on."""
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
    """Each request in an engine of its own, without prefix cache."""
    out: dict[str, list[int]] = {}
    for req in fresh():
        out |= answers(rig(executor="torch_cpu", prefix_cache=False), [req])
    assert all(len(tokens) == OUTPUT for tokens in out.values())
    return out


def test_batched_answers_are_those_given_alone(alone):
    assert answers(rig(executor="torch_cpu"), fresh()) == alone


@pytest.mark.parametrize("token_budget", [1, 7, 16, 64])
def test_chunked_answers_are_those_given_alone(alone, token_budget):
    assert answers(rig(executor="torch_cpu", token_budget=token_budget), fresh()) == alone


def test_preempted_answers_are_those_given_alone(alone):
    engine = rig(n_blocks=9, max_model_len=144, executor="torch_cpu", token_budget=48)
    assert answers(engine, fresh()) == alone
    assert engine.state.counters.preemptions > 0


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


def test_a_prefix_hit_answers_as_a_miss(alone):
    engine = rig(executor="torch_cpu")
    answers(engine, fresh())
    again = fresh()
    assert answers(engine, again) == alone
    assert sum(req.n_cached for req in again) > 100


def test_a_seed_repeats_and_another_differs():
    def sampled(name: str, seed: int) -> Request:
        return request(name, [1, 2, 3], 12, sampling=Sampling(1.0, seed=seed))

    out = answers(rig(executor="torch_cpu"), [sampled("a", 1), sampled("b", 1), sampled("c", 2)])
    assert out["a"] == out["b"] != out["c"]
