"""Plans and simulated runs of agents."""

import itertools
from collections import defaultdict

import numpy as np
import pytest
from pydantic import ValidationError

from loadgen.errors import UsageError
from loadgen.lab.simulate import simulate
from loadgen.measure.prefix_hits import ideal_hits
from loadgen.records import Status
from loadgen.studies.capacity.spec import CapacitySpec, question_of
from loadgen.workload.agents.load import load_corpus
from loadgen.workload.preview import preview
from loadgen.workload.prompts import PromptFit, Prompts
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan
from loadgen.workload.texts import Synthetic
from tests.workload.test_pieces import common
from tests.workload.weka_files import asked, conversation, fanned_out, written

FIXED = {"kind": "burst", "requests": 2}


@pytest.fixture
def corpus(tmp_path):
    return written(
        tmp_path / "agents.jsonl",
        fanned_out(),
        conversation(asked(0.0, [1, 2, 3], took=3.0), asked(5.0, [1, 2, 3, 4], took=2.0)),
    )


def scenario(corpus, arrivals=FIXED, measure="60s", **keys):
    values = {
        "name": "agents",
        "arrivals": arrivals,
        "agents": {"path": str(corpus)},
        "phases": {"warmup": "0s", "measure": measure},
        "slo": ["ttft <= 1s"],
        **keys,
    }
    return Scenario.model_validate(values)


def test_each_tree_is_played_before_any_is_played_again(corpus):
    plan = make_plan(scenario(corpus, {"kind": "burst", "requests": 6}))
    sizes = np.bincount(plan.schedule["session_id"]).tolist()
    assert sorted(sizes) == [2, 2, 2, 6, 6, 6]
    assert all(sorted(pair) == [2, 6] for pair in (sizes[:2], sizes[2:4], sizes[4:]))
    other = make_plan(scenario(corpus, {"kind": "burst", "requests": 6}, seed=3))
    assert np.bincount(other.schedule["session_id"]).tolist() != sizes


def test_the_plan_of_a_tree_has_its_lengths_edges_and_delays(corpus):
    plan = make_plan(scenario(corpus))
    rows = plan.schedule
    session = int(np.argmax(np.bincount(rows["session_id"])))
    own = rows[rows["session_id"] == session]
    first = int(own["request_id"][0])
    assert own["input_tokens"].tolist() == [133, 133, 133, 197, 197, 261]
    assert own["n_parents"].tolist() == [0, 1, 1, 1, 2, 2]
    edges = plan.edges[np.isin(plan.edges["request_id"], own["request_id"])]
    links = [(int(c) - first, int(p) - first, float(d)) for c, p, d in edges.tolist()]
    assert links == [
        (1, 0, 1.0), (2, 0, 1.5), (3, 1, 0.5), (4, 0, 4.0), (4, 3, 0.5), (5, 2, 2.5), (5, 4, 8.0),
    ]  # fmt: skip
    assert own["scheduled_s"][0] == 0.0
    assert np.isnan(own["scheduled_s"][1:]).all()


def test_plays_share_text_within_and_nothing_between(tmp_path):
    """Two trees share 3 blocks of 64 and differ after: an unlimited cache has exactly these 192
    tokens of the second in the recording, and none where each play has text of its own."""
    together = written(
        tmp_path / "one.json", conversation(asked(0.0, [1, 2, 3, 4]), asked(2.0, [1, 2, 3, 5]))
    )
    (tree,) = load_corpus(together).trees
    assert tree.hit_tokens.tolist() == [0, 192]
    plan = make_plan(scenario(together, {"kind": "burst", "requests": 2}))
    assert ideal_hits(plan.schedule, plan.pieces).tolist() == [0, 192, 0, 192]
    prompts = Prompts(Synthetic(tokenizer="bytes"), 0, b"salt", plan.pieces)
    texts = [prompts.render(row, PromptFit()) for row in plan.schedule]
    equal = [common(texts[a], texts[b]) for a, b in itertools.combinations(range(4), 2)]
    assert 192 <= equal[0] == equal[5] < 196
    assert max(equal[1:5]) < 8


def test_requests_that_no_server_could_reach_in_time_are_not_planned(corpus):
    plan = make_plan(scenario(corpus, measure="4s"))
    sizes = sorted(np.bincount(plan.schedule["session_id"]).tolist())
    # of 6 requests the fifth waits 4 s after the first, and the last 8 s after it; of 2 the second
    # waits 2 s after the first
    assert sizes == [2, 5]
    assert np.isin(plan.edges["after"], plan.schedule["request_id"]).all()
    n_edges = np.bincount(plan.edges["request_id"], minlength=len(plan.schedule))
    assert n_edges.tolist() == plan.schedule["n_parents"].tolist()


def test_a_tree_cut_by_the_window_has_requests_that_are_never_released(corpus):
    """Each tree whose last answer cannot come in time has a request that no server can reach."""
    run = simulate(scenario(corpus, measure="4s"))
    status = run.request_rows["status"]
    sizes = np.bincount(run.schedule_rows["session_id"])
    cut = run.schedule_rows["session_id"] == int(np.argmax(sizes))
    assert np.count_nonzero(status[cut] == Status.not_released) == 1
    assert (status[~cut] == Status.ok).all()


def test_rows_have_the_number_of_their_chain(corpus):
    rows = make_plan(scenario(corpus)).schedule
    session = int(np.argmax(np.bincount(rows["session_id"])))
    assert rows["chain"][rows["session_id"] == session].tolist() == [1, 2, 3, 2, 1, 1]
    assert rows["chain"][rows["session_id"] != session].tolist() == [1, 1]


