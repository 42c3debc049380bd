"""A single simulated engine makes the decisions that it made before several could be simulated: the
digests were taken from the loop that ran one engine to the end of each step."""

import hashlib

import numpy as np
import pytest

from loadgen.lab.prompt_ids import PromptIds
from loadgen.lab.sim_options import sim_options
from loadgen.lab.simulated_engine import build
from loadgen.lab.virtual_client import VirtualClient
from loadgen.workload.scenario import load_scenario
from loadgen.workload.schedule import make_plan
from reference_engine.state.steps import StepLog, StepRecord

PHASES = ["phases.warmup=0s", "phases.measure=10s", "phases.drain=60s"]
TIGHT = {"kv_blocks": 400, "swap_blocks": 200}
AHEAD = {"async_depth": 1}
LONG, AGENTS = "long_prompt_interference", "agent_multi_turn"
CASES = {
    "bucketed": (LONG, {"mode": "bucketed"}, "0d5016595edd23e3"),
    "chunked": (LONG, {"mode": "chunked"}, "f5b2a3924a5b96fc"),
    "continuous": (LONG, {"mode": "continuous"}, "10a4b7006dc5db27"),
    "deadline": (LONG, {"mode": "deadline"}, "fb0275ccee80ccbf"),
    "dynamic": (LONG, {"mode": "dynamic"}, "88251af3164a3175"),
    "mlfq": (LONG, {"mode": "mlfq"}, "fb0275ccee80ccbf"),
    "orca": (LONG, {"mode": "orca"}, "4f5a963eeb840407"),
    "prefill_first": (LONG, {"mode": "prefill_first"}, "ef7059a5ed8cab22"),
    "priority": (LONG, {"mode": "priority"}, "3e78d54551d04dab"),
    "sjf": (LONG, {"mode": "sjf"}, "e16a6ba81e6c2725"),
    "smdp_table": (LONG, {"mode": "smdp_table"}, "1025b34fc305eae9"),
    "split_fuse": (LONG, {"mode": "split_fuse"}, "e9032fe84669a7ac"),
    "static": (LONG, {"mode": "static"}, "317c55a88c3c8635"),
    "token_fair": (LONG, {"mode": "token_fair"}, "f5b2a3924a5b96fc"),
    "weighted_naive": (LONG, {"mode": "weighted_naive"}, "cf4fea976789e14a"),
    "chunked planning ahead": (LONG, {"mode": "chunked", **AHEAD}, "e0082af486ff88dc"),
    "chunked short of memory": (AGENTS, {"mode": "chunked", **TIGHT}, "4de5b2198a69a23a"),
    "static planning ahead": (LONG, {"mode": "static", **AHEAD}, "d37c8e1d7c8d454f"),
    "static short of memory": (AGENTS, {"mode": "static", **TIGHT}, "f28846d9813e18df"),
    "sjf planning ahead": (LONG, {"mode": "sjf", **AHEAD}, "fe26ef75b367cc09"),
    "sjf short of memory": (AGENTS, {"mode": "sjf", **TIGHT}, "4de5b2198a69a23a"),
    "chunked users": ("closed_loop_users", {"mode": "chunked"}, "8450b9345b5feb85"),
}


def digest(scenario_name, settings):
    """SHA-256 of the recorded rows, the chunks and the steps, with times in whole microseconds, in
    which the powers of different C libraries agree."""
    scenario = load_scenario(scenario_name, PHASES)
    plan = make_plan(scenario)
    steps: list[StepRecord] = []
    engine = build(
        sim_options(settings), PromptIds(plan).is_sharing, log=StepLog("full", on_step=steps.append)
    )
    client = VirtualClient(scenario, plan, None)
    engine.simulator.run(client)
    rows, chunks, _ = client.tables()
    sha = hashlib.sha256()
    for name in ("released_s", "first_token_s", "last_token_s", "done_s", "server_queue_s"):
        sha.update(whole_us(rows[name]))
    for name in ("status", "output_tokens", "cached_tokens", "finish_reason"):
        sha.update(rows[name].tobytes())
    sha.update(whole_us(chunks["received_s"]))
    sha.update(whole_us(np.array([(s.began_s, s.end_s, s.duration_s) for s in steps])))
    sha.update(repr([(s.items, s.causes, s.kv_used_blocks, s.n_preempted) for s in steps]).encode())
    return sha.hexdigest()[:16]


def whole_us(seconds):
    return np.round(np.nan_to_num(np.asarray(seconds, "f8"), nan=-1.0) * 1e6).astype("i8").tobytes()


@pytest.mark.parametrize("name", sorted(CASES))
def test_one_engine_decides_as_it_did_alone(name):
    scenario_name, settings, expected = CASES[name]
    assert digest(scenario_name, settings) == expected
