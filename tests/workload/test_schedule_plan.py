"""Plans with classes, sessions, chains and users: what waits for what, and what is in a prompt."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import ScenarioError
from loadgen.records import Phase, schedule_sha256
from loadgen.workload.scenario import Scenario, load_scenario
from loadgen.workload.schedule import make_plan, merge, split, split_plan

HALF = {"kind": "uniform", "min": 1, "max": 40}


def scenario(**keys):
    defaults = {
        "name": "planned",
        "arrivals": {"kind": "poisson", "rate": "20/s"},
        "phases": {"warmup": "2s", "measure": "8s"},
    }
    return Scenario.model_validate({**defaults, **keys})


def asked(inputs=100, outputs=10, **more):
    return {"input_tokens": inputs, "output_tokens": outputs, **more}


def turns_of(schedule):
    """(row numbers) of each session, in order."""
    return [np.flatnonzero(schedule["session_id"] == s) for s in np.unique(schedule["session_id"])]


think = st.sampled_from(["0s", "2s", {"kind": "exponential", "mean": "1s"}])
lengths = st.sampled_from([5, 64, HALF])
open_arrivals = st.sampled_from(
    [
        {"kind": "poisson", "rate": "6/s"},
        {"kind": "gamma", "rate": "4/s", "cv": 2.0},
        {"kind": "constant", "rate": "3/s"},
    ]
)
arrivals = open_arrivals | st.fixed_dictionaries(
    {
        "kind": st.just("users"),
        "users": st.integers(1, 12),
        "think": st.sampled_from(["500ms", "3s"]),
        "ramp_up": st.sampled_from(["0s", "3s"]),
    }
)
sessions = st.fixed_dictionaries(
    {"turns": st.sampled_from([1, 2, {"kind": "uniform", "min": 1, "max": 5}]), "think": think},
    optional={"context": st.sampled_from(["scripted", "real"])},
)


@st.composite
def chains(draw):
    """A chain whose steps wait for any of those above them."""
    steps: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 5))):
        above = [step["name"] for step in steps]
        after = draw(st.lists(st.sampled_from(above), unique=True)) if above else []
        step = {"name": f"s{number}", "requests": asked(draw(lengths), draw(lengths))}
        steps.append(step | ({"after": after, "think": draw(think)} if after else {}))
    return steps


@st.composite
def classes(draw):
    own = {"priority": draw(st.integers(-3, 3)), "tenant": draw(st.sampled_from(["a", "b"]))}
    shape = draw(st.sampled_from(["single", "session", "chain"]))
    if shape == "chain":
        return own | {"chain": draw(chains())}
    prefix = draw(st.none() | st.just({"tokens": 30, "groups": 3, "hit_rate": 0.5}))
    requests = asked(draw(lengths), draw(lengths), **({"shared_prefix": prefix} if prefix else {}))
    return own | {"requests": requests} | ({"session": draw(sessions)} if shape != "single" else {})


@st.composite
def scenarios(draw):
    """Scenarios with any mix of classes that has at least one arrival in the window."""
    names = draw(st.lists(st.sampled_from(["chat", "rag", "agent"]), min_size=1, unique=True))
    mix = {name: draw(classes()) for name in names}
    for name in names[1:]:
        if draw(st.booleans()):
            mix[name]["arrivals"] = draw(arrivals)
        else:
            mix[name]["weight"] = draw(st.floats(0.1, 5))
    first = {"kind": "constant", "rate": "3/s"}
    return scenario(
        arrivals=draw(st.just(first) | arrivals),
        classes=mix | {"steady": {"arrivals": first, "requests": asked()}},
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=60, deadline=None)
@given(scenarios(), st.integers(1, 7))
def test_every_plan_keeps_its_invariants(planned, n_shards):
    plan = make_plan(planned)
    rows, edges, _ = plan
    n = len(rows)
    assert rows["request_id"].tolist() == list(range(n))
    # sorted and in the window
    roots = rows[rows["n_parents"] == 0]
    assert np.all(np.diff(roots["scheduled_s"]) >= 0)
    assert np.all((roots["scheduled_s"] >= 0) & (roots["scheduled_s"] < 10.0))
    assert np.isnan(rows["scheduled_s"][rows["n_parents"] > 0]).all()
    assert np.array_equal(
        roots["phase"], np.where(roots["scheduled_s"] < 2.0, Phase.warmup, Phase.measure)
    )
    # edges: acyclic (a parent has the smaller number), inside a session, counted
    assert np.all(edges["after"] < edges["request_id"])
    assert np.array_equal(
        rows["session_id"][edges["after"]], rows["session_id"][edges["request_id"]]
    )
    assert np.array_equal(np.bincount(edges["request_id"], minlength=n), rows["n_parents"])
    assert len(np.unique(edges)) == len(edges)
    # sessions are numbered in order and are neighbours
    assert np.all(np.diff(rows["session_id"].astype(int)) >= 0)
    assert (rows["input_tokens"] > 0).all()
    assert (rows["input_tokens"] > rows["prefix_tokens"]).all()
    # the same seed gives the same bytes
    again = make_plan(planned)
    assert again.schedule.tobytes() == rows.tobytes()
    assert again.edges.tobytes() == edges.tobytes()
    # the number of shards changes nothing
    parts = split_plan(plan, n_shards)
    assert merge([part.schedule for part in parts]).tobytes() == rows.tobytes()
    joined = np.concatenate([part.edges for part in parts])
    joined.sort(order=["request_id", "after"])
    assert joined.tobytes() == edges.tobytes()
    for part in parts:
        assert np.isin(part.edges["after"], part.schedule["request_id"]).all()


@settings(max_examples=25, deadline=None)
@given(scenarios())
def test_a_scenario_with_classes_written_as_yaml_reads_back_equal(tmp_path_factory, planned):
    path = tmp_path_factory.getbasetemp() / "classes.yaml"
    path.write_text(planned.to_yaml(), "utf-8")
    assert load_scenario(path) == planned
    assert Scenario.model_validate(planned.resolved()) == planned


def test_a_plain_scenario_has_no_edges_and_the_schedule_of_before():
    plan = make_plan(scenario(requests=asked()))
    assert len(plan.edges) == 0
    assert np.array_equal(plan.schedule["session_id"], plan.schedule["request_id"])
    assert schedule_sha256(*plan) == schedule_sha256(plan.schedule)


def test_edges_are_part_of_the_fingerprint():
    plan = make_plan(scenario(requests=asked(), session={"turns": 3}))
    fewer = plan.edges[:-1]
    assert schedule_sha256(*plan) != schedule_sha256(plan.schedule, fewer)


def test_a_turn_holds_everything_said_before():
    """By hand: turns of 100 new tokens and 10 of answer behind a prefix of 50."""
    rows, edges, _ = make_plan(
        scenario(requests=asked(shared_prefix={"tokens": 50}), session={"turns": 3, "think": "4s"})
    )
    for session in turns_of(rows)[:20]:
        assert rows["input_tokens"][session].tolist() == [150, 260, 370]
        assert rows["think_s"][session].tolist() == [0.0, 4.0, 4.0]
        assert rows["n_parents"][session].tolist() == [0, 1, 1]
        assert rows["context"][session].tolist() == [0, 1, 1]
        assert len(set(rows["prefix_id"][session].tolist())) == 1
    assert np.array_equal(edges["after"], edges["request_id"] - 1)


def test_drawn_turns_hold_the_sum_of_what_was_drawn():
    rows, *_ = make_plan(
        scenario(requests=asked(HALF, HALF), session={"turns": HALF, "context": "real"})
    )
    for session in turns_of(rows):
        inputs = rows["input_tokens"][session].astype(int)
        outputs = rows["output_tokens"][session].astype(int)
        new = np.diff(inputs) - outputs[:-1]
        assert np.all((new >= 1) & (new <= 40))
        assert set(rows["context"][session[1:]].tolist()) <= {2}


def test_a_chain_fans_out_and_in():
    steps = [
        {"name": "plan", "requests": asked(10, 1)},
        {"name": "left", "after": ["plan"], "requests": asked(20, 2)},
        {"name": "right", "after": ["plan"], "think": "1s", "requests": asked(30, 3)},
        {"name": "join", "after": ["left", "right"], "requests": asked(40, 4)},
    ]
    rows, edges, _ = make_plan(scenario(chain=steps))
    assert rows["input_tokens"][:8].tolist() == [10, 20, 30, 40] * 2
    assert rows["n_parents"][:8].tolist() == [0, 1, 1, 2] * 2
    assert rows["think_s"][:4].tolist() == [0.0, 0.0, 1.0, 0.0]
    pairs = [(int(e["request_id"]), int(e["after"])) for e in edges[:8]]
    assert pairs == [(1, 0), (2, 0), (3, 1), (3, 2), (5, 4), (6, 4), (7, 5), (7, 6)]
    assert not rows["context"].any()


def test_users_have_enough_to_do_until_the_window_ends():
    """A user whose answers take 2 ms + 10 tokens at 10 000/s, and who thinks a second, needs at
    least the 10 s of the run / 1.003 s rows; at that pace the last planned row comes too late, and
    it alone."""
    planned = scenario(
        arrivals={"kind": "users", "users": 3, "think": "1s", "ramp_up": "2s"}, requests=asked()
    )
    rows, edges, _ = make_plan(planned)
    assert len(np.unique(rows["session_id"])) == 3
    for user in turns_of(rows):
        start_s = rows["scheduled_s"][user[0]]
        assert start_s + (len(user) - 2) * 1.003 < 10.0 <= start_s + (len(user) - 1) * 1.003
        assert rows["think_s"][user[1:]].tolist() == [1.0] * (len(user) - 1)
        assert rows["after_failure"][user].tolist() == [False] + [True] * (len(user) - 1)
    assert np.array_equal(edges["after"], edges["request_id"] - 1)


@pytest.mark.parametrize(("users", "answer_s"), [(27, 0.003), (60, 0.006), (2000, 0.03)])
def test_a_large_closed_loop_is_planned_for_slower_answers(users, answer_s):
    """100 000 rows in 10 s are 60 users with answers of 6 ms; 2000 users have more rows, for
    answers of 30 ms (20 ms + 10 tokens at 1000/s)."""
    arrivals = {"kind": "users", "users": users, "think": "0s"}
    rows, *_ = make_plan(scenario(arrivals=arrivals, requests=asked()))
    assert len(rows) == pytest.approx(users * 10.0 / answer_s, rel=0.01)


def test_users_of_chains_begin_again_when_every_last_step_has_ended():
    steps = [
        {"name": "ask", "requests": asked()},
        {"name": "log", "after": ["ask"], "requests": asked()},
        {"name": "reply", "after": ["ask"], "requests": asked()},
    ]
    rows, edges, _ = make_plan(
        scenario(arrivals={"kind": "users", "users": 1, "think": "2s"}, chain=steps)
    )
    pairs = [(int(e["request_id"]), int(e["after"])) for e in edges[:5]]
    assert pairs == [(1, 0), (2, 0), (3, 1), (3, 2), (4, 3)]
    assert rows["think_s"][:6].tolist() == [0, 0, 0, 2, 0, 0]
    assert rows["after_failure"][:6].tolist() == [False, False, False, True, False, False]


def test_users_beyond_memory_are_refused_before_they_are_drawn():
    planned = scenario(
        arrivals={"kind": "users", "users": 1_000_000, "think": "0s"}, requests=asked()
    )
    with pytest.raises(ScenarioError, match=r"1000000 users could send .* lengthen think"):
        make_plan(planned)


def test_weights_share_one_stream_out():
    planned = scenario(
        arrivals={"kind": "poisson", "rate": "400/s"},
        classes={
            "chat": {"weight": 3, "requests": asked(100)},
            "rag": {"weight": 1, "requests": asked(900), "tenant": "b", "priority": -2},
        },
    )
    rows, *_ = make_plan(planned)
    is_rag = rows["class_id"] == 1
    n = len(rows)
    assert is_rag.mean() == pytest.approx(0.25, abs=4 * np.sqrt(0.1875 / n))  # 4 sigma
    assert set(rows["input_tokens"][is_rag].tolist()) == {900}
    assert set(rows["priority"][is_rag].tolist()) == {-2}
    assert planned.names().classes == ("chat", "rag")
    assert planned.names().tenants == ("default", "b")
    assert set(rows["tenant_id"][is_rag].tolist()) == {1}
    # a stream of classes is the stream without them
    alone, *_ = make_plan(
        planned.model_copy(update={"classes": {}, "requests": planned_requests()})
    )
    assert np.array_equal(rows["scheduled_s"], alone["scheduled_s"])


def planned_requests():
    return scenario(requests=asked()).requests


def test_another_class_leaves_the_draws_of_the_others_as_they_were():
    law = {"kind": "uniform", "min": 1, "max": 10_000}
    own = {"kind": "poisson", "rate": "9/s"}
    one = {"a": {"arrivals": own, "requests": asked(law, law)}}
    two = {"b": {"arrivals": own, "requests": asked(law, law)}, **one}
    alone, *_ = make_plan(scenario(arrivals=None, classes=one))
    both, *_ = make_plan(scenario(arrivals=None, classes=two))
    theirs = both[both["class_id"] == 1]
    assert np.array_equal(theirs["scheduled_s"], alone["scheduled_s"])
    assert np.array_equal(theirs["input_tokens"], alone["input_tokens"])
    others = both[both["class_id"] == 0]
    assert not np.array_equal(others["input_tokens"][:20], theirs["input_tokens"][:20])


def test_classes_do_not_share_prefixes():
    prefix = {"tokens": 20, "groups": 4}
    mix = {name: {"requests": asked(shared_prefix=prefix)} for name in ("a", "b")}
    rows, *_ = make_plan(scenario(classes=mix))
    ids = [set(rows["prefix_id"][rows["class_id"] == k].tolist()) for k in (0, 1)]
    assert ids[0] == {1, 2, 3, 4}
    assert ids[1] == {5, 6, 7, 8}


def test_a_class_without_a_prefix_behind_one_with_prefixes_has_none():
    shared = {"requests": asked(shared_prefix={"tokens": 20, "groups": 4})}
    mix = {"a": shared, "b": {"requests": asked()}, "c": shared}
    rows, *_ = make_plan(scenario(classes=mix))
    ids = [set(rows["prefix_id"][rows["class_id"] == k].tolist()) for k in (0, 1, 2)]
    assert ids == [{1, 2, 3, 4}, {0}, {5, 6, 7, 8}]


def test_a_request_at_the_end_of_the_warm_up_is_measured():
    def planned(warmup_s):
        phases = {"warmup": f"{warmup_s!r}s", "measure": "8s"}
        every = {"kind": "constant", "rate": "4/s"}
        return make_plan(scenario(arrivals=every, requests=asked(), phases=phases)).schedule

    fifth_s = float(planned(2.0)["scheduled_s"][4])
    rows = planned(fifth_s)
    assert rows["scheduled_s"][4] == fifth_s
    assert rows["phase"][:6].tolist() == [Phase.warmup] * 4 + [Phase.measure] * 2


def test_popularity_follows_zipf():
    """P(k) ∝ 1/k over four groups: 12, 6, 4, 3 of 25."""
    prefix = {"tokens": 20, "groups": 4, "popularity": {"kind": "zipf", "exponent": 1.0}}
    rows, *_ = make_plan(
        scenario(
            arrivals={"kind": "constant", "rate": "1000/s"}, requests=asked(shared_prefix=prefix)
        )
    )
    n = len(rows)
    counts = np.bincount(rows["prefix_id"], minlength=5)[1:]
    expected = n * np.array([12, 6, 4, 3]) / 25
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < 16.3  # 3 degrees of freedom, 0.1 %


def test_an_infinite_cache_hits_as_often_as_asked():
    """Replays the prefixes through a cache that forgets nothing: hits = hit_rate · n − groups."""
    prefix = {"tokens": 20, "groups": 10, "hit_rate": "70%"}
    rows, *_ = make_plan(
        scenario(
            arrivals={"kind": "constant", "rate": "500/s"}, requests=asked(shared_prefix=prefix)
        )
    )
    seen, hits = set(), 0
    for prefix_id in rows["prefix_id"].tolist():
        hits += prefix_id in seen
        seen.add(prefix_id)
    n = len(rows)
    assert (hits + 10) / n == pytest.approx(0.7, abs=4 * np.sqrt(0.21 / n))  # 4 sigma


def test_split_never_parts_a_session():
    rows, *_ = make_plan(scenario(requests=asked(), session={"turns": 4}))
    for part in split(rows, 3):
        _, counts = np.unique(part["session_id"], return_counts=True)
        assert set(counts.tolist()) == {4}


def test_a_conversation_that_no_counter_holds_is_refused():
    planned = scenario(requests=asked(10_000_000, 10_000_000), session={"turns": 200})
    with pytest.raises(ScenarioError, match=r"a session grows to .* tokens; plan fewer turns"):
        make_plan(planned)


def test_a_burst_inside_the_warm_up_is_explained():
    arrivals, phases = {"kind": "burst", "requests": 30}, {"warmup": "5s", "measure": "10s"}
    planned = scenario(arrivals=arrivals, requests=asked(), phases=phases)
    with pytest.raises(
        ScenarioError, match=r"all 30 requests arrive in the warm-up of 5s \(a burst"
    ):
        make_plan(planned)
