"""Token ids of simulated prompts: later turns repeat the conversation, failed turns do not grow."""

import pytest

from loadgen.lab.prompt_ids import PromptIds
from loadgen.workload.dialogue import Context, conversation_parents
from loadgen.workload.scenario import load_scenario
from loadgen.workload.schedule import make_plan
from reference_engine.state.kv import KvPool
from reference_engine.state.sequence import Request
from tests.workload.hashed_trace import hashed_trace


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
    first = prompts.of(parent).tokens
    prompts.answered(parent, Request("a", [*first, *[7] * n_answer], n_answer, 0.0))
    assert prompts.of(row).tokens[: len(first) + n_answer] == [*first, *[7] * n_answer]


def test_a_turn_after_a_failure_repeats_the_planned_answer():
    prompts, parent, row, n_answer = a_later_turn(make_plan(load_scenario("agent_multi_turn")))
    first = prompts.of(parent).tokens
    second = prompts.of(row).tokens
    scripted = second[len(first) : len(first) + n_answer]
    assert second[: len(first)] == first
    assert len(set(scripted)) == 1
    assert scripted[0] not in first
    assert scripted[0] != second[len(first) + n_answer]


@pytest.mark.parametrize("name", ["agent_multi_turn", "rag_shared_prefix"])
@pytest.mark.parametrize("block_tokens", [7, 16])
def test_keys_are_equal_where_hashes_of_tokens_are(name, block_tokens):
    keys_agree(
        make_plan(load_scenario(name, ["phases.warmup=0s", "phases.measure=40s"])), block_tokens
    )


@pytest.mark.parametrize("block_tokens", [7, 16])
def test_keys_of_pieces_are_equal_where_hashes_of_tokens_are(tmp_path, block_tokens):
    keys_agree(make_plan(hashed_trace(tmp_path)), block_tokens)


def keys_agree(plan, block_tokens):
    pool = KvPool(10, block_tokens)
    hashes: dict[int, list[bytes]] = {}
    keys: dict[int, list[bytes]] = {}
    by_tokens, by_keys = PromptIds(plan), PromptIds(plan, block_tokens)
    for row, planned in enumerate(plan.schedule):
        n_answer = int(planned["output_tokens"])
        for prompts, seen in ((by_tokens, hashes), (by_keys, keys)):
            tokens, chain = prompts.of(row)
            request = Request(f"q{row}", tokens, n_answer, 0.0, chain=chain)
            if row % 5:
                request.tokens += [7] * n_answer
                pool.prefix_keys(request)
                prompts.answered(row, request)
            seen[row] = list(pool.prefix_keys(request))
    all_hashes = [key for row in hashes for key in hashes[row]]
    all_keys = [key for row in keys for key in keys[row]]
    assert len(all_hashes) == len(all_keys) > len(set(all_hashes)) > 300
    assert len(set(zip(all_hashes, all_keys, strict=True))) == len(set(all_hashes))
    assert len(set(all_keys)) == len(set(all_hashes))
