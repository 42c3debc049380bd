"""Token ids of simulated prompts: later turns repeat the conversation, failed turns do not grow."""

from loadgen.lab.prompt_ids import PromptIds
from loadgen.workload.dialogue import Context, conversation_parents
from loadgen.workload.scenario import load_scenario
from loadgen.workload.schedule import make_plan


def a_later_turn(plan):
    """(prompts, parent, row, planned output of the parent) of a turn with real context."""
    schedule, parents = plan.schedule, conversation_parents(plan.schedule, plan.edges)
    row, parent = next(
        (row, parent)
        for row, parent in parents.items()
        if parent not in parents and schedule["context"][row] == Context.real
    )
    return PromptIds(plan), parent, row, int(schedule["output_tokens"][parent])


def test_a_turn_after_an_answer_repeats_the_answer():
    prompts, parent, row, n_answer = a_later_turn(make_plan(load_scenario("agent_multi_turn")))
    first = prompts.of(parent)
    prompts.answered(parent, [*first, *[7] * n_answer])
    assert prompts.of(row)[: len(first) + n_answer] == [*first, *[7] * n_answer]


def test_a_turn_after_a_failure_repeats_the_planned_answer():
    prompts, parent, row, n_answer = a_later_turn(make_plan(load_scenario("agent_multi_turn")))
    first = prompts.of(parent)
    second = prompts.of(row)
    scripted = second[len(first) : len(first) + n_answer]
    assert second[: len(first)] == first
    assert len(set(scripted)) == 1
    assert scripted[0] not in first
    assert scripted[0] != second[len(first) + n_answer]
