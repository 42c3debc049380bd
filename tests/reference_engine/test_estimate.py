"""The price and the time of an answer, before it is asked for."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from reference_engine.policies.token_fair import TokenFair
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.serving.estimate import estimate
from reference_engine.state.cost_model import StepCost
from reference_engine.state.sequence import State
from tests.reference_engine.engine_kit import request, rig
from tests.reference_engine.engine_server import serving


def engine(**fields):
    """Steps of 10 ms whatever they do, 4 tokens each."""
    fields = {"token_budget": 4, "cost": StepCost(step_s=0.01), **fields}
    return rig(executor_args={"step_s": 0.01}, **fields)


def test_an_idle_engine_starts_at_once_and_reads_in_as_many_steps_as_it_takes():
    found = estimate(engine().state, request("r", [1] * 10, 5))
    assert (found.tokens_ahead, found.start_s) == (0, 0.0)
    assert found.ttft_p50_s == found.ttft_p90_s == pytest.approx(0.03)
    # 10 prompt tokens at 1, 5 expected at 2.
    assert (found.virtual_tokens, found.refusal) == (20.0, None)


def test_a_cached_prefix_makes_it_cheaper_and_sooner():
    work = engine()
    work.admit(request("first", [1] * 33, 1))
    work.drain()
    found = estimate(work.state, request("r", [1] * 40, 5))
    assert (found.input_tokens, found.cached_tokens) == (40, 32)
    assert found.virtual_tokens == pytest.approx(40 - 32 + 2 * found.output_tokens.mean)
    assert found.ttft_p50_s == pytest.approx(0.02)


def test_a_queue_is_waited_for_and_the_divisor_is_told():
    work = engine(max_num_seqs=64)
    for n in range(10):
        work.admit(request(f"r{n}", [n] * 40, 20))
    for _ in range(60):
        work.step()
    found = estimate(work.state, request("r", [99] * 8, 5))
    waiting = sum(r.n_tokens for r in work.state.queues.waiting.values())
    reading = sum(r.n_remaining for r in work.state.queues.prefilling.values())
    assert found.tokens_ahead == waiting + reading > 0
    assert found.tokens_per_s is not None
    assert found.start_s == pytest.approx(found.tokens_ahead / found.tokens_per_s)
    assert (found.ttft_p50_s or 0.0) > (found.start_s or 0.0)
    before = work.state.counters.admitted, len(work.state.log.events)
    estimate(work.state, request("r", [99] * 8, 5))
    assert (work.state.counters.admitted, len(work.state.log.events)) == before


def test_the_errors_of_earlier_forecasts_correct_the_next():
    """A forecast that was always a second too early is answered a second later, when there are
    enough of them to tell."""
    work = engine(max_num_seqs=2)
    for n in range(8):
        work.admit(request(f"r{n}", [n] * 40, 20))
    for _ in range(30):
        work.step()
    asked = request("r", [99] * 8, 5)
    errors = work.state.accounting.prompt_rate.errors
    assert isinstance(errors, deque)
    errors.clear()
    plain = estimate(work.state, asked)
    plain_s = plain.ttft_p50_s or 0.0
    assert plain_s == plain.ttft_p90_s
    assert plain_s > 0
    errors.extend([1.0] * 18 + [3.0] * 2)
    found = estimate(work.state, asked)
    assert (plain.n_errors, found.n_errors) == (0, 20)
    assert found.ttft_p50_s == found.ttft_p90_s == pytest.approx(plain_s + 1.0)
    errors.extend([3.0] * 2)
    assert estimate(work.state, asked).ttft_p90_s == pytest.approx(plain_s + 3.0)


def test_a_mode_with_prices_of_its_own_is_asked_for_them():
    found = estimate(
        rig(policy=TokenFair(input_cost=3.0, output_cost=5.0)).state, request("r", [1] * 10, 4)
    )
    assert found.virtual_tokens == 50.0


def test_a_budget_that_is_spent_is_said_before_the_request_is_sent():
    budgets = {"red": {"rate": "1/s", "burst": 10, "when_over": "refuse"}}
    work = rig(policy=TokenFair.model_validate({"budgets": budgets}))
    for n in range(3):
        if estimate(work.state, request("x", [1] * 10, 4, tenant="red")).refusal is None:
            work.admit(request(f"r{n}", [1] * 10, 4, tenant="red"))
            work.drain()
    refusal = estimate(work.state, request("x", [1] * 10, 4, tenant="red")).refusal
    assert refusal is not None
    assert refusal.code == "tenant_budget"
    assert estimate(work.state, request("x", [1] * 10, 4, tenant="blue")).refusal is None


def test_the_route_answers_for_either_kind_of_body():
    async def scene():
        async with serving() as server:
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 7}
            found = [
                await server.post("/v1/estimate", chat),
                await server.post("/v1/estimate", {"prompt": "abc"}),
                await server.post("/v1/estimate", {"prompt": "x" * 5000}),
                await server.post("/v1/estimate", {"prompt": "x", "model": "other"}),
            ]
            return found, (await server.idle())["admitted"]

    (chat, completion, long, other), admitted = asyncio.run(scene())
    assert chat[0] == 200
    assert chat[1]["input_tokens"] == len("user: Hi\nassistant: ")
    assert chat[1]["output_tokens"]["p90"] == 7
    assert chat[1]["predicted_start_ms"] == 0
    assert completion[1]["price"] == {"virtual_tokens": 35, "input_cost": 1, "output_cost": 2}
    assert (long[0], long[1]["error"]["code"]) == (400, "context_length_exceeded")
    assert other[0] == 404
    assert admitted == 0


@pytest.mark.usefixtures("both_forms")
def test_answers_carry_what_was_foretold_at_arrival():
    async def scene():
        async with serving() as server:
            found = []
            for stream in (True, False):
                body = {"prompt": "abc", "max_tokens": 3, "stream": stream}
                async with server.session.post("/v1/completions", json=body) as response:
                    await response.read()
                    found.append(dict(response.headers))
            return found

    for headers in asyncio.run(scene()):
        assert int(headers["x-tokens-ahead"]) >= 0
        assert float(headers["x-predicted-start-ms"]) >= 0


def predicted_after(question) -> float:
    """What a predictor of 200 answers and 3 more says, where `question` was put in between to an
    engine that has it."""
    predictor = QuantilePredictor()
    engine = rig(predictor=predictor)

    def learn(n_output: int) -> None:
        over = request("x", [1] * 20, 100)
        over.tokens += [2] * n_output
        over.state = State.finished_stop
        predictor.observe(over)

    for i in range(200):
        learn(5 + i % 7)
    question(engine.state, request("draft", [3] * 20, 100))
    for _ in range(3):
        learn(90)
    return predictor.predict(request("next", [4] * 20, 100)).mean


def test_a_question_changes_no_later_prediction():
    asked = predicted_after(lambda state, draft: estimate(state, draft))
    assert asked == predicted_after(lambda state, draft: None)
    # What a request of its own would have changed: a table is made, and kept for a while.
    assert asked != predicted_after(lambda state, draft: state.view().predictor.predict(draft))


def test_a_question_makes_nobody_a_tenant():
    engine = rig(policy="token_fair", budgets="*=10/s:20:refuse")
    engine.admit(request("a", [1] * 16, 16, tenant="a"))
    engine.drain()  # it used more than its burst, and no time passed
    for i in range(5000):  # more tenants than are remembered
        assert estimate(engine.state, request("d", [1] * 8, 4, tenant=f"t{i}")).refusal is None
    assert estimate(engine.state, request("d", [1] * 8, 4, tenant="a")).refusal is not None
