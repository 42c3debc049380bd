"""Which recorded request waits for which."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loadgen.workload.agents.trees import Edge, RecordedRequest, grow_tree
from tests.workload.test_pieces import common


def request(start_s, ids, took_s=1.0, model="m", agent=0):
    return RecordedRequest(start_s, start_s + took_s, model, np.array(ids, np.int64), agent)


def grown(*requests, spawns=()):
    return grow_tree(requests, spawns)


def test_turns_that_extend_each_other_are_a_chain_with_gaps_from_end_to_start():
    tree = grown(request(0, [1]), request(4, [1, 2]), request(5, [1, 2, 3]))
    assert tree.chain_of == (0, 0, 0)
    assert tree.edges == (Edge(1, 0, 3.0), Edge(2, 1, 0.0))


def test_a_compaction_stays_in_its_chain():
    tree = grown(request(0, [1, 2, 3, 4]), request(4, [1, 2, 3, 4, 5]), request(8, [1, 2, 7]))
    assert tree.chain_of == (0, 0, 0)


def test_a_request_that_overlaps_its_chain_is_a_child_of_the_request_it_branches_from():
    """Requests 2 and 3 run at the same time and both extend request 1; request 4 extends 2 and
    starts after both."""
    tree = grown(
        request(0, [1]), request(2, [1, 2]), request(4, [1, 2, 3], took_s=5),
        request(5, [1, 2, 4], took_s=2), request(10, [1, 2, 3, 5]),
    )  # fmt: skip
    assert tree.chain_of == (0, 0, 0, 1, 0)
    assert (tree.chains[1].origin, tree.chains[1].parent, tree.chains[1].depth) == (1, 0, 1)
    assert tree.edges == (
        Edge(1, 0, 1.0), Edge(2, 1, 1.0), Edge(3, 1, 2.0), Edge(4, 2, 1.0), Edge(4, 3, 3.0),
    )  # fmt: skip
    assert tree.n_background == 0


def test_interleaved_agents_without_overlap_are_told_apart_by_their_prompts():
    tree = grown(
        request(0, [1]), request(2, [1, 2]), request(4, [1, 9]),
        request(6, [1, 2, 3]), request(8, [1, 9, 10]),
    )  # fmt: skip
    assert tree.chain_of == (0, 0, 1, 0, 1)
    assert tree.chains[1].origin == 0


def test_a_branch_of_a_running_request_hangs_on_the_latest_that_had_ended():
    tree = grown(request(0, [5]), request(3, [1], took_s=9), request(5, [1, 2]))
    assert tree.chain_of[2] not in tree.chain_of[:2]
    assert tree.chains[tree.chain_of[2]].origin == 1
    assert Edge(2, 0, 4.0) in tree.edges


def test_without_any_ended_request_a_branch_keeps_its_offset():
    tree = grown(request(0, [1], took_s=9), request(5, [1, 2]))
    assert tree.edges == ()
    assert tree.n_background == 1


def test_another_model_is_another_chain():
    tree = grown(request(0, [1]), request(2, [1, 2], model="small"), request(4, [1, 3]))
    assert tree.chain_of == (0, 1, 0)
    assert tree.edges == (Edge(1, 0, 1.0), Edge(2, 0, 3.0), Edge(2, 1, 1.0))


def test_a_parent_waits_for_a_subagent_with_its_first_request_after_the_subagents_end():
    """Request 3 of the parent starts while the subagent still runs, request 4 after its end."""
    tree = grown(
        request(0, [1]), request(2, [7], agent=1), request(4, [7, 8], agent=1, took_s=4),
        request(5, [1, 2]), request(9, [1, 2, 3]), spawns=[0],
    )  # fmt: skip
    assert tree.chain_of == (0, 1, 1, 0, 0)
    assert tree.edges == (
        Edge(1, 0, 1.0), Edge(2, 1, 1.0), Edge(3, 0, 4.0), Edge(4, 2, 1.0), Edge(4, 3, 3.0),
    )  # fmt: skip


def test_a_subagent_that_outlasts_its_parent_is_in_the_background():
    tree = grown(
        request(0, [1]), request(2, [7], agent=1, took_s=9), request(4, [1, 2]), spawns=[0]
    )
    assert tree.n_background == 1


@st.composite
def recordings(draw):
    rng = draw(st.randoms(use_true_random=False))
    requests, at_s = list[RecordedRequest](), 0.0
    n_agents = draw(st.integers(0, 2))
    for _ in range(draw(st.integers(1, 20))):
        at_s += rng.choice([0.0, 0.5, 1.0, 3.0])
        agent = rng.randint(0, n_agents) if requests else 0
        own = [k.ids.tolist() for k in requests if k.agent == agent] or [[100 * agent]]
        base = rng.choice(own[-3:])
        ids = [*base[: rng.randint(0, len(base))], *(rng.randint(0, 3) for _ in range(2))]
        model = rng.choice(["m", "m", "m", "s"])
        requests.append(request(at_s, ids, rng.choice([0.0, 0.5, 2.0]), model, agent))
    return requests, [0] * n_agents


@given(recordings())
def test_every_tree_keeps_its_invariants_and_replays_its_recording(recording):
    requests, spawns = recording
    tree = grow_tree(requests, spawns)
    for chain in tree.chains:
        for a, b in itertools.pairwise(chain.rows):
            first, second = requests[a], requests[b]
            assert first.end_s <= second.start_s + 1e-9, "a chain overlaps itself"
            assert (first.model, first.agent) == (second.model, second.agent)
            assert common(first.ids, second.ids) > 0
            assert any(edge.child == b and edge.parent == a for edge in tree.edges)
    assert sorted(row for chain in tree.chains for row in chain.rows) == [*range(len(requests))]
    replayed = [one.start_s for one in requests]
    for row, own in enumerate(requests):
        waits = [
            replayed[edge.parent] + requests[edge.parent].end_s - requests[edge.parent].start_s
            + edge.delay_s
            for edge in tree.edges
            if edge.child == row
        ]  # fmt: skip
        replayed[row] = max(waits, default=own.start_s)
        assert abs(replayed[row] - own.start_s) < 1e-6
    pairs = [(edge.child, edge.parent) for edge in tree.edges]
    assert len(pairs) == len(set(pairs))
    assert all(parent < child for child, parent in pairs)
