"""Prompts and decodes on two parts of a GPU, against timelines worked out by hand."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.executors.halves import on_part
from reference_engine.state.cost_model import StepCost
from reference_engine.state.sequence import State
from tests.reference_engine.cluster_kit import Steps, divided, prompt

# A token takes 10 ms on the whole GPU, 20 ms on half of it; a token of context 10 ms on both.
ARITHMETIC = StepCost(token_s=0.01)
BOTH = StepCost(token_s=0.01, context_token_s=0.01)


def times(requests):
    return [pytest.approx(request.token_times_s) for request in requests]


def waits(account):
    sums = Counter[str]()
    for cause, seconds in account.waits:
        sums[cause.why.name] += seconds
    return {name: pytest.approx(seconds) for name, seconds in sums.items() if seconds}


@pytest.mark.parametrize(
    ("share", "arithmetic", "reading"), [(1.0, 1, 1), (0.5, 2, 1), (0.4, 2.5, 1), (0.1, 10, 4)]
)
def test_a_part_computes_by_its_share_and_reads_at_full_speed_from_two_fifths_on(
    share, arithmetic, reading
):
    cost = StepCost(
        step_s=1.0,
        seq_s=1.0,
        weights_s=1.0,
        token_s=1.0,
        head_s=1.0,
        context_token_s=1.0,
        prefill_attention_s=1.0,
    )
    part = on_part(cost, share)
    assert (part.token_s, part.head_s, part.prefill_attention_s) == (arithmetic,) * 3
    assert (part.weights_s, part.context_token_s) == (reading, reading)
    assert (part.step_s, part.seq_s) == (1.0, 1.0)


def test_both_halves_compute_at_the_same_time_each_at_its_share():
    simulator = divided(cost=ARITHMETIC)
    client = Steps([prompt("a", 10, 4), prompt("b", 10, 2, 0.05)])
    simulator.run(client)
    # a: prompt 0–0.2 s, three decodes of 20 ms; b: prompt 0.2–0.4 s, a decode
    assert times(client.requests) == [[0.2, 0.22, 0.24, 0.26], [0.4, 0.42]]
    assert simulator.replicas[0].busy_s == pytest.approx(0.4)
    assert simulator.replicas[1].busy_s == pytest.approx(0.08)


def test_unequal_parts_trade_prompts_for_decodes():
    simulator = divided(cost=ARITHMETIC, share=0.8)
    client = Steps([prompt("a", 16, 3)])
    simulator.run(client)
    # a prompt of 0.16 s at 80 % of the rate, decodes of 10 ms at 20 %
    assert times(client.requests) == [[0.2, 0.25, 0.3]]


def test_two_halves_do_at_most_the_measured_gain_over_taking_turns():
    simulator = divided(cost=BOTH)
    client = Steps([prompt("a", 10, 3), prompt("b", 10, 2, 0.05)])
    simulator.run(client)
    # a: prompt 0–0.2 s; decodes of 0.11 and 0.12 s on the whole GPU, 0.12 and 0.13 s on half of
    # it: next to b's prompt at half the speed they take (0.11 + 0.06) / 1.2 and (0.12 + 0.065) /
    # 1.2 s. b's prompt: (0.1 + 0.2 · 0.11 / 0.12) / 1.2 s; it waits for the decode under way, and
    # its own decode has the half without a prompt next to it.
    first_s, second_s = 0.17 / 1.2, 0.185 / 1.2
    prompt_s = (0.1 + 0.2 * 11 / 12) / 1.2
    assert times(client.requests) == [
        [0.2, 0.2 + first_s, 0.2 + first_s + second_s],
        [0.2 + prompt_s, 0.2 + first_s + second_s + 0.12],
    ]
    account = client.accounts["b"]
    waited_s = 0.15 + first_s + second_s - prompt_s
    assert waits(account) == {"step_in_flight": waited_s}


def test_the_share_follows_the_present_decodes():
    simulator = divided(cost=BOTH, share=None, gain=2.0)
    client = Steps([prompt("a", 10, 2), prompt("b", 12, 1, 0.05)])
    simulator.run(client)
    # a: prompt on the whole GPU, 0.1 s. A decode takes 0.11 s there, 0.125 s on 40 % and 0.167 s on
    # 30 %, of which only the first is within 1.3 times: b's 12 tokens are computed on 60 %.
    assert times(client.requests) == [[0.1, 0.225], [0.3]]


def test_memory_is_shared_and_nothing_is_copied():
    # 3 blocks, of which the prompts of 32 and 16 tokens take all.
    simulator = divided(cost=ARITHMETIC, n_blocks=3)
    a, b = prompt("a", 32, 2), prompt("b", 16, 2, 0.01)
    client = Steps([a, b])
    simulator.run(client)
    # a: prompt 0–0.64 s. b's prompt takes the last block, so that a has none for its token and is
    # preempted, and the next plan finds no block for it. b passes at 0.96 s, takes a block that a
    # gave up, and ends at 0.98 s; the other still has a's first 16 tokens, so that 17 are computed
    # again, 0.98–1.32 s.
    assert times(client.requests) == [[0.64, 1.32], [0.96, 0.98]]
    assert waits(client.accounts["a"]) == {"no_kv_blocks": 0.34}
    for replica in simulator.replicas:
        replica.state.check()
    assert simulator.replicas[0].state.kv.n_free == 3


def test_new_prompts_wait_for_preempted_requests_of_the_decode_half():
    simulator = divided(cost=ARITHMETIC, n_blocks=3)
    client = Steps([prompt("a", 32, 2), prompt("b", 16, 1, 0.01), prompt("c", 16, 1, 0.02)])
    simulator.run(client)
    # b's prompt takes the last block at 0.64 s and a is preempted. At 0.96 s b ends: c would take
    # its block, but a goes first, with its 32 tokens from the cache; then c's prompt.
    assert times(client.requests) == [[0.64, 0.98], [0.96], [1.3]]
    waited_s = waits(client.accounts["c"])
    assert waited_s == {"step_in_flight": 0.62, "no_kv_blocks": 0.34}


def test_a_request_waits_for_a_sequence_slot_of_the_decode_half():
    simulator = divided(cost=ARITHMETIC, max_num_seqs=1)
    client = Steps([prompt("a", 10, 12), prompt("b", 10, 2, 0.05)])
    simulator.run(client)
    # a: prompt 0–0.2 s, 11 decodes until 0.42 s; b: prompt 0.2–0.4 s, then the slot of a
    a, b = client.requests
    assert a.token_times_s[-1] == pytest.approx(0.42)
    assert b.token_times_s == pytest.approx([0.4, 0.44])
    assert waits(client.accounts["b"]) == {"step_in_flight": 0.15, "no_seq_slot": 0.02}


@pytest.mark.parametrize(("at_s", "n_tokens"), [(0.1, 0), (0.41, 1), (0.47, 2)])
def test_a_cancelled_request_leaves_no_memory_behind(at_s, n_tokens):
    # b gets its first token at 0.4 s and waits for a's decode of 0.3 to 0.45 s.
    cost = StepCost(step_s=0.1, token_s=0.005)
    simulator = divided(cost=cost, gain=2.0)
    client = Steps([prompt("a", 10, 9), prompt("b", 10, 5, 0.05)], [(at_s, "b")])
    simulator.run(client)
    b = client.requests[1]
    assert b.state is State.finished_abort
    for replica in simulator.replicas:
        replica.state.check()
        assert not replica.state.lent
        assert not replica.coming
        assert replica.state.kv.n_free == 1000


def test_the_router_counts_both_halves():
    simulator = divided(n_gpus=2, cost=ARITHMETIC)
    # a decodes for long when b arrives: the other GPU has fewer requests.
    client = Steps([prompt("a", 10, 500), prompt("b", 10, 500, 1.0), prompt("c", 1, 1, 1.0)])
    simulator.run(client)
    received = [replica.n_received for replica in simulator.replicas]
    assert sorted(received[::2]) == [1, 2]


REQUESTS = st.tuples(
    st.sampled_from([0.0, 0.05, 0.3, 1.0, 2.7]),  # arrival
    st.integers(1, 70),  # prompt
    st.sampled_from([1, 2, 3, 16, 17, 60]),  # output
    st.sampled_from([None, None, None, 0.2, 1.7]),  # cancelled after
)


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(REQUESTS, min_size=1, max_size=12),
    n_blocks=st.sampled_from([9, 12, 40]),
    share=st.sampled_from([0.3, 0.7, None]),
    mode=st.sampled_from(["chunked", "continuous", "prefill_first", "sjf"]),
)
def test_requests_and_memory_are_conserved(jobs, n_blocks, share, mode):
    simulator = divided(cost=BOTH, share=share, n_blocks=n_blocks, mode=mode)
    requests = [
        prompt(f"q{k}", n_prompt, n_output, at_s, text=k % 3)
        for k, (at_s, n_prompt, n_output, _) in enumerate(jobs)
    ]
    cancels = [(j[0] + j[3], f"q{k}") for k, j in enumerate(jobs) if j[3] is not None]
    client = Steps(requests, cancels)
    simulator.run(client)
    for replica in simulator.replicas:
        replica.state.check()
        assert not replica.state.lent
    assert simulator.replicas[0].state.kv.n_free == n_blocks
    for request in requests:
        assert request.state.is_over
        if request.state is not State.finished_abort:
            assert len(request.token_times_s) == request.max_tokens
            assert request.token_times_s == sorted(request.token_times_s)
