"""What a turn says: all before it, an answer, and a question that makes up the planned length."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.records import REASONING
from loadgen.workload.dialogue import Dialogue
from loadgen.workload.prompts import PromptFit, Prompts
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan, split_plan
from loadgen.workload.texts import Synthetic

BYTES = PromptFit(12.0, 1.0)


def plan(context="scripted", turns=3, reasoning="drop", **requests):
    asked = {"input_tokens": 60, "output_tokens": 20, **requests}
    return make_plan(
        Scenario.model_validate(
            {
                "name": "talk",
                "arrivals": {"kind": "constant", "rate": "4/s"},
                "requests": asked,
                "session": {"turns": turns, "context": context, "reasoning": reasoning},
                "phases": {"measure": "2s"},
            }
        )
    )


def dialogue(planned, fit=BYTES):
    return Dialogue(planned.schedule, planned.edges, Prompts(Synthetic(), 1, b"run"), fit)


@settings(max_examples=25, deadline=None)
@given(st.integers(13, 200), st.integers(1, 200), st.integers(1, 5), st.randoms())
def test_scripted_turns_have_exactly_their_planned_tokens_in_any_order(new, spoken, turns, random):
    planned = plan(turns=turns, input_tokens=new, output_tokens=spoken)
    order = list(range(len(planned.schedule)))
    random.shuffle(order)
    talk = dialogue(planned)
    in_order = dialogue(planned)
    expected = {row: in_order.prompt(row).as_messages() for row in sorted(order)}
    for row in order:
        messages = talk.prompt(row).as_messages()
        assert messages == expected[row]
        n_chars = sum(len(content) for _, content in messages)
        assert n_chars + 12 == planned.schedule["input_tokens"][row]


def test_a_turn_begins_with_all_that_was_said_before():
    talk = dialogue(plan(shared_prefix={"tokens": 30}))
    first, second, third = (talk.prompt(row).as_messages() for row in range(3))
    assert [role for role, _ in third] == ["user", "assistant", "user", "assistant", "user"]
    assert third[:3] == second
    assert second[:1] == first
    assert len(second[1][1]) == 20


def test_sessions_say_different_things():
    talk = dialogue(plan())
    said = [talk.prompt(row).as_messages()[-1][1] for row in range(24)]
    assert len(set(said)) == 24


def test_a_real_turn_waits_for_the_answer_and_quotes_it():
    planned = plan(context="real")
    talk = dialogue(planned)
    assert [talk.waits_for(row) for row in range(4)] == [None, 0, 1, None]
    first = talk.prompt(0).as_messages()
    second = talk.prompt(1, "so spoke the server").as_messages()
    third = talk.prompt(2, "and again").as_messages()
    assert second[:2] == (*first, ("assistant", "so spoke the server"))
    assert third[3] == ("assistant", "and again")
    assert third[:3] == second
    assert len(third[4][1]) == 60


def test_a_real_turn_sends_the_reasoning_back_only_where_it_is_kept():
    talks = {word: dialogue(plan(context="real", reasoning=word)) for word in ("drop", "keep")}
    first = talks["keep"].prompt(0).as_messages()
    second = talks["keep"].prompt(1, "an answer", "a thought").as_messages()
    assert second[:3] == (*first, (REASONING, "a thought"), ("assistant", "an answer"))
    third = talks["keep"].prompt(2, "another", "").as_messages()  # it did not think
    assert third[:5] == (*second, ("assistant", "another"))
    assert [talks["keep"].waits_for(row) for row in range(4)] == [None, 0, 1, None]
    talks["drop"].prompt(0)
    dropped = talks["drop"].prompt(1, "an answer", "a thought").as_messages()
    assert dropped == (*first, ("assistant", "an answer"), second[3])


def test_before_any_answer_a_kept_turn_has_reasoning_of_half_the_planned_tokens():
    """The preflight sends such a turn."""
    talk = dialogue(plan(context="real", reasoning="keep"))
    (_, question), (role, thought), (_, answer), _ = talk.prompt(1).as_messages()
    assert role == REASONING
    assert len({question, thought, answer}) == 3
    scripted = dialogue(plan()).prompt(1).as_messages()[1][1]
    assert len(thought) + len(answer) == len(scripted)


def test_parts_of_a_plan_say_what_the_whole_says():
    planned = plan()
    whole = dialogue(planned)
    said = {int(planned.schedule["request_id"][r]): whole.prompt(r) for r in range(24)}
    for part in split_plan(planned, 3):
        talk = dialogue(part)
        for row, request_id in enumerate(part.schedule["request_id"].tolist()):
            assert talk.prompt(row).as_messages() == said[request_id].as_messages()


@pytest.mark.parametrize("tokens_per_char", [0.25, 0.4])
def test_with_a_fit_a_turn_is_right_to_half_a_character_per_message(tokens_per_char):
    planned = plan(turns=4)
    talk = dialogue(planned, PromptFit(12.0, tokens_per_char))
    for row in range(4):
        messages = talk.prompt(row).as_messages()
        tokens = 12 + tokens_per_char * sum(len(content) for _, content in messages)
        slack = tokens_per_char * len(messages) / 2
        assert abs(tokens - int(planned.schedule["input_tokens"][row])) <= slack + 1e-9


def test_chains_say_nothing_of_each_other():
    planned = make_plan(
        Scenario.model_validate(
            {
                "name": "chain",
                "arrivals": {"kind": "constant", "rate": "4/s"},
                "chain": [
                    {"name": "a", "requests": {"input_tokens": 40, "output_tokens": 5}},
                    {
                        "name": "b",
                        "after": ["a"],
                        "requests": {"input_tokens": 50, "output_tokens": 5},
                    },
                ],
                "phases": {"measure": "2s"},
            }
        )
    )
    talk = dialogue(planned)
    lengths = [len(talk.prompt(row).prompt) for row in range(4)]
    assert lengths == [28, 38, 28, 38]
    assert np.all(planned.schedule["context"] == 0)
