"""Migration of decoding requests, against timelines worked out by hand."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.reference_engine.cluster_kit import (
    Jumps,
    Part,
    Steps,
    check_conserved,
    course_of,
    disaggregated,
    link,
    prompt,
    rebalanced,
)


def to_the_first(request):
    return 0


def every_half_second(first_s, n):
    return [first_s + 0.5 * k for k in range(n)]


@pytest.mark.parametrize("client_kind", [Steps, Jumps])
def test_a_request_moves_while_it_is_computed_and_pauses_for_the_rest(client_kind):
    simulator, transfers = rebalanced([Part(n=2, step_s=0.5)], link(32.0), 2.2, 0.2, to_the_first)
    client = client_kind([prompt("b", 32, 22), prompt("a", 16, 40)])
    simulator.run(client)
    b, a = client.requests
    # At 2.2 s each has 4 tokens. With the tokens to come "a" will have 56 and "b" 54, as near to
    # half of the difference, 110, so that "b" goes, which came first. 35 of its tokens are in KV,
    # and are copied until 3.29375 s. It leaves at the end of the step, 3.5 s, with 7 tokens of its
    # answer and 38 in KV, the last 3 of which take 0.09375 s.
    assert a.token_times_s == every_half_second(0.5, 40)
    assert b.token_times_s == every_half_second(0.5, 7) + every_half_second(4.09375, 15)
    assert transfers.links.sent_bytes == {0: 38.0}
    assert transfers.n_migrated == transfers.n_done == 1
    assert transfers.copied_s == pytest.approx(0.09375)
    waits = {cause.why.name: seconds for cause, seconds in client.accounts["b"].waits if seconds}
    assert waits == {"kv_transfer": pytest.approx(0.09375)}


def test_equal_loads_stay():
    simulator, transfers = rebalanced(
        [Part(n=2, step_s=0.5)], link(32.0), 1.2, 0.2, lambda request: int(request.id == "b")
    )
    client = Steps([prompt("a", 16, 40), prompt("b", 20, 40)])
    simulator.run(client)
    assert transfers.links.sent_bytes == {}
    assert client.requests[1].token_times_s == every_half_second(0.5, 40)


def test_a_request_that_ends_while_it_is_copied_stays():
    simulator, transfers = rebalanced([Part(n=2, step_s=0.5)], link(16.0), 2.2, 0.2, to_the_first)
    client = Steps([prompt("b", 32, 8), prompt("a", 16, 8), prompt("c", 16, 1, 10.0)])
    simulator.run(client)  # the copy of "b" ends at 4.3875 s, "b" itself at 4 s
    assert client.requests[0].token_times_s == every_half_second(0.5, 8)
    assert client.requests[1].token_times_s == every_half_second(0.5, 8)
    assert transfers.links.sent_bytes == {0: 35.0}
    assert transfers.n_migrated == transfers.n_done == 0
    assert all(replica.state.kv.n_free == 1000 for replica in simulator.replicas)


REQUESTS = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.7, 5.0]),  # arrival
    st.integers(1, 70),  # prompt
    st.sampled_from([1, 3, 17, 60, 100]),  # output
    st.sampled_from([None, None, None, 0.2, 1.7]),  # cancelled after
)


# A decode replica without requests, some of whose blocks are still being copied away.
@example(
    [(0.0, 60, 60, None), (0.0, 1, 3, None), (2.7, 48, 3, None)],
    *(1, 2, 11, 0.07, 1000.0, "chunked"),
)
@settings(deadline=None, max_examples=40)
@given(
    st.lists(REQUESTS, min_size=1, max_size=9),
    st.integers(0, 2),
    st.integers(2, 3),
    st.integers(11, 30),
    st.sampled_from([0.07, 0.5]),
    st.sampled_from([50.0, 1000.0]),
    st.sampled_from(["chunked", "prefill_first", "priority", "sjf", "mlfq"]),
)
def test_migration_conserves_requests_memory_and_bytes(
    jobs, n_prefill, n, n_blocks, every_s, bytes_per_s, mode
):
    left = []
    for client_kind in (Steps, Jumps):
        if n_prefill:
            parts = [
                Part("prefill", n_prefill, 0.3, n_blocks, mode),
                Part("decode", n, 0.05, n_blocks, mode),
            ]
            simulator, transfers = disaggregated(parts, link(bytes_per_s), rebalance_s=every_s)
        else:
            parts = [Part("both", n, 0.05, n_blocks, mode)]
            simulator, transfers = rebalanced(
                parts, link(bytes_per_s), every_s, 0.1, lambda request: int(request.id[1]) % 2
            )
        requests = [prompt(f"q{k}", n, n_output, s) for k, (s, n, n_output, _) in enumerate(jobs)]
        cancels = [(s + after, f"q{k}") for k, (s, _, _, after) in enumerate(jobs) if after]
        client = client_kind(requests, cancels)
        simulator.run(client)
        check_conserved(simulator, transfers, requests, n_blocks)
        links = transfers.links
        moved = (links.sent_bytes, links.busy_s, transfers.n_migrated, transfers.n_done)
        left.append((*course_of(simulator, client), moved))
    single, at_once = left
    for part, same in zip(single, at_once, strict=True):
        assert part == same
