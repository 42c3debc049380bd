"""Prompts made of pieces share exactly what the trace shares, however their text is written."""

import itertools
from typing import Any

import numpy as np
import pytest

from loadgen.records import FIRST_PIECE, PIECES, schedule_sha256
from loadgen.workload.pieces import OTHER_TEXT, PieceTree, Span, joined
from loadgen.workload.prompts import PromptFit, Prompts
from loadgen.workload.schedule import make_plan, split_plan
from loadgen.workload.texts import Synthetic
from loadgen.workload.word_text import WordCounts, unframed
from tests.workload.hashed_trace import BLOCK_TOKENS, hashed_lists, hashed_trace

P = FIRST_PIECE
TABLE = np.array([(0, 10), (P, 5), (P, 7), (P + 2, 1)], PIECES)


def common(one, other):
    pairs = zip(one, other, strict=False)
    return len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])


def test_a_path_runs_from_the_start_of_the_prompt_and_is_cut():
    tree = PieceTree(TABLE)
    assert tree.path(P + 3, 18) == [Span(P, 0, 10), Span(P + 2, 10, 17), Span(P + 3, 17, 18)]
    assert tree.path(P + 1, 12) == [Span(P, 0, 10), Span(P + 1, 10, 12)]
    assert tree.path(P + 1, 4) == [Span(P, 0, 4)]
    assert tree.path(P + 1, 0) == []


def test_a_prefix_that_is_no_piece_is_a_single_text():
    tree = PieceTree(TABLE)
    assert tree.path(3, 9) == [Span(3, 0, 9)]
    assert tree.path((P + 1) ^ OTHER_TEXT, 9) == [Span((P + 1) ^ OTHER_TEXT, 0, 9)]


def test_tables_keep_their_trees_when_they_are_joined():
    whole = joined([TABLE, TABLE])
    assert whole["after"].tolist() == [0, P, P, P + 2, 0, P + 4, P + 4, P + 6]
    assert whole["tokens"].tolist() == [10, 5, 7, 1] * 2


WORDS = (
    *("alpha", "beta", "gamma", "delta", "eps", "zeta", "eta", "theta"),
    *("iota", "kappa", "lam", "mu", "nu", "xi", "omi", "pi"),
)
FITS = {
    "bytes": (Synthetic(tokenizer="bytes"), PromptFit(), 1),
    "characters": (Synthetic(), PromptFit(0.0, 0.25), 4),
    "words": (Synthetic(), PromptFit(words=WordCounts(0, WORDS, (1,) * len(WORDS))), None),
}


@pytest.mark.parametrize("how", FITS)
def test_texts_are_equal_as_far_as_the_hash_lists_and_no_farther(tmp_path, how):
    kind, fit, chars_per_token = FITS[how]
    plan, lists = make_plan(hashed_trace(tmp_path)), hashed_lists()
    prompts = Prompts(kind, 0, b"salt", plan.pieces)
    texts: list[Any] = [prompts.render(row, fit) for row in plan.schedule]
    if how == "words":
        texts = [unframed(text).split() for text in texts]
        chars_per_token = 1
    lengths = np.array([len(text) for text in texts])
    assert lengths.tolist() == (plan.schedule["input_tokens"] * chars_per_token).tolist()
    for a, b in itertools.combinations(range(len(lists)), 2):
        blocks = common(lists[a], lists[b])
        most = min(plan.schedule["prefix_tokens"][[a, b]].tolist())
        shared = min(blocks * BLOCK_TOKENS, most)
        equal = common(texts[a], texts[b])
        assert equal >= shared * chars_per_token
        assert equal < (shared + 4) * chars_per_token + 8, (a, b)  # chance, within a few words


def test_the_order_in_which_prompts_are_written_does_not_matter(tmp_path):
    plan = make_plan(hashed_trace(tmp_path))
    forward, backward = (Prompts(Synthetic(), 0, b"salt", plan.pieces) for _ in range(2))
    fit = PromptFit(0.0, 0.3)
    texts = [forward.render(row, fit) for row in plan.schedule]
    assert [backward.render(row, fit) for row in plan.schedule[::-1]] == texts[::-1]


def test_rounds_of_a_loop_share_nothing(tmp_path):
    plan, n = make_plan(hashed_trace(tmp_path, loop=True)), len(hashed_lists())
    prompts = Prompts(Synthetic(tokenizer="bytes"), 0, b"salt", plan.pieces)
    first, again = (prompts.render(plan.schedule[k], PromptFit()) for k in (0, n))
    assert plan.schedule["prefix_tokens"][n] == plan.schedule["prefix_tokens"][0] == 59
    assert len(first) == len(again)
    assert common(first, again) < 8


def test_pieces_are_part_of_the_fingerprint_and_of_every_share(tmp_path):
    plan = make_plan(hashed_trace(tmp_path))
    other = plan.pieces.copy()
    other["tokens"][-1] += 1
    assert schedule_sha256(*plan) != schedule_sha256(plan.schedule, plan.edges, other)
    assert schedule_sha256(*plan) != schedule_sha256(plan.schedule, plan.edges)
    for share in split_plan(plan, 3):
        assert share.pieces.tobytes() == plan.pieces.tobytes()


def test_classes_of_a_trace_and_classes_with_prefixes_keep_apart(tmp_path):
    trace = hashed_trace(tmp_path).arrivals
    lengths = {"input_tokens": 100, "output_tokens": 3}
    prefixed = {
        "arrivals": {"kind": "constant", "rate": "5/s"},
        "requests": {**lengths, "shared_prefix": {"tokens": 50, "groups": 2}},
    }
    replayed = {"arrivals": trace.model_dump(mode="json", by_alias=True, exclude_defaults=True)}
    replayed["arrivals"]["kind"] = "trace"
    planned = hashed_trace(tmp_path).model_copy(update={"arrivals": None})
    values = planned.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    values |= {"classes": {"a": prefixed, "b": replayed, "c": prefixed, "d": replayed}}
    plan = make_plan(type(planned).model_validate(values))
    ids = [
        set(plan.schedule["prefix_id"][plan.schedule["class_id"] == k].tolist()) for k in range(4)
    ]
    assert (ids[0], ids[2]) == ({1, 2}, {3, 4})
    n = len(plan.pieces) // 2
    assert max(ids[1]) < P + n <= min(ids[3] - {0})
    assert plan.pieces["tokens"][:n].tolist() == plan.pieces["tokens"][n:].tolist()
