"""A log replayed decides the same, whatever happened; and a change in how is decided shows."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.core import interventions
from reference_engine.core.setup import NotReplayable, Setup
from reference_engine.policies.base import POLICIES
from reference_engine.policies.chunked import Chunked
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.state.cost_model import StepCost
from reference_engine.state.plan import AdmissionError, How
from reference_engine.state.sequence import State
from reference_engine.state.steps import StepEvent, StepLog
from reference_engine.step_log.log_replay import EngineLog, replay
from tests.reference_engine.engine_kit import Rig, request, rig

MODES = sorted({POLICIES.get(name).kind for name in POLICIES.names()})
COST = StepCost(step_s=0.01, token_s=0.001, graph_rows=(1, 2, 4))
STOP = 257
KNOBS: dict[str, dict[str, object]] = {
    "token_fair": {"budgets": "a=300/s:400 b=200/s:100:refuse"},
    "bucketed": {"min_batch": 2},
}


def recorded(engine: Rig, log: StepLog) -> EngineLog:
    """As it would be read from disk."""
    events = [event._replace(detail=json.loads(json.dumps(event.detail))) for event in log.events]
    return EngineLog(list(log.steps), events)


def logged_rig(mode: str, **options) -> tuple[Rig, StepLog]:
    log = StepLog("full")
    engine = rig(
        policy=POLICIES.build({"kind": mode, **KNOBS.get(mode, {})}), log=log, cost=COST,
        predictor=QuantilePredictor(), **options,
    )  # fmt: skip
    log.add_event(Setup.of(engine.state).event(engine.clock.now_s()))
    return engine, log


def play(engine: Rig, draw: Random, n_requests: int) -> None:
    """Random traffic with everything that may happen to it, steps of uneven length included."""
    state, n_arrived = engine.state, 0
    for _ in range(100_000):
        for _ in range(draw.choice((0, 0, 1, 2)) if n_arrived < n_requests else 0):
            start = draw.choice((0, 0, n_arrived))  # some prompts begin alike
            asked = request(
                f"r{n_arrived % 40}",  # ids are used again
                [(start + k) % 256 for k in range(draw.randint(1, 90))],
                draw.randint(1, 30),
                arrived_s=engine.clock.now_s() - draw.random() * 1e-3,
                stop_ids=[STOP], tenant=draw.choice("ab"), priority=draw.randint(-1, 1),
                ttft_slo_s=draw.choice((None, 0.05, 0.4)), tpot_slo_s=draw.choice((None, 0.02)),
                deadline_s=draw.choice((None, engine.clock.now_s() + 0.3)),
            )  # fmt: skip
            if state.queues.find(asked.id) is None:
                with suppress(AdmissionError):
                    state.admit(asked)
            n_arrived += 1
        meddle(state, draw)
        if n_arrived >= n_requests:
            interventions.resume(state, "a")
            interventions.resume(state, "b")
            if not state.has_work:
                return
        if state.has_work:
            engine.step()
        engine.clock.advance(draw.random() * 0.02)  # the loop's own time, and waiting on purpose
    raise AssertionError("not done after 100 000 steps")


def meddle(state, draw: Random) -> None:
    name = f"r{draw.randrange(40)}"
    what = draw.random()
    if what < 0.04:
        state.end(name, State.finished_abort)
    elif what < 0.08:
        state.end(name, State.finished_stop)  # a stop string
    elif what < 0.11:
        interventions.pause(state, draw.choice("ab"), "op", "noisy")
    elif what < 0.14:
        interventions.resume(state, draw.choice("ab"), "op")
    elif what < 0.18:
        interventions.reprioritise(state, name, draw.randint(-2, 2), "op")
    elif what < 0.19:
        interventions.reset_prefix_cache(state, "op", "a new measurement")
    elif what < 0.21:
        kind = draw.choice(MODES)
        interventions.switch_policy(
            state, POLICIES.build({"kind": kind, **KNOBS.get(kind, {})}), "op", "to see"
        )


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=2)
@given(
    seed=st.integers(0, 10_000),
    async_depth=st.sampled_from([0, 1]),
    n_blocks=st.sampled_from([10, 40]),
    n_host_blocks=st.sampled_from([0, 12]),
    eos_every=st.sampled_from([0, 9]),
    prefix_cache=st.booleans(),
)
def test_whatever_happened_is_decided_again(
    mode, seed, async_depth, n_blocks, n_host_blocks, eos_every, prefix_cache
):
    engine, log = logged_rig(
        mode, n_blocks=n_blocks, max_model_len=160, max_num_seqs=6, max_step_tokens=64,
        executor_args={"step_s": 0.013, "eos_every": eos_every}, prefix_cache=prefix_cache,
        n_host_blocks=n_host_blocks, how=How.auto, async_depth=async_depth, is_strict=False,
    )  # fmt: skip
    play(engine, Random(seed), n_requests=35)
    found = replay(recorded(engine, log))
    assert found.is_identical, f"seed {seed}: {found.sentence()}"
    assert found.n_steps == len(log.steps)
    assert found.n_decisions > sum(len(record.items) for record in log.steps) > 0
    assert found.n_open == 0


def chunked_log(**options) -> EngineLog:
    engine, log = logged_rig("chunked", executor_args={"step_s": 0.01}, **options)
    engine.admit(*(request(f"r{i}", [i] * (20 + 9 * i), 12) for i in range(8)))
    engine.drain()
    return recorded(engine, log)


def test_another_policy_is_found_at_its_first_decision():
    log = chunked_log(max_num_seqs=4)
    changed = replay(log, lambda description: Chunked(token_budget=64))
    assert str(changed.difference) == "start before step 0: detail.policy was " + (
        f"{Chunked().described()!r}, replayed {Chunked(token_budget=64).described()!r}"
    )

    class Hasty(Chunked):
        """As described, and yet another."""

        def plan(self, view):
            plan = super().plan(view)
            return plan if view.now_s < 0.02 else plan._replace(hold=("r0",))

    changed = replay(log, lambda description: Hasty())
    assert changed.sentence() == ("step 2: n_decode was 4, replayed 3 (after 2 steps, 8 decisions)")


def test_a_policy_that_looks_at_a_clock_of_its_own_is_found():
    class Clocked(Chunked):
        def plan(self, view):
            plan = super().plan(view)
            return plan._replace(action=str(time.perf_counter_ns()))

    log = StepLog("full")
    engine = rig(log=log, policy=Clocked())
    log.add_event(Setup.of(engine.state).event(0.0))
    engine.admit(request("a", [1, 2], 3))
    engine.drain()
    found = replay(recorded(engine, log), lambda description: Clocked())
    assert found.difference is not None
    assert (found.difference.where, found.difference.what) == ("step 0", "action")


def test_a_changed_log_is_told_from_what_would_be_decided():
    log = chunked_log()
    steps = [*log.steps]
    (first, *others), n_tokens = steps[0].items, steps[0].n_prefill_tokens
    steps[0] = steps[0]._replace(items=((first[0], first[1] - 1), *others))
    found = replay(replace(log, steps=steps))
    assert str(found.difference) == "step 0: items[0] was ('r0', 19), replayed ('r0', 20)"
    assert found.n_steps == 0
    assert n_tokens == 20 * 8 + 9 * 28
    lost = [event for event in log.events if event.request_id != "r3"]
    assert not replay(replace(log, events=lost)).is_identical
    without_end = [e for e in log.events if (e.kind, e.request_id) != ("finish", "r3")]
    assert replay(replace(log, events=without_end)).n_open == 1


def test_what_a_replay_cannot_do_is_said():
    log = chunked_log()
    with pytest.raises(NotReplayable, match="no 'start' event"):
        replay(replace(log, events=log.events[1:]))
    small = [
        event._replace(detail={k: v for k, v in event.detail.items() if k != "tokens"})
        for event in log.events
    ]
    with pytest.raises(NotReplayable, match="log_level=full"):
        replay(replace(log, events=small))
    with pytest.raises(NotReplayable, match="begins at step 3"):
        replay(replace(log, steps=log.steps[3:]))
    start = log.events[0]
    odd = StepEvent(**{**start._asdict(), "detail": {**start.detail, "cost": None}})
    with pytest.raises(NotReplayable, match="cost model of its own kind"):
        replay(replace(log, events=[odd, *log.events[1:]]))
