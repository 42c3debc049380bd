"""Blocks that leave the prefix cache go to host memory and come back, where that is cheaper."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loadgen.system.clock import VirtualClock
from reference_engine.core.core import EngineState
from reference_engine.executors.base import Caps
from reference_engine.executors.simulated import Simulated
from reference_engine.policies.chunked import Chunked
from reference_engine.simulator import Replica, Simulator
from reference_engine.state.batch import Copy
from reference_engine.state.cost_model import StepCost
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import How
from reference_engine.state.steps import StepLog
from reference_engine.state.swap import HostPool
from tests.reference_engine.cluster_kit import WIDE, Jumps, Steps, prompt
from tests.reference_engine.engine_kit import request, rig, toy_output
from tests.reference_engine.test_swap import Watched

COST = StepCost(token_s=0.01)  # a block of 16 tokens takes 160 ms


def engine(n_blocks, n_host_blocks, copy_s=0.02, latency_s=0.005, how=How.auto):
    """A simulator of an engine with host memory for prefixes."""
    clock = VirtualClock()
    host = HostPool(n_host_blocks, copy_s, latency_s, keeps_prefixes=True)
    log = StepLog(level="full")
    state = EngineState(
        WIDE, KvPool(n_blocks), clock, Chunked(), cost=COST, log=log, host=host, preempt=how
    )
    caps = Caps(n_host_blocks, copy_s=copy_s, copy_latency_s=latency_s)
    return Simulator([Replica(state, Simulated(COST, caps))], clock)


def ends(simulator, requests, client_kind=Steps):
    client = client_kind(requests)
    simulator.run(client)
    simulator.replicas[0].state.check()
    return [request.token_times_s[0] for request in requests]


def alternating():
    """Two texts of which the memory holds one: the third prompt is that of the first."""
    return [prompt("a", 32, 1, 0.0, 1), prompt("b", 40, 1, 1.0, 2), prompt("c", 33, 1, 2.0, 1)]


@pytest.mark.parametrize("client_kind", [Steps, Jumps])
def test_an_evicted_prefix_is_copied_out_and_back(client_kind):
    simulator = engine(n_blocks=3, n_host_blocks=4)
    requests = alternating()
    # a: 0–0.32 s, 2 full blocks. b needs 3 of 3 blocks: 2 copies out, 45 ms, and 40 tokens. c needs
    # 3: b's 2 blocks are copied out and a's 2 back, 90 ms, and a token is computed.
    assert ends(simulator, requests, client_kind) == pytest.approx([0.32, 1.445, 2.10])
    assert [request.n_cached for request in requests] == [0, 0, 32]
    totals = simulator.replicas[0].totals
    assert (totals.copied_out_blocks, totals.copied_back_blocks) == (4, 2)
    assert totals.copying_s == pytest.approx(0.045 + 0.09)
    assert totals.prompt_tokens == 32 + 40 + 1


@pytest.mark.parametrize(
    ("options", "end_s", "copied"),
    [
        ({"how": How.recompute}, 2.33, (0, 0)),
        ({"copy_s": 0.081}, 2.33, (0, 0)),  # twice is more than the 160 ms of a block
        ({"copy_s": 0.079, "latency_s": 0.0}, 2.326, (4, 2)),
        ({"copy_s": 0.081, "latency_s": 0.0, "how": How.swap}, 2.334, (4, 2)),
        ({"latency_s": 0.29}, 2.66, (4, 0)),  # 0.33 s back, 0.32 s to compute; b's are copied out
        ({"latency_s": 0.27}, 2.63, (4, 2)),
        ({"n_host_blocks": 2}, 2.055, (2, 2)),  # while a's come back, there is no room for b's
    ],
)
def test_what_is_cheaper_to_compute_is_not_copied(options, end_s, copied):
    simulator = engine(**{"n_blocks": 3, "n_host_blocks": 4, **options})
    found = ends(simulator, alternating())
    totals = simulator.replicas[0].totals
    assert (totals.copied_out_blocks, totals.copied_back_blocks) == copied
    assert found[2] == pytest.approx(end_s)


def test_a_prefix_in_host_memory_is_copied_out_once():
    simulator = engine(n_blocks=3, n_host_blocks=8)
    texts = [1, 2, 1, 2, 1]
    requests = [prompt(f"q{k}", 33, 1, float(k), text) for k, text in enumerate(texts)]
    ends(simulator, requests)
    totals = simulator.replicas[0].totals
    assert (totals.copied_out_blocks, totals.copied_back_blocks) == (4, 6)


def test_preempted_requests_take_the_memory_of_kept_prefixes():
    host = HostPool(2, keeps_prefixes=True)
    host.keep([b"a", b"b"], [5, 6])
    assert (host.n_free, host.n_prefixes) == (2, 2)
    victim = request("v", [1] * 20, 4)
    victim.blocks, victim.n_computed = [7, 8], 20
    host.swap_out(victim, 2)
    assert (host.n_free, host.n_prefixes) == (0, 0)
    assert host.find([b"a"], 0) == []
    host.keep([b"c"], [9])  # no memory is left
    assert host.n_prefixes == 0
    for _ in host.checks([victim]):
        pass


def test_copies_keep_their_order():
    host = HostPool(1, keeps_prefixes=True)
    host.keep([b"a"], [5])
    host.keep([b"b"], [6])  # replaces the least recently used
    assert host.drain() == [Copy(5, 0, is_out=True), Copy(6, 0, is_out=True)]
    assert host.drain() == []
    assert host.find([b"b"], 0) == [b"b"]
    assert host.find([b"a", b"b"], 0) == []


def test_an_emptied_prefix_cache_is_empty_in_host_memory_too():
    simulator = engine(n_blocks=3, n_host_blocks=4)
    ends(simulator, alternating()[:2])
    state = simulator.replicas[0].state
    assert state.host.n_prefixes == 2
    state.kv.clear_prefix_cache()
    state.check()
    assert (state.host.n_prefixes, state.host.n_free) == (0, 4)


TEXTS = st.tuples(
    st.integers(0, 2),  # prefix
    st.integers(0, 3),  # its length, blocks
    st.integers(1, 40),  # tokens of its own
    st.integers(1, 40),  # output
)


# A prefix is copied out and its host memory then given to a preempted request, in one step.
@example([(0, 0, 6, 11), (0, 0, 38, 12), (0, 1, 23, 11), (1, 1, 17, 2)], 10, 3, How.swap, 0)
# A prefix is copied out of a block that a swapped request takes, in one step.
@example([(0, 0, 8, 25), (0, 0, 25, 25), (0, 3, 1, 17)], 9, 5, How.swap, 0)
@settings(deadline=None, max_examples=60)
@given(
    jobs=st.lists(TEXTS, min_size=2, max_size=14),
    n_blocks=st.integers(9, 20),
    n_host_blocks=st.integers(1, 30),
    how=st.sampled_from([How.swap, How.auto]),
    async_depth=st.sampled_from([0, 1]),
)
def test_the_kv_that_comes_back_is_the_kv_that_left(
    jobs, n_blocks, n_host_blocks, how, async_depth
):
    # The toy executor computes every token from the content of the blocks.
    built = rig(
        n_blocks=n_blocks,
        max_model_len=128,
        max_num_seqs=3,
        n_host_blocks=n_host_blocks,
        host_prefixes=True,
        how=how,
        cost=COST,
        async_depth=async_depth,
        watermark=0,
    )
    watched = built.executor = Watched(built.executor)
    requests = []
    for k, (text, n_shared, n_own, n_output) in enumerate(jobs):
        tokens = [text] * (16 * n_shared) + [100 + k] * n_own
        requests.append(request(f"r{k}", tokens, n_output))
        built.admit(requests[-1])
        built.step()
        built.state.check()
    built.drain()
    built.state.check()
    for made in requests:
        assert made.output == toy_output(made.tokens[: made.n_prompt], made.max_tokens)
    for batch in watched.batches:
        filled = set()
        for copy in batch.copies:
            assert not copy.is_out or copy.block not in filled, "copied out what just came in"
            if not copy.is_out:
                filled.add(copy.block)
    counters = built.state.counters
    assert counters.copied_back_blocks == 0 or counters.copied_out_blocks > 0
