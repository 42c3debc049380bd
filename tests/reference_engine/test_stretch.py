"""Decode steps that a simulator takes at once, against the same steps taken one by one."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.system.clock import VirtualClock
from reference_engine.cluster.routers import ROUTERS, Site, read_router
from reference_engine.core.core import EngineState
from reference_engine.core.stretch import PromptStretch
from reference_engine.executors.base import Caps
from reference_engine.executors.delayed import NO_DELAY, StepDelay
from reference_engine.executors.simulated import TOKEN, Simulated
from reference_engine.policies.base import POLICIES
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.simulator import PatientClient, Replica, Simulator
from reference_engine.state.cost_model import StepCost
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import Limits
from reference_engine.state.sequence import Request
from reference_engine.state.step_variation import StepVariation
from reference_engine.state.steps import StepLog
from reference_engine.state.swap import HostPool

LIMITS = Limits(64, 16, 200, 400)
COST = StepCost(
    step_s=0.004, seq_s=0.0003, added_token_s=0.0002, context_token_s=1e-6, prefill_attention_s=1e-7
)
VARYING = StepVariation((0.1, 0.9, 1.0), (0.8, 1.0, 1.7), 0.5, 8.0, 0.2, (0.001, 0.02))
MODES = [
    *({"kind": kind} for kind in POLICIES.names()),
    {"kind": "chunked", "token_budget": 24},
    {"kind": "chunked", "max_num_seqs": 3},
    {"kind": "continuous", "max_num_seqs": 4, "reserve": "max"},
    {"kind": "split_fuse", "token_budget": 16, "pad": "budget"},
    {"kind": "sjf", "preempt": False},
    {"kind": "priority", "preemptive": True},
    {"kind": "mlfq", "base_quantum": "100ms", "n_levels": 3},
    {"kind": "bucketed", "order": "oldest_first"},
]


@dataclass(frozen=True)
class Job:
    at_s: float
    n_prompt: int
    n_output: int
    priority: int = 0
    cancel_after_s: float = math.inf
    stops: bool = False
    follow_ups: int = 0
    """Requests of the same lengths, each sent when the one before has ended."""
    text: int = 1
    """The token of the prompt: jobs with the same token share their prefix."""
    tenant: str = "default"


@dataclass(frozen=True)
class Engine:
    mode: dict[str, object]
    n_blocks: int = 60
    n_host_blocks: int = 0
    host_prefixes: bool = False
    prefix_cache: bool = True
    delay: StepDelay = NO_DELAY
    async_depth: int = 0
    variation: StepVariation | None = None


class StepByStep:
    """Sends jobs and their follow-ups, and cancels some; the engines take single steps for it."""

    def __init__(self, jobs):
        self.jobs = sorted(jobs, key=lambda job: job.at_s)
        self.todo = [(job.at_s, f"r{k}", job) for k, job in enumerate(self.jobs)]
        self.cancels, self.requests, self.received, self.refused = [], {}, {}, []

    @property
    def is_closed(self):
        return not self.todo and all(r.finished_s is not None for r in self.requests.values())

    def next_s(self):
        instants_s = [at_s for at_s, *_ in self.todo + self.cancels]
        return min(instants_s, default=None)

    def act(self, engine):
        for due in [entry for entry in self.todo if entry[0] <= engine.now_s]:
            self.todo.remove(due)
            self.send(*due, engine)
        for due in [entry for entry in self.cancels if entry[0] <= engine.now_s]:
            self.cancels.remove(due)
            engine.cancel(due[1])

    def send(self, at_s, name, job, engine):
        request = self.requests[name] = Request(
            name,
            [job.text] * job.n_prompt,
            job.n_output,
            at_s,
            tenant=job.tenant,
            priority=job.priority,
            stop_ids=frozenset({TOKEN}) if job.stops else frozenset(),
            token_times_s=[],
        )
        engine.submit(request)
        if job.cancel_after_s < math.inf:
            self.cancels.append((at_s + job.cancel_after_s, name))

    def receive(self, events, engine):
        for event in events:
            self.received.setdefault(event.request.id, []).append(engine.now_s)
        for request in events.ends:
            name, _, lap = request.id.partition("+")
            job = self.jobs[int(name[1:])]
            if int(lap or 0) < job.follow_ups:
                self.todo.append((engine.now_s, f"{name}+{int(lap or 0) + 1}", job))

    def refuse(self, request, error):
        self.refused.append((request.id, error.code))
        request.finished_s = math.nan


class AtOnce(StepByStep):
    def quiet_until_s(self):
        next_s = self.next_s()
        return math.inf if next_s is None else next_s


JOBS = st.builds(
    Job,
    at_s=st.sampled_from([0.0, 0.01, 0.1, 0.137, 0.3, 0.9]),
    n_prompt=st.integers(1, 60),
    n_output=st.sampled_from([1, 2, 15, 16, 17, 40, 120]),
    priority=st.integers(0, 2),
    cancel_after_s=st.sampled_from([math.inf, math.inf, 0.05, 0.4]),
    stops=st.sampled_from([False, False, False, True]),
    follow_ups=st.integers(0, 2),
    text=st.integers(1, 3),
    tenant=st.sampled_from(["default", "other"]),
)
ENGINES = st.builds(
    Engine,
    mode=st.sampled_from(MODES),
    n_blocks=st.integers(14, 60),
    n_host_blocks=st.sampled_from([0, 0, 40]),
    host_prefixes=st.booleans(),
    prefix_cache=st.booleans(),
    delay=st.sampled_from([NO_DELAY, StepDelay(share=0.1), StepDelay(seconds=0.003)]),
    async_depth=st.sampled_from([0, 0, 0, 1]),
    variation=st.sampled_from([None, None, VARYING]),
)
TWO_BEHIND = [f"{kind}:stale=50ms" for kind in ("least_kv", "prefix_aware")] + ROUTERS.names()


def played(client, engine, n_replicas, router):
    """All that a run leaves behind."""
    clock = VirtualClock()
    caps = Caps(n_host_blocks=engine.n_host_blocks, copy_s=1e-4, copy_latency_s=1e-3)
    replicas = [
        Replica(
            EngineState(
                LIMITS,
                KvPool(engine.n_blocks, prefix_cache=engine.prefix_cache),
                clock,
                POLICIES.build(engine.mode),
                cost=COST,
                predictor=QuantilePredictor(),
                log=StepLog(level="full"),
                host=HostPool(
                    caps.n_host_blocks, caps.copy_s, caps.copy_latency_s, engine.host_prefixes
                ),
                async_depth=engine.async_depth,
            ),
            Simulated(COST, caps, engine.delay, engine.variation, k),
            f"replica {k}",
        )
        for k in range(n_replicas)
    ]
    route = read_router(router).route(Site(replicas, clock.now_s, np.random.default_rng(1)))
    Simulator(replicas, clock, route).run(client)
    for replica in replicas:
        replica.state.check()
    return {
        "requests": {
            name: (r.token_times_s, r.tokens, r.state, r.first_token_s, r.finished_s, r.blocks)
            for name, r in client.requests.items()
            if (name, "refused") not in client.refused
        },
        "steps": [list(replica.state.log.steps) for replica in replicas],
        "events": [list(replica.state.log.events) for replica in replicas],
        "counters": [replica.state.counters for replica in replicas],
        "accounts": [dict(replica.state.accounting.accounts) for replica in replicas],
        "busy_s": [pytest.approx(replica.busy_s) for replica in replicas],
        "refused": client.refused,
        "ended_s": clock.now_s(),
    }


def assert_same(jobs, engine, n_replicas, router):
    single, at_once = StepByStep(jobs), AtOnce(jobs)
    expected = played(single, engine, n_replicas, router)
    found = played(at_once, engine, n_replicas, router)
    assert isinstance(at_once, PatientClient)
    assert not isinstance(single, PatientClient)
    for part, value in expected.items():
        assert found[part] == value, part
    times = {name: r.token_times_s for name, r in single.requests.items() if r.token_times_s}
    assert times == single.received
    return found


@settings(deadline=None, max_examples=60)
@given(st.lists(JOBS, min_size=1, max_size=8), ENGINES)
def test_steps_taken_at_once_leave_what_single_steps_leave(jobs, engine):
    assert_same(jobs, engine, 1, "round_robin")


@settings(deadline=None, max_examples=40)
@given(st.lists(JOBS, min_size=1, max_size=8), ENGINES, st.sampled_from(TWO_BEHIND))
def test_a_router_reads_steps_that_are_taken_at_once(jobs, engine, router):
    assert_same(jobs, engine, 2, router)


def test_a_request_that_arrives_at_the_end_of_a_step_joins_the_next():
    # Steps of 7.7 ms and more: the request arrives when the second decode step of a replica ends.
    first = Job(0.0, 1, 40)
    engine = Engine({"kind": "chunked"}, prefix_cache=False)
    client = StepByStep([first])
    played(client, engine, 2, "round_robin")
    end_s = client.requests["r0"].token_times_s[2]
    jobs = [first, first, Job(end_s, 1, 40), Job(end_s, 1, 40)]
    assert_same(jobs, engine, 2, "round_robin")


@pytest.mark.parametrize("n_prompt", [32, 33, 49, 60])
@pytest.mark.parametrize("after_s", [0.003, 0.012, 0.02])
@pytest.mark.parametrize("variation", [None, VARYING])
def test_pieces_of_a_prompt_alone_are_taken_at_once(n_prompt, after_s, variation, monkeypatch):
    taken = []
    commit = PromptStretch.commit

    def counted(stretch, n):
        taken.append(n)
        commit(stretch, n)

    monkeypatch.setattr(PromptStretch, "commit", counted)
    # At most 16 tokens a step; the second request interrupts the prompt of the first.
    jobs = [Job(0.0, n_prompt, 3), Job(after_s, 40, 3, text=2), Job(1.0, n_prompt, 3, text=3)]
    assert_same(jobs, Engine({"kind": "chunked"}, variation=variation), 1, "round_robin")
    assert max(taken) >= 1


@pytest.mark.parametrize("last", [Job(5.0, 20, 180, text=99), Job(5.0, 190, 3, text=99)])
def test_steps_that_copy_a_prefix_to_host_memory_are_taken_singly(last):
    # 15 prompts leave 45 of 50 blocks in the prefix cache; the last request needs 13 or more.
    jobs = [Job(0.2 * k, 50, 1, text=k) for k in range(15)]
    engine = Engine({"kind": "chunked"}, n_blocks=50, n_host_blocks=40, host_prefixes=True)
    found = assert_same([*jobs, last], engine, 1, "round_robin")
    assert found["counters"][0].copied_out_blocks > 5


def test_a_stretch_is_taken_where_nothing_happens_and_preempts_where_memory_ends():
    jobs = [Job(0.0, 20, 120, text=k) for k in range(4)]
    engine = Engine({"kind": "chunked"}, n_blocks=24)
    found = assert_same(jobs, engine, 1, "round_robin")
    assert found["counters"][0].preemptions > 0
    roomy = assert_same(jobs, replace(engine, n_blocks=200), 1, "round_robin")
    assert roomy["counters"][0].preemptions == 0
