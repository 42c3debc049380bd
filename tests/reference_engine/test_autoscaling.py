"""Autoscaling, against timelines worked out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.cluster.autoscaling import ScalingRule
from reference_engine.cluster.failures import Failure, Retries
from tests.reference_engine.cluster_kit import Jumps, Part, Steps, lossy, prompt

# A step takes 1 s. Two requests per replica; results of each second, replicas ready after 2 s.
RULE = ScalingRule(least=1, target=2.0, every_s=1.0, startup_s=2.0, stabilization_s=3.0)


@pytest.mark.parametrize("client_kind", [Steps, Jumps])
def test_replicas_start_with_the_requests_and_stop_after_them(client_kind):
    simulator, _, scaling = lossy([Part(n=3)], rule=RULE, router="jsq")
    requests = [prompt(name, 16, 10) for name in "abcd"]
    requests += [prompt(name, 16, 5, 3.5) for name in "ef"]
    requests += [prompt("g", 16, 2, 20.0)]
    client = client_kind(requests)
    simulator.run(client)
    # 1 s: 4 requests on 1 replica, so 2 replicas, the second ready at 3 s. 4 s: 6 requests, so 3.
    # "e" and "f" go to the second. 10 s: all have ended. Results of the last 3 s fall to 2 at 12 s
    # and to 1 at 13 s.
    assert [request.token_times_s[-1] for request in requests[:4]] == [10.0] * 4
    assert [request.token_times_s[0] for request in requests[4:6]] == [4.5] * 2
    assert [replica.n_received for replica in simulator.replicas] == [5, 2, 0]
    assert requests[6].token_times_s == [21.0, 22.0]
    on_s = scaling.totals_s(simulator.now_s)
    assert [on_s[replica] for replica in simulator.replicas] == [22.0, 12.0, 8.0]
    assert scaling.n_starts == 2


def test_a_difference_within_a_tenth_changes_nothing():
    rule = RULE._replace(target=20.0)
    simulator, _, scaling = lossy([Part(n=3)], rule=rule, router="jsq")
    client = Steps([prompt(f"q{k}", 16, 5) for k in range(21)])
    simulator.run(client)
    assert scaling.n_starts == 0
    simulator, _, scaling = lossy([Part(n=3)], rule=rule, router="jsq")
    simulator.run(Steps([prompt(f"q{k}", 16, 5) for k in range(23)]))
    assert scaling.n_starts == 1


def test_a_replica_that_stops_ends_its_requests_and_returns_at_once_if_needed():
    rule = RULE._replace(stabilization_s=0.0)
    simulator, _, scaling = lossy([Part(n=2)], rule=rule, router="jsq")
    # 1 s: 4 requests, so 2 replicas from 3 s on; "e" goes to the second at 3.5 s and stays until
    # 23.5 s. 5 s: 2 requests are left, so 1 replica; the second has fewer requests, and stops.
    # 8 s: 4 requests, so it is back; "h" goes there at 8.5 s, between two steps.
    requests = [prompt(name, 16, 4) for name in "abc"] + [prompt("d", 16, 20)]
    requests += [prompt("e", 16, 20, 3.5), prompt("f", 16, 4, 7.5), prompt("g", 16, 4, 7.5)]
    requests += [prompt("h", 16, 2, 8.5)]
    client = Steps(requests)
    simulator.run(client)
    assert simulator.replicas[1].n_received == 2
    assert scaling.n_starts == 1
    assert requests[4].token_times_s[-1] == 23.5
    assert requests[7].token_times_s == [9.5, 10.5]
    on_s = scaling.totals_s(simulator.now_s)
    assert on_s[simulator.replicas[1]] == 22.5  # 1–23.5 s


def test_a_replica_that_is_off_does_not_fail():
    simulator, _, _ = lossy([Part(n=2)], [Failure(1.5, 1, 50.0)], rule=RULE, router="jsq")
    requests = [prompt(name, 16, 10, 4.0) for name in "abcd"]
    requests += [prompt(name, 16, 5, 8.5) for name in "ef"]
    simulator.run(Steps(requests))
    # 5 s: 4 requests, so that the second replica receives requests from 7 s on
    assert [replica.n_failures for replica in simulator.replicas] == [0, 0]
    assert [request.token_times_s[0] for request in requests[4:]] == [9.5, 9.5]


REQUESTS = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.7, 5.0]),  # arrival
    st.integers(1, 70),  # prompt
    st.sampled_from([1, 3, 17, 60]),  # output
    st.sampled_from([None, None, None, 0.2, 1.7]),  # cancelled after
)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(REQUESTS, min_size=1, max_size=12),
    st.lists(
        st.builds(Failure, st.sampled_from([0.15, 1.2, 2.9]), st.integers(0, 2), st.just(0.8)),
        max_size=3,
    ),
    st.integers(1, 3),
    st.sampled_from([0.5, 2.0]),
    st.sampled_from([0.0, 0.4, 3.0]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from(["jsq", "round_robin", "least_kv", "central_queue:most_requests=2"]),
)
def test_steps_taken_at_once_scale_as_single_steps(
    jobs, planned, least, target, startup_s, stabilization_s, router
):
    left = []
    for client_kind in (Steps, Jumps):
        rule = ScalingRule(least, target, 0.25, startup_s, stabilization_s)
        simulator, _, scaling = lossy(
            [Part(n=3, step_s=0.05, n_blocks=40)], planned, Retries(9, True), rule, router
        )
        requests = [prompt(f"q{k}", n, n_output, s) for k, (s, n, n_output, _) in enumerate(jobs)]
        cancels = [(s + after, f"q{k}") for k, (s, _, _, after) in enumerate(jobs) if after]
        client = client_kind(requests, cancels)
        simulator.run(client)
        ended = {request.id for request in client.ended}
        assert {request.id for request in requests} - ended <= {name for _, name in cancels}
        on_s = scaling.totals_s(simulator.now_s)
        assert all(0 <= seconds <= simulator.now_s + 1e-9 for seconds in on_s.values())
        for replica in simulator.replicas:
            assert replica.busy_s <= on_s[replica] + 1e-9
            assert np.isfinite(replica.busy_s)
        left.append(
            (
                [(r.token_times_s, r.state, r.finished_s) for r in requests],
                [list(replica.state.log.steps) for replica in simulator.replicas],
                [list(replica.state.log.events) for replica in simulator.replicas],
                list(on_s.values()),
                scaling.n_starts,
                client.accounts,
            )
        )
    single, at_once = left
    for part, same in zip(single, at_once, strict=True):
        assert part == same
