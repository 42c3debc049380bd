"""Prompts from local files: somebody's text, JSON lines, ShareGPT."""

import json
from typing import Any

import numpy as np
import pytest

from loadgen.errors import ScenarioError
from loadgen.records import SCHEDULE
from loadgen.workload.prompts import HEAD_CHARS, PromptFit, Prompts
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan

LINES = [
    {"prompt": "What is a queue?", "output_tokens": 40},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
]
SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "Why is the sky blue?"},
            {"from": "gpt", "value": "Rayleigh scattering, in one phrase!"},
            {"from": "human", "value": "Thanks"},
        ],
    },
    {"id": "b", "conversations": [{"from": "gpt", "value": "I begin"}, {"from": "human"}]},
    {"id": "c", "conversations": [{"from": "human", "value": "Alone"}]},
]


def scenario(prompts, **requests):
    return Scenario.model_validate(
        {
            "name": "recorded",
            "arrivals": {"kind": "constant", "rate": "20/s"},
            "requests": requests,
            "phases": {"measure": "5s"},
            "prompts": prompts,
        }
    )


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES) + "\n")
    return str(path)


def test_each_request_sends_one_prompt_of_the_file_as_it_is(lines):
    planned = scenario({"kind": "dataset", "path": lines, "salt": "none"}, output_tokens=9)
    rows, *_ = make_plan(planned)
    prompts = Prompts(planned.prompts, 0, b"")
    said = {prompts.prompt(row, PromptFit()).as_messages() for row in rows}
    assert said == {
        (("user", "What is a queue?"),),
        (("system", "Be brief."), ("user", "Hi")),
    }


