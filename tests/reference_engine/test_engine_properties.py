"""The engine under a policy that does anything it may, while an operator and clients do the same:
every token once and in order, no block lost or shared by mistake, limits held, nobody stuck."""

from __future__ import annotations

import math
from collections import defaultdict
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import PrivateAttr

from reference_engine.core import interventions
from reference_engine.policies.base import Policy
from reference_engine.state.cost_model import StepCost
from reference_engine.state.plan import AdmissionError, Cause, How, Item, Plan, Preemption, Why
from reference_engine.state.sequence import State
from tests.reference_engine.engine_kit import request, rig, toy_output

COST = StepCost(step_s=0.01, token_s=0.001)
STOP = 257
STEP_S = 0.37


class Chaos(Policy):
    """Any valid plan may come of it: chunks, holds, reservations, preemptions, idling, victims."""

    kind = "chaos"
    seed: int = 0
    _draw: Random = PrivateAttr()

    def model_post_init(self, context: object) -> None:
        self._draw = Random(self.seed)

    def on_arrival(self, request, view):
        view.assign(request.id, self._draw.choice(["", "x", "y"]))

    def plan(self, view):
        draw, chance = self._draw, self._draw.random
        running, waiting = list(view.running), list(view.waiting)
        calm = chance() < 0.5  # otherwise nothing would ever end
        preempt = [r for r in running if chance() < 0.1 and not calm]
        left = [r for r in running if r not in preempt]
        hold = [r for r in left if chance() < 0.2 and not calm]
        decode_all = chance() < 0.7
        budget = view.limits.max_step_tokens
        if decode_all:
            budget -= sum(r in left and r not in hold for r in view.decoding)
        items: list[Item] = []
        for r in [*left, *draw.sample(waiting, len(waiting))]:
            most = min(view.to_compute(r), budget)
            is_free = r not in hold and not (decode_all and view.is_decoding(r.id))
            if most > 0 and is_free and (calm or chance() < 0.8) and len(items) < 4:
                reserve = draw.choice([0, r.n_tokens, r.n_most, 10_000])
                items.append(Item(r.id, draw.randint(1, most), reserve))
                budget -= items[-1].n_tokens
        n_new = view.limits.max_num_seqs - len(left)
        new = [item for item in items if view.is_waiting(item.request_id)]
        items = [item for item in items if item not in new[max(0, n_new) :]]
        draw.shuffle(items)
        causes = [(r.id, Cause(Why.behind, "x")) for r in waiting if chance() < 0.2]
        return Plan(
            tuple(items),
            decode_all=decode_all,
            hold=tuple(r.id for r in hold),
            preempt=tuple(Preemption(r.id, draw.choice(list(How))) for r in preempt),
            causes=tuple(causes),
            segments=(("x", Cause(Why.bucket_not_ready)),),
            rest=Cause(draw.choice([Why.no_seq_slot, Why.no_token_budget])),
            wait_until_s=view.now_s + 1.0,
        )

    def victims(self, view, request, need_blocks):
        running = [r.id for r in view.running]
        return self._draw.sample(running, len(running))


jobs = st.lists(
    st.tuples(st.integers(1, 70), st.integers(1, 30), st.integers(0, 25), st.integers(0, 2)),
    min_size=1,
    max_size=9,
)
meddling = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.sampled_from(["cancel", "pause", "resume", "priority", "switch"]),
        st.integers(0, 8),
    ),
    max_size=12,
)


def prompt_of(family: int, n: int) -> list[int]:
    """Prompts of one family are prefixes of each other."""
    return [(family * 31 + 7 * i) % 256 for i in range(n)]


def expected(prompt: list[int], n: int, eos_every: int) -> tuple[list[int], State]:
    """The toy model's answer, cut at its first stop token."""
    tokens = toy_output(prompt, n) if not eos_every else toy_output(prompt, n, eos_every, STOP)
    if STOP in tokens:
        return tokens[: tokens.index(STOP) + 1], State.finished_stop
    return tokens, State.finished_length