def test_a_session_of_agents_stays_within_its_kind(corpus):
    for keys in ({"requests": {"input_tokens": 5, "output_tokens": 5}}, {"session": {"turns": 2}}):
        with pytest.raises(ValidationError, match="the agents' files state the requests"):
            scenario(corpus, **keys)


def test_slos_about_trees_need_agents_and_a_share_of_trees(corpus):
    slo = ["ttft <= 1s", "task_time <= 60s", "attainment(tree) >= 90%"]
    assert scenario(corpus, slo=slo).slos()[1].scope == "tree"
    with pytest.raises(ValidationError, match=r"add 'attainment\(tree\) >= 95%'"):
        scenario(corpus, slo=slo[:2])
    plain = {"requests": {"input_tokens": 5, "output_tokens": 5}, "agents": None}
    with pytest.raises(ValidationError, match="which only agents have"):
        scenario(corpus, slo=slo, **plain)
    with pytest.raises(UsageError, match="is about trees"):
        question_of(
            CapacitySpec(scenario(corpus, {"kind": "poisson", "rate": "1/s"}, slo=slo), "sim")
        )


def live_intervals(run):
    """(first release, last end, requests) of each tree, by session and in order."""
    rows, schedule = run.request_rows, run.schedule_rows
    is_first = schedule["after_failure"] | (schedule["n_parents"] == 0)
    trees: defaultdict[int, list[list[int]]] = defaultdict(list)
    for row in range(len(rows)):
        new_session = not row or schedule["session_id"][row] != schedule["session_id"][row - 1]
        if new_session or (is_first[row] and not is_first[row - 1]):
            trees[int(schedule["session_id"][row])].append([])
        trees[int(schedule["session_id"][row])][-1].append(row)
    return {
        session: [(rows["released_s"][of[0]], rows["done_s"][of].max(), len(of)) for of in own]
        for session, own in trees.items()
    }


def test_agents_in_a_simulated_run_keep_their_gaps_and_hit_what_can_be_hit(corpus):
    run = simulate(scenario(corpus, {"kind": "poisson", "rate": "0.5/s"}), block_tokens="16")
    rows, schedule, edges = run.request_rows, run.schedule_rows, run.edge_rows
    assert len(rows) > 60
    released = np.isfinite(rows["released_s"])
    ready_s = np.where(schedule["n_parents"] > 0, -np.inf, schedule["scheduled_s"])
    ends_s = rows["done_s"][edges["after"]] + edges["delay_s"]
    np.maximum.at(ready_s, edges["request_id"], ends_s)
    assert rows["released_s"][released] == pytest.approx(ready_s[released], abs=1e-6)
    order = np.argsort(rows["released_s"][released], kind="stable")
    sent = schedule[released][order]
    ideal = ideal_hits(sent, run.piece_rows) // 16 * 16
    is_ok = (rows["status"] == Status.ok)[released][order]
    assert np.count_nonzero(is_ok) > 50
    assert rows["cached_tokens"][released][order][is_ok].tolist() == ideal[is_ok].tolist()


def test_lanes_are_users_who_play_tree_after_tree(corpus):
    """At every instant each of three users has a tree: the next begins when the last has ended."""
    lanes = {"kind": "users", "users": 3, "think": "0s"}
    run = simulate(scenario(corpus, lanes, "90s"))
    for trees in live_intervals(run).values():
        released = [tree for tree in trees if np.isfinite(tree[0])]
        assert len(released) >= 4
        assert {n for *_, n in released} == {2, 6}
        for (_, ended_s, _), (begun_s, *_) in itertools.pairwise(released):
            assert begun_s == pytest.approx(ended_s, abs=1e-6)
        assert len(trees) > len(released)  # nobody runs out of trees


def test_the_preview_states_the_corpus_and_the_plan(corpus):
    planned = scenario(corpus, {"kind": "burst", "requests": 2})
    plan = make_plan(planned)
    figures = preview(planned, *plan)["agents"]["default"]
    assert {key: figures[key] for key in ("trees", "requests", "chains", "subagents")} == {
        "trees": 2, "requests": 8, "chains": 4, "subagents": 2,
    }  # fmt: skip
    assert (figures["background_chains"], figures["deepest_chain"]) == (0, 1)
    # hits of 64 + 64 + 128 + 128 + 192 of 1054 tokens, and of 192 of 458
    assert figures["ideal_hit_rate"] == pytest.approx((576 + 192) / (1054 + 458))
    assert figures["distinct_tokens_per_tree"]["max"] == 1054 - 576
    assert figures["planned"] == {
        "plays": 2,
        "requests": 8,
        "ideal_hit_rate": pytest.approx((576 + 192) / (1054 + 458)),
        "working_set_tokens": 409 + 266,  # at 6 s: all but the last 69 of the 478 of the first
    }


def test_the_block_limits_context_and_idle_time(corpus):
    agents = {"path": str(corpus), "max_context": 207, "idle_cap": {"at_most": "500ms"}}
    plan = make_plan(scenario(corpus, agents=agents))
    assert np.bincount(plan.schedule["session_id"]).tolist() in ([5, 1], [1, 5])
    assert sorted(plan.edges["delay_s"].tolist()) == [0.5, 0.5, 0.5, 1.0, 3.5]
