"""Datasets of other tools: each record is read as meant, or left out and counted."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import ScenarioError
from loadgen.workload.dataset_file import read_records
from loadgen.workload.dataset_forms import LeftOut, read_prompts
from loadgen.workload.texts import Dataset, ShareGPTPrompts

TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": "{}"}}


KEYS = ["prompt", "messages", "conversations", "body", "role", "content", "from", "value",
        "url", "turns", "instruction", "input", "output", "system", "tool_calls",
        "max_tokens"]  # fmt: skip


def turn(role, text):
    return {"role": role, "content": text}


def said(role, text):
    return {"from": role, "value": text}


def one(record, **how):
    prompts = read_prompts(record, "f:1", **how)
    assert len(prompts) == 1
    return prompts[0]


@pytest.mark.parametrize(
    ("record", "messages", "output_tokens", "answer"),
    [
        ({"prompt": "a", "output_tokens": 12, "id": 7}, [("user", "a")], 12, ""),
        ({"question": "why?", "answer": "..."}, [("user", "why?")], None, ""),
        ({"Prompt": "a", "MaxTokens": 5.0}, [("user", "a")], 5, ""),
        ({"prompt": "a", "GeneratedTokens": "8"}, [("user", "a")], 8, ""),
        ({"prompt": "a", "output_tokens": None}, [("user", "a")], None, ""),
        ({"prompt": "a", "completion": "bcd"}, [("user", "a")], None, "bcd"),
        ({"prompt": "a", "messages": []}, [("user", "a")], None, ""),
        ({"system": "s", "query": "a"}, [("system", "s"), ("user", "a")], None, ""),
        ({"instruction": "do", "input": "it", "output": "xy"}, [("user", "do\n\nit")], None, "xy"),
        ({"instruction": "do", "input": "", "output": "xy"}, [("user", "do")], None, "xy"),
        ({"question": "why?", "context": "C d."}, [("user", "C d.\n\nwhy?")], None, ""),
        ({"instruction": "do", "context": "C", "response": "r"}, [("user", "C\n\ndo")], None, "r"),
        ({"input": "why?", "context": " ", "answers": ["a"]}, [("user", "why?")], None, ""),
        ({"question": "", "context": "C", "prompt": "a"}, [("user", "C\n\na")], None, ""),
        ("a text", [("user", "a text")], None, ""),
        (
            {"messages": [turn("system", "s"), turn("user", "q"), turn("assistant", "a1")]},
            [("system", "s"), ("user", "q")],
            None,
            "a1",
        ),
        (
            {"messages": [turn("user", "q"), turn("assistant", "a1"), turn("user", "r")]},
            [("user", "q"), ("assistant", "a1"), ("user", "r")],
            None,
            "",
        ),
        ({"prompt": [turn("user", "q")], "chosen": "ok"}, [("user", "q")], None, ""),
        (
            {"conversations": [said("system", "s"), said("human", "q"), said("gpt", "a")]},
            [("system", "s"), ("user", "q")],
            None,
            "a",
        ),
        (
            {"system": "s", "conversations": [said("user", "q"), said("assistant", "a")]},
            [("system", "s"), ("user", "q")],
            None,
            "a",
        ),
        (
            {
                "conversation_hash": "x",
                "model": "gpt-4",
                "conversation": [
                    {**turn("user", "q1"), "language": "English", "toxic": False},
                    {**turn("assistant", "a1"), "language": "English", "toxic": False},
                    {**turn("user", "q2"), "language": "English", "toxic": False},
                ],
            },
            [("user", "q1")],
            None,
            "a1",
        ),
        ([said("human", "foo"), said("gpt", "bar")], [("user", "foo")], None, "bar"),
        ({"messages": [said("human", "q"), said("gpt", "a")]}, [("user", "q")], None, "a"),
        ({"question_id": 81, "turns": ["first", "second"]}, [("user", "first")], None, ""),
        (
            {
                "custom_id": "r-1",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": "gpt-4o", "messages": [turn("user", "q")], "max_tokens": 64},
            },
            [("user", "q")],
            64,
            "",
        ),
        (
            {"custom_id": "r", "url": "/v1/completions", "body": {"prompt": "p", "max_tokens": 3}},
            [("user", "p")],
            3,
            "",
        ),
    ],
)
def test_a_record_of_another_tool_is_read_as_meant(record, messages, output_tokens, answer):
    prompt = one(record)
    assert list(prompt.messages) == messages
    assert (prompt.output_tokens, prompt.answer, prompt.fields) == (output_tokens, answer, {})


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": ""}, "an empty prompt"),
        ({"prompt": "  \n"}, "an empty prompt"),
        ({"prompt": []}, "an empty prompt"),
        ({"prompt": [1, 2, 3]}, "a prompt of token ids, not of text"),
        ({"prompt": 5}, "a prompt of token ids, not of text"),
        ({"prompt": "a", "output_tokens": 0}, "an answer of 0 tokens"),
        ({"messages": [turn("assistant", "a")]}, "no question"),
        ({"messages": [turn("user", "")]}, "an empty prompt"),
        ({"messages": [{"content": "q"}]}, "a message without a role"),
        ({"messages": ["q"]}, "messages that are no list of {role, content}"),
        ({"conversations": [said("gpt", "a"), said("human", "q")]}, "no question at its start"),
        ({"url": "/v1/embeddings", "body": {"input": "x"}}, "a batch request to '/v1/embeddings'"),
        ({"title": "a"}, "no prompt"),
        ({}, "no prompt"),
        (5, "no object but a number"),
        (None, "no object but null"),
    ],
)
def test_a_record_that_cannot_be_a_request_is_left_out_with_the_reason(record, reason):
    with pytest.raises(LeftOut) as caught:
        read_prompts(record, "f:1")
    assert str(caught.value).startswith(reason)


def test_a_list_of_prompts_holds_a_request_each():
    prompts = read_prompts({"prompt": ["one", "two"]}, "f:1")
    assert [prompt.messages for prompt in prompts] == [(("user", "one"),), (("user", "two"),)]


def test_tools_calls_and_parts_are_sent_as_recorded():
    messages = [
        turn("user", "weather?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL], "audio": None},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    called = one({"messages": messages, "tools": TOOLS, "source": "x"})
    sent = [messages[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}, messages[2]]
    assert called.fields == {"messages": sent, "tools": TOOLS}
    assert called.needs_chat
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    parts = [turn("user", [{"type": "text", "text": "what is it?"}, image])]
    assert one({"messages": parts}).fields == {"messages": parts}
    assert one({"messages": parts}).messages == (("user", "what is it?"),)


def test_a_batch_body_is_sent_with_its_fields_but_those_of_the_run():
    body = {
        "model": "gpt-4o",
        "messages": [turn("user", "q")],
        "tools": TOOLS,
        "top_p": 0.5,
        "temperature": 1,
        "stream": False,
        "max_completion_tokens": 9,
    }
    prompt = one({"custom_id": "1", "url": "/v1/chat/completions", "body": json.dumps(body)})
    assert prompt.fields == {"tools": TOOLS, "top_p": 0.5}
    assert prompt.output_tokens == 9


@pytest.mark.parametrize("value", ["many", -1, 7.5, True, [1], float("nan"), float("inf")])
def test_a_wrong_length_is_a_mistake_with_its_place(value):
    with pytest.raises(ScenarioError, match=r"^f:1: max_tokens: expected a whole number"):
        read_prompts({"prompt": "a", "max_tokens": value}, "f:1")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(KEYS),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_prompts_with_text_or_one_line(record):
    try:
        prompts = read_prompts(record, "f:1")
    except (LeftOut, ScenarioError) as error:
        message, prompts = str(error), []
    else:
        message = ""
    assert len(message.splitlines()) == (not prompts)
    for prompt in prompts:
        assert any(text.strip() for _, text in prompt.messages) or "messages" in prompt.fields


def records(path, content, **how):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_records(str(path), "f", **how))


def test_lines_end_only_in_lf_and_crlf(tmp_path):
    texts = ["first\u2028second", "price\u0085next", "para\u2029graph\fform", "a\x1cb\u000bc\r"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    content = "\ufeff" + "\r\n\r\n".join(lines) + "\n"
    found = records(tmp_path / "a.jsonl", content)
    assert found == [(1 + 2 * k, {"prompt": text}) for k, text in enumerate(texts)]


def test_every_container_yields_the_same_records(tmp_path):
    rows = [{"prompt": "a, b\nc", "completion": "x"}, {"prompt": "d", "completion": "y"}]
    lines = "\n".join(json.dumps(row) for row in rows)
    pretty = json.dumps(rows, indent=1)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = {
        "lines": records(tmp_path / "a.jsonl", lines),
        "gzip": records(tmp_path / "a.jsonl.gz", gzip.compress(lines.encode())),
        "array": records(tmp_path / "a.json", json.dumps(rows)),
        "pretty": records(tmp_path / "b.json", pretty),
        "object": records(tmp_path / "c.json", json.dumps({"version": 1, "data": rows}, indent=1)),
        "csv": records(tmp_path / "a.csv", 'prompt,completion\r\n"a, b\nc",x\r\nd,y\r\n'),
        "tsv": records(tmp_path / "a.tsv", 'prompt\tcompletion\n"a, b\nc"\tx\nd\ty\n'),
        "parquet": list(read_records(str(tmp_path / "a.parquet"), "f")),
    }
    assert {name: [value for _, value in some] for name, some in found.items()} == dict.fromkeys(
        found, rows
    )
    assert [number for number, _ in found["csv"]] == [2, 4]
    assert [number for number, _ in found["pretty"]] == [2, 6]


def test_a_single_record_and_plain_lines(tmp_path):
    only = {"conversations": [said("human", "q"), said("gpt", "a")]}
    assert records(tmp_path / "a.json", json.dumps(only)) == [(1, only)]
    assert records(tmp_path / "b.json", json.dumps(only, indent=2)) == [(1, only)]
    assert records(tmp_path / "c.txt", "one\n\ntwo\n", is_plain=True) == [(1, "one"), (3, "two")]
    assert records(tmp_path / "d.jsonl", '"one"\n"two"\n') == [(1, "one"), (2, "two")]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "f:2: is not JSON"),
        ('[{"prompt": "a"},\n{"prompt" "b"}]', "f:2: is not JSON"),
        ('[{"prompt": "a"}\n{"prompt": "b"}]', "f:2: is not JSON: expected ',' or ']'"),
        ('[{"prompt": "a"}', "f:1: is not JSON: expected ',' or ']'"),
        ('[{"prompt": "a"}]\n{}', "f:2: is not JSON: text after the end of the array"),
        ('prompt,id\n"a,1\n', "f:2: is not CSV"),
        (b'{"prompt": "\xff"}', "f:1: is not UTF-8 text"),
        ("", "f: is empty"),
        (b"PK\x03\x04", "f: is a zip archive"),
        (b"PAR1 and no more", "f: is a damaged Parquet file"),
    ],
)
def test_a_damaged_file_is_one_line_with_the_place(tmp_path, content, problem):
    with pytest.raises(ScenarioError) as caught:
        records(tmp_path / "bad", content)
    assert str(caught.value).startswith(problem)
    assert len(str(caught.value).splitlines()) == 1


@given(st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=6), min_size=1)))
def test_arrays_are_those_of_the_json_module(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "rows.json"
    for indent in (None, 1):
        found = records(path, json.dumps(rows, indent=indent, ensure_ascii=False))
        assert [value for _, value in found] == rows


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_left_out_records_are_counted_by_reason_with_their_first_line(tmp_path):
    rows = [
        {"prompt": "a"},
        {"prompt": ""},
        {"prompt": "b", "output_tokens": 0},
        {"prompt": "  "},
    ]
    kind = Dataset(path=write(tmp_path / "a.jsonl", rows))
    assert len(kind.recorded()) == 1
    assert kind.notes() == (
        "3 of 4 records left out: 2 with an empty prompt (first in line 2), 1 with an answer of 0 "
        "tokens (first in line 3)",
    )


def test_a_refusal_names_the_keys_and_the_nearest_form(tmp_path):
    kind = Dataset(path=write(tmp_path / "a.jsonl", [{"id": 1, "promt": "a"}]))
    with pytest.raises(ScenarioError) as caught:
        kind.recorded()
    message = str(caught.value)
    assert f"{kind.path}:1: no prompt; keys found: id, promt; expected prompt or" in message
    assert message.endswith("did you mean 'prompt'?")


def test_the_length_of_a_recorded_answer_is_that_of_the_answer(tmp_path):
    row = {"messages": [turn("user", "q"), turn("assistant", "x" * 40)]}
    path = write(tmp_path / "a.jsonl", [row])
    assert [p.output_tokens for p in Dataset(path=path).recorded()] == [10]
    assert [p.output_tokens for p in Dataset(path=path, tokenizer="bytes").recorded()] == [40]
    stated = write(tmp_path / "b.jsonl", [{**row, "output_tokens": 7}])
    assert [p.output_tokens for p in Dataset(path=stated).recorded()] == [7]


def test_sharegpt_leaves_out_conversations_without_an_answer(tmp_path):
    rows = [
        {"conversations": [said("system", "s"), said("user", "q"), said("assistant", "abcdefgh")]},
        {"conversations": [said("human", "alone")]},
        {"conversations": []},
    ]
    kind = ShareGPTPrompts(path=write(tmp_path / "a.json", rows))
    (prompt,) = kind.recorded()
    assert prompt.messages == (("system", "s"), ("user", "q"))
    assert (prompt.output_tokens, prompt.place) == (2, f"{kind.path}:1")
    assert "2 of 3 records left out" in kind.notes()[0]


def test_a_format_is_read_where_the_keys_fit_several(tmp_path):
    row = {"question": "q", "conversations": [said("human", "c"), said("gpt", "a")]}
    path = write(tmp_path / "a.jsonl", [row])
    assert Dataset(path=path).recorded()[0].messages == (("user", "c"),)
    assert Dataset(path=path, format="prompt").recorded()[0].messages == (("user", "q"),)
    (tmp_path / "a.txt").write_text('{"a" is a line\nso is this\n')
    lines = Dataset(path=str(tmp_path / "a.txt"), format="lines").recorded()
    assert [line.messages[0][1] for line in lines] == ['{"a" is a line', "so is this"]