def test_every_prompt_is_sent_once_before_any_is_sent_again(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {k}"}) + "\n" for k in range(40)))
    orders = []
    for seed in (0, 1):
        values = scenario(
            {"kind": "dataset", "path": str(path), "salt": "none"}, output_tokens=9
        ).resolved()
        planned = Scenario.model_validate({**values, "seed": seed})
        prompts = Prompts(planned.prompts, seed, b"")
        sent = [prompts.prompt(row, PromptFit()).prompt for row in make_plan(planned).schedule]
        assert len(sent) == 100
        assert sent[:40] == sent[40:80] == [*sent[80:], *sent[20:40]]
        assert sorted(sent[:40]) == sorted(f"prompt {k}" for k in range(40))
        orders.append(sent)
    assert orders[0] != orders[1]
    assert orders[0][:40] != [f"prompt {k}" for k in range(40)]


def test_lengths_are_those_of_the_prompt_that_is_sent(lines):
    planned = scenario(
        {"kind": "dataset", "path": lines, "salt": "none", "tokenizer": "bytes"}, output_tokens=9
    )
    rows, *_ = make_plan(planned)
    prompts = Prompts(planned.prompts, 0, b"")
    for row in rows:
        texts = [text for _, text in prompts.prompt(row, PromptFit()).as_messages()]
        assert row["input_tokens"] == sum(len(text.encode()) for text in texts)
        assert row["output_tokens"] == (40 if len(texts) == 1 else 9)


def test_without_a_tokenizer_four_characters_are_planned_as_a_token(lines):
    rows, *_ = make_plan(
        scenario({"kind": "dataset", "path": lines, "salt": "none"}, output_tokens=9)
    )
    assert set(rows["input_tokens"].tolist()) == {16 // 4, round(11 / 4)}


def test_a_salt_puts_a_head_of_its_own_before_each(lines):
    planned = scenario({"kind": "dataset", "path": lines}, output_tokens=9)
    rows, *_ = make_plan(planned)
    prompts = Prompts(planned.prompts, 0, b"this run")
    firsts = [prompts.prompt(row, PromptFit()).as_messages()[0][1] for row in rows]
    assert {text[HEAD_CHARS:] for text in firsts} == {" What is a queue?", " Be brief."}
    assert len({text[:HEAD_CHARS] for text in firsts}) == len(rows)


def test_sharegpt_gives_first_questions_with_the_length_of_their_answers(tmp_path):
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(SHAREGPT))
    planned = scenario({"kind": "sharegpt", "path": str(path), "salt": "none"})
    rows, *_ = make_plan(planned)
    prompts = Prompts(planned.prompts, 0, b"")
    assert {prompts.prompt(row, PromptFit()).prompt for row in rows} == {"Why is the sky blue?"}
    answer = "Rayleigh scattering, in one phrase!"
    assert set(rows["output_tokens"].tolist()) == {round(len(answer) / 4)}


def test_a_missing_length_of_an_answer_is_a_mistake(lines):
    with pytest.raises(ScenarioError) as caught:
        make_plan(scenario({"kind": "dataset", "path": lines}))
    assert str(caught.value) == (
        f"{lines}:2: states no length of its answer, like 1 of 2 prompts; set "
        "requests.output_tokens (--output-len)"
    )


def test_tools_and_parts_get_the_head_too(tmp_path):
    path = tmp_path / "parts.jsonl"
    parts = [{"type": "text", "text": "what is it?"}]
    rows: list[dict[str, list[dict[str, Any]]]] = [
        {"messages": [{"role": "user", "content": parts}], "tools": [{"type": "function"}]},
        {"messages": [{"role": "user", "content": "hello", "name": "ann"}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    planned = scenario({"kind": "dataset", "path": str(path)}, output_tokens=4)
    prompts = Prompts(planned.prompts, 0, b"this run")
    for row in make_plan(planned).schedule:
        fields = prompts.prompt(row, PromptFit()).fields
        (message,) = fields["messages"]
        if "tools" in fields:
            head, part = message["content"]
            assert (len(head["text"]), part) == (HEAD_CHARS, parts[0])
        else:
            assert message["content"][HEAD_CHARS:] == " hello"
            assert message["name"] == "ann"
    assert prompts.needs_chat == f"{path}:1"
    assert rows[0]["messages"][0]["content"] == parts


def test_recorded_prompts_without_a_salt_are_counted_by_their_text(tmp_path):
    def counted(records, **kind):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        planned = scenario({"kind": "dataset", "path": str(path), **kind}, output_tokens=9)
        return Prompts(planned.prompts, 0, b"salt").n_repeated

    same = {"prompt": "What is a queue?"}
    assert counted([same, same, *LINES], salt="none") == 2
    assert counted([same] * 3, salt="none") == 1
    plain: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    tools = {**plain, "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert counted([plain, tools], salt="none") == 2
    assert counted([same] * 3) is None  # the salt makes each prompt new
    synthetic = scenario({"kind": "synthetic", "salt": "none"}, input_tokens=9, output_tokens=9)
    assert Prompts(synthetic.prompts, 0, b"").n_repeated is None


def test_text_is_cut_from_the_file(tmp_path):
    path = tmp_path / "faust.txt"
    path.write_text("Habe nun, ach!  Philosophie,\nJuristerei und Medizin\n" * 40, "utf-8")
    planned = scenario({"kind": "text", "path": str(path)}, input_tokens=200, output_tokens=5)
    rows, *_ = make_plan(planned)
    prompts = Prompts(planned.prompts, 0, b"x")
    text = prompts.render(rows[0], PromptFit())
    assert len(text) == 200
    flat = " ".join(path.read_text().split())
    assert text[HEAD_CHARS + 1 : 150] in flat + " " + flat


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", ":1: is not JSON"),
        ("[1]", ":1: no object but a number; keys found: a number; expected prompt or question"),
        ('{"prompt": 5}', ":1: a prompt of token ids, not of text; keys found: prompt; expected"),
        ('{"messages": [{"role": "user"}]}', ":1: an empty prompt; keys found: messages"),
        ('{"prompt": "a"}\n{"prompt": "a", "output_tokens": -1}', ":2: output_tokens: expected"),
        ("", ": is empty"),
        ("[]", ": has no prompt to send"),
    ],
)
def test_a_bad_line_is_told_with_its_number(tmp_path, content, said):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ScenarioError) as caught:
        make_plan(scenario({"kind": "dataset", "path": str(path)}, output_tokens=1))
    assert f"prompts.path: {path}{said}" in str(caught.value)


@pytest.mark.parametrize("kind", ["text", "dataset", "sharegpt"])
def test_a_missing_file_is_told(kind):
    planned = scenario({"kind": kind, "path": "nowhere.txt"}, input_tokens=9, output_tokens=9)
    with pytest.raises(
        ScenarioError, match=r"prompts\.path: nowhere\.txt: (cannot be r|no such f)"
    ):
        make_plan(planned), Prompts(planned.prompts, 0, b"")


def test_a_row_without_a_recorded_length_gets_the_one_asked(lines):
    law = {"kind": "uniform", "min": 100, "max": 200}
    rows, *_ = make_plan(scenario({"kind": "dataset", "path": lines}, output_tokens=law))
    other = rows["output_tokens"][rows["output_tokens"] != 40]
    assert len(other) > 20
    assert np.all((other >= 100) & (other <= 200))
    assert rows.dtype == SCHEDULE
