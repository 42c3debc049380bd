"""What is foretold at arrival: known answers of a queue that moves evenly."""

from __future__ import annotations

import pytest

from reference_engine.accounting.accounting import PromptReadRate
from reference_engine.state.cost_model import StepCost
from reference_engine.state.sequence import StartForecast
from tests.reference_engine.engine_kit import request, rig


def test_pace_is_tokens_per_busy_second_of_late():
    pace = PromptReadRate()
    assert pace.tokens_per_s is None
    pace.add(100, 0.0, 1.0)
    assert pace.tokens_per_s == pytest.approx(100)
    pace.add(100, 1.0, 2.0)
    assert pace.tokens_per_s == pytest.approx(100)
    for i in range(400):
        pace.add(10, 10.0 + i, 11.0 + i)
    assert pace.tokens_per_s == pytest.approx(10, rel=1e-3)


def test_steps_that_overlap_are_not_counted_twice():
    pace = PromptReadRate()
    pace.add(100, 0.0, 1.0)
    pace.add(100, 0.0, 2.0)  # planned when the one before began
    assert pace.tokens_per_s == pytest.approx(100)


def test_a_request_that_can_start_is_told_so():
    engine = rig(executor_args={"step_s": 1.0})
    engine.clock.advance(3.0)
    assert engine.state.forecast(10) == StartForecast(0, None, 3.0)


def test_without_a_pace_the_cost_model_says_how_long_it_takes():
    engine = rig(cost=StepCost(token_s=0.01))
    engine.admit(request("a", range(50), 5), request("b", range(100, 150), 5))
    assert engine.state.forecast(10) == pytest.approx((100, 100.0, 1.0))


def test_a_queue_that_moves_evenly_is_foretold_exactly():
    """20 prompt tokens a second, one request after the other."""
    engine = rig(token_budget=20, executor_args={"step_s": 1.0})
    for i in range(12):
        engine.admit(request(f"r{i}", range(100 * i, 100 * i + 40), 1))
    engine.step()
    engine.step()
    engine.admit(late := request("late", range(5000, 5040), 1, arrived_s=2.0))
    assert late.forecast == pytest.approx((11 * 40, 20.0, 24.0))
    engine.drain()
    entry = engine.state.explain("late")
    assert entry is not None
    assert entry.tokens_ahead == 440
    assert entry.predicted_start_s == pytest.approx(24.0)
    assert entry.start_error_s == pytest.approx(0.0)
    assert engine.state.accounting.prompt_rate.errors[-1] == pytest.approx(0.0)


def test_without_a_free_slot_the_requests_own_prompt_is_added_to_the_tokens_ahead():
    """Each prompt stands for a slot that becomes free, and this request needs one more."""
    engine = rig(max_num_seqs=1, cost=StepCost(token_s=0.01), executor_args={"step_s": 1.0})
    engine.admit(request("a", range(50), 5))
    engine.step()
    assert engine.state.forecast(10) == pytest.approx((0, 100.0, 1.1))
    engine.admit(request("b", range(100, 130), 5, arrived_s=1.0))
    assert engine.state.forecast(10) == pytest.approx((30, 100.0, 1.4))


def test_where_slots_are_scarce_the_pace_is_that_of_the_slots():
    """One slot, 5 s each: a prompt of 10 tokens every 5 s."""
    engine = rig(max_num_seqs=1, executor_args={"step_s": 1.0})
    engine.admit(*(request(f"r{i}", range(20 * i, 20 * i + 10), 5) for i in range(20)))
    while engine.clock.now_s() < 60.0:
        engine.step()
    engine.admit(request("late", range(900, 910), 5, arrived_s=60.0))
    engine.drain()
    entry = engine.state.explain("late")
    assert entry is not None
    assert entry.tokens_ahead == 8 * 10  # r12 to r19
    assert entry.start_error_s == pytest.approx(0.0, abs=5.0)
    assert entry.queue_s == pytest.approx(40.0)
