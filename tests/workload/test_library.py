"""Every shipped scenario loads, says where it comes from, and makes a schedule."""

import json

import numpy as np
import pytest
import yaml

from loadgen.records import Phase
from loadgen.workload.preview import preview
from loadgen.workload.scenario import load_scenario, read_source, shipped_scenarios
from loadgen.workload.schedule import make_plan

LIBRARY = {
    *("quickstart", "chat_poisson", "chat_bursty", "power_law_mix", "long_prompt_interference"),
    *("rag_shared_prefix", "agent_multi_turn", "flash_crowd", "diurnal_day", "azure_replay"),
    *("mooncake_replay", "mixed_classes", "closed_loop_users", "offline_batch"),
    *("capacity_search", "nightly_small", "uneven_answers", "equal_cost"),
    *("long_prompt_interference_cpu", "uneven_answers_cpu", "code_generation", "long_writing"),
}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{15 + k // 60:02d}:{k % 60:02d}.1234567,{100 + k},{10 + k % 7}\n"
    for k in range(600)
)
MOONCAKE = "".join(
    json.dumps(
        {"timestamp": 600 * k, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2 + k]}
    )
    + "\n"
    for k in range(2000)
)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Loads a shipped scenario; replays get a small made-up file."""
    folder = tmp_path_factory.mktemp("traces")
    samples = {"azure_replay": ("a.csv", AZURE), "mooncake_replay": ("m.jsonl", MOONCAKE)}

    def load(name):
        if name not in samples:
            return load_scenario(name)
        file, text = samples[name]
        (folder / file).write_text(text)
        return load_scenario(name, [f"arrivals.path={folder / file}"])

    return load


def test_the_library_is_complete():
    assert set(shipped_scenarios()) >= LIBRARY


@pytest.mark.parametrize("name", sorted(LIBRARY))
def test_a_shipped_scenario_makes_its_schedule_and_its_preview(load, name):
    scenario = load(name)
    schedule, edges, _ = make_plan(scenario)
    assert np.count_nonzero(schedule["phase"] == Phase.measure) > 50
    assert (schedule["input_tokens"] > 0).all()
    assert (schedule["output_tokens"] > 0).all()
    figures = json.loads(json.dumps(preview(scenario, schedule, edges), allow_nan=False))
    assert figures["scenario"] == name
    assert figures["n"] >= figures["n_measured"] > 0
    waiting = ("agent_multi_turn", "closed_loop_users", "long_prompt_interference_cpu")
    is_plain = name not in (*waiting, "uneven_answers", "uneven_answers_cpu")
    assert (len(edges) == 0) == is_plain


@pytest.mark.parametrize("name", shipped_scenarios())
def test_a_shipped_scenario_begins_with_a_sentence_and_keeps_no_default(name):
    label, text = read_source(name)
    scenario = load_scenario(name)
    assert text.startswith("# "), label
    assert text.splitlines()[0].endswith("."), label
    assert scenario.name == name
    assert keys(text) == keys(scenario.to_yaml()), f"{label} says a key that is a default"


def keys(text):
    """Top-level blocks and the keys in them."""
    blocks = yaml.safe_load(text)
    return {
        (name, key)
        for name, block in blocks.items()
        for key in (block if isinstance(block, dict) else [None])
    }


def test_the_replays_keep_lengths_and_prefixes_of_their_trace(load):
    azure, *_ = make_plan(load("azure_replay"))
    assert azure["input_tokens"][:3].tolist() == [100, 101, 102]
    assert azure["output_tokens"][:3].tolist() == [10, 11, 12]
    assert azure["scheduled_s"][1] - azure["scheduled_s"][0] == pytest.approx(1.0, abs=1e-9)
    mooncake, *_ = make_plan(load("mooncake_replay"))
    assert len(mooncake) == pytest.approx(200, abs=54)  # 4 sigma of thinning 2000 to a tenth
    assert len(set(mooncake["prefix_id"].tolist())) == 1
    assert set(mooncake["prefix_tokens"].tolist()) == {1024}  # two of three blocks of 512


def test_one_request_in_five_of_the_rag_scenario_brings_its_own_document(load):
    rows, *_ = make_plan(load("rag_shared_prefix"))
    ids, counts = np.unique(rows["prefix_id"], return_counts=True)
    share = counts[ids <= 200].sum() / len(rows)
    assert share == pytest.approx(0.8, abs=4 * np.sqrt(0.16 / len(rows)))  # 4 sigma
    assert (counts[ids > 200] == 1).all()


def test_some_requests_of_the_interference_scenario_are_documents(load):
    rows, *_ = make_plan(load("long_prompt_interference"))
    is_long = rows["class_id"] == 1
    assert is_long.mean() == pytest.approx(0.15, abs=4 * np.sqrt(0.15 * 0.85 / len(rows)))
    assert set(rows["input_tokens"][is_long].tolist()) == {8000}
    assert rows["input_tokens"][~is_long].max() <= 1000
