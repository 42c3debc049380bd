"""Several simulated engines behind a router, against queueing theory."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import UsageError
from loadgen.lab.simulate import simulate as simulate_scenario
from loadgen.records import Status
from loadgen.system.clock import VirtualClock
from loadgen.workload.scenario import load_scenario
from reference_engine.cluster.routers import ROUTERS, Site, read_router
from reference_engine.core.core import EngineState
from reference_engine.executors.base import Caps
from reference_engine.executors.simulated import Simulated
from reference_engine.policies.base import POLICIES
from reference_engine.simulator import Replica, Simulator, simulate
from reference_engine.state.batch import StepResult
from reference_engine.state.cost_model import StepCost
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import Limits
from reference_engine.state.sequence import Request, State

MOONCAKE = "mooncake_synthetic_trace.jsonl"
WIDE = Limits(100_000, 1 << 20, 1 << 17, 1 << 17)
ONE_AT_A_TIME = POLICIES.build({"kind": "chunked", "max_num_seqs": 1})


class ExponentialSteps:
    """Steps of mean 1 s, exponentially distributed."""

    caps = Caps()

    def __init__(self, rng):
        self.rng = rng

    def execute(self, batch):
        return StepResult([0] * batch.n_tokens, None, float(self.rng.exponential()))


class Traffic:
    """Submits requests at their arrivals, cancels some, and keeps the ends."""

    def __init__(self, requests, cancel_s=()):
        self.todo = [(r.arrived_s, 0, k, r) for k, r in enumerate(requests)]
        self.todo += [(at_s, 1, k, name) for k, (at_s, name) in enumerate(cancel_s)]
        self.todo.sort(key=lambda entry: entry[:3], reverse=True)
        self.ended: list[Request] = []

    @property
    def is_closed(self):
        return not self.todo

    def next_s(self):
        return self.todo[-1][0] if self.todo else None

    def act(self, engine):
        while self.todo and self.todo[-1][0] <= engine.now_s:
            _, is_cancel, _, subject = self.todo.pop()
            if is_cancel:
                engine.cancel(subject)
            else:
                engine.submit(subject)

    def receive(self, events, engine):
        self.ended += events.ends

    def refuse(self, request, error):
        raise error


def cluster(n, router, make_executor, policy=ONE_AT_A_TIME, seed=0, n_blocks=64):
    clock = VirtualClock()
    replicas = [
        Replica(EngineState(WIDE, KvPool(n_blocks), clock, policy), make_executor(), f"r{k}")
        for k in range(n)
    ]
    route = read_router(router).route(Site(replicas, clock.now_s, np.random.default_rng(seed)))
    return Simulator(replicas, clock, route)


def mean_response_s(n, router, rate_per_s, n_requests, seed=1):
    """Poisson arrivals at `n` servers of exponential service time, mean 1 s."""
    rng = np.random.default_rng(seed)
    arrived_s = np.cumsum(rng.exponential(1 / rate_per_s, n_requests)).tolist()
    traffic = Traffic([Request(f"q{k}", [0], 1, at_s) for k, at_s in enumerate(arrived_s)])
    engines = cluster(n, router, lambda: ExponentialSteps(rng))
    engines.run(traffic)
    assert len(traffic.ended) == n_requests
    mean_s = float(np.mean([done_s(r) - r.arrived_s for r in traffic.ended]))
    settled = [r for r in traffic.ended if r.arrived_s > arrived_s[n_requests // 5]]
    # L = λW, with L from the integral over time and λ from the count
    mean_n = engines.population.request_s(engines.now_s) / engines.now_s
    assert mean_n == pytest.approx(n_requests / engines.now_s * mean_s, rel=1e-6)
    return float(np.mean([done_s(r) - r.arrived_s for r in settled]))


def done_s(request):
    assert request.finished_s is not None
    return request.finished_s


def shortest_queue_response_s(rho):
    """Mean response of two exponential servers behind a join-the-shortest-queue router, from the
    stationary distribution of the queue lengths (truncated at 32)."""
    size, rate = 32, 2 * rho
    flow = np.zeros((size * size, size * size))
    for i in range(size):
        for j in range(size):
            here = i * size + j
            for share, a, b in ((i < j) + 0.5 * (i == j), 1, 0), ((j < i) + 0.5 * (i == j), 0, 1):
                if share and max(i + a, j + b) < size:
                    flow[here, (i + a) * size + j + b] += rate * share
            if i:
                flow[here, here - size] += 1
            if j:
                flow[here, here - 1] += 1
    flow -= np.diag(flow.sum(axis=1))
    flow[:, 0] = 1.0  # the probabilities add up to 1
    shares = np.linalg.solve(flow.T, np.eye(size * size)[0]).reshape(size, size)
    counts = np.add.outer(np.arange(size), np.arange(size))
    return float((shares * counts).sum() / rate)


# Standard errors of the means: some 2 %
def test_random_routing_makes_independent_m_m_1_queues():
    assert mean_response_s(4, "random", 2.0, 8_000) == pytest.approx(2.0, rel=0.06)


def test_a_central_queue_is_m_m_c():
    # Erlang C for c = 4, ρ = 0.7: W = 1 + 0.42865 / (4 − 2.8)
    response_s = mean_response_s(4, "central_queue:most_requests=1", 2.8, 8_000)
    assert response_s == pytest.approx(1.3572, rel=0.05)


def test_the_shortest_of_two_queues_is_the_known_markov_chain():
    expected_s = shortest_queue_response_s(0.7)
    assert 1 / (1 - 0.7**2) < expected_s < 1 / (1 - 0.7)  # between M/M/2 and M/M/1
    assert mean_response_s(2, "jsq", 1.4, 8_000) == pytest.approx(expected_s, rel=0.06)


def test_the_shorter_of_two_random_queues_is_the_mean_field():
    # Mitzenmacher (2001), table 1: 100 servers, λ = 0.8: 1.9474 predicted, 1.9600 simulated
    assert mean_response_s(100, "power_of_two", 80.0, 12_000) == pytest.approx(1.95, rel=0.06)


def test_old_information_sends_a_herd_to_one_replica():
    fresh_s, old_s = (mean_response_s(4, r, 2.8, 4_000) for r in ("jsq", "jsq:stale=4s"))
    random_s = mean_response_s(4, "random", 2.8, 4_000)
    assert fresh_s < random_s < old_s


@settings(max_examples=25)
@given(
    st.lists(st.floats(0, 0.5), min_size=1, max_size=25),
    st.integers(1, 4),
    st.sampled_from(ROUTERS.names()),
    st.integers(0, 9),
)
def test_every_request_ends_on_one_replica_or_is_cancelled(gaps_s, n, router, every):
    arrived_s = np.cumsum(gaps_s).tolist()
    requests = [Request(f"q{k}", [k % 3] * 40, 5, at_s) for k, at_s in enumerate(arrived_s)]
    cancels = [(r.arrived_s + 0.3, r.id) for k, r in enumerate(requests) if every and not k % every]
    if router == "central_queue":
        router = "central_queue:most_requests=1"
    engines = cluster(n, router, lambda: Simulated(StepCost(step_s=0.2)), n_blocks=8)
    engines.run(Traffic(requests, cancels))
    assert {request.state for request in requests} <= {
        State.finished_length, State.finished_abort, State.waiting
    }  # fmt: skip
    at_router = [request for request in requests if request.state is State.waiting]
    assert {request.id for request in at_router} <= {name for _, name in cancels}
    assert sum(r.n_received for r in engines.replicas) == len(requests) - len(at_router)
    for replica in engines.replicas:
        assert len(replica.population) == 0
        assert replica.state.kv.n_free == 8
        replica.state.check()


def test_replicas_with_traffic_of_their_own_are_engines_of_their_own():
    def requests():
        rng = np.random.default_rng(3)
        at_s = np.cumsum(rng.exponential(0.05, 80))
        return [
            Request(f"q{k}", [k] * int(rng.integers(1, 400)), int(rng.integers(1, 60)), float(t))
            for k, t in enumerate(at_s)
        ]

    cost, policy = StepCost(step_s=0.01, token_s=1e-4), POLICIES.build({"kind": "chunked"})
    together = requests()
    engines = cluster(2, "round_robin", lambda: Simulated(cost), policy, n_blocks=100)
    engines.run(Traffic(together))
    for parity in range(2):
        alone = simulate(requests()[parity::2], policy, cost, n_blocks=100).finished
        expected = {request.id: (request.first_token_s, done_s(request)) for request in alone}
        for request in together[parity::2]:
            assert (request.first_token_s, done_s(request)) == pytest.approx(expected[request.id])


def test_conversations_return_to_the_replica_that_has_their_prefix():
    scenario = load_scenario(
        "agent_multi_turn", ["phases.warmup=0s", "phases.measure=30s", "phases.drain=60s"]
    )
    cached = {}
    for router in ("round_robin", "prefix_aware", "prefix_aware:stale=30s"):
        run = simulate_scenario(scenario, replicas=4, router=router)
        engine = run.manifest.engine
        assert engine is not None
        assert engine.router == router
        n_sent = int(np.isfinite(run.request_rows["sent_s"]).sum())
        assert sum(replica.requests for replica in engine.replicas) == n_sent
        cached[router] = engine.cached_tokens
    counts = [cached[r] for r in ("prefix_aware", "prefix_aware:stale=30s", "round_robin")]
    assert all(more > less for more, less in pairwise(counts))


def test_replicas_may_differ_in_hardware_and_mode():
    scenario = load_scenario("chat_bursty", ["phases.warmup=0s", "phases.measure=10s"])
    run = simulate_scenario(scenario, replicas="1+1:hardware=a100;mode=static", router="jsq")
    engine = run.manifest.engine
    assert engine is not None
    first, second = engine.replicas
    assert first.requests > second.requests > 0
    assert "replicas=1+1:hardware=a100;mode=static" in json.dumps(run.manifest.target.labels.flags)


def test_a_scenario_runs_with_prefill_and_decode_apart():
    scenario = load_scenario("chat_bursty", ["phases.warmup=0s", "phases.measure=10s"])
    run = simulate_scenario(
        scenario, replicas="1:role=prefill+2:role=decode", link_bytes_per_s=10e9, kv_factor=0.5
    )
    engine = run.manifest.engine
    assert engine is not None
    assert engine.transfers is not None
    rows = run.request_rows
    moved = rows[rows["output_tokens"] > 1]
    assert engine.transfers.requests == len(moved) == len(rows)
    # an 8b token has 2 · 32 layers · 8 heads · 128 numbers of 2 bytes
    assert engine.transfers.kv_bytes == pytest.approx(0.5 * 131_072 * moved["input_tokens"].sum())
    assert [replica.role for replica in engine.replicas] == ["prefill", "decode", "decode"]
    assert engine.replicas[0].requests == len(rows)
    assert sum(replica.requests for replica in engine.replicas[1:]) == len(rows)
    assert sum(seconds["kv_transfer"] for seconds in engine.waits_s.values()) > 0


def test_a_scenario_runs_on_divided_gpus():
    scenario = load_scenario("chat_bursty", ["phases.warmup=0s", "phases.measure=10s"])
    run = simulate_scenario(scenario, replicas="1:split=70%+1:split=auto+1", router="jsq")
    engine, rows = run.manifest.engine, run.request_rows
    assert engine is not None
    assert [replica.role for replica in engine.replicas] == [
        *("prefill", "decode", "prefill", "decode", "both")
    ]
    first, second, third, fourth, whole = (replica.requests for replica in engine.replicas)
    assert first + third + whole == len(rows)
    assert second + fourth <= first + third
    n_single = int((rows["output_tokens"] == 1).sum())
    assert second + fourth >= first + third - n_single
    assert whole > 0


def test_kv_goes_to_host_memory_and_comes_back():
    scenario = load_scenario(
        "rag_shared_prefix", ["phases.warmup=0s", "phases.measure=20s", "phases.drain=30s"]
    )
    without = simulate_scenario(scenario, kv_blocks=1500).manifest.engine
    assert without is not None
    assert without.host is None
    engine = simulate_scenario(
        scenario, kv_blocks=1500, host_memory=40e9, host_prefixes=True, host_latency="1ms"
    ).manifest.engine
    assert engine is not None
    assert engine.cached_tokens > 2 * without.cached_tokens
    assert engine.host is not None
    assert engine.host.back_bytes > 0
    # copied at 50 GB/s, with a millisecond for each direction of a step
    n_bytes = engine.host.out_bytes + engine.host.back_bytes
    copying_s = n_bytes / 50e9
    assert copying_s < engine.host.copying_s < copying_s + 2e-3 * engine.steps
    assert n_bytes % (16 * 131_072) == 0


def test_requests_of_a_failed_replica_are_recorded_as_a_gateway_would():
    scenario = load_scenario(
        "long_prompt_interference",
        ["phases.warmup=0s", "phases.measure=20s", "arrivals.rate=60/s"],
    )
    lost = {}
    for retries, resume in ((0, False), (1, False), (1, True)):
        run = simulate_scenario(
            scenario,
            replicas=3,
            router="jsq",
            fail="2@10s:5s",
            retries=retries,
            resume=resume,
        )
        engine, rows = run.manifest.engine, run.request_rows
        assert engine is not None
        assert engine.failures is not None
        failed = rows[rows["status"] != Status.ok]
        assert engine.failures.lost == len(failed)
        begun = failed["chunks"] > 0
        assert (failed["status"][begun] == Status.stream_error).all()
        assert (failed["http_status"][~begun] == 502).all()
        assert (failed["done_s"] == 10.0).all()
        assert [replica.failures for replica in engine.replicas] == [0, 1, 0]
        lost[retries, resume] = engine.failures.lost
    assert lost[0, False] > lost[1, False] > lost[1, True] == 0


def test_replicas_scale_with_a_flash_crowd():
    scenario = load_scenario(
        "flash_crowd", ["phases.warmup=0s", "phases.measure=2m", "arrivals.peak=60/s"]
    )
    run = simulate_scenario(
        scenario, replicas=4, hardware="a100", router="jsq", target_requests=24, startup="10s"
    )
    engine = run.manifest.engine
    assert engine is not None
    assert engine.scaling is not None
    assert engine.scaling.starts > 0
    shares = [replica.on_share for replica in engine.replicas]
    assert shares[0] == 1.0
    assert engine.scaling.mean_replicas == pytest.approx(sum(shares))
    assert 1.0 < engine.scaling.mean_replicas < 4.0
    assert all(replica.busy_share <= replica.on_share for replica in engine.replicas)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": "0"}, "replicas: expected a number"),
        ({"replicas": "2:replicas=3"}, "a setting of all replicas together"),
        ({"replicas": "2:hardwar=h100"}, "did you mean 'hardware'"),
        ({"replicas": 2, "router": "jsq:stal=1s"}, "router: stal: unknown key"),
        ({"replicas": 2, "router": "jsq:stale"}, "expected key=value after 'jsq:'"),
        ({"replicas": 2, "router": "round_robn"}, "did you mean 'round_robin'"),
        ({"replicas": 2, "router": "jqs"}, "router: unknown router 'jqs'; did you mean 'jsq'"),
        ({"replicas": 2, "decode_router": "p2"}, "decode_router: .*did you mean 'p2c'"),
        ({"split": "0"}, "split: "),
        ({"host_memory": 1e9, "swap_blocks": 9}, "host_memory: leave out swap_blocks"),
        (
            {"host_prefixes": True},
            "host_prefixes: has no effect without host_memory or swap_blocks",
        ),
        ({"split": "50%", "async_depth": 1}, "async_depth=0"),
        ({"split": "50%", "mode": "static"}, "a mode that streams"),
        ({"split": "50%", "pipeline": 2}, "split: not simulated together with pipeline"),
        ({"replicas": "1:split=50%+1", "fail": "1@1s:1s"}, "split: role, rebalance, failures"),
        ({"split_gain": 1.1}, "split_gain: has no effect without split, e.g. split=70%"),
        ({"role": "prefill"}, "needs a group with role=decode"),
        ({"replicas": "2+2:role=decode"}, "needs a group with role=decode"),
        ({"replicas": "1:role=prefil+1:role=decode"}, "'prefil'; did you mean 'prefill'"),
        ({"replicas": "1:role=prefill;mode=static+1:role=decode"}, "a mode that streams"),
        ({"replicas": "1:role=prefill;async_depth=1+1:role=decode"}, "async_depth=0"),
        ({"replicas": "1:role=prefill;shape=1b+1:role=decode"}, "equal shapes and kv_dtypes"),
        ({"rebalance": "1s"}, "needs two replicas that decode"),
        ({"replicas": "2", "mode": "static", "rebalance": "1s"}, "a mode that streams"),
        ({"replicas": 2, "fail": "3@10s:10s"}, "no replica 3; known: 1 to 2"),
        ({"replicas": 2, "fail": "1@10:10s"}, "fail: '1@10:10s': .*e.g. 2@30s:60s"),
        ({"replicas": 2, "fail": "0@10s:10s"}, "expected replica@instant:repair"),
        ({"replicas": 2, "target_requests": 8, "min_replicas": 3}, "min_replicas: 3 is more than"),
        (
            {"replicas": 2, "target_requests": 8, "decode_min_replicas": 1},
            "decode_min_replicas: has",
        ),
        (
            {"replicas": "2:role=prefill+1:role=decode", "target_requests": 8, "min_replicas": 2},
            "decode_min_replicas: 2 is more than the 1",
        ),
        ({"replicas": 2, "retries": 1}, "retries: has no effect without fail or mtbf"),
        ({"replicas": 2, "fail": "1@1s:1s", "repair": "5s"}, "repair: has no effect without mtbf"),
        ({"replicas": 2, "startup": "5s"}, "startup: has no effect without target_requests"),
        ({"replicas": 2, "kv_factor": 0.5}, "kv_factor: has no effect, because no KV is copied"),
        ({"replicas": 2, "rebalance": "1"}, "rebalance: '1' is not a duration"),
        ({"replicas": "1+1:block_tokens=64"}, "block_tokens is a setting of all"),
        ({"replicas": "1:kv_factor=0.5"}, "a setting of all replicas together"),
    ],
)
def test_a_malformed_cluster_is_named(settings, message):
    with pytest.raises(UsageError, match=message):
        simulate_scenario(load_scenario("chat_bursty"), **settings)


def cluster_speed(shared, *arguments):
    program = Path(__file__).parents[2] / "benchmarks" / "cluster_speed.py"
    return subprocess.run(
        [sys.executable, str(program), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, "SLOBENCH_SHARED": str(shared)},
    ).stdout


def test_eight_replicas_serve_a_published_trace():
    path = Path(os.environ.get("SLOBENCH_SHARED", "../shared")) / "traces" / MOONCAKE
    if not path.is_file():
        pytest.skip(f"{path} is not there (set SLOBENCH_SHARED to the folder that holds traces/)")
    shown = cluster_speed(path.parents[1], "--requests", "150")
    assert "'ended': 150, 'refused': 0" in shown


def test_keys_of_hashed_blocks_hit_the_cache_as_hashes_of_tokens(tmp_path):
    rng = np.random.default_rng(8)
    lines = []
    for k in range(60):
        n_shared = int(rng.integers(0, 6))
        n_tokens = 512 * n_shared + int(rng.integers(1, 3000))
        n_ids = -(-n_tokens // 512)
        hash_ids = [*range(n_shared), *range(100 * k + 100, 100 * k + 200)][:n_ids]
        line = {"timestamp": 40 * k, "input_length": n_tokens, "output_length": 40}
        lines.append(json.dumps(line | {"hash_ids": hash_ids}))
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / MOONCAKE).write_text("\n".join(lines))
    words = ("--requests", "150", "--speedup", "1")
    by_keys, by_tokens = (
        cluster_speed(tmp_path, *words, *more) for more in ((), ("--hash-tokens",))
    )
    assert "'cached_tokens': 0," not in by_keys
    assert re.findall(r"'cached_tokens.*", by_keys) == re.findall(r"'cached_tokens.*", by_tokens)
