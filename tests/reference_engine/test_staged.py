"""Pipeline parallelism, against timelines worked out by hand and closed forms of tandem queues."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import UsageError
from loadgen.lab.sim_options import sim_options
from loadgen.lab.simulate import simulate
from loadgen.lab.simulated_engine import build
from loadgen.system.clock import VirtualClock
from loadgen.workload.scenario import load_scenario
from reference_engine.core.core import EngineState
from reference_engine.executors.simulated import Simulated
from reference_engine.executors.staged import Staged, Stages
from reference_engine.policies.base import POLICIES
from reference_engine.simulator import PipelinedReplica, Simulator
from reference_engine.state.cost_model import StepCost, stage_shares
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import Plan, View, check_plan
from reference_engine.state.sequence import State
from reference_engine.state.steps import StepLog
from tests.reference_engine.cluster_kit import WIDE, Steps, prompt

THIRDS = (1 / 3, 1 / 3, 1 / 3)
IN_ORDER = ["chunked", "continuous", "orca", "prefill_first", "split_fuse"]


def pipeline(
    shares,
    cost,
    hop_s=0.0,
    hop_token_s=0.0,
    mode="chunked",
    n_blocks=1000,
    n_batches=None,
    batch_seqs=None,
    limits=WIDE,
    **args,
):
    """A simulator of a replica whose layers are in several stages."""
    clock = VirtualClock()
    policy = POLICIES.build({"kind": mode, **args})
    log = StepLog(level="full")
    state = EngineState(limits, KvPool(n_blocks), clock, policy, cost=cost, log=log)
    staged = Staged(Simulated(cost), Stages(shares, hop_s, hop_token_s), clock)
    replica = PipelinedReplica(state, staged, n_batches=n_batches, batch_seqs=batch_seqs)
    return Simulator([replica], clock)


def run(simulator, requests, cancel_s=()):
    client = Steps(requests, cancel_s)
    simulator.run(client)
    return client


def test_three_batches_fill_three_stages():
    #          0   1   2   3   4   5   6   7   8
    # stage 1  | a | b | c | a | b | c |
    # stage 2      | a | b | c | a | b | c |
    # stage 3          | a | b | c | a | b | c |
    simulator = pipeline(THIRDS, StepCost(step_s=3.0), batch_seqs=1)
    a, b, c = run(simulator, [prompt(name, 16, 2) for name in "abc"]).requests
    assert a.token_times_s == pytest.approx([3.0, 6.0])
    assert b.token_times_s == pytest.approx([4.0, 7.0])
    assert c.token_times_s == pytest.approx([5.0, 8.0])
    (replica,) = simulator.replicas
    assert replica.busy_s == pytest.approx(6.0)  # of the 8 s, in each stage
    assert replica.stages.bubble_share == pytest.approx(0.25)


def test_a_batch_is_composed_anew_and_filled_when_it_leaves():
    # Stages of 1 s, at most 2 requests in a batch, at most 3 batches.
    # 0    {a, b} begins. 0.5  {c} begins, waits for stage 1 until 1.
    # 2.2  {d} begins: stage 1 until 3.2. 2.5  e arrives and waits: three batches are under way.
    # 3    {a, b} leaves and a ends: {b, e} begins, in stage 1 from 3.2 on.
    # 4    {c} leaves and c ends: nothing waits.
    # 4.1  f arrives: {f} begins, in stage 1 from 4.2 on.
    # 5.2  {d} leaves and begins again at once. 6.2  {b, e}, 7.2  {f} and 8.2  {d} leave, and end.
    simulator = pipeline(THIRDS, StepCost(step_s=3.0), batch_seqs=2)
    client = run(
        simulator,
        [
            prompt("a", 16, 1),
            prompt("b", 16, 2),
            prompt("c", 16, 1, 0.5),
            prompt("d", 16, 2, 2.2),
            prompt("e", 16, 1, 2.5),
            prompt("f", 16, 1, 4.1),
        ],
    )
    times_s = {request.id: request.token_times_s for request in client.requests}
    assert times_s == {
        "a": pytest.approx([3.0]),
        "b": pytest.approx([3.0, 6.2]),
        "c": pytest.approx([4.0]),
        "d": pytest.approx([5.2, 8.2]),
        "e": pytest.approx([6.2]),
        "f": pytest.approx([7.2]),
    }
    batches = [[name for name, _ in step.items] for step in simulator.replicas[0].state.log.steps]
    assert batches == [["a", "b"], ["c"], ["d"], ["e", "b"], ["f"], ["d"]]
    # 6 batches of 1 s in each of 3 stages, within 8.2 s
    assert simulator.replicas[0].stages.bubble_share == pytest.approx(1 - 18 / 24.6)
    ((cause, waited_s),) = client.accounts["e"].waits
    assert (str(cause.why), waited_s) == ("step in flight", pytest.approx(0.5))


def test_pieces_of_a_prompt_follow_each_other_through_the_stages():
    # 6 tokens in pieces of 2, 3 s each: they enter at 0, 1 and 2 s, and the last leaves at 5 s.
    simulator = pipeline(THIRDS, StepCost(added_token_s=1.5), token_budget=2)
    (a,) = run(simulator, [prompt("a", 6, 1)]).requests
    assert a.token_times_s == pytest.approx([5.0])


def test_a_request_alone_takes_the_time_of_all_stages():
    simulator = pipeline((0.5, 0.5), StepCost(step_s=1.0))
    (a,) = run(simulator, [prompt("a", 16, 3)]).requests
    assert a.token_times_s == [1.0, 2.0, 3.0]
    assert simulator.replicas[0].stages.bubble_share == 0.5


def test_a_hop_takes_its_message():
    simulator = pipeline((0.5, 0.5), StepCost(step_s=1.0), hop_s=0.25, hop_token_s=0.0625)
    (a,) = run(simulator, [prompt("a", 16, 2)]).requests
    # 16 tokens: 0.25 + 1 s between the stages; then a single token: 0.25 + 0.0625 s
    assert a.token_times_s == [2.25, 2.25 + 1.3125]


def test_a_long_batch_holds_the_next_up():
    # A token costs 0.25 s: the prompt of "a" takes 4 s, 2 s in each stage, that of "b" 1 s.
    simulator = pipeline((0.5, 0.5), StepCost(added_token_s=0.25), batch_seqs=1)
    a, b = run(simulator, [prompt("a", 16, 2), prompt("b", 4, 3)]).requests
    # a: stage 1 0–2 s, stage 2 2–4 s, then 4–4.125 and 4.5–4.625 s behind "b"
    # b: stage 1 2–2.5 s, stage 2 4–4.5 s; a step of 0.25 s from 4.5 s on: 4.625–4.75 s
    assert b.token_times_s == [4.5, 4.75, 5.0]
    assert a.token_times_s == [4.0, 4.625]


def test_the_kv_memory_of_a_request_in_flight_is_not_taken():
    # 4 blocks of 16 tokens; "a" and "b" have 2 each after a token, in two batches. Stages of 1 s.
    # a and b get a token every 2 s, at 2, 4, … and at 3, 5, … With 32 tokens computed, at 66 s, "a"
    # needs a third block. None is free and "b" is in flight, so "a" skips the batch. At 67 s "b"
    # lands, which was admitted later: it is preempted, and "a" goes on at 69 s.
    simulator = pipeline((0.5, 0.5), StepCost(step_s=2.0), n_blocks=4, batch_seqs=1, watermark=0.0)
    client = run(simulator, [prompt("a", 1, 40), prompt("b", 1, 40)])
    a, b = client.requests
    assert a.token_times_s[:32] == [2.0 * k for k in range(1, 33)]
    assert a.token_times_s[32] == 67.0
    assert b.token_times_s[:32] == [2.0 * k + 1 for k in range(1, 33)]
    assert (a.n_preemptions, b.n_preemptions) == (0, 1)


def test_an_admission_leaves_memory_for_the_requests_in_flight():
    # Of 4 blocks "a" has 1, and 2 shall stay free: "b", with 2, starts when "a" has ended.
    simulator = pipeline((0.5, 0.5), StepCost(step_s=2.0), n_blocks=4, watermark=0.5)
    a, b = run(simulator, [prompt("a", 8, 2), prompt("b", 32, 1, 0.5)]).requests
    assert (a.token_times_s, b.token_times_s) == ([2.0, 4.0], [6.0])


def test_a_cancelled_request_in_flight_leaves_with_its_batch():
    simulator = pipeline(THIRDS, StepCost(step_s=3.0), batch_seqs=1)
    requests = [prompt("a", 16, 5), prompt("b", 16, 2)]
    client = run(simulator, requests, cancel_s=[(1.5, "a")])
    a, b = client.requests
    assert a.token_times_s == pytest.approx([3.0])
    assert (a.state, a.finished_s) == (State.finished_abort, pytest.approx(3.0))
    assert b.token_times_s == pytest.approx([4.0, 7.0])


def test_batches_pass_stages_in_their_order():
    stages = Stages((0.25, 0.25, 0.5))
    assert stages.enter(0.0, 4.0, 1) == 4.0  # 0–1, 1–2, 2–4
    assert stages.enter(0.0, 2.0, 1) == 5.0  # 1–1.5, 2–2.5, 4–5
    assert (stages.busy_s, stages.occupied_s) == (6.0, 5.0)
    assert stages.enter(10.0, 4.0, 1) == 14.0
    assert (stages.busy_s, stages.occupied_s) == (10.0, 9.0)
    assert stages.bubble_share == pytest.approx(1 - 10 / 27)


def test_a_pipeline_that_stops_loses_what_is_to_come():
    stages = Stages((0.5, 0.5))
    stages.enter(0.0, 4.0, 1)  # 0–2, 2–4
    stages.enter(0.0, 4.0, 1)  # 2–4, 4–6
    stages.stop(3.0)
    assert (stages.busy_s, stages.occupied_s) == (4.0, 3.0)
    assert stages.enter(3.0, 4.0, 1) == 7.0


@pytest.mark.parametrize(
    ("n_layers", "n_stages", "layers"), [(80, 4, [20] * 4), (80, 3, [27, 27, 26]), (7, 1, [7])]
)
def test_layers_left_over_go_to_the_stages_before_the_last(n_layers, n_stages, layers):
    assert stage_shares(n_layers, n_stages) == tuple(n / n_layers for n in layers)


# --- closed forms


@pytest.mark.parametrize("shares", [(0.2, 0.5, 0.3), (0.5, 0.3, 0.2), (0.1, 0.1, 0.3, 0.5)])
def test_the_slowest_stage_sets_the_throughput_and_the_sum_the_latency(shares):
    # As many requests as stages: the first token after all stages, then one per slowest stage.
    n = len(shares)
    simulator = pipeline(shares, StepCost(step_s=10.0), batch_seqs=1)
    client = run(simulator, [prompt(f"r{k}", 16, 30) for k in range(n)])
    times_s = sorted(t for request in client.requests for t in request.token_times_s)
    assert times_s == pytest.approx([10.0 + 5.0 * k for k in range(30 * n)])


@pytest.mark.parametrize("n_batches", [1, 2, 3, 4, 6])
def test_too_few_batches_leave_bubbles(n_batches):
    # Of m batches and p equal stages, min(m, p) are computed at any time.
    simulator = pipeline((0.25,) * 4, StepCost(step_s=4.0), batch_seqs=1, n_batches=n_batches)
    run(simulator, [prompt(f"r{k}", 16, 600) for k in range(n_batches)])
    bubbles = simulator.replicas[0].stages.bubble_share
    assert bubbles == pytest.approx(1 - min(n_batches, 4) / 4, abs=0.002)


@pytest.mark.parametrize("shares", [(1 / 3, 1 / 3, 1 / 3), (0.2, 0.5, 0.3), (0.5, 0.4, 0.1)])
def test_the_wait_in_a_tandem_is_that_of_its_slowest_stage(shares):
    # Constant times of service: the sum of all waits is the wait of an M/D/1 queue with the
    # longest of them, whatever their order (Friedman, Operations Research 13(1), 1965).
    rng, load, slowest_s = np.random.default_rng(5), 0.6, max(shares)
    arrivals_s = np.cumsum(rng.exponential(slowest_s / load, 6_000))
    requests = [prompt(f"r{k}", 1, 1, float(t)) for k, t in enumerate(arrivals_s)]
    simulator = pipeline(shares, StepCost(step_s=1.0), batch_seqs=1, n_batches=200)
    run(simulator, requests)
    waits_s = [r.token_times_s[0] - r.arrived_s - 1.0 for r in requests]
    expected_s = load * slowest_s / (2 * (1 - load))
    # 6 000 waits, correlated over some 1 / (1 - load)² of them: a standard error of 4 %
    assert np.mean(waits_s) == pytest.approx(expected_s, rel=0.12)


# --- properties


class Watched(Steps):
    """Checks the engine and its batches at every step."""

    def receive(self, events, engine):
        super().receive(events, engine)
        (replica,) = engine.replicas
        replica.state.check()
        flying = [
            request.id
            for flight in replica.flights
            for request in flight.started.planned.batch.sampled_requests()
        ]
        assert len(flying) == len(set(flying))
        assert set(flying) == set(replica.state.queues.in_flight)
        assert len(replica.flights) <= replica.n_batches
        assert replica.state.queues.n_running <= replica.state.limits.max_num_seqs
        ends_s = [flight.end_s for flight in replica.flights]
        assert ends_s == sorted(ends_s)


requests_of = st.lists(
    st.tuples(st.integers(1, 70), st.integers(1, 40), st.floats(0, 30)), min_size=1, max_size=14
)


@settings(max_examples=80, deadline=None)
@given(
    shapes=requests_of,
    n_stages=st.integers(1, 5),
    n_batches=st.integers(1, 6),
    max_num_seqs=st.integers(1, 8),
    batch_seqs=st.none() | st.integers(1, 8),
    n_blocks=st.integers(7, 20),
    mode=st.sampled_from([*IN_ORDER, "sjf", "priority", "deadline", "bucketed"]),
    cancels=st.lists(st.tuples(st.floats(0, 60), st.integers(0, 13)), max_size=4),
)
def test_requests_and_memory_are_conserved(
    shapes, n_stages, n_batches, max_num_seqs, batch_seqs, n_blocks, mode, cancels
):
    args = {"token_budget": 16} if "token_budget" in POLICIES.get(mode).model_fields else {}
    limits = replace(WIDE, max_num_seqs=max_num_seqs)
    simulator = pipeline(
        (1 / n_stages,) * n_stages,
        StepCost(step_s=0.5, added_token_s=0.03),
        hop_s=0.01,
        mode=mode,
        n_blocks=n_blocks,
        n_batches=n_batches,
        batch_seqs=batch_seqs,
        limits=limits,
        **args,
    )
    requests = [prompt(f"r{k}", *shape) for k, shape in enumerate(shapes)]
    client = Watched(requests, [(at_s, f"r{k}") for at_s, k in cancels if k < len(shapes)])
    simulator.run(client)
    assert len({request.id for request in client.ended}) == len(client.ended)
    for request in requests:
        assert request.state.is_over
        if request.state is State.finished_abort:
            assert request.id in {name for _, name in ((a, f"r{k}") for a, k in cancels)}
        else:
            assert len(request.token_times_s) == request.max_tokens
    (replica,) = simulator.replicas
    assert replica.state.kv.n_free == n_blocks
    assert not replica.state.queues.in_flight
    stages = replica.stages
    assert 0 <= stages.bubble_share < 1 or n_stages == 1
    assert replica.busy_s <= simulator.now_s + 1e-6


def test_a_plan_cannot_name_a_request_in_flight():
    simulator = pipeline(THIRDS, StepCost(step_s=3.0))
    (replica,) = simulator.replicas
    state = replica.state
    request = prompt("a", 16, 4)
    state.admit(request)
    replica.begin(0.0)
    view = state.view()
    assert isinstance(view, View)
    assert (list(view.running), view.is_running("a"), view.to_compute(request)) == ([], True, 0)
    assert check_plan(Plan(), view) == Plan()  # nothing to plan is no lack of progress
    with pytest.raises(Exception, match="plan holds 'a', which is not running"):
        check_plan(Plan(hold=("a",)), view)


# --- settings


def test_a_replica_of_the_settings_has_one_pool_and_its_batches():
    whole = build(sim_options({"shape": "70b", "hardware": "4xh200"}), is_sharing=False)
    staged = build(
        sim_options({"shape": "70b", "hardware": "h200", "pipeline": 4}), is_sharing=False
    )
    (replica,) = staged.simulator.replicas
    assert isinstance(replica, PipelinedReplica)
    assert replica.state.kv.n_blocks == whole.simulator.replicas[0].state.kv.n_blocks
    assert (replica.n_batches, replica.batch_seqs) == (4, 64)
    assert "a pipeline of 4 stages with up to 4 batches under way" in staged.description


def test_the_stage_with_the_most_layers_limits_the_memory():
    # 80 layers in 27, 27 and 26: each stage holds at most 27 layers' KV next to their weights, so
    # all three hold as much as 80 / 27 GPUs.
    def tokens(n_stages):
        engine = build(
            sim_options({"shape": "70b", "hardware": "h200", "pipeline": n_stages}),
            is_sharing=False,
        )
        return engine.simulator.replicas[0].state.kv.n_blocks * 16

    two, three, four = tokens(2), tokens(3), tokens(4)
    per_gpu = (four - two) / 2
    assert three == pytest.approx(two + (80 / 27 - 2) * per_gpu, rel=0.001)


def test_a_pipeline_serves_a_scenario_and_reports_its_bubbles():
    scenario = load_scenario("chat_poisson", ["phases.warmup=0s", "phases.measure=10s"])
    run = simulate(scenario, shape="70b", hardware="h200", pipeline=4)
    engine = run.manifest.engine
    assert engine is not None
    (replica,) = engine.replicas
    assert replica.bubble_share is not None
    assert 0 < replica.bubble_share < 1
    assert 0 < replica.busy_share < 1
    rows = run.request_rows
    assert (rows["status"] == 0).all()
    # a token needs at least the weights' passage: 141 GB at 98 % of 4.3 TB/s is 33 ms
    tpot_s = (rows["last_token_s"] - rows["first_token_s"]) / (rows["output_tokens"] - 1)
    assert tpot_s.min() > 0.033


@pytest.mark.parametrize(
    "settings",
    [
        {"replicas": 2, "rebalance": "500ms", "mtbf": "4s", "retries": 3, "repair": "2s"},
        {"replicas": "1:role=prefill+2:role=decode", "fail": "2@3s:3s", "resume": True},
        {"replicas": "2:role=prefill;pipeline=1;hardware=2xh200+2:role=decode"}
        | {"target_requests": 2, "decode_target_requests": 8, "autoscale_every": "1s"},
    ],
)
def test_pipelines_with_roles_migrate_fail_and_scale(settings):
    scenario = load_scenario("chat_poisson", ["phases.warmup=0s", "phases.measure=10s"])
    run = simulate(scenario, shape="70b", hardware="h200", pipeline=2, **settings)
    rows, engine = run.request_rows, run.manifest.engine
    assert (rows["status"] == 0).any()
    assert engine is not None
    assert any(replica.bubble_share is not None for replica in engine.replicas)
    assert (engine.failures is not None) == ("mtbf" in settings or "fail" in settings)
    assert (engine.scaling is not None) == ("target_requests" in settings)
    assert engine.transfers is not None
    n_lost = 0 if engine.failures is None else engine.failures.lost
    assert (rows["status"] != 0).sum() >= n_lost


@pytest.mark.parametrize("mode", ["static", "dynamic", "mlfq", "token_fair"])
def test_a_mode_that_follows_its_batch_has_one_batch_under_way(mode):
    scenario = load_scenario(
        "chat_poisson", ["phases.warmup=0s", "phases.measure=5s", "arrivals.rate=1/s"]
    )
    run = simulate(
        scenario, shape="70b", hardware="h200", pipeline=2, pipeline_batches=1, mode=mode
    )
    assert (run.request_rows["status"] == 0).all()
    engine = run.manifest.engine
    assert engine is not None
    (replica,) = engine.replicas
    assert replica.bubble_share is not None
    assert replica.bubble_share > 0.49
    with pytest.raises(UsageError, match=f"'{mode}' follows one batch .* pipeline_batches=1"):
        simulate(scenario, shape="70b", hardware="h200", pipeline=2, mode=mode)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline": 2, "shape": "tiny", "hardware": "cpu"}, "no costs of several stages"),
        ({"pipeline": 0}, "pipeline"),
        ({"pipeline": 33}, "pipeline: 8b has 32 layers"),
        ({"pipeline": 2, "async_depth": 1}, "a pipeline plans ahead by itself"),
        ({"pipeline_batches": 2}, "pipeline_batches: has no effect without pipeline"),
        ({"pipeline_batch_seqs": 2}, "pipeline_batch_seqs: has no effect without pipeline"),
    ],
)
def test_an_impossible_pipeline_is_named(settings, message):
    with pytest.raises(UsageError, match=message):
        simulate(load_scenario("chat_poisson"), **settings)
