"""Ranking and fair modes under random actions of operators and impatient clients."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import pytest

from reference_engine.core import interventions
from reference_engine.policies.base import POLICIES, Policy
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.state.cost_model import StepCost
from reference_engine.state.plan import AdmissionError
from reference_engine.state.sequence import Request, State
from tests.reference_engine.engine_kit import Rig, request, rig, toy_output

KNOBS: dict[str, dict[str, Any]] = {
    "bucketed": {"pad": "batch_max", "min_batch": 2, "max_bucket_wait": "300ms"},
    "priority": {"preemptive": True},
    "weighted_naive": {},
    "sjf": {},
    "mlfq": {},
    "token_fair": {"budgets": "a=200/s:60 *=2000/s:100:refuse"},
    "deadline": {},
    "smdp_table": {},
}
N_REQUESTS = 20


def policy(mode: str) -> Policy:
    return POLICIES.build({"kind": mode, **KNOBS[mode]})


def intervene(engine: Rig, draw: Random, live: dict[str, Request]) -> None:
    """One of: cancel, pause, resume, reprioritise, ask why, switch to another mode."""
    state, chance = engine.state, draw.random()
    if live and chance < 0.05:
        state.end(draw.choice(list(live)), State.finished_abort)
    elif chance < 0.08:
        interventions.pause(state, draw.choice("abc"))
    elif chance < 0.2:
        interventions.resume(state, draw.choice("abc"))
    elif live and chance < 0.24:
        interventions.reprioritise(state, draw.choice(list(live)), draw.randint(-3, 3))
    elif live and chance < 0.3:
        state.policy.explain(draw.choice(list(live)), state.view())
    elif chance < 0.32:
        interventions.switch_policy(state, policy(draw.choice(list(KNOBS))))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("mode", KNOBS)
def test_no_request_or_block_is_lost_under_random_interventions(mode: str, seed: int) -> None:
    draw = Random(f"{mode} {seed}")
    engine = rig(
        draw.randint(12, 40), 160, draw.randint(1, 6), policy=policy(mode),
        executor_args={"step_s": 0.02}, predictor=QuantilePredictor(),
        cost=StepCost(step_s=0.01, token_s=1e-4), async_depth=seed % 2, n_host_blocks=30,
    )  # fmt: skip
    live: dict[str, Request] = {}
    n_submitted = 0
    for _ in range(5000):
        if n_submitted < N_REQUESTS and draw.random() < 0.3:
            n_prompt, n_output = draw.randint(1, 100), draw.randint(1, 50)
            req = request(
                f"r{n_submitted}", [(n_submitted * 7 + i) % 250 for i in range(n_prompt)], n_output,
                arrived_s=engine.clock.now_s(), tenant=draw.choice("abc"),
                priority=draw.randint(-2, 2),
            )  # fmt: skip
            n_submitted += 1
            with suppress(AdmissionError):  # a hard budget
                engine.admit(req)
                live[req.id] = req
        intervene(engine, draw, live)
        if engine.state.has_work:
            engine.step()
        engine.clock.advance(0.01)
        if n_submitted == N_REQUESTS and all(req.state.is_over for req in live.values()):
            break
    for req in live.values():
        expected = toy_output(req.tokens[: req.n_prompt], req.max_tokens)
        assert req.state.is_over, f"{req.id} is {req.state} (seed {seed})"
        n_output = req.n_output if req.state is State.finished_abort else req.max_tokens
        assert req.output == expected[:n_output]
    assert engine.state.kv.n_free == engine.state.kv.n_blocks
    assert engine.state.counters.rejected_plans == 0
