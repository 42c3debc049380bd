"""Prefill and decode on different replicas, against timelines worked out by hand."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference_engine.state.plan import AdmissionError
from reference_engine.state.sequence import State
from tests.reference_engine.cluster_kit import (
    Jumps,
    Part,
    Steps,
    check_conserved,
    course_of,
    disaggregated,
    link,
    prompt,
)

# A prefill step takes 1 s and a decode step 0.1 s, whatever is in it; a token has a byte of KV.
PREFILL, DECODE = Part("prefill"), Part("decode", step_s=0.1)


def times(requests):
    return [pytest.approx(request.token_times_s) for request in requests]


def waits(account):
    return {cause.why.name: pytest.approx(seconds) for cause, seconds in account.waits if seconds}


@pytest.mark.parametrize("client_kind", [Steps, Jumps])
def test_a_request_is_computed_copied_and_decoded(client_kind):
    simulator, transfers = disaggregated([PREFILL, DECODE], link(16.0))
    client = client_kind([prompt("a", 16, 3)])
    simulator.run(client)
    # prompt 0–1 s, 16 bytes at 16 bytes/s 1–2 s, two steps of 0.1 s
    assert times(client.requests) == [[1.0, 2.1, 2.2]]
    assert transfers.links.sent_bytes == {0: 16.0}
    assert transfers.links.received_bytes == {1: 16.0}
    assert waits(client.accounts["a"]) == {"kv_transfer": 1.0}
    assert client.accounts["a"].ttft_s == pytest.approx(1.0)
    assert client.accounts["a"].e2e_s == pytest.approx(2.2)


def test_a_link_copies_one_request_at_a_time():
    simulator, _ = disaggregated([PREFILL, DECODE], link(16.0, latency_s=0.5))
    client = Steps([prompt("a", 16, 3), prompt("b", 16, 3)])
    simulator.run(client)
    # both prompts 0–1 s; copies of 1.5 s, 1–2.5 and 2.5–4 s
    assert times(client.requests) == [[1.0, 2.6, 2.7], [1.0, 4.1, 4.2]]
    assert waits(client.accounts["b"]) == {"kv_transfer": 3.0}


def test_two_decode_replicas_receive_from_one_link():
    simulator, transfers = disaggregated([PREFILL, Part("decode", 2, 0.1)], link(16.0))
    client = Steps([prompt("a", 16, 3), prompt("b", 32, 2)])
    simulator.run(client)
    # the copies leave by the same link: 1–2 s to replica 1, 2–4 s to replica 2
    assert times(client.requests) == [[1.0, 2.1, 2.2], [1.0, 4.1]]
    assert transfers.links.received_bytes == {1: 16.0, 2: 32.0}


def test_two_prefill_replicas_send_to_one_link():
    simulator, transfers = disaggregated([Part("prefill", 2), DECODE], link(16.0))
    client = Steps([prompt("a", 16, 3), prompt("b", 16, 3)])
    simulator.run(client)
    assert times(client.requests) == [[1.0, 2.1, 2.2], [1.0, 3.1, 3.2]]
    assert transfers.links.sent_bytes == {0: 16.0, 1: 16.0}


def test_compressed_kv_takes_its_share_of_the_time():
    simulator, transfers = disaggregated([PREFILL, DECODE], link(16.0), kv_factor=0.25)
    client = Steps([prompt("a", 16, 2)])
    simulator.run(client)
    assert times(client.requests) == [[1.0, 1.35]]
    assert transfers.links.sent_bytes == {0: 4.0}


def test_a_full_decode_replica_holds_memory_of_the_prefill_replica():
    # "a" needs 3 of 4 blocks for 32 tokens and the next, so "b" waits until "a" ends. "c" needs 4
    # of the 5 blocks of the prefill replica, of which "b" keeps 2 until its copy ends.
    parts = [Part("prefill", n_blocks=5), Part("decode", step_s=0.1, n_blocks=4)]
    simulator, _ = disaggregated(parts, link(16.0))
    client = Steps([prompt("a", 32, 3), prompt("b", 32, 3), prompt("c", 50, 2, 1.5)])
    simulator.run(client)
    # a: copy 1–3 s; b: copy 3.2–5.2 s; c: prompt 5.2–6.2 s, copy 6.2–9.325 s
    assert times(client.requests) == [[1.0, 3.1, 3.2], [1.0, 5.3, 5.4], [6.2, 9.425]]
    assert waits(client.accounts["a"]) == {"kv_transfer": 2.0}
    assert waits(client.accounts["b"]) == {"no_kv_blocks": 2.2, "kv_transfer": 2.0}
    assert waits(client.accounts["c"]) == {"no_kv_blocks": 3.7, "kv_transfer": 3.125}


def test_a_request_of_one_token_ends_at_the_prefill_replica():
    simulator, transfers = disaggregated([PREFILL, DECODE], link(16.0))
    client = Steps([prompt("a", 16, 1)])
    simulator.run(client)
    assert times(client.requests) == [[1.0]]
    assert transfers.links.sent_bytes == {}


@pytest.mark.parametrize(("at_s", "n_tokens"), [(0.5, 1), (1.5, 1), (2.05, 2)])
def test_a_cancelled_request_leaves_no_memory_behind(at_s, n_tokens):
    simulator, _ = disaggregated([PREFILL, DECODE], link(16.0))
    client = Steps([prompt("a", 16, 3), prompt("b", 16, 3, 10.0)], [(at_s, "a")])
    simulator.run(client)
    a, b = client.requests
    assert a.state is State.finished_abort
    assert len(a.token_times_s) == n_tokens
    assert b.token_times_s == pytest.approx([11.0, 12.1, 12.2])
    for replica in simulator.replicas:
        replica.state.check()
        assert replica.state.kv.n_free == replica.state.kv.n_blocks


def test_a_request_too_large_for_a_decode_replica_is_refused_at_once():
    parts = [PREFILL, Part("decode", n_blocks=2)]
    simulator, _ = disaggregated(parts, link(16.0))
    with pytest.raises(AdmissionError, match="need 3 KV blocks"):
        simulator.run(Steps([prompt("a", 16, 30)]))


def test_a_link_is_an_m_d_1_queue():
    # Prompts take no time to compute, so that copies of 1 s arrive as a Poisson process, 0.6 a
    # second: they wait rho / (2 (1 - rho)) = 0.75 s on average (Pollaczek-Khinchine).
    instant = Part("prefill", step_s=1e-9, n_blocks=100_000)
    simulator, _ = disaggregated([instant, Part("decode", 1, 1e-9, 100_000)], link(16.0))
    at_s = np.cumsum(np.random.default_rng(5).exponential(1 / 0.6, 5000))
    client = Jumps([prompt(f"q{k}", 16, 2, float(t)) for k, t in enumerate(at_s)])
    simulator.run(client)
    waits_s = [request.token_times_s[1] - request.token_times_s[0] for request in client.requests]
    assert np.mean(waits_s) - 1.0 == pytest.approx(0.75, rel=0.15)


REQUESTS = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.7, 5.0]),  # arrival
    st.integers(1, 70),  # prompt
    st.sampled_from([1, 2, 3, 16, 17, 60]),  # output
    st.sampled_from([None, None, None, 0.2, 1.7]),  # cancelled after
)


@example([(0.0, 67, 60, 1.7), (1.0, 48, 2, None)], 1, 1, 9, "round_robin", "chunked")
@example(
    [(0.0, 32, 60, None), (0.0, 32, 60, None), (0.0, 48, 2, None), (0.0, 1, 2, None)],
    *(1, 1, 9, "round_robin", "chunked"),
)
@settings(deadline=None, max_examples=40)
@given(
    st.lists(REQUESTS, min_size=1, max_size=9),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(9, 30),
    st.sampled_from(["round_robin", "jsq", "least_kv", "predicted_load", "prefix_aware"]),
    st.sampled_from(["chunked", "prefill_first", "priority", "continuous", "mlfq"]),
)
def test_bytes_requests_and_memory_are_conserved(jobs, n_prefill, n_decode, n_blocks, router, mode):
    left = []
    for client_kind in (Steps, Jumps):
        parts = [
            Part("prefill", n_prefill, 0.3, n_blocks, mode),
            Part("decode", n_decode, 0.05, n_blocks, mode),
        ]
        simulator, transfers = disaggregated(
            parts, link(100.0, 0.01), 0.5, router=router, decode_router=router
        )
        requests = [prompt(f"q{k}", n, n_output, s) for k, (s, n, n_output, _) in enumerate(jobs)]
        cancels = [(s + after, f"q{k}") for k, (s, _, _, after) in enumerate(jobs) if after]
        client = client_kind(requests, cancels)
        simulator.run(client)
        check_conserved(simulator, transfers, requests, n_blocks)
        links = transfers.links
        if not cancels:
            n_tokens = sum(request.n_prompt for request in requests if request.max_tokens > 1)
            assert sum(links.sent_bytes.values()) == pytest.approx(0.5 * n_tokens)
            assert transfers.n_done == sum(request.max_tokens > 1 for request in requests)
        for replica in simulator.replicas:
            # The run may end before the copy of a cancelled request.
            assert set(replica.state.lent) <= {name for _, name in cancels}
            assert not replica.coming
            assert not replica.copying or cancels
        left.append((*course_of(simulator, client), (links.sent_bytes, links.busy_s)))
    single, at_once = left
    for part, same in zip(single, at_once, strict=True):
        assert part == same
