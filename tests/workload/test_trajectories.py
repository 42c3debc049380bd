"""Lines of lengths and tool times as trees of requests."""

import json

import numpy as np
import pytest

from loadgen.errors import TraceFileError
from loadgen.lab.simulate import simulate
from loadgen.measure.prefix_hits import ideal_hits
from loadgen.workload.agents.load import load_corpus
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan


def line(group=1, prompt=100, out=(10, 20), obs=(33,), tools=(4.5,), **keys):
    return {
        "group": group,
        "prompt_len": prompt,
        "out_lens": list(out),
        "obs_lens": list(obs),
        "tool_times": list(tools),
        **keys,
    }


def written(tmp_path, *lines):
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_line_is_a_chain_whose_tools_take_their_time(tmp_path):
    (tree,) = load_corpus(written(tmp_path, line(obs=(33, 7), tools=(4.5, 9.0)))).trees
    assert tree.input_tokens.tolist() == [100, 143]
    assert tree.output_tokens.tolist() == [10, 20]
    (edge,) = tree.tree.edges
    assert (edge.child, edge.parent) == (1, 0)
    assert edge.delay_s == pytest.approx(4.5)
    assert tree.hit_tokens.tolist() == [0, 96]


def test_streams_of_a_group_share_their_first_prompt_and_wait_for_nothing(tmp_path):
    """The second stream's prompt has 32 tokens more. Whole blocks of 16: 96 of the first's 100
    tokens are shared, by later turns of either stream only their own."""
    lines = line(stream=0), line(group=2), line(stream=1, prompt=132, tools=(0.1,))
    first, second = load_corpus(written(tmp_path, *lines)).trees
    assert (len(first), len(second)) == (4, 2)
    assert first.input_tokens.tolist() == [100, 132, 175, 143]
    assert first.hit_tokens.tolist() == [0, 96, 128, 96]
    assert first.tree.chain_of == (0, 1, 1, 0)
    edges = [(edge.child, edge.parent) for edge in first.tree.edges]
    assert sorted(edges) == [(2, 1), (3, 0)]


def test_a_simulated_run_keeps_the_tools_and_shares_the_prompt(tmp_path):
    scenario = Scenario.model_validate(
        {
            "name": "lines",
            "arrivals": {"kind": "burst", "requests": 2},
            "agents": {"path": str(written(tmp_path, line(), line(stream=1)))},
            "phases": {"warmup": "0s", "measure": "60s"},
        }
    )
    plan = make_plan(scenario)
    first, *_, last = np.split(
        plan.schedule, np.flatnonzero(np.diff(plan.schedule["session_id"])) + 1
    )
    assert ideal_hits(first, plan.pieces).tolist() == [0, 96, 96, 96]
    assert ideal_hits(np.r_[first, last], plan.pieces)[4:].tolist() == [0, 96, 96, 96]
    run = simulate(scenario, block_tokens="16")
    rows, ids = run.request_rows, run.schedule_rows["request_id"]
    assert len(rows) == 8
    child, parent = (np.searchsorted(ids, run.edge_rows[key]) for key in ("request_id", "after"))
    assert len(child) == 4
    gaps_s = rows["released_s"][child] - rows["done_s"][parent]
    assert gaps_s.tolist() == pytest.approx([4.5] * 4, abs=1e-3)
    # The streams of a tree begin at once: neither first prompt is cached when the other comes.
    assert rows["cached_tokens"].tolist() == [0, 0, 96, 96, 0, 0, 96, 96]


def test_a_context_that_is_too_long_ends_the_group(tmp_path):
    """The third request of the first stream starts before the second of the other."""
    lines = line(out=(10, 20, 5), obs=(33, 50), tools=(1, 1)), line(stream=1)
    (tree,) = load_corpus(written(tmp_path, *lines), max_context=170).trees
    assert tree.input_tokens.tolist() == [100, 100, 143]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"out": (), "obs": (), "tools": ()}, ":2: out_lens: expected an answer"),
        ({"obs": (1, 2, 3)}, ":2: obs_lens and tool_times: expected 1 or 2 values each"),
        ({"out": (0, 5)}, ":2: prompt_len, out_lens and obs_lens: expected numbers of tokens"),
        ({"tools": (-1.0,)}, ":2: tool_times: expected seconds"),
        ({"prompt": 2**31}, ":2: more than"),
        ({"prompt": "many"}, ":2: prompt_len: expected 'int', got 'str'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, wrong, reason):
    with pytest.raises(TraceFileError, match=reason):
        load_corpus(written(tmp_path, line(), line(**wrong)))
