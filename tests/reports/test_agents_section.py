"""The trees of agents in the terminal, on the page and in summary.json."""

import json
from typing import Any

import pytest

from loadgen.lab.simulate import simulate
from loadgen.measure.aggregate import summarize
from loadgen.workload.scenario import Scenario
from reports.run.agents_section import spread_rows, texts, turn_rows
from reports.run.page import render
from tests.measure.agent_runs import BROKEN, FANNED_OUT, LINEAR, UNFINISHED, agent_run
from tests.reports.test_console import printed
from tests.runs import measured_run
from tests.workload.weka_files import asked, conversation, fanned_out, written

RUN = agent_run(FANNED_OUT, LINEAR, UNFINISHED, BROKEN, slo=["ttft <= 1s", "attainment >= 50%"])


def agents(run=RUN):
    found = summarize(run).agents
    assert found is not None
    return found


def test_the_sentences_count_every_tree():
    assert texts(agents()) == [
        "4 trees began in the window: 2 met, 1 missed, 1 not ended",
        "attainment(tree) 66.7 % [20.8 %, 93.9 %] of 3; 50 % to 75 % of 4, however the others end",
        "tasks 240/h, without a miss 240/h",
        "prompt tokens cached: ideal 0 % [0 %, 0 %], reported not stated by the server; "
        "not cached: 100 % first sight, 0 % compaction; working set at most 700 tokens",
    ]


def test_limits_of_requests_decide_which_trees_met():
    found = agents(agent_run(FANNED_OUT, LINEAR, slo=["e2e <= 2.9s", "attainment >= 50%"]))
    assert (found.met, found.missed) == (0, 2)  # requests of 3.5 s and of 3 s
    assert found.tasks_per_hour.value == 240
    assert found.goodput_tasks_per_hour.value == 0


def test_the_tables_show_the_parts_of_the_task_time_and_the_turns():
    cells = [[cell.text for cell in row][:4] for row in spread_rows(agents())]
    assert cells == [
        ["task time", "2", "9 s", "6 s*"],
        ["model", "2", "4.5 s", "4.5 s*"],
        ["tools", "2", "1 s", "500 ms*"],
        ["subagents", "2", "3.5 s", "0 µs*"],
        ["wait share", "2", "79.2 %", "75 %*"],
    ]
    assert [[cell.text for cell in row][:3] for row in turn_rows(agents())] == [
        ["1", "6", "100 ms*"], ["2", "4", "100 ms*"], ["3-5", "2", "100 ms*"],
    ]  # fmt: skip


def test_every_number_of_the_tables_is_in_summary_json():
    content = summarize(RUN).to_json()
    for row in (*spread_rows(agents()), *turn_rows(agents())):
        for cell in filter(lambda cell: cell.path, row):
            value: Any = content
            for key in cell.path.split("."):
                value = value[int(key) if isinstance(value, list) else key]
            assert value is not None, cell.path


def test_the_terminal_shows_the_trees_within_100_columns():
    text = printed(RUN)
    assert "2 met, 1 missed, 1 not ended" in text
    assert "wait share" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_page_has_a_section_on_agents(cache):
    page = render(RUN, summarize(RUN), cache)
    assert '<h2 id="agents">Agents</h2>' in page
    assert 'data-path="agents.task_time_s.mean.value"' in page
    assert '<h2 id="agents">' not in render(measured_run(), summarize(measured_run()), cache)


def test_other_runs_have_no_key_of_agents():
    assert "agents" not in summarize(measured_run()).to_json()
    assert json.loads(json.dumps(summarize(RUN).to_json()))["agents"]["planned"] == 4


def test_a_simulated_engine_reports_what_can_be_cached(tmp_path):
    """With room for all text, the reported share is the ideal one, less a block of 16 per
    request."""
    corpus = written(
        tmp_path / "agents.jsonl",
        fanned_out(),
        conversation(asked(0.0, [1, 2, 3], took=3.0), asked(5.0, [1, 2, 3, 4], took=2.0)),
    )
    scenario = Scenario.model_validate(
        {
            "name": "agents",
            "arrivals": {"kind": "poisson", "rate": "0.5/s"},
            "agents": {"path": str(corpus)},
            "phases": {"warmup": "0s", "measure": "60s"},
            "slo": ["ttft <= 1s"],
        }
    )
    cache = agents(simulate(scenario, block_tokens="16")).cache
    assert cache.reported is not None
    assert cache.lost == pytest.approx(cache.ideal.value - cache.reported.value)
    assert 0 <= cache.lost * cache.prompt_tokens <= 16 * cache.requests
    assert cache.first_sight + cache.compaction == pytest.approx(1 - cache.ideal.value)
    assert 0.2 < cache.ideal.value < 0.9
