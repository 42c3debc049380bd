"""The price and the times of a request that is not sent."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from reference_engine.policies.token_fair import TokenFair
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.serving.routes.estimate import estimate
from reference_engine.state.cost_model import StepCost
from reference_engine.state.sequence import State
from tests.reference_engine.engine_kit import request, rig
from tests.reference_engine.engine_server import serving


def engine(**fields):
    """An engine whose steps take 10 ms and compute 4 tokens."""
    fields = {"token_budget": 4, "cost": StepCost(step_s=0.01), **fields}
    return rig(executor_args={"step_s": 0.01}, **fields)


def test_an_idle_engine_starts_at_once_and_prefills_in_steps():
    result = estimate(engine().state, request("r", [1] * 10, 5))
    assert (result.tokens_ahead, result.start_s) == (0, 0.0)
    assert result.ttft_p50_s == result.ttft_p90_s == pytest.approx(0.03)
    # 10 prompt tokens at 1, 5 expected at 2.
    assert (result.virtual_tokens, result.refusal) == (20.0, None)


def test_the_rate_of_an_idle_engine_is_that_of_reading_the_prompt():
    """16 000 tokens in a step of 10 ms + 16 ms, and not the 99 tokens/s of a prompt of one."""
    cost = StepCost(step_s=0.01, token_s=1e-6)
    idle = rig(max_model_len=1 << 15, n_blocks=2048, cost=cost)
    result = estimate(idle.state, request("r", [1] * 16_000, 1))
    assert result.tokens_per_s == pytest.approx(16_000 / 0.026)


def test_a_cached_prefix_makes_it_cheaper_and_sooner():
    work = engine()
    work.admit(request("first", [1] * 33, 1))
    work.drain()
    result = estimate(work.state, request("r", [1] * 40, 5))
    assert (result.input_tokens, result.cached_tokens) == (40, 32)
    assert result.virtual_tokens == pytest.approx(40 - 32 + 2 * result.output_tokens.mean)
    assert result.ttft_p50_s == pytest.approx(0.02)


def test_the_start_follows_from_the_queue_and_the_shown_rate():
    work = engine(max_num_seqs=64)
    for n in range(10):
        work.admit(request(f"r{n}", [n] * 40, 20))
    for _ in range(60):
        work.step()
    result = estimate(work.state, request("r", [99] * 8, 5))
    waiting = sum(r.n_tokens for r in work.state.queues.waiting.values())
    reading = sum(r.n_remaining for r in work.state.queues.prefilling.values())
    assert result.tokens_ahead == waiting + reading > 0
    assert result.tokens_per_s is not None
    assert result.start_s == pytest.approx(result.tokens_ahead / result.tokens_per_s)
    assert (result.ttft_p50_s or 0.0) > (result.start_s or 0.0)
    before = work.state.counters.admitted, len(work.state.log.events)
    estimate(work.state, request("r", [99] * 8, 5))
    assert (work.state.counters.admitted, len(work.state.log.events)) == before


def test_the_errors_of_earlier_forecasts_correct_the_next():
    """After enough forecasts that were a second too early, an estimate is a second later."""
    work = engine(max_num_seqs=2)
    for n in range(8):
        work.admit(request(f"r{n}", [n] * 40, 20))
    for _ in range(30):
        work.step()
    draft = request("r", [99] * 8, 5)
    errors = work.state.accounting.prompt_rate.errors
    assert isinstance(errors, deque)
    errors.clear()
    plain = estimate(work.state, draft)
    plain_s = plain.ttft_p50_s or 0.0
    assert plain_s == plain.ttft_p90_s
    assert plain_s > 0
    errors.extend([1.0] * 18 + [3.0] * 2)
    result = estimate(work.state, draft)
    assert (plain.n_errors, result.n_errors) == (0, 20)
    assert result.ttft_p50_s == result.ttft_p90_s == pytest.approx(plain_s + 1.0)
    errors.extend([3.0] * 2)
    assert estimate(work.state, draft).ttft_p90_s == pytest.approx(plain_s + 3.0)


def test_prices_of_the_mode_are_used():
    result = estimate(
        rig(policy=TokenFair(input_cost=3.0, output_cost=5.0)).state, request("r", [1] * 10, 4)
    )
    assert result.virtual_tokens == 50.0


def test_a_spent_budget_is_a_refusal_in_the_estimate():
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
            result = [
                await server.post("/v1/estimate", chat),
                await server.post("/v1/estimate", {"prompt": "abc"}),
                await server.post("/v1/estimate", {"prompt": "x" * 5000}),
                await server.post("/v1/estimate", {"prompt": "x", "model": "other"}),
            ]
            return result, (await server.idle())["admitted"]

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
def test_responses_carry_the_forecast_made_at_arrival():
    async def scene():
        async with serving() as server:
            result = []
            for stream in (True, False):
                body = {"prompt": "abc", "max_tokens": 3, "stream": stream}
                async with server.session.post("/v1/completions", json=body) as response:
                    await response.read()
                    result.append(dict(response.headers))
            return result

    for headers in asyncio.run(scene()):
        assert int(headers["x-tokens-ahead"]) >= 0
        assert float(headers["x-predicted-start-ms"]) >= 0


def predicted_after(use) -> float:
    """The prediction after 200 answers, a call of `use` with the predictor's engine, and 3 more
    answers."""
    predictor = QuantilePredictor()
    engine = rig(predictor=predictor)

    def learn(n_output: int) -> None:
        over = request("x", [1] * 20, 100)
        over.tokens += [2] * n_output
        over.state = State.finished_stop
        predictor.observe(over)

    for i in range(200):
        learn(5 + i % 7)
    use(engine.state, request("draft", [3] * 20, 100))
    for _ in range(3):
        learn(90)
    return predictor.predict(request("next", [4] * 20, 100)).mean


def test_an_estimate_changes_no_later_prediction():
    predicted = predicted_after(lambda state, draft: estimate(state, draft))
    assert predicted == predicted_after(lambda state, draft: None)
    # A real request would have changed it: the predictor makes a table and reuses it for a while.
    assert predicted != predicted_after(lambda state, draft: state.view().predictor.predict(draft))


def test_an_estimate_registers_no_tenant():
    engine = rig(policy="token_fair", budgets="*=10/s:20:refuse")
    engine.admit(request("a", [1] * 16, 16, tenant="a"))
    engine.drain()  # it used more than its burst, and no time has passed
    for i in range(5000):  # more tenants than the policy stores
        assert estimate(engine.state, request("d", [1] * 8, 4, tenant=f"t{i}")).refusal is None
    assert estimate(engine.state, request("d", [1] * 8, 4, tenant="a")).refusal is not None
