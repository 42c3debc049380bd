"""KV that is sent layer by layer, against timelines worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import UsageError
from loadgen.lab.simulate import simulate
from loadgen.workload.scenario import load_scenario
from reference_engine.cluster.failures import Failure, Retries
from reference_engine.cluster.transfers import Computing
from tests.reference_engine.cluster_kit import Jumps, Part, Steps, conducted, link, prompt

# Steps of 4 s for prompts, 1 s for answers; 4 layers; a token of KV has 1 byte.
ROLES = [Part("prefill", step_s=4.0), Part("decode", step_s=1.0)]
KINDS = pytest.mark.parametrize("client_kind", [Steps, Jumps])


@KINDS
@pytest.mark.parametrize(
    ("bytes_per_s", "copied_s"),
    [
        (4.0, 5.0),  # a layer a second: 1–2, 2–3, 3–4, 4–5 s
        (2.0, 9.0),  # a layer in 2 s: 1–3, 3–5, 5–7, 7–9 s
        (16.0, 4.25),  # the last layer alone, 4–4.25 s
    ],
)
def test_a_layer_is_sent_while_the_next_is_computed(client_kind, bytes_per_s, copied_s):
    simulator, parts = conducted(ROLES, link(bytes_per_s), n_layers=4)
    client = client_kind([prompt("a", 16, 3)])
    simulator.run(client)
    assert client.requests[0].token_times_s == [4.0, copied_s + 1, copied_s + 2]
    transfers = parts["transfers"]
    assert (transfers.n_done, transfers.copied_s) == (1, copied_s - 4.0)
    assert transfers.links.sent_bytes == {0: 16.0}


def test_without_layers_the_copy_begins_after_the_prompt():
    simulator, _ = conducted(ROLES, link(4.0))
    client = Steps([prompt("a", 16, 3)])
    simulator.run(client)
    assert client.requests[0].token_times_s == [4.0, 9.0, 10.0]


def test_the_latency_of_a_link_is_added_once():
    simulator, _ = conducted(ROLES, link(4.0, 0.5), n_layers=4)
    client = Steps([prompt("a", 16, 2)])
    simulator.run(client)
    assert client.requests[0].token_times_s == [4.0, 6.5]


@KINDS
def test_the_pieces_before_the_last_are_sent_first(client_kind):
    # 8 of 16 tokens in each of two steps. From 4 s on the first 8 are sent, until 6 s; the layers
    # of the others, computed by 5, 6, 7 and 8 s, at 6–6.5, 6.5–7, 7–7.5 and 8–8.5 s.
    simulator, _ = conducted(ROLES, link(4.0), n_layers=4)
    simulator.replicas[0].state.policy = simulator.replicas[0].state.policy.model_copy(
        update={"token_budget": 8}
    )
    client = client_kind([prompt("a", 16, 2)])
    simulator.run(client)
    assert client.requests[0].token_times_s == [8.0, 9.5]


def test_two_prompts_of_a_step_are_sent_one_after_the_other():
    # "a" until 5 s as if alone. The link then sends all of "b" at once, until 9 s.
    simulator, _ = conducted(ROLES, link(4.0), n_layers=4)
    client = Steps([prompt("a", 16, 2), prompt("b", 16, 2)])
    simulator.run(client)
    assert [request.token_times_s for request in client.requests] == [[4.0, 6.0], [4.0, 10.0]]


def test_a_copy_that_waits_for_memory_begins_late():
    # The decode replica has 2 blocks, which "a" has until its last token at 9 s: "b" is sent from
    # then on, all at once, until 13 s.
    parts = [Part("prefill", step_s=4.0), Part("decode", step_s=1.0, n_blocks=2)]
    simulator, _ = conducted(parts, link(4.0), n_layers=4)
    client = Steps([prompt("a", 16, 5), prompt("b", 16, 2, 0.5)])
    simulator.run(client)
    assert client.requests[0].token_times_s == [4.0, 6.0, 7.0, 8.0, 9.0]
    assert client.requests[1].token_times_s == [8.0, 14.0]
    waits = {cause.why.name: waited_s for cause, waited_s in client.accounts["b"].waits}
    assert waits["no_kv_blocks"] == pytest.approx(1.0)
    assert waits["kv_transfer"] == pytest.approx(4.0)


@pytest.mark.parametrize("bytes_per_s", [4.0, 1.0])
def test_a_request_that_ends_with_its_first_token_leaves_no_copy(bytes_per_s):
    # It stops by itself, which the transfer could not foresee; a copy under way goes on.
    simulator, parts = conducted(ROLES, link(bytes_per_s), n_layers=4)
    request = prompt("a", 16, 9)
    request.oracle_output_tokens, request._n_last = 1, 16
    client = Steps([request, prompt("b", 16, 3, 0.5)])
    simulator.run(client)
    assert request.token_times_s == [4.0]
    assert len(client.requests[1].token_times_s) == 3
    assert parts["transfers"].n_done == 1
    for replica in simulator.replicas:
        assert replica.state.kv.n_free == 1000
        assert not replica.coming
        assert not replica.copying


def test_a_target_that_fails_is_replaced_at_the_end_of_the_prompt():
    parts = [Part("prefill", step_s=4.0), Part("decode", 2, step_s=1.0)]
    simulator, made = conducted(
        parts, link(4.0), [Failure(3.0, 1, 90.0)], n_layers=4, router="round_robin"
    )
    client = Steps([prompt("a", 16, 2)])
    simulator.run(client)
    # two of four layers were sent in vain; all are sent again after the prompt
    assert client.requests[0].token_times_s == [4.0, 9.0]
    assert made["transfers"].links.received_bytes[2] == 16.0


def test_a_source_that_fails_during_the_prompt_frees_the_target():
    simulator, _ = conducted(ROLES, link(4.0), [Failure(3.0, 0, 1.0)], Retries(1), n_layers=4)
    client = Steps([prompt("a", 16, 2)])
    simulator.run(client)
    # computed again from 4 to 5 s (the repaired replica has steps of `parts[0]`, 4 s): until 8 s
    assert client.requests[0].token_times_s == [8.0, 10.0]
    assert [replica.state.kv.n_free for replica in simulator.replicas] == [1000, 1000]


@given(step_s=st.floats(0.1, 10), copy_s=st.floats(0.1, 10), n_layers=st.integers(1, 8))
def test_the_end_of_a_stream_is_that_of_its_layers(step_s, copy_s, n_layers):
    # The recursion of a tandem of two: layer l is computed, then sent after the layer before.
    sent_s = 0.0
    for layer in range(1, n_layers + 1):
        sent_s = max(sent_s, layer * step_s / n_layers) + copy_s / n_layers
    computing = Computing(0.0, step_s, 1, n_layers)
    assert computing.sent_s(copy_s) == pytest.approx(sent_s)


def test_layers_shorten_the_pause_of_a_scenario():
    scenario = load_scenario(
        "long_prompt_interference",
        ["phases.warmup=0s", "phases.measure=20s", "arrivals.rate=8/s"],
    )
    settings = {"replicas": "2:role=prefill+2:role=decode"}
    whole = simulate(scenario, **settings)
    layers = simulate(scenario, layerwise=True, **settings)
    paused_s = [run.manifest.engine.transfers.mean_copy_s for run in (whole, layers)]
    assert paused_s[1] < paused_s[0] / 2
    assert (np.sort(layers.request_rows["status"]) == np.sort(whole.request_rows["status"])).all()


def test_layers_need_roles():
    with pytest.raises(UsageError, match="layerwise: has no effect without replicas of two roles"):
        simulate(load_scenario("chat_poisson"), replicas=2, rebalance="1s", layerwise=True)
