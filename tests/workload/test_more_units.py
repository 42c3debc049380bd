"""The rows of users of a closed loop beyond their plan."""

from typing import Any

import numpy as np
import pytest

from loadgen.records import Edges, Schedule
from loadgen.workload.more_units import Continuation
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan, more_units, split_plan


def planned(**keys):
    defaults: dict[str, Any] = {
        "name": "loop",
        "arrivals": {"kind": "users", "users": 3, "think": {"kind": "exponential", "mean": "1s"}},
        "requests": {"input_tokens": {"kind": "uniform", "min": 9, "max": 90}, "output_tokens": 8},
        "phases": {"measure": "1s"},
    }
    given = {key: value for key, value in {**defaults, **keys}.items() if value is not None}
    scenario = Scenario.model_validate(given)
    plan = make_plan(scenario)
    units = more_units(scenario, plan)
    assert units is not None
    return plan, units


def parents_of(edges: Edges, request_id: int) -> list[int]:
    after: list[int] = edges["after"][edges["request_id"] == request_id].tolist()
    return after


def all_of(continuation: Continuation, users, n_blocks) -> dict[int, list[Schedule]]:
    """Blocks by user; users take turns, so that each is drawn between blocks of others."""
    blocks: dict[int, list[Schedule]] = {user: [] for user in users}
    for _ in range(n_blocks):
        for user in users:
            blocks[user].append(continuation.more(user, 0)[0])
    return blocks


def test_a_user_goes_on_after_the_last_planned_row_with_its_own_ids():
    plan, units = planned()
    own = plan.schedule[plan.schedule["session_id"] == 1]
    continuation = Continuation(units, *plan[:2])
    rows, edges = continuation.more(1, 0)
    n, first = len(plan.schedule), int(rows["request_id"][0])
    assert rows["request_id"].tolist() == [n + 3 * k + 1 for k in range(len(rows))]
    assert parents_of(edges, first) == [int(own["request_id"][-1])]
    assert all(parents_of(edges, first + 3 * k) == [first + 3 * (k - 1)] for k in range(1, 64))
    assert rows["n_parents"].tolist() == [1] * len(rows)
    assert rows["after_failure"].all()
    assert np.isnan(rows["scheduled_s"]).all()
    assert set(rows["session_id"]) == {1}
    later, links = continuation.more(1, 0)
    assert parents_of(links, int(later["request_id"][0])) == [int(rows["request_id"][-1])]
    # the law of the class: uniform lengths from 9 to 90, pauses of 1 s on average
    both = np.concatenate([rows, later])
    assert 9 <= both["input_tokens"].min() < 20
    assert 80 < both["input_tokens"].max() <= 90
    assert both["think_s"].mean() == pytest.approx(1.0, abs=0.35)
    assert len(np.unique(both["prompt_seed"])) == len(both)


def test_the_rows_do_not_depend_on_the_process_or_on_the_order_of_users():
    plan, units = planned()
    together = all_of(Continuation(units, *plan[:2]), [0, 1, 2], 2)
    for part in split_plan(plan, 2):
        users = np.unique(part.schedule["session_id"])[::-1].tolist()
        for user, blocks in all_of(Continuation(units, *part[:2]), users, 2).items():
            assert [block.tobytes() for block in blocks] == [
                block.tobytes() for block in together[user]
            ]
    ids = np.concatenate([block["request_id"] for blocks in together.values() for block in blocks])
    assert len(np.unique(ids)) == len(ids)


def test_sessions_keep_growing_and_the_next_waits_for_the_last_turn():
    plan, units = planned(session={"turns": 3, "think": "2s", "context": "scripted"})
    last = plan.schedule["request_id"][plan.schedule["session_id"] == 0][-1]
    rows, edges = Continuation(units, *plan[:2]).more(0, 0)
    first, second, third = rows["request_id"][:3].tolist()
    assert parents_of(edges, first) == [int(last)]
    assert (parents_of(edges, second), parents_of(edges, third)) == ([first], [second])
    assert rows["after_failure"][:4].tolist() == [True, False, False, True]
    assert rows["think_s"][1:3].tolist() == [2.0, 2.0]
    # each turn has the conversation so far: its parent's input and output, and at least a token
    assert (rows["input_tokens"][1:3] > rows["input_tokens"][:2] + 8).all()
    assert rows["input_tokens"][3] <= 90


def test_every_first_step_of_a_chain_waits_for_every_last_step_before():
    step = {"requests": {"input_tokens": 10, "output_tokens": 2}}
    chain = [
        {"name": "plan", **step},
        {"name": "left", "after": ["plan"], **step},
        {"name": "right", "after": ["plan"], **step},
    ]
    plan, units = planned(chain=chain, requests=None)
    before = plan.schedule["request_id"][plan.schedule["session_id"] == 2][-2:].tolist()
    rows, edges = Continuation(units, *plan[:2]).more(2, 0)
    first, left, right, following = rows["request_id"][:4].tolist()
    assert sorted(parents_of(edges, first)) == before
    assert parents_of(edges, left) == parents_of(edges, right) == [first]
    assert sorted(parents_of(edges, following)) == [left, right]
    assert rows["n_parents"][:4].tolist() == [2, 1, 1, 2]


def test_an_open_loop_has_no_further_rows():
    scenario = Scenario.model_validate(
        {
            "name": "open",
            "arrivals": {"kind": "poisson", "rate": "9/s"},
            "requests": {"input_tokens": 9, "output_tokens": 9},
            "phases": {"measure": "1s"},
        }
    )
    assert more_units(scenario, make_plan(scenario)) is None
