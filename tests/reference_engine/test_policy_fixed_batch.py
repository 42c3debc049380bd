"""Batches that run to completion, by example: static and dynamic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from loadgen.errors import UsageError
from reference_engine.core.interventions import switch_policy
from reference_engine.policies.base import POLICIES
from reference_engine.state.cost_model import Padding
from reference_engine.state.plan import Cause, Why
from reference_engine.state.sequence import State
from tests.reference_engine.engine_kit import Rig, request, rig, toy_output
from tests.reference_engine.policy_kit import finish_times, job


def gang(n: int, policy: str = "static", **knobs: Any) -> Rig:
    """An engine with n requests waiting: prompts of 10, 20, … tokens, answers of 2, 3, …"""
    engine = rig(policy=policy, executor_args={"step_s": 0.01}, **knobs)
    engine.admit(
        *(request(f"r{k}", range(100 * k, 100 * k + 10 * (k + 1)), k + 2) for k in range(n))
    )
    return engine


def test_a_full_batch_is_prefilled_together_and_padded_to_its_longest_prompt() -> None:
    engine = gang(4, batch_size=3)
    plan = engine.plan
    assert engine.shares == {"r0": 10, "r1": 20, "r2": 30}
    assert plan.padding == Padding(prefill_tokens=3 * 30 - 60)


def test_no_request_joins_before_the_last_of_the_batch_ends() -> None:
    engine = gang(4, batch_size=3)
    sizes = []
    while "r3" in {r.id for r in engine.state.view().waiting}:
        sizes.append(len(engine.shares))
        if sizes[-1] == 1 and engine.state.view().running:
            assert engine.plan.rest == Cause(Why.static_group_running, "r2")
        engine.step()
        engine.state.is_source_closed = True
    # One prefill step, then answers of 2, 3 and 4 tokens end in turn.
    assert sizes[:4] == [3, 3, 2, 1]


def test_masked_rows_are_computed_to_the_end() -> None:
    """r0 ends with 11 tokens in KV, r1 with 22: their rows continue, a token longer each step."""
    engine = gang(3, batch_size=3)
    paddings = []
    while engine.state.has_work:
        paddings.append(engine.plan.padding)
        engine.step()
    assert [(p.decode_rows, p.decode_context_tokens) for p in paddings[1:]] == [
        (0, 0),
        (1, 11),
        (2, 12 + 22),
    ]


def test_dropped_rows_and_packed_prompts_cost_nothing() -> None:
    engine = gang(3, batch_size=3, finished_rows="dropped", pad="none")
    while engine.state.has_work:
        assert engine.plan.padding == Padding()
        engine.step()


@pytest.mark.parametrize(
    ("policy", "knobs"),
    [
        ("static", {"batch_size": 8, "fill_timeout": "250ms"}),
        ("dynamic", {"max_batch_size": 8, "max_delay": "250ms"}),
    ],
)
def test_a_smaller_batch_begins_when_its_oldest_request_has_waited(
    policy: str, knobs: dict[str, Any]
) -> None:
    engine = gang(2, policy, **knobs)
    plan = engine.plan
    assert not plan.items
    assert plan.wait_until_s == pytest.approx(0.25)
    assert (plan.rest.why, plan.rest.have, plan.rest.want) == (Why.window_open, 2, 8)
    engine.clock.advance(0.25)
    assert engine.shares == {"r0": 10, "r1": 20}


def test_a_smaller_batch_begins_when_no_more_requests_will_arrive() -> None:
    engine = gang(2, batch_size=8, fill_timeout="1h")
    assert not engine.plan.items
    engine.state.is_source_closed = True
    assert len(engine.plan.items) == 2
    engine.drain()


def test_a_window_closes_at_a_preferred_size() -> None:
    engine = gang(5, "dynamic", max_batch_size=8, preferred_sizes=[2, 4])
    assert len(engine.plan.items) == 4


def test_without_a_delay_a_batch_takes_all_waiting_requests() -> None:
    engine = gang(3, "dynamic", max_batch_size=8, max_delay="0s")
    assert len(engine.plan.items) == 3
    engine.step()
    engine.admit(request("late", range(900, 905), 2))
    assert "late" not in engine.shares
    assert engine.plan.rest == Cause(Why.static_group_running, "r2")


def test_a_batch_is_limited_by_the_memory_of_its_longest_outputs() -> None:
    """32 blocks of 16; each of these may fill 10 of them."""
    engine = rig(policy="static", n_blocks=32, batch_size=4)
    engine.admit(*(request(f"r{k}", range(30 * k, 30 * k + 20), 141) for k in range(4)))
    assert [item.request_id for item in engine.plan.items] == ["r0", "r1", "r2"]
    engine.state.is_source_closed = True
    engine.drain()
    assert engine.state.counters.preemptions == 0


def test_a_batch_longer_than_a_step_is_prefilled_before_its_first_decode() -> None:
    engine = gang(3, batch_size=3, max_step_tokens=25)
    assert engine.shares == {"r0": 10, "r1": 15}
    engine.step()
    assert engine.shares == {"r1": 5, "r2": 20}
    engine.step()
    assert engine.shares == {"r2": 10}
    engine.step()
    assert engine.shares == {"r0": 1, "r1": 1, "r2": 1}


SEED_CASE = [job("short", 0, 30), job("mid", 0, 50), job("long", 0, 200), job("late", 1, 10)]


@pytest.mark.parametrize(
    ("answers", "ends_s"),
    [
        ("at_end", {"short": 200, "mid": 200, "long": 200, "late": 210}),
        ("streamed", {"short": 30, "mid": 50, "long": 200, "late": 210}),
    ],
)
def test_answers_end_with_the_longest_of_their_batch(
    answers: str, ends_s: dict[str, float]
) -> None:
    """Steps of 1 s. Requests of 30 and 50 tokens wait for that of 200."""
    knobs: dict[str, Any] = {"batch_size": 3, "max_num_seqs": 8}
    assert finish_times("static", SEED_CASE, answers=answers, **knobs) == ends_s
    if answers == "at_end":
        assert finish_times("static", SEED_CASE, **knobs) == ends_s
        assert finish_times("dynamic", SEED_CASE, max_batch_size=3, max_num_seqs=8)["short"] == 30


def test_answers_at_the_end_are_delivered_whole_and_once() -> None:
    engine = gang(3, batch_size=3)
    outputs: dict[str, list[int]] = {}
    n_delivering = 0
    while engine.state.has_work:
        events = engine.step()
        n_delivering += bool(events)
        for request_, token, finish, _ in events:
            outputs.setdefault(request_.id, []).append(token)
            is_last = len(outputs[request_.id]) == request_.max_tokens
            assert (finish is not None) == is_last
    assert n_delivering == 1
    for k in range(3):
        own = range(100 * k, 100 * k + 10 * (k + 1))
        assert outputs[f"r{k}"] == toy_output(own, k + 2)
    account = engine.state.explain("r0")
    assert account is not None
    assert account.ttft_s == account.e2e_s == pytest.approx(0.04)


@pytest.mark.parametrize("async_depth", [0, 1])
def test_padding_is_the_same_whenever_answers_are_delivered(async_depth: int) -> None:
    n_padding = []
    for answers in ("at_end", "streamed"):
        engine = gang(7, batch_size=3, answers=answers, async_depth=async_depth)
        engine.state.is_source_closed = True
        engine.drain()
        n_padding.append((engine.state.counters.padding_tokens, engine.state.counters.steps))
    assert n_padding[0] == n_padding[1]


@pytest.mark.parametrize("cancelled", ["r0", "r2"])
def test_a_cancel_while_answers_are_held_delivers_the_others(cancelled: str) -> None:
    """r0 has ended and is held, r2 is the last of its batch and still runs."""
    engine = gang(3, batch_size=3)
    for _ in range(3):
        assert engine.step() == []
    engine.state.end(cancelled, State.finished_abort)
    ended = {event.request.id for event in engine.drain() if event.finish is not None}
    assert ended == {"r0", "r1", "r2"} - {cancelled}
    account = engine.state.explain(cancelled)
    assert account is not None
    assert account.ttft_s is None


def test_another_mode_delivers_the_held_answers_in_its_first_step() -> None:
    engine = gang(3, batch_size=3)
    engine.step()
    engine.step()
    switch_policy(engine.state, POLICIES.build({"kind": "chunked"}))
    delivered = [event.request.id for event in engine.step()]
    assert sorted(delivered) == ["r0"] * 2 + ["r1"] * 3 + ["r2"] * 3
    assert engine.state.counters.finished == 2  # r1 ends in this step
    engine.drain()


def test_a_request_cancelled_in_the_queue_leaves_no_masked_row() -> None:
    """Only requests of the batch have a row to be masked."""
    engine = gang(4, batch_size=2)
    engine.step()
    engine.state.end("r3", State.finished_abort)
    assert engine.plan.padding == Padding()
    engine.state.end("r0", State.finished_abort)
    assert engine.plan.padding.decode_rows == 1


# --- fixed sizes of batches, and tables of them


def test_a_batch_is_filled_up_to_the_next_compiled_size() -> None:
    """Three prompts of 10, 20 and 30 tokens in a batch of four: the fourth row is like the
    longest, in every step."""
    engine = gang(3, "dynamic", max_batch_size=8, max_delay="0s", pad_to=[8, 4, 2])
    assert engine.plan.padding == Padding(prefill_tokens=4 * 30 - 60)
    engine.step()
    assert engine.plan.padding == Padding(decode_rows=1, decode_context_tokens=30)
    engine.step()
    # r0 has ended with 11 tokens in KV.
    assert engine.plan.padding == Padding(decode_rows=2, decode_context_tokens=31 + 11)
    engine.drain()


def test_a_batch_of_a_compiled_size_or_beyond_all_is_not_filled_up() -> None:
    for n, sizes in ((2, [2, 4]), (3, [1, 2])):
        engine = gang(n, "dynamic", max_batch_size=8, max_delay="0s", pad="none", pad_to=sizes)
        assert engine.plan.padding == Padding()


def test_sizes_are_read_from_a_command_line() -> None:
    policy = POLICIES.build({"kind": "dynamic", "pad_to": "2 8", "preferred_sizes": "4"})
    knobs = policy.model_dump()
    assert (knobs["pad_to"], knobs["preferred_sizes"]) == ((2, 8), (4,))
    with pytest.raises(ValidationError, match="pad_to"):
        POLICIES.build({"kind": "dynamic", "pad_to": "2 0"})


def batch_table(tmp_path: Path, **fields: Any) -> str:
    """A file that serves pairs of requests, for loads below 10/s."""
    content: dict[str, Any] = {
        "schema": 1, "states": "waiting_requests", "actions": "batch_size", "name": "pairs",
        "tables": [{"load_per_s": [0, 10], "batch_sizes": [0, 0, 2, 2, 4, 4]}],
    }  # fmt: skip
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(content | fields))
    return str(path)


@pytest.mark.parametrize(("n_waiting", "size"), [(1, 0), (2, 2), (3, 2), (4, 4), (7, 4)])
def test_a_table_has_the_batch_size_for_each_queue(
    tmp_path: Path, n_waiting: int, size: int
) -> None:
    engine = gang(n_waiting, "dynamic", table=batch_table(tmp_path), max_delay="250ms")
    plan = engine.plan
    assert len(plan.items) == size
    if not size:
        assert plan.wait_until_s == pytest.approx(0.25)
        engine.clock.advance(0.25)
        assert len(engine.plan.items) == 1


def test_a_batch_of_a_table_is_at_most_the_largest(tmp_path: Path) -> None:
    engine = gang(5, "dynamic", table=batch_table(tmp_path), max_batch_size=3)
    assert len(engine.plan.items) == 3


def test_for_another_load_or_cost_model_a_batch_takes_all_that_wait(tmp_path: Path) -> None:
    other = batch_table(tmp_path, cost_model="0123456789abcdef")
    engine = gang(3, "dynamic", table=other, max_delay="250ms")
    assert len(engine.plan.items) == 3
    explained = engine.policy.explain("r0", engine.state.view())
    assert explained["fallbacks"] == {"other_cost_model": 1}
    fast = batch_table(tmp_path)
    engine = gang(3, "dynamic", table=fast, max_delay="250ms", load_window="100ms")
    assert len(engine.plan.items) == 3
    explained = engine.policy.explain("r0", engine.state.view())
    assert explained["fallbacks"] == {"out_of_load": 1}
    assert (explained["arrivals_per_s"], explained["batch_size"]) == (pytest.approx(30), None)
    engine = gang(3, "dynamic", table=fast, max_delay="250ms", load_window="100ms")
    engine.clock.advance(0.2)  # 30/s · e⁻² = 4/s
    assert len(engine.plan.items) == 2
    assert engine.policy.explain("r0", engine.state.view())["batch_size"] == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"states": "boxes"}, "states"),
        ({"tables": []}, "tables"),
        ({"tables": [{"load_per_s": [3, 2], "batch_sizes": [0, 1]}]}, "must be a range"),
        ({"tables": [{"load_per_s": [0, 2], "batch_sizes": [0, 2]}]}, "cannot be formed of 1"),
        ({"tables": [{"load_per_s": [0, 2], "batch_sizes": [0, 0]}]}, "must not be 0"),
    ],
)
def test_an_invalid_table_of_batch_sizes_is_rejected_with_its_name_and_key(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    path = batch_table(tmp_path, **fields)
    with pytest.raises(UsageError, match=message) as caught:
        gang(1, "dynamic", table=path)
    assert path in str(caught.value)
