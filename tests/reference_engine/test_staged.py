"""Pipeline parallelism, against timelines worked out by hand."""

import pytest

from loadgen.clock import VirtualClock
from loadgen.errors import UsageError
from loadgen.lab.sim_options import sim_options
from loadgen.lab.simulate import simulate
from loadgen.lab.simulated_engine import build
from loadgen.workload.scenario import load_scenario
from reference_engine.executors.simulated import Simulated
from reference_engine.executors.staged import Staged, Stages
from reference_engine.simulator import Replica, Simulator
from reference_engine.state.cost_model import StepCost
from tests.reference_engine.cluster_kit import Part, Steps, prompt, replicas_of


def pipeline(n, cost, hop_s=0.0, hop_token_s=0.0):
    """A simulator of the engines of a pipeline; requests go to them in turn."""
    clock, stages = VirtualClock(), Stages(n, hop_s, hop_token_s)
    engines = [
        Replica(replica.state, Staged(Simulated(cost), stages, clock), replica.name)
        for replica in replicas_of([Part(n=n)], clock)
    ]
    return Simulator(engines, clock, lambda request: "ab".index(request.id) % n)


def test_two_engines_fill_two_stages():
    # A step takes 1 s, half of it in each stage.
    client = Steps([prompt("a", 16, 3), prompt("b", 16, 3)])
    pipeline(2, StepCost(step_s=1.0)).run(client)
    a, b = client.requests
    assert a.token_times_s == [1.0, 2.0, 3.0]
    assert b.token_times_s == [1.5, 2.5, 3.5]  # behind "a" in the first stage


def test_an_engine_alone_takes_the_time_of_all_stages():
    client = Steps([prompt("a", 16, 3)])
    pipeline(2, StepCost(step_s=1.0)).run(client)
    assert client.requests[0].token_times_s == [1.0, 2.0, 3.0]


def test_a_hop_takes_its_message():
    client = Steps([prompt("a", 16, 2)])
    pipeline(2, StepCost(step_s=1.0), hop_s=0.25, hop_token_s=0.0625).run(client)
    # 16 tokens: 0.25 + 1 s between the stages; then a single token: 0.25 + 0.0625 s
    assert client.requests[0].token_times_s == [2.25, 2.25 + 1.3125]


def test_a_long_step_holds_the_next_engine_up():
    # A token costs 0.25 s: the prompt of "a" takes 4 s, 2 s in each stage, that of "b" 1 s.
    client = Steps([prompt("a", 16, 2), prompt("b", 4, 3)])
    pipeline(2, StepCost(added_token_s=0.25)).run(client)
    a, b = client.requests
    # a: stage 1 0–2 s, stage 2 2–4 s, then 4–4.125 and 4.5–4.625 s behind "b"
    # b: stage 1 2–2.5 s, stage 2 4–4.5 s; a step of 0.25 s from 4.5 s on: 4.625–4.75 s
    assert b.token_times_s == [4.5, 4.75, 5.0]
    assert a.token_times_s == [4.0, 4.625]


def test_steps_pass_stages_in_their_order():
    stages = Stages(3)
    assert stages.enter(0.0, 3.0, 1) == 3.0
    assert stages.enter(0.0, 1.5, 1) == 3.5  # half a second behind the first in the last stage
    assert stages.enter(10.0, 3.0, 1) == 13.0


def test_saturated_engines_share_the_pipeline():
    # 3 engines, each with a decoding request: a step of 1.5 s leaves the last stage every 0.5 s.
    stages = 3
    client = Steps([prompt(name, 16, 40) for name in "abc"])
    clock, shared = VirtualClock(), Stages(stages)
    engines = [
        Replica(r.state, Staged(Simulated(StepCost(step_s=1.5)), shared, clock), r.name)
        for r in replicas_of([Part(n=stages)], clock)
    ]
    Simulator(engines, clock, lambda request: "abc".index(request.id)).run(client)
    times_s = sorted(t for request in client.requests for t in request.token_times_s)
    assert times_s == [1.5 + 0.5 * k for k in range(120)]


def test_a_replica_of_the_settings_has_an_engine_per_stage():
    whole = build(sim_options({"shape": "70b", "hardware": "4xh200"}), is_sharing=False)
    staged = build(
        sim_options({"shape": "70b", "hardware": "h200", "pipeline": 4}), is_sharing=False
    )
    names = [replica.name for replica in staged.simulator.replicas]
    assert names == [f"replica 1, engine {k}" for k in (1, 2, 3, 4)]
    n_blocks = [replica.state.kv.n_blocks for replica in staged.simulator.replicas]
    assert n_blocks == [whole.simulator.replicas[0].state.kv.n_blocks // 4] * 4


def test_a_pipeline_serves_a_scenario():
    scenario = load_scenario("chat_poisson", ["phases.warmup=0s", "phases.measure=10s"])
    run = simulate(scenario, shape="70b", hardware="h200", pipeline=4, router="jsq")
    engine = run.manifest.engine
    assert engine is not None
    assert len(engine.replicas) == 4
    rows = run.request_rows
    assert (rows["status"] == 0).all()
    # a token needs at least the weights' passage: 141 GB at 98 % of 4.3 TB/s is 33 ms
    tpot_s = (rows["last_token_s"] - rows["first_token_s"]) / (rows["output_tokens"] - 1)
    assert tpot_s.min() > 0.033


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline": 2, "shape": "tiny", "hardware": "cpu"}, "no costs of several stages"),
        ({"pipeline": 2, "mtbf": "1m"}, "failures and autoscaling of the engines of a pipeline"),
        ({"replicas": "1:pipeline=2+1", "fail": "1@1s:1s"}, "of the engines of a pipeline"),
        ({"replicas": 2, "pipeline": 2, "rebalance": "1s"}, "of the engines of a pipeline"),
        ({"replicas": "1:role=prefill+1:role=decode", "pipeline": 2}, "roles, migration"),
        ({"pipeline": 0}, "pipeline"),
    ],
)
def test_an_impossible_pipeline_is_named(settings, message):
    with pytest.raises(UsageError, match=message):
        simulate(load_scenario("chat_poisson"), **settings)
