"""The 24 public conversations: hits, joins and waits by scripts that share no code with the loader.

Hit rates: requests in order of their recorded start, a cache per file, subagents included, a block
known by the hash of itself and of all before it.
"""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from loadgen.measure.prefix_hits import ideal_hits
from loadgen.workload.agents.load import load_corpus
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan

FOLDER = Path(os.environ.get("SLOBENCH_SHARED", "../shared")) / "traces" / "agents" / "weka"


@pytest.fixture(scope="module")
def folder():
    if not FOLDER.is_dir():
        pytest.skip(f"{FOLDER} is not there (set SLOBENCH_SHARED to the folder that holds traces/)")
    return FOLDER


@pytest.fixture(scope="module")
def corpus(folder):
    return load_corpus(folder)


def flat(path):
    """(start, request) of all requests of a file, in order of their start."""
    found = []
    for request in json.loads(path.read_text())["requests"]:
        if "requests" in request:
            found += [(request["t"] + inner["t"], inner) for inner in request["requests"]]
        else:
            found.append((request["t"], request))
    return sorted(found, key=lambda pair: pair[0])


def hits_and_inputs(path):
    seen, hits, inputs = set(), [], []
    for _, request in flat(path):
        known, n_hit, chained = True, 0, 0
        for block in request["hash_ids"]:
            chained = hash((chained, block))
            known = known and chained in seen
            n_hit += known
            seen.add(chained)
        hits.append(64 * n_hit)
        inputs.append(request["in"])
    return hits, inputs


def test_the_ideal_hits_of_every_request_are_those_of_a_set_of_chained_hashes(folder, corpus):
    total, hit, rates = 0, 0, {}
    for path, tree in zip(sorted(folder.glob("*.json")), corpus.trees, strict=True):
        hits, inputs = hits_and_inputs(path)
        assert tree.hit_tokens.tolist() == hits, path
        assert tree.input_tokens.tolist() == inputs, path
        total, hit = total + sum(inputs), hit + sum(hits)
        rates[tree.name] = f"{sum(hits) / sum(inputs):.2%}"
    assert (len(corpus.trees), total, f"{hit / total:.2%}") == (24, 93_413_353, "94.65%")
    assert (rates["trace_0291"], rates["trace_0456"]) == ("89.73%", "74.41%")


def test_a_plan_has_the_recorded_sharing_less_the_last_token_of_a_prompt(folder, corpus):
    values = {
        "name": "all",
        "arrivals": {"kind": "burst", "requests": 24},
        "agents": {"path": str(folder)},
        "phases": {"warmup": "0s", "measure": "10h"},
        "slo": ["ttft <= 15s"],
    }
    plan = make_plan(Scenario.model_validate(values))
    assert len(plan.schedule) == 922
    hits = ideal_hits(plan.schedule, plan.pieces)
    of_trees = sorted(tree.hit_tokens.tolist() for tree in corpus.trees)
    bounds = np.flatnonzero(np.diff(plan.schedule["session_id"])) + 1
    of_plan = sorted(own.tolist() for own in np.split(hits, bounds))
    missing = [np.subtract(a, b) for a, b in zip(of_trees, of_plan, strict=True)]
    assert {int(n) for own in missing for n in own} <= {0, 1}


def test_the_parents_of_trace_0277_wait_for_a_subagent_each(corpus):
    """Its first three subagents end at 135.1, 345.5 and 399.4 s, whatever started before that."""
    (tree,) = (tree for tree in corpus.trees if tree.name == "trace_0277")
    of_subagents = {
        round(float(tree.starts_s[edge.child]), 1): round(float(tree.ends_s[edge.parent]), 1)
        for edge in tree.tree.edges
        if tree.tree.chain_of[edge.child] == 0 and tree.tree.chain_of[edge.parent] != 0
    }
    assert of_subagents == {228.0: 135.1, 347.0: 345.5, 763.0: 399.4}
    assert tree.tree.n_background == 1


def test_no_chain_overlaps_itself_and_replays_at_the_recorded_pace_are_the_recording(
    folder, corpus
):
    for path, tree in zip(sorted(folder.glob("*.json")), corpus.trees, strict=True):
        recorded = flat(path)
        starts_s = np.array([start for start, _ in recorded]) - recorded[0][0]
        assert tree.starts_s == pytest.approx(starts_s, abs=1e-9)
        for chain in tree.tree.chains:
            for a, b in zip(chain.rows[:-1], chain.rows[1:], strict=True):
                took_s = recorded[a][1].get("api_time", 0.0)
                assert starts_s[a] + took_s <= starts_s[b] + 1e-9, path
                assert recorded[a][1]["model"] == recorded[b][1]["model"]
        replayed = starts_s.copy()
        for row in range(len(tree)):
            waits = [
                replayed[edge.parent] + tree.ends_s[edge.parent] - tree.starts_s[edge.parent]
                + edge.delay_s
                for edge in tree.tree.edges
                if edge.child == row
            ]  # fmt: skip
            replayed[row] = max(waits, default=starts_s[row])
        assert replayed == pytest.approx(starts_s, abs=1e-6)


def test_the_24_files_are_read_in_less_than_5_seconds_of_cpu(folder):
    begun_s = time.process_time()
    load_corpus(folder)
    assert time.process_time() - begun_s < 5.0
