"""Failures, autoscaling and pipelines of replicas between which requests move, against timelines
worked out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.cluster.autoscaling import ScalingRule
from reference_engine.cluster.failures import Failure, RandomFailures, Retries
from reference_engine.state.sequence import State
from tests.reference_engine.cluster_kit import (
    Jumps,
    Part,
    Steps,
    conducted,
    course_of,
    link,
    prompt,
)

# A step takes 1 s, whatever is in it; a token of KV has 1 byte, of which a link sends 8 a second.
ONE_AND_TWO = [Part("prefill"), Part("decode", 2)]
TWO_AND_ONE = [Part("prefill", 2), Part("decode")]
AGAIN = Retries(1, resume=True)
KINDS = pytest.mark.parametrize("client_kind", [Steps, Jumps])


def waits(account):
    return {cause.why.name: pytest.approx(seconds) for cause, seconds in account.waits if seconds}


def free_blocks(simulator):
    return [replica.state.kv.n_free for replica in simulator.replicas]


@KINDS
def test_kv_goes_to_another_replica_if_its_target_fails(client_kind):
    simulator, parts = conducted(
        ONE_AND_TWO, link(8.0), [Failure(2.0, 1, 50.0)], AGAIN, router="round_robin"
    )
    client = client_kind([prompt("a", 16, 3)])
    simulator.run(client)
    # The prompt until 1 s; 8 of 16 tokens to replica 1 by 2 s; all to replica 2 by 4 s.
    assert client.requests[0].token_times_s == [1.0, 5.0, 6.0]
    assert parts["failures"].n_retried == 0  # its KV was not lost
    links = parts["transfers"].links
    assert (links.sent_bytes, links.received_bytes) == ({0: 24.0}, {1: 8.0, 2: 16.0})
    assert links.busy_s == {0: 3.0}
    assert waits(client.accounts["a"]) == {"kv_transfer": 3.0}


@KINDS
def test_a_request_whose_kv_is_lost_is_computed_again(client_kind):
    simulator, parts = conducted(
        TWO_AND_ONE, link(8.0), [Failure(2.0, 0, 50.0)], AGAIN, router="round_robin"
    )
    client = client_kind([prompt("a", 16, 3)])
    simulator.run(client)
    # Replica 0 fails with the KV half sent. Replica 1 computes 17 tokens from 2 to 3 s, and sends
    # them until 5.125 s.
    assert client.requests[0].token_times_s == [1.0, 3.0, 6.125]
    assert parts["failures"].n_retried == 1
    assert free_blocks(simulator) == [1000] * 3


def test_a_request_whose_kv_is_lost_fails_without_resume():
    simulator, _ = conducted(
        TWO_AND_ONE, link(8.0), [Failure(2.0, 0, 50.0)], Retries(1), router="round_robin"
    )
    client = Steps([prompt("a", 16, 3)])
    simulator.run(client)
    assert client.lost == [("a", "r0 failed", 2.0)]
    assert free_blocks(simulator) == [1000] * 3


@KINDS
def test_a_decoding_request_of_a_failed_replica_is_computed_again(client_kind):
    simulator, _ = conducted(
        ONE_AND_TWO, link(8.0), [Failure(4.5, 1, 50.0)], AGAIN, router="round_robin"
    )
    client = client_kind([prompt("a", 16, 4)])
    simulator.run(client)
    # At replica 1 from 3 s on, a token at 4 s. At 4.5 s 18 tokens to the prefill replica: the third
    # token at 5.5 s, its KV at replica 2 by 7.75 s.
    assert client.requests[0].token_times_s == [1.0, 4.0, 5.5, 8.75]


@KINDS
def test_kv_waits_where_it_is_while_no_replica_decodes(client_kind):
    parts = [Part("prefill"), Part("decode")]
    simulator, _ = conducted(parts, link(8.0), [Failure(0.5, 1, 4.5)])
    client = client_kind([prompt("a", 16, 2), prompt("b", 16, 2, 0.25)], [(3.0, "b")])
    simulator.run(client)
    a, b = client.requests
    # The first tokens at 1 and 2 s; replica 1 is back at 5 s; the copy takes until 7 s.
    assert a.token_times_s == [1.0, 8.0]
    assert (b.token_times_s, b.state) == ([2.0], State.finished_abort)
    assert waits(client.accounts["a"]) == {"no_kv_blocks": 4.0, "kv_transfer": 2.0}
    assert free_blocks(simulator) == [1000] * 2


def test_a_request_that_waits_for_a_replica_is_lost_with_its_kv():
    parts = [Part("prefill", 2), Part("decode")]
    planned = [Failure(0.5, 2, 9.5), Failure(2.0, 0, 50.0)]
    simulator, _ = conducted(parts, link(8.0), planned, AGAIN, router="round_robin")
    client = Steps([prompt("a", 16, 3)])
    simulator.run(client)
    # At 2 s "a" goes to replica 1, which has its second token at 3 s and sends from 10 s on.
    assert client.requests[0].token_times_s == [1.0, 3.0, 10 + 17 / 8 + 1]


@KINDS
@pytest.mark.parametrize(("number", "is_lost"), [(1, False), (0, True)])
def test_a_migration_ends_with_either_of_its_replicas(client_kind, number, is_lost):
    # At 5 s one of two requests leaves replica 0 for the empty replica 1: 21 tokens take 21 s.
    planned = [Failure(10.0, number, 100.0)]
    simulator, parts = conducted(
        [Part(n=2)], link(1.0), planned, rebalance_s=5.0, router="round_robin"
    )
    requests = [prompt("a", 16, 40), prompt("b", 16, 1), prompt("c", 16, 40)]
    requests[1].arrived_s = requests[2].arrived_s = 0.5
    client = client_kind(requests)
    simulator.run(client)
    transfers = parts["transfers"]
    assert transfers.n_migrated == 0
    assert not transfers._migrating
    lost = {name for name, _, _ in client.lost}
    assert bool(lost) == is_lost
    assert free_blocks(simulator) == [1000] * 2
    assert all(not r.coming and not r.copying for r in simulator.replicas)


def test_a_pausing_request_goes_on_where_it_was_if_its_target_fails():
    # At 5 s "a" and "c" are on replica 0 and replica 1 is empty.
    simulator, parts = conducted(
        [Part(n=2)], link(20.0, 0.5), [], rebalance_s=5.0, router="round_robin"
    )
    client = Steps([prompt("a", 16, 30), prompt("b", 16, 1, 0.1), prompt("c", 16, 30, 0.2)])
    simulator.run(client)
    moved = parts["transfers"].n_migrated
    assert moved == 1
    pauses = [
        (request.id, before_s, after_s)
        for request in client.requests
        for before_s, after_s in zip(request.token_times_s, request.token_times_s[1:], strict=False)
        if after_s - before_s > 1.2
    ]
    ((name, left_s, _),) = pauses
    simulator, parts = conducted(
        [Part(n=2)],
        link(20.0, 0.5),
        [Failure(left_s + 0.25, 1, 90.0)],
        rebalance_s=5.0,
        router="round_robin",
    )
    client = Steps([prompt("a", 16, 30), prompt("b", 16, 1, 0.1), prompt("c", 16, 30, 0.2)])
    simulator.run(client)
    assert client.lost == []
    (request,) = (request for request in client.requests if request.id == name)
    # It misses the step from `left_s` to the next second, and has a token at the end of the one
    # after, with the KV that it had.
    k = request.token_times_s.index(left_s)
    assert request.token_times_s[k + 1] == pytest.approx(left_s + 2.0)
    assert free_blocks(simulator) == [1000] * 2


def test_each_role_scales_with_its_own_requests():
    rule = ScalingRule(least=1, target=2.0, every_s=1.0, startup_s=2.0, stabilization_s=3.0)
    simulator, parts = conducted(
        [Part("prefill", 2), Part("decode", 3)], link(1e9), rule=rule, decode_rule=rule
    )
    client = Steps([prompt(name, 16, 20) for name in "abcdef"])
    simulator.run(client)
    # All prompts are computed at once, by 1 s, when the 6 requests are counted at the decoders.
    assert parts["entry"].n_starts == 0
    assert parts["decode"].n_starts == 2
    assert all(len(request.token_times_s) == 20 for request in client.requests)
    on_s = parts["decode"].totals_s(simulator.now_s)
    # The third and second of the decoders are on from 1 s until their results of 3 s are lower.
    assert [on_s[replica] > 20 for replica in simulator.replicas[2:]] == [True, False, False]


def test_a_replica_that_sends_kv_is_not_switched_off():
    rule = ScalingRule(least=1, target=1.0, every_s=1.0, startup_s=0.0, stabilization_s=0.0)
    simulator, parts = conducted([Part("prefill", 2), Part("decode")], link(2.0), rule=rule)
    requests = [prompt("a", 16, 2), *(prompt(name, 16, 2, 0.1) for name in "bcd")]
    client = Steps([*requests, prompt("e", 16, 2, 1.5)])
    simulator.run(client)
    # 1 s: 3 requests, so replica 1 is on, and gets "e". 2 s: only "e" is left, so replica 0 stops;
    # its 4 requests of 8 s each are copied from 1 s until 33 s.
    on_s = parts["entry"].totals_s(simulator.now_s)
    assert [on_s[replica] for replica in simulator.replicas[:2]] == [33.0, simulator.now_s - 1.0]
    assert all(len(request.token_times_s) == 2 for request in client.requests)


def test_no_request_moves_to_a_replica_that_is_switched_off():
    rule = ScalingRule(least=1, target=100.0, every_s=1.0, startup_s=0.0, stabilization_s=0.0)
    simulator, parts = conducted([Part(n=2)], link(1e9), rule=rule, rebalance_s=5.0)
    client = Steps([prompt("a", 16, 30), prompt("b", 16, 30)])
    simulator.run(client)
    assert parts["transfers"].n_migrated == 0
    assert simulator.replicas[1].n_received == 0


# --- pipelines


def test_a_pipeline_of_prompts_sends_its_kv_to_a_pipeline_that_decodes():
    simulator, _ = conducted([Part("prefill"), Part("decode")], link(8.0), stages=2)
    client = Steps([prompt("a", 16, 3), prompt("b", 16, 2, 0.25)])
    simulator.run(client)
    a, b = client.requests
    # The prompt of "b" is half a second behind in both stages. "a" is sent until 3 s, "b" from then
    # until 5 s.
    assert a.token_times_s == [1.0, 4.0, 5.0]
    assert b.token_times_s == [1.5, 6.0]


def test_a_request_leaves_a_pipeline_when_its_batch_has_left():
    simulator, parts = conducted(
        [Part(n=2)], link(25.0), stages=2, rebalance_s=5.5, router="round_robin"
    )
    client = Steps([prompt("a", 16, 30), prompt("b", 16, 1, 0.1), prompt("c", 16, 30, 0.2)])
    simulator.run(client)
    a, _, c = client.requests
    # Tokens of "a" at 1, 2, … and of "c" at 1.5, 2.5, … s. The KV of the 20 tokens that "a" has in
    # memory at 5.5 s is copied until 6.3 s. The batch of "c" leaves at 6.5 s, that of "a" at 7 s:
    # then 2 tokens are copied in 0.08 s, and the next is there after another second.
    assert a.token_times_s[:9] == pytest.approx([1, 2, 3, 4, 5, 6, 7, 8.08, 9.08])
    assert c.token_times_s == pytest.approx([1.5 + k for k in range(30)])
    assert parts["transfers"].n_migrated == 1
    assert [replica.n_received for replica in simulator.replicas] == [2, 2]


def test_the_batches_of_a_pipeline_that_fails_are_lost():
    simulator, _ = conducted(
        [Part(n=2)], link(1.0), [Failure(2.75, 0, 50.0)], AGAIN, stages=2, router="round_robin"
    )
    client = Steps([prompt("a", 16, 5), prompt("b", 16, 5), prompt("c", 16, 5, 0.25)])
    simulator.run(client)
    a, b, c = client.requests
    # Replica 0: "a" in stage 1 at 0, 1 and 2 s, "c" at 0.5, 1.5 and 2.5 s. Both go to replica 1,
    # which has a batch of "b" under way, in one batch, in stage 1 until 3.25 s.
    assert a.token_times_s == [1.0, 2.0, 3.75, 4.75, 5.75]
    assert c.token_times_s == [1.5, 2.5, 3.75, 4.75, 5.75]
    assert b.token_times_s == [1.0, 2.0, 3.0, 4.25, 5.25]
    failed = simulator.replicas[0]
    # stage 1 until 2.75 s without a pause, stage 2 from 0.5 s on
    assert failed.busy_s == pytest.approx((2.75 + 2.25) / 2)


# --- properties

shapes_of = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 25), st.floats(0, 25)), min_size=1, max_size=12
)


def setting(roles, stages, rebalances, mtbf_s, is_scaling, resume, bytes_per_s, n_layers):
    parts = [Part("prefill", 2, n_blocks=12), Part("decode", 2, n_blocks=12)]
    if not roles:
        parts = [Part(n=3, n_blocks=12)]
    rule = ScalingRule(1, 2.0, 3.0, 2.0, 5.0) if is_scaling else None
    random = None
    if mtbf_s is not None:
        random = RandomFailures(mtbf_s, 7.0, np.random.default_rng(3))
    return conducted(
        parts,
        link(bytes_per_s),
        n_layers=n_layers,
        retries=Retries(3, resume),
        rule=rule,
        decode_rule=rule if roles else None,
        rebalance_s=2.0 if rebalances else None,
        random=random,
        stages=stages,
    )


features = {
    "roles": st.booleans(),
    "rebalances": st.booleans(),
    "mtbf_s": st.none() | st.sampled_from([8.0, 30.0]),
    "is_scaling": st.booleans(),
    "resume": st.booleans(),
    "n_layers": st.sampled_from([0, 1, 4]),
    "bytes_per_s": st.sampled_from([4.0, 40.0, 1e9]),
}


@settings(max_examples=120, deadline=None)
@given(
    shapes=shapes_of,
    stages=st.integers(1, 3),
    cancels=st.lists(st.tuples(st.floats(0, 40), st.integers(0, 11)), max_size=3),
    **features,
)
def test_every_request_ends_once_and_all_memory_is_free(shapes, stages, cancels, **setting_of):
    simulator, parts = setting(stages=stages, **setting_of)
    requests = [prompt(f"r{k}", *shape) for k, shape in enumerate(shapes)]
    cancelled = [(at_s, f"r{k}") for at_s, k in cancels if k < len(shapes)]
    client = Steps(requests, cancelled)
    simulator.run(client)
    ended = [request.id for request in client.ended] + [name for name, _, _ in client.lost]
    assert len(ended) == len(set(ended))
    for request in requests:
        assert request.state.is_over
        if request.state is State.finished_abort:
            assert request.id in ended or request.id in {name for _, name in cancelled}
        else:
            assert request.id in ended
            assert len(request.token_times_s) == request.max_tokens
    transfers = parts["transfers"]
    transfers.population.check("transfers")
    assert len(transfers.population) == 0
    sent, received = transfers.links.sent_bytes, transfers.links.received_bytes
    assert sum(sent.values()) == pytest.approx(sum(received.values()))
    for replica in simulator.replicas:
        state = replica.state
        state.check()
        assert state.kv.n_free + sum(map(len, state.lent.values())) == state.kv.n_blocks
        assert not replica.coming
        assert replica.busy_s <= simulator.now_s + 1e-6


@settings(max_examples=60, deadline=None)
@given(shapes=shapes_of, **features)
def test_many_steps_at_once_are_single_steps(shapes, **setting_of):
    courses = []
    for client_kind in (Steps, Jumps):
        simulator, _ = setting(stages=1, **setting_of)
        client = client_kind([prompt(f"r{k}", *shape) for k, shape in enumerate(shapes)])
        simulator.run(client)
        courses.append((course_of(simulator, client), client.lost))
    assert courses[0] == courses[1]
