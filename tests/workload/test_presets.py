"""SLO presets: the published limits, to the digit, and an expression after one overrides it."""

import pytest

from loadgen.cli.kinds import describe
from loadgen.measure.slo import parse_slo
from loadgen.workload.presets import CATALOGUE
from loadgen.workload.scenario import load_scenario

# preset: TTFT, TPOT in ms, as in mlperf.conf (target_latency_percentile 99)
MLPERF = """
llama2-70b 2000 200
llama2-70b-interactive 450 40
mixtral-8x7b 2000 200
llama3.1-405b 6000 175
llama3.1-405b-interactive 4500 80
llama3.1-8b 2000 100
llama3.1-8b-interactive 500 30
deepseek-r1 2000 80
deepseek-r1-interactive 1500 15
gpt-oss-120b 3000 80
gpt-oss-120b-interactive 2000 15
"""
# preset: metric, percentile, limit in ms
OTHERS = {
    "gptj": [("e2e_s", 0.99, 20000)],
    "qwen3-vl-235b": [("e2e_s", 0.99, 12000)],
    "chat": [("ttft_s", 0.99, 200), ("itl_s", 0.99, 50)],
    "rag": [("ttft_s", 0.99, 300), ("itl_s", 0.99, 100), ("e2e_s", 0.99, 3000)],
    "agent": [("e2e_s", 0.99, 5000)],
    "content": [("ttft_s", 0.99, 600), ("itl_s", 0.99, 200)],
    "code": [("ttft_s", 0.99, 500), ("itl_s", 0.99, 150)],
    "code-completion": [("e2e_s", 0.99, 2000)],
    "interactive-chat": [("ttft_s", 0.99, 1000), ("itl_s", 0.99, 50)],
    "reasoning": [("ttft_s", 0.99, 2000), ("itl_s", 0.99, 100)],
    "code-generation": [("ttft_s", 0.95, 30000), ("itl_s", 0.99, 100)],
    "deep-research": [("ttft_s", 0.9, 10000), ("itl_s", 0.99, 100)],
    "batch-summarization-rag": [
        ("ttft_s", 0.9, 15000),
        ("itl_s", 0.95, 150),
        ("e2e_s", 0.99, 630000),
    ],
    "batch-synthetic-data": [("e2e_s", 0.99, 2080000)],
}


def preset_slos(name):
    """(metric, percentile, limit in ms) of each promise."""
    slos = [parse_slo(text) for text in CATALOGUE[name].slos]
    return [(slo.metric, slo.quantile, pytest.approx(slo.limit * 1000)) for slo in slos]


@pytest.mark.parametrize("line", MLPERF.split("\n")[1:-1])
def test_mlperf_presets_are_those_of_the_table(line):
    name, ttft_ms, tpot_ms = line.split()
    assert preset_slos(name) == [("ttft_s", 0.99, int(ttft_ms)), ("tpot_s", 0.99, int(tpot_ms))]
    assert name.replace("3.1", "3_1") in CATALOGUE[name].source


@pytest.mark.parametrize("name", OTHERS)
def test_the_other_presets_are_those_of_their_sources(name):
    assert preset_slos(name) == OTHERS[name]


def test_there_are_no_presets_but_these_and_each_says_why_and_whence():
    assert set(CATALOGUE) == set(OTHERS) | {line.split()[0] for line in MLPERF.split("\n")[1:-1]}
    assert all(len(preset.why) > 30 and len(preset.source) > 15 for preset in CATALOGUE.values())


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_preset_can_be_named_in_a_scenario(name):
    scenario = load_scenario("quickstart", {"slo": [{"preset": name}]})
    assert scenario.slo_texts() == CATALOGUE[name].slos


def test_an_expression_after_a_preset_overrides_it():
    slo = [{"preset": "llama3.1-8b-interactive"}, "p99(ttft) <= 400ms", "ttft <= 400ms"]
    scenario = load_scenario("quickstart", {"slo": slo})
    assert scenario.slo_texts() == ("p99(tpot) <= 30ms", "p99(ttft) <= 400ms", "ttft <= 400ms")


def test_presets_are_listed_with_their_promises_and_reasons():
    listed = {entry["kind"]: entry for entry in describe("presets")}
    assert set(listed) == set(CATALOGUE)
    assert "p99(ttft) <= 200ms" in listed["chat"]["what"]
    assert CATALOGUE["chat"].why in listed["chat"]["what"]
