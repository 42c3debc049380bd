"""Prompts: exact lengths, and shared beginnings exactly where they are declared."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.records import SCHEDULE
from loadgen.workload.prompts import PromptFit, Prompts, word_starts
from loadgen.workload.scenario import scenario_from_flags
from loadgen.workload.schedule import make_schedule
from loadgen.workload.texts import Synthetic
from loadgen.workload.vocabulary import WORDS

BYTES = PromptFit()
PROMPTS = Prompts(Synthetic(), 7, b"salt of this run")


def row(input_tokens, prompt_seed=1, prefix_id=0, prefix_tokens=0):
    rows = np.zeros(1, SCHEDULE)
    rows["input_tokens"], rows["prompt_seed"] = input_tokens, prompt_seed
    rows["prefix_id"], rows["prefix_tokens"] = prefix_id, prefix_tokens
    return rows[0]


def schedule(**changes):
    asked = {"rate": "100/s", "input_len": 200, "output_len": 8, "duration": "10s", **changes}
    return make_schedule(scenario_from_flags(**asked))


def first_blocks(prompts, rows):
    return [prompts.render(row, BYTES)[:16] for row in rows]


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 40))
def test_with_a_byte_tokenizer_the_length_is_exact(input_tokens, prompt_seed, overhead):
    text = PROMPTS.render(row(input_tokens, prompt_seed), PromptFit(overhead, 1.0))
    assert text.isascii()
    assert len(text.encode()) + overhead == max(input_tokens, overhead + 1)
    assert text == text.strip(), "a template that strips blanks would change the length"


@settings(max_examples=30)
@given(st.integers(1, 5000), st.floats(0, 50), st.floats(0.1, 2))
def test_a_fit_is_met_to_half_a_character(input_tokens, overhead, tokens_per_char):
    fit = PromptFit(overhead, tokens_per_char)
    tokens = overhead + tokens_per_char * len(PROMPTS.render(row(input_tokens), fit))
    if fit.is_reachable(input_tokens):
        assert abs(tokens - input_tokens) <= tokens_per_char / 2 + 1e-6
    else:
        assert tokens == overhead + tokens_per_char


def test_lengths_below_the_overhead_are_countable():
    lengths = np.array([1, 20, 29, 30, 31, 500], np.uint32)
    fit = PromptFit(overhead_tokens=30, tokens_per_char=1.0)
    assert fit.is_reachable(lengths).tolist() == [False, False, False, False, True, True]


def test_a_prompt_longer_than_the_corpus_is_still_exact():
    assert len(PROMPTS.render(row(1_000_000), BYTES)) == 1_000_000


def test_no_two_requests_share_their_first_block():
    blocks = first_blocks(PROMPTS, schedule())
    assert len(blocks) > 900
    assert len(set(blocks)) == len(blocks)


def test_no_two_salts_share_a_first_block():
    rows = schedule()
    runs = [Prompts(Synthetic(), 0, salt) for salt in (b"a", b"b", b"")]
    blocks = list(itertools.chain.from_iterable(first_blocks(run, rows) for run in runs))
    assert len(set(blocks)) == len(blocks)


def test_the_same_salt_gives_the_same_text():
    rows = schedule()[:50]
    first, second = (Prompts(Synthetic(), 3, b"x") for _ in range(2))
    assert [first.render(r, BYTES) for r in rows] == [second.render(r, BYTES) for r in rows]


@pytest.mark.parametrize("kind", [Synthetic(), Synthetic(salt="none")])
def test_prompts_salted_anew_are_those_that_were_made_with_that_salt(kind):
    rows = [row(300, 5), row(300, 5, prefix_id=3, prefix_tokens=120)]
    of_preflight = Prompts(kind, 7, b"preflight")
    before = [of_preflight.render(one, BYTES) for one in rows]
    made, again = Prompts(kind, 7, b"a run"), of_preflight.salted(b"a run")
    assert [again.render(one, BYTES) for one in rows] == [made.render(one, BYTES) for one in rows]
    assert [of_preflight.render(one, BYTES) for one in rows] == before


def test_salt_none_ignores_the_salt_of_the_run():
    unsalted = Synthetic(salt="none")
    first, second = (Prompts(unsalted, 3, salt) for salt in (b"x", b"y"))
    assert first.render(row(300), BYTES) == second.render(row(300), BYTES)


def test_a_group_shares_its_declared_prefix_and_not_a_character_more():
    rows = schedule(overrides=["requests.shared_prefix={tokens: 120, groups: 3}"])[:200]
    texts = [PROMPTS.render(r, BYTES) for r in rows]
    assert {len(text) for text in texts} == {320}
    prefixes = [
        {t[:120] for t, r in zip(texts, rows, strict=True) if r["prefix_id"] == g}
        for g in (1, 2, 3)
    ]
    assert [len(prefix) for prefix in prefixes] == [1, 1, 1]
    assert len({next(iter(prefix))[:16] for prefix in prefixes}) == 3
    assert len({text[120:136] for text in texts}) == len(texts)


def test_a_shared_prefix_changes_with_the_salt():
    other = Prompts(Synthetic(), 7, b"another run")
    asked = row(400, prefix_id=1, prefix_tokens=300)
    assert PROMPTS.render(asked, BYTES)[:16] != other.render(asked, BYTES)[:16]


def test_a_prefix_as_long_as_the_prompt_leaves_one_character_of_its_own():
    fit = PromptFit(overhead_tokens=25, tokens_per_char=1.0)
    prefix = PROMPTS.render(row(999, 1, 1, 300), fit)[:300]
    text = PROMPTS.render(row(310, 2, 1, 300), fit)
    assert len(text) == 285
    assert text[:284] == prefix[:284]


def test_bodies_are_made_of_our_words():
    body = PROMPTS.render(row(2000), BYTES).removesuffix(".").split(" ")[1:-1]
    assert len(body) > 200
    assert set(body) <= set(WORDS)


def test_the_words_are_common_ascii_and_without_repetition():
    assert len(WORDS) == len(set(WORDS)) > 800
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


@pytest.mark.parametrize("fit", [(-1.0, 1.0), (0.0, 0.0)])
def test_a_fit_that_no_tokenizer_has_is_refused(fit):
    with pytest.raises(AssertionError, match="token"):
        PromptFit(*fit)


def test_a_sample_for_calibration_has_the_asked_length_and_is_no_request():
    sample = PROMPTS.sample(400)
    assert len(sample) == 400
    assert sample[:16] not in first_blocks(PROMPTS, schedule())
    assert set(sample.removesuffix(".").split(" ")[1:-1]) <= set(WORDS)


@given(st.text(st.sampled_from("aß字\U0001f600 \t\n\x1c\x85\u3000\u200b\ud800"), max_size=40))
def test_words_begin_where_a_regular_expression_finds_them(text):
    assert word_starts(text).tolist() == [word.start() for word in re.finditer(r"\S+", text)]
