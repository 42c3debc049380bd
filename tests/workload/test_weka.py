"""Files of Weka's kv-cache-tester as trees."""

import gzip
import json

import pytest

from loadgen.errors import TraceFileError
from loadgen.workload.agents.corpus import without_idle
from loadgen.workload.agents.load import load_corpus
from loadgen.workload.agents.trees import Edge
from loadgen.workload.traces.file import load_trace
from tests.workload.weka_files import asked, conversation, fanned_out, subagent, written


def only(path):
    (tree,) = load_corpus(path).trees
    return tree


def test_a_conversation_with_subagents(tmp_path):
    tree = only(written(tmp_path / "a.json", fanned_out()))
    assert tree.starts_s.tolist() == [0.0, 3.0, 3.5, 4.5, 6.0, 15.0]
    assert tree.tree.chain_of == (0, 1, 2, 1, 0, 0)
    assert tree.tree.edges == (
        Edge(1, 0, 1.0), Edge(2, 0, 1.5), Edge(3, 1, 0.5), Edge(4, 0, 4.0), Edge(4, 3, 0.5),
        Edge(5, 2, 2.5), Edge(5, 4, 8.0),
    )  # fmt: skip
    assert tree.hit_tokens.tolist() == [0, 64, 64, 128, 128, 192]
    assert tree.prefix_tokens.tolist() == [128, 128, 64, 128, 192, 192]
    assert tree.n_agents == 2


def test_times_of_subagents_may_count_from_the_start_of_the_conversation(tmp_path):
    whole = fanned_out()
    for marker in whole["requests"]:
        for inner in marker.get("requests", ()):
            inner["t"] += marker["t"]
    tree = only(written(tmp_path / "a.json", whole))
    assert tree.starts_s.tolist() == [0.0, 3.0, 3.5, 4.5, 6.0, 15.0]
    (note,) = load_corpus(tmp_path / "a.json").notes
    assert note.endswith("whose times count from the start of the conversation")


def test_folders_lines_and_gzip(tmp_path):
    one = conversation(asked(0.0, [1]), id="one")
    written(tmp_path / "b.jsonl", one, conversation(asked(1.0, [1]), id="two"))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(one).encode()))
    (tmp_path / "README.md").write_text("no trace")
    corpus = load_corpus(tmp_path)
    assert [tree.name for tree in corpus.trees] == ["one", "one", "two"]
    assert corpus.trees[2].starts_s.tolist() == [0.0]


def test_indented_files_are_one_conversation(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(fanned_out(), indent=1))
    assert len(only(tmp_path / "a.json")) == 6


def test_what_is_left_out_is_counted(tmp_path):
    written(
        tmp_path / "a.jsonl",
        conversation(
            subagent(0.5, asked(0.0, [3])), asked(1.0, [1]), asked(3.0, [1], out=0),
            subagent(4.0, asked(0.0, [3], out=0)), asked(6.0, [1, 2]),
        ),
        conversation(asked(0.0, [1], out=0)),
    )  # fmt: skip
    corpus = load_corpus(tmp_path / "a.jsonl")
    assert [len(tree) for tree in corpus.trees] == [2]
    assert set(corpus.notes) == {
        "3 requests left out: zero input or output tokens (no answer)",
        "1 subagents left out: no request before them",
        "1 subagents left out: no request with input and output tokens",
        "1 conversations with subagents, whose times count from their own start",
        "1 conversations left out: no request with input and output tokens",
    }


def test_an_answer_without_a_time_takes_the_pace_of_the_others_until_the_next_request(tmp_path):
    """0.1 s per token; 40 tokens would take 4 s, and the next request starts after 2 s."""
    tree = only(
        written(
            tmp_path / "a.json",
            conversation(
                asked(0.0, [1], out=10, took=1.0), asked(2.0, [1, 2], out=10, took=None),
                asked(5.0, [1, 2, 3], out=40, took=None), asked(7.0, [1, 2, 3, 4], took=None),
            ),
        )
    )  # fmt: skip
    assert tree.ends_s.tolist() == pytest.approx([1.0, 3.0, 7.0, 8.0])
    assert tree.tree.chain_of == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "is in no known format of agents (weka, trajectories)"),
        ('{"requests": [{"type": "n", "t": "soon"}]}', "a.json:1: requests[0].t: expected"),
        ('{"requests": [{"t": 0, "in": -1, "out": 2}]}', "at t = 0: in and out: expected numbers"),
        ('{"block_size": 0, "requests": [{"t": 0}]}', "block_size: expected a number of tokens"),
        ('{"requests": [{"t": 0, "in": 0}]}', "no conversation in it can be replayed"),
    ],
)
def test_other_content_is_refused_with_its_place(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(TraceFileError) as refused:
        load_corpus(tmp_path / "a.json")
    assert message in str(refused.value)


def test_a_trace_of_agents_is_named_as_such(tmp_path):
    path = written(tmp_path / "a.json", fanned_out())
    with pytest.raises(TraceFileError, match="holds conversations of agents; replay it with"):
        load_trace(path)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(TraceFileError, match=r"no file \.json"):
        load_corpus(tmp_path)


def test_a_tree_ends_before_the_first_request_that_is_too_long(tmp_path):
    """The prompts have 133, 133, 133, 197, 197 and 261 tokens, the answers 10."""
    path = written(tmp_path / "a.jsonl", fanned_out(), conversation(asked(0.0, [1, 2, 3, 4])))
    corpus = load_corpus(path, max_context=207)
    assert [len(tree) for tree in corpus.trees] == [5]
    assert set(corpus.notes[1:]) == {
        "1 conversations end early, at a request above max_context",
        "1 requests left out behind it",
        "1 conversations left out: their first request is above max_context",
    }
    (tree,) = load_corpus(path, max_context=206).trees
    assert tree.input_tokens.tolist() == [133, 133, 133]
    assert tree.tree.edges == (Edge(1, 0, 1.0), Edge(2, 0, 1.5))
    assert (tree.n_agents, tree.tree.n_background) == (2, 2)


def test_long_idle_times_are_cut_and_overlap_is_kept(tmp_path):
    """Idle from 2 to 3 s and from 12.5 to 15 s; the second subagent runs from 3.5 to 12.5 s."""
    (tree,) = load_corpus(written(tmp_path / "a.json", fanned_out())).trees
    cut = without_idle(tree, 0.5)
    assert cut.starts_s.tolist() == [0.0, 2.5, 3.0, 4.0, 5.5, 12.5]
    assert cut.ends_s.tolist() == [2.0, 3.5, 12.0, 5.0, 6.5, 13.5]
    assert cut.tree.edges == (
        Edge(1, 0, 0.5), Edge(2, 0, 1.0), Edge(3, 1, 0.5), Edge(4, 0, 3.5), Edge(4, 3, 0.5),
        Edge(5, 2, 0.5), Edge(5, 4, 6.0),
    )  # fmt: skip
    assert without_idle(tree, 2.5) is tree
