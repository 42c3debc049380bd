"""The table policy: macro-states, table files, the hand-made table, actions and fallbacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import UsageError
from reference_engine.smdp.decision_table import ArrivalRate, digest, load_table, pick, table_of
from reference_engine.smdp.states import FEATURES, N_STATES, Action, MacroState, state_of
from reference_engine.state.cost_model import StepCost
from reference_engine.state.plan import Cause, Why
from tests.reference_engine.engine_kit import Rig, request, rig
from tests.reference_engine.policy_kit import play, traffic

DECODE, SHORT, FCFS, BIG, WAIT = range(5)


def smdp(n_blocks: int = 4096, max_model_len: int = 8192, **knobs: Any) -> Rig:
    return rig(
        n_blocks, max_model_len, 256, policy="smdp_table", prefix_cache=False,
        executor_args={"step_s": 0.01}, **knobs,
    )  # fmt: skip


def prompts(*lengths: int, max_tokens: int = 4, arrived_s: float = 0.0) -> list[Any]:
    return [
        request(f"p{k}-{n}", [k % 256] * n, max_tokens, arrived_s=arrived_s)
        for k, n in enumerate(lengths)
    ]


def planned(engine: Rig) -> dict[str, int]:
    return {item.request_id: item.n_tokens for item in engine.plan.items}


def file_with(**sheet: Any) -> dict[str, Any]:
    """A table file of one sheet."""
    return {
        "schema": 1,
        "name": "mine",
        "states": {name: list(levels) for name, levels in FEATURES.items()},
        "actions": list(Action),
        "tables": [sheet],
    }


def written(tmp_path: Path, content: object, name: str = "mine.json") -> str:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


# --- states


def test_the_boxes_are_numbered_without_gap():
    every = [
        MacroState(queue, long, running, kv, slack).number
        for queue in range(6)
        for long in range(3)
        for running in range(5)
        for kv in range(4)
        for slack in range(3)
    ]
    assert every == list(range(N_STATES)) == list(range(1080))


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((0, 0, False, 0, 0.0, 0), ("0", "none", "0", "<50%", "ok")),
        ((1, 0, False, 1, 0.49, 1), ("1-2", "none", "1-8", "<50%", "tight")),
        ((2, 1, False, 8, 0.5, 2), ("1-2", "queued", "1-8", "50-80%", "late")),
        ((8, 3, True, 9, 0.8, 0), ("3-8", "at_head", "9-32", "80-95%", "ok")),
        ((9, 0, False, 33, 0.95, 0), ("9-16", "none", "33-128", "95%+", "ok")),
        ((33, 0, False, 129, 1.0, 0), ("33+", "none", "129+", "95%+", "ok")),
    ],
)
def test_edges_of_the_boxes(numbers, words):
    assert tuple(state_of(*numbers).words().values()) == words


# --- files


def test_the_hand_made_table_goes_d_c_b_a_else():
    table = table_of(load_table("hand_made").tables[0])

    def of(**words: str) -> Action:
        chosen = {name: levels[0] for name, levels in FEATURES.items()} | words
        levels = (FEATURES[name].index(level) for name, level in chosen.items())
        return table.actions[MacroState(*levels).number]

    assert of(kv="80-95%", long="at_head", queue="33+") is Action.decode_only  # D before C
    assert of(long="at_head", queue="33+") is Action.prefill_short  # C before B
    assert of(queue="9-16") is Action.prefill_big  # B
    assert of(queue="3-8") is of() is Action.prefill_fcfs  # A
    assert of(long="queued", queue="33+") is Action.prefill_short  # else
    assert len(table.actions) == N_STATES


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        (file_with(actions=[0] * 7), "7 entries, there are 1080"),
        (file_with(actions=[9] * N_STATES), "numbers from 0 to 4"),
        (file_with(), "either rules or actions"),
        (file_with(rules=[{"do": "sleep"}]), "tables.0.rules.0.do"),
        (file_with(rules=[{"do": "wait", "when": {"ky": ["<50%"]}}]), "did you mean 'kv'"),
        (file_with(rules=[{"do": "wait", "when": {"kv": ["60%"]}}]), "has no level '60%'"),
        (file_with(rules=[{"do": "wait", "when": {"kv": ["<50%"]}}]), "must have no `when`"),
        (file_with(rules=[{"do": "wait"}], load_per_s=[5, 2]), "must be a range"),
        (file_with(rules=[{"do": "wait"}]) | {"schema": 2}, "schema"),
        (file_with(rules=[{"do": "wait"}]) | {"states": {}}, "not those of this version"),
        (file_with(rules=[{"do": "wait"}]) | {"actions": ["wait"]}, "not those of this version"),
    ],
)
def test_an_invalid_table_file_is_rejected_with_its_name_and_key(tmp_path, content, message):
    path = written(tmp_path, content)
    with pytest.raises(UsageError) as caught:
        load_table(path)
    assert path in str(caught.value)
    assert message in str(caught.value)


def test_an_unknown_table_name_lists_the_shipped_tables():
    with pytest.raises(UsageError, match="hand_made"):
        load_table("handmade")


# --- which table


def test_the_load_chooses_a_table_and_keeps_it_for_a_while(tmp_path):
    content = file_with(actions=[FCFS] * N_STATES, load_per_s=[0, 10])
    content["tables"].append({"actions": [BIG] * N_STATES, "load_per_s": [10, 100]})
    tables = [table_of(sheet) for sheet in load_table(written(tmp_path, content)).tables]
    assert [pick(tables, rate, None) for rate in (0, 9.9, 10, 99, 100)] == [0, 0, 1, 1, None]
    assert [pick(tables, rate, 0) for rate in (9.9, 10.9, 11.1)] == [0, 0, 1]
    assert [pick(tables, rate, 1) for rate in (9.1, 8.9)] == [1, 0]


def test_the_arrival_rate_follows_the_arrivals():
    rate = ArrivalRate(window_s=10.0)
    for k in range(400):
        rate.arrive(k / 8)
    assert rate.per_s(50.0) == pytest.approx(8, rel=0.02)
    assert rate.per_s(80.0) == pytest.approx(8 / 20.1, rel=0.02)  # e³ less after three windows


def test_where_no_table_is_valid_prompts_are_first_come_first_served(tmp_path):
    """An unvisited state, another load, another cost model: first come first served, counted."""
    visits = [1] * N_STATES
    visits[state_of(1, 0, False, 0, 0.0, 0).number] = 0
    table = written(tmp_path, file_with(actions=[BIG] * N_STATES, visits=visits))
    engine = smdp(table=table)
    engine.admit(*prompts(600, max_tokens=1))
    assert (engine.plan.action, planned(engine)) == ("prefill_fcfs: unvisited", {"p0-600": 512})
    engine.admit(*prompts(1, 600, 600)[1:])
    assert engine.plan.action == "prefill_big"
    explained = engine.policy.explain("p0-600", engine.state.view())
    assert explained["state"]["queue"] == "3-8"
    assert (explained["action"], explained["fallbacks"]) == ("prefill_big", {"unvisited": 2})

    table = written(tmp_path, file_with(actions=[BIG] * N_STATES, load_per_s=[5, 9]))
    engine = smdp(table=table)
    engine.admit(*prompts(600))
    assert engine.plan.action == "prefill_fcfs: out_of_load"

    cost = StepCost(step_s=0.01)
    content = file_with(actions=[BIG] * N_STATES) | {"cost_model": digest(cost)}
    table = written(tmp_path, content)
    for used, action in [
        (cost, "prefill_big"),
        (StepCost(step_s=0.011), "prefill_fcfs: other_cost_model"),
    ]:
        engine = smdp(table=table, cost=used)
        engine.admit(*prompts(600))
        assert engine.plan.action == action


# --- what the actions do


def acting(tmp_path: Path, number: int, **knobs: Any) -> Rig:
    """An engine with the same action for every state."""
    return smdp(table=written(tmp_path, file_with(actions=[number] * N_STATES)), **knobs)


def test_prefill_actions_choose_the_order_and_the_budget(tmp_path):
    for number, shares in [
        (FCFS, {"p0-3000": 512}),
        (BIG, {"p0-3000": 2048}),
        (SHORT, {"p1-100": 100, "p2-90": 90, "p0-3000": 322}),
    ]:
        engine = acting(tmp_path, number)
        engine.admit(*prompts(3000, 100, 90))
        assert planned(engine) == shares


def test_short_prompts_overtake_a_long_prompt_in_prefill(tmp_path):
    engine = acting(tmp_path, SHORT)
    engine.admit(*prompts(3000))
    engine.step()
    engine.admit(*prompts(1, 400)[1:])
    assert planned(engine) == {"p1-400": 400, "p0-3000": 112}


def test_decode_only_admits_no_request_while_requests_decode(tmp_path):
    engine = acting(tmp_path, DECODE)
    engine.admit(*prompts(10, max_tokens=3))
    assert engine.plan.action == "prefill_fcfs: nothing decodes"
    engine.step()
    engine.admit(*prompts(1, 20, arrived_s=0.01)[1:])
    assert (engine.plan.action, engine.shares) == ("decode_only", {"p0-10": 1})
    engine.drain()
    account = engine.state.accounting.accounts.get("p1-20")
    assert account is not None
    assert dict(account.waits)[Cause(Why.smdp_wait)] == pytest.approx(0.02)


def test_waiting_ends_after_max_wait_or_when_no_more_will_arrive(tmp_path):
    engine = acting(tmp_path, WAIT, max_wait="30ms")
    engine.admit(*prompts(10))
    assert (engine.plan.items, engine.plan.wait_until_s) == ((), 0.03)
    engine.clock.advance(0.03)
    assert planned(engine) == {"p0-10": 10}
    engine = acting(tmp_path, WAIT, max_wait="30ms")
    engine.admit(*prompts(10))
    engine.state.is_source_closed = True
    assert planned(engine) == {"p0-10": 10}


def test_a_starving_request_is_served_whatever_the_table_says(tmp_path):
    engine = acting(tmp_path, DECODE, starvation="2s")
    engine.admit(*prompts(10, max_tokens=900))
    engine.step()
    engine.admit(*prompts(1, 20)[1:])
    assert planned(engine) == {}
    engine.clock.advance(2.0)
    assert (engine.plan.action, planned(engine)) == ("prefill_fcfs: starvation", {"p1-20": 20})


def test_slack_is_that_of_the_most_urgent():
    engine = smdp()
    engine.admit(
        request("calm", [1] * 5, 2, ttft_slo_s=10.0), request("hasty", [2] * 5, 2, ttft_slo_s=1.0)
    )

    def slack() -> str:
        explained: str = engine.policy.explain("calm", engine.state.view())["state"]["slack"]
        return explained

    assert slack() == "ok"
    engine.clock.advance(0.51)
    assert slack() == "tight"
    engine.clock.advance(0.5)
    assert slack() == "late"


@settings(max_examples=20)
@given(
    coming=traffic,
    actions=st.lists(st.integers(0, 4), min_size=N_STATES, max_size=N_STATES),
    max_num_seqs=st.integers(1, 6),
)
def test_every_request_ends_under_any_table(tmp_path_factory, coming, actions, max_num_seqs):
    """A table of random actions on a small KV memory."""
    table = written(tmp_path_factory.mktemp("tables"), file_with(actions=actions))
    for moment in play(
        "smdp_table", coming, n_blocks=12, max_num_seqs=max_num_seqs, table=table
    ):  # fmt: skip
        n_decoding = moment.n_tokens - sum(item.n_tokens for item in moment.plan.items)
        assert moment.n_tokens <= n_decoding + 2048
        assert moment.n_tokens or moment.plan.wait_until_s
