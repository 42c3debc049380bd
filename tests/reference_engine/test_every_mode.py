"""Properties of every batching mode under random traffic on a small engine."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.policies.base import POLICIES
from reference_engine.state.sequence import Request, State
from tests.reference_engine.engine_kit import Rig, request, rig, toy_output

N_BLOCKS, STEP_S = 12, 0.01
MODES = sorted({POLICIES.get(name).kind for name in POLICIES.names()})  # aliases left out


@dataclass(frozen=True)
class Arrival:
    at_s: float
    prompt: list[int]
    max_tokens: int
    tenant: str
    priority: int
    cancel_after_s: float | None


@st.composite
def traffic(draw: st.DrawFn) -> list[Arrival]:
    """One to ten requests within a second, in order of time, each of which fits the engine."""
    n = draw(st.integers(1, 10))
    arrivals = []
    for k in range(n):
        n_prompt, n_output = draw(st.integers(1, 120)), draw(st.integers(1, 30))
        start = draw(st.sampled_from([0, 0, 7 * k]))  # some prompts begin alike
        arrivals.append(
            Arrival(
                at_s=draw(st.integers(0, 20)) / 20,
                prompt=[(start + i) % 256 for i in range(n_prompt)],
                max_tokens=n_output,
                tenant=draw(st.sampled_from("ab")),
                priority=draw(st.integers(-1, 1)),
                cancel_after_s=draw(st.none() | st.just(0.1)),
            )
        )
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def play(mode: str, arrivals: list[Arrival]) -> dict[str, Request]:
    """Run the traffic to its end in virtual time; the requests by id."""
    engine = rig(
        n_blocks=N_BLOCKS, max_model_len=160, max_num_seqs=8, policy=mode,
        executor_args={"step_s": STEP_S},
    )  # fmt: skip
    coming = list(enumerate(arrivals))
    requests: dict[str, Request] = {}
    cancels: list[tuple[float, str]] = []
    for _ in range(5000):
        now_s = engine.clock.now_s()
        while coming and coming[0][1].at_s <= now_s:
            k, arrival = coming.pop(0)
            name = f"r{k}"
            requests[name] = request(
                name,
                arrival.prompt,
                arrival.max_tokens,
                arrived_s=arrival.at_s,
                tenant=arrival.tenant,
            )
            requests[name].priority = arrival.priority
            engine.admit(requests[name])
            if arrival.cancel_after_s is not None:
                cancels.append((arrival.at_s + arrival.cancel_after_s, name))
        for due_s, name in [entry for entry in cancels if entry[0] <= now_s]:
            cancels.remove((due_s, name))
            engine.state.end(name, State.finished_abort)
        if engine.state.has_work:
            _step(engine)
        elif not coming:
            engine.state.check()
            assert engine.state.kv.n_free == N_BLOCKS
            return requests
        else:
            engine.clock.advance(coming[0][1].at_s - now_s)
    raise AssertionError(f"{mode}: not done after 5000 steps")


def _step(engine: Rig) -> None:
    """One step. If the mode waits on purpose, time advances to the end of the wait, at most by a
    step."""
    before_s = engine.clock.now_s()
    engine.step()
    until_s = engine.state.wait_until_s
    if until_s is not None and engine.clock.now_s() == before_s:
        assert until_s > before_s
        engine.clock.advance(min(until_s - before_s, STEP_S))


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8)
@given(arrivals=traffic())
def test_every_request_gets_exactly_the_tokens_of_the_model(
    mode: str, arrivals: list[Arrival]
) -> None:
    """The toy model's tokens depend on the whole context, so a lost, doubled or misplaced token, a
    block shared by mistake or a wrong recomputation after a preemption would show."""
    requests = play(mode, arrivals)
    for k, arrival in enumerate(arrivals):
        answered = requests[f"r{k}"]
        expected = toy_output(arrival.prompt, arrival.max_tokens)
        output = answered.tokens[answered.n_prompt :]
        if answered.state is State.finished_abort:
            assert output == expected[: len(output)]
        else:
            assert answered.state is State.finished_length
            assert output == expected


IN_ORDER = [mode for mode in MODES if POLICIES.get(mode).is_in_order]


def test_the_modes_in_order_are_the_first_come_first_served_ones():
    assert IN_ORDER == [
        "chunked", "continuous", "dynamic", "orca", "prefill_first", "split_fuse", "static",
    ]  # fmt: skip


@pytest.mark.parametrize("mode", IN_ORDER)
@settings(max_examples=5)
@given(arrivals=traffic())
def test_a_mode_that_claims_the_order_of_arrival_starts_requests_in_it(
    mode: str, arrivals: list[Arrival]
) -> None:
    requests = play(mode, arrivals)
    started = [r for r in requests.values() if r.scheduled_s is not None]
    started.sort(key=lambda r: r.arrival)
    starts_s = [r.scheduled_s or 0.0 for r in started]
    assert starts_s == sorted(starts_s)
