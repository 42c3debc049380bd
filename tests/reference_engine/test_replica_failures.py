"""Replicas that fail, against timelines worked out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.cluster.failures import Failure, RandomFailures, Retries
from reference_engine.state.sequence import State
from reference_engine.state.step_variation import StepVariation
from tests.reference_engine.cluster_kit import Jumps, Part, Steps, lossy, prompt

# A step takes 1 s, whatever is in it. Round robin: requests go to replicas 0, 1, 0, 1, …
TWO = [Part(n=2)]
AT_2_5_S = [Failure(2.5, 0, 10.0)]  # back at 12.5 s


def waits(account):
    return {cause.why.name: pytest.approx(seconds) for cause, seconds in account.waits if seconds}


@pytest.mark.parametrize("client_kind", [Steps, Jumps])
def test_requests_of_a_failed_replica_fail(client_kind):
    simulator, failures, _ = lossy(TWO, AT_2_5_S)
    client = client_kind([prompt("a", 16, 5), prompt("b", 16, 5)])
    simulator.run(client)
    a, b = client.requests
    assert client.lost == [("a", "r0 failed", 2.5)]
    assert a.token_times_s == [1.0, 2.0]
    assert a.state is State.finished_abort
    assert b.token_times_s == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert (failures.n_lost, failures.n_retried) == (1, 0)
    assert simulator.replicas[0].busy_s == pytest.approx(2.5)
    assert simulator.replicas[0].totals.steps == 2  # the third was lost


def test_a_request_without_a_token_is_sent_again():
    simulator, failures, _ = lossy(TWO, [Failure(0.5, 0, 10.0)], Retries(1))
    client = Steps([prompt("a", 16, 3), prompt("b", 16, 3)])
    simulator.run(client)
    # "a" arrives at replica 1 during its first step, which ends at 1 s
    assert client.requests[0].token_times_s == [2.0, 3.0, 4.0]
    assert client.requests[1].token_times_s == [1.0, 2.0, 3.0]
    assert client.lost == []
    assert (failures.n_lost, failures.n_retried) == (0, 1)
    assert waits(client.accounts["a"]) == {"replica_failed": 0.5}


def test_an_answer_is_continued_elsewhere_where_replicas_resume():
    simulator, _, _ = lossy(TWO, AT_2_5_S, Retries(1, resume=True))
    client = Steps([prompt("a", 16, 5), prompt("b", 16, 5)])
    simulator.run(client)
    # two tokens by 2 s; its prompt and they are computed again from 3 s
    assert client.requests[0].token_times_s == [1.0, 2.0, 4.0, 5.0, 6.0]
    assert simulator.replicas[1].totals.prompt_tokens == 32
    assert client.lost == []


def test_an_answer_is_not_continued_elsewhere_without_resume():
    simulator, _, _ = lossy(TWO, AT_2_5_S, Retries(1))
    client = Steps([prompt("a", 16, 5), prompt("b", 16, 5)])
    simulator.run(client)
    assert client.lost == [("a", "r0 failed", 2.5)]


def test_retries_are_counted():
    planned = [Failure(0.5, 0, 100.0), Failure(0.75, 1, 100.0)]
    simulator, failures, _ = lossy([Part(n=3)], planned, Retries(1))
    client = Steps([prompt("a", 16, 2), prompt("b", 16, 2)])
    simulator.run(client)
    # The router begins anew with replicas 1 and 2: "a" goes to 1, which fails, too
    assert client.lost == [("a", "r1 failed", 0.75)]
    assert client.requests[1].token_times_s == [1.75, 2.75]
    assert (failures.n_lost, failures.n_retried) == (1, 2)


def test_requests_wait_at_the_router_while_no_replica_is_there():
    simulator, _, _ = lossy([Part(n=1)], [Failure(0.5, 0, 10.0)], Retries(1))
    client = Steps(
        [prompt("a", 16, 2), prompt("b", 16, 2, 3.0), prompt("c", 16, 2, 4.0)], [(5.0, "c")]
    )
    simulator.run(client)
    assert client.requests[0].token_times_s == [11.5, 12.5]
    assert client.requests[1].token_times_s == [11.5, 12.5]
    assert waits(client.accounts["a"]) == {"replica_failed": 10.0}
    assert client.requests[2].token_times_s == []


def test_a_replica_forgets_its_prefix_cache():
    simulator, _, _ = lossy([Part(n=1)], [Failure(5.0, 0, 1.0)])
    client = Steps(
        [prompt("a", 33, 1, 0.0, 7), prompt("b", 33, 1, 2.0, 7), prompt("c", 33, 1, 7.0, 7)]
    )
    simulator.run(client)
    assert [request.n_cached for request in client.requests] == [0, 32, 0]
    assert simulator.replicas[0].totals.cached_tokens == 32


def test_random_failures_are_a_renewal_process():
    # Each of 3 replicas serves for 30 s on average and is repaired in 10 s: 100 failures in 4 000 s
    # with a variance of 100 · 30² / 40² = 56, and there for 3/4 of the time.
    random = RandomFailures(30.0, 10.0, np.random.default_rng(4))
    simulator, failures, _ = lossy([Part(n=3)], random=random)
    n_there = []

    class Observer(Steps):
        def act(self, engine):
            members = failures._members
            n_there.append(sum(map(members.is_open, simulator.replicas)))
            super().act(engine)

    simulator.run(Observer([prompt(f"q{k}", 1, 1, 0.5 + k) for k in range(4000)]))
    n_failures = [replica.n_failures for replica in simulator.replicas]
    assert all(abs(n - 100) < 4 * 7.5 for n in n_failures)
    assert len(set(n_failures)) > 1
    assert np.mean(n_there) / 3 == pytest.approx(0.75, abs=0.05)


def test_planned_failures_do_not_multiply_random_ones():
    # 4 000 s hold 133 random failures, with a standard deviation of 11.5, and 50 planned failures.
    random = RandomFailures(30.0, 0.01, np.random.default_rng(4))
    planned = [Failure(10.3 + k, 0, 0.01) for k in range(50)]
    simulator, _, _ = lossy([Part(n=1)], planned, random=random)
    simulator.run(Steps([prompt(f"q{k}", 1, 1, 0.5 + k) for k in range(4000)]))
    assert abs(simulator.replicas[0].n_failures - 183) < 4 * 11.5


REQUESTS = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.7, 5.0]),  # arrival
    st.integers(1, 70),  # prompt
    st.sampled_from([1, 3, 17, 60]),  # output
    st.sampled_from([None, None, None, 0.2, 1.7]),  # cancelled after
)
FAILURES = st.builds(
    Failure,
    st.sampled_from([0.0, 0.15, 0.31, 1.2, 2.9, 3.05]),
    st.integers(0, 2),
    st.sampled_from([0.1, 2.0]),
)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(REQUESTS, min_size=1, max_size=9),
    st.lists(FAILURES, max_size=5),
    st.integers(9, 30),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(["round_robin", "jsq", "least_kv", "central_queue:most_requests=2"]),
    st.sampled_from(["chunked", "prefill_first", "priority", "sjf"]),
    st.sampled_from([None, StepVariation((0.5, 1.0), (0.8, 1.3), 0.5, 4.0, 0.1, (0.02,))]),
)
def test_every_request_ends_once(jobs, planned, n_blocks, most, resume, router, mode, variation):
    left = []
    for client_kind in (Steps, Jumps):
        parts = [Part("both", 3, 0.05, n_blocks, mode, variation=variation)]
        simulator, failures, _ = lossy(parts, planned, Retries(most, resume), router=router)
        requests = [prompt(f"q{k}", n, n_output, s) for k, (s, n, n_output, _) in enumerate(jobs)]
        cancels = [(s + after, f"q{k}") for k, (s, _, _, after) in enumerate(jobs) if after]
        client = client_kind(requests, cancels)
        simulator.run(client)
        lost = [name for name, _, _ in client.lost]
        assert len(set(lost)) == len(lost) == failures.n_lost
        ended = {request.id for request in client.ended}
        assert not ended & set(lost)
        for request in requests:
            if request.id in ended:
                assert len(request.token_times_s) == request.max_tokens
                assert request.token_times_s == sorted(request.token_times_s)
            else:
                assert request.id in lost or request.id in [name for _, name in cancels]
        for replica in simulator.replicas:
            replica.state.check()
            assert replica.state.kv.n_free == n_blocks
        assert np.isfinite([replica.busy_s for replica in simulator.replicas]).all()
        left.append(
            (
                [(r.token_times_s, r.state, r.finished_s) for r in requests],
                [list(replica.state.log.steps) for replica in simulator.replicas],
                [list(replica.state.log.events) for replica in simulator.replicas],
                [replica.totals for replica in simulator.replicas],
                [pytest.approx(replica.busy_s) for replica in simulator.replicas],
                client.accounts,
                client.lost,
            )
        )
    single, at_once = left
    for part, same in zip(single, at_once, strict=True):
        assert part == same