@settings(max_examples=60, deadline=None)
@given(
    jobs=jobs,
    meddling=meddling,
    policy=st.one_of(st.integers(0, 1000), st.sampled_from(["chunked", "prefill_first", "orca"])),
    n_blocks=st.integers(7, 30),
    n_host_blocks=st.sampled_from([0, 3, 40]),
    preempt=st.sampled_from(list(How)),
    async_depth=st.sampled_from([0, 1]),
    max_num_seqs=st.integers(1, 6),
    max_step_tokens=st.integers(6, 64),
    prefix_cache=st.booleans(),
    eos_every=st.sampled_from([0, 9]),
)
@example(  # a prompt in pieces, sent away again and again by decodes that never got their turn
    jobs=[
        (3, 5, 0, 0), (56, 30, 16, 0), (56, 30, 16, 0), (4, 9, 12, 1), (18, 7, 19, 0),
        (11, 21, 6, 1), (23, 10, 1, 0), (50, 16, 15, 1), (16, 21, 22, 0),
    ],
    meddling=[(2, "cancel", 2)],
    policy="prefill_first",
    n_blocks=17,
    n_host_blocks=3,
    preempt=How.recompute,
    async_depth=0,
    max_num_seqs=5,
    max_step_tokens=9,
    prefix_cache=True,
    eos_every=0,
)  # fmt: skip
def test_every_request_gets_its_own_tokens_whatever_happens(
    jobs,
    meddling,
    policy,
    n_blocks,
    n_host_blocks,
    preempt,
    async_depth,
    max_num_seqs,
    max_step_tokens,
    prefix_cache,
    eos_every,
):
    engine = rig(
        n_blocks,
        max_num_seqs=max_num_seqs,
        max_step_tokens=max_step_tokens,
        prefix_cache=prefix_cache,
        executor_args={"step_s": STEP_S, "copy_s": 0.001, "eos_every": eos_every},
        policy=Chaos(seed=policy) if isinstance(policy, int) else policy,
        cost=COST,
        n_host_blocks=n_host_blocks,
        how=preempt,
        async_depth=async_depth,
    )
    state = engine.state
    requests = [
        request(
            f"r{i}",
            prompt_of(family, n_prompt),
            n_out,
            stop_ids=[STOP],
            tenant=f"t{i % 2}",
        )
        for i, (n_prompt, n_out, _, family) in enumerate(jobs)
    ]
    got = defaultdict(list)
    waited_s: defaultdict[str, float] = defaultdict(float)
    i_step = 0
    while i_step < 45 or state.has_work:
        for req, (_, _, arrives, _) in zip(requests, jobs, strict=True):
            if arrives == i_step:
                req.arrived_s = engine.clock.now_s()
                engine.admit(req)
        for at, what, which in meddling:
            if at == i_step:
                meddle(state, what, which)
                state.check()
        if i_step == 42:
            interventions.resume(state, "t0")
            interventions.resume(state, "t1")
        before_s = engine.clock.now_s()
        if state.has_work:
            for event in engine.step():
                got[event.request.id].append(event.token)
            assert state.log.steps[-1].n_prefill_tokens + state.log.steps[-1].n_decode <= (
                max_step_tokens
            )
        if engine.clock.now_s() == before_s:
            engine.clock.advance(STEP_S)
        for name in [*state.queues.waiting, *state.queues.held]:
            waited_s[name] += engine.clock.now_s() - before_s
        i_step += 1
        assert i_step < 10_000, "no progress"
    assert state.kv.n_free == n_blocks
    assert state.host.n_free == n_host_blocks
    for req, (n_prompt, n_out, _, family) in zip(requests, jobs, strict=True):
        tokens, how = expected(prompt_of(family, n_prompt), n_out, eos_every)
        if req.state is State.finished_abort:
            assert got[req.id] == tokens[: len(got[req.id])]
        else:
            assert (got[req.id], req.state) == (tokens, how)
        entry = state.explain(req.id)
        assert entry is not None
        charged_s = sum(seconds for _, seconds in entry.waits)
        if req.n_preemptions == 0:
            assert charged_s == pytest.approx(entry.queue_s, abs=1e-9)
        if not async_depth:  # else steps are planned before the clock moves past the one before
            assert charged_s == pytest.approx(waited_s[req.id], abs=1e-9)
        assert all(seconds >= 0 for _, seconds in entry.waits)


def meddle(state, what, which):
    if what == "cancel":
        state.end(f"r{which}", State.finished_abort)
    elif what == "pause":
        interventions.pause(state, f"t{which % 2}", "op", "noisy")
    elif what == "resume":
        interventions.resume(state, f"t{which % 2}", "op")
    elif what == "priority":
        interventions.reprioritise(state, f"r{which}", which, "op")
    else:
        interventions.switch_policy(state, Chaos(seed=which), "op", "to see")


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "code"),
    [(90, 11, "context_length_exceeded"), (64, 18, "kv_capacity_exceeded")],
)
def test_what_could_never_fit_is_refused_and_not_queued(n_prompt, max_tokens, code):
    engine = rig(n_blocks=5, max_model_len=100)
    req = request("big", range(n_prompt), max_tokens)
    with pytest.raises(AdmissionError) as caught:
        engine.admit(req)
    assert (caught.value.code, caught.value.retry_after_s) == (code, None)
    assert req.state is State.rejected
    assert not engine.state.has_work


def test_waiting_for_ever_is_a_plan_too():
    class Patient(Chaos):
        def plan(self, view):
            return Plan(wait_until_s=math.inf)

    engine = rig(policy=Patient())
    engine.admit(request("a", [1], 1))
    assert engine.step() == []
    assert engine.state.wait_until_s == math.inf
