"""Calibration against tokenizers trained here: what a server would count, and what we then send."""

import os
from typing import Any

import numpy as np
import pytest

from loadgen.records import SCHEDULE
from loadgen.workload.calibration import Calibration
from loadgen.workload.dialogue import Dialogue
from loadgen.workload.prompts import Prompts
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan
from loadgen.workload.texts import Synthetic, TextFile
from loadgen.workload.vocabulary import COMMON, WORDS

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
models, trainers = tokenizers.models, tokenizers.trainers
pre = tokenizers.pre_tokenizers

rng = np.random.default_rng(5)
CORPUS = [" ".join(rng.choice([*COMMON, *WORDS], 40)) for _ in range(100)]


def trained(model, pre_tokenizer, trainer, corpus=CORPUS, **settings):
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(corpus, trainer(show_progress=False, **settings))
    return tokenizer


def byte_level(vocab_size, corpus=CORPUS, use_regex=True):
    return trained(
        models.BPE(), pre.ByteLevel(add_prefix_space=False, use_regex=use_regex),
        trainers.BpeTrainer, corpus, vocab_size=vocab_size,
        initial_alphabet=pre.ByteLevel.alphabet(),
    )  # fmt: skip


def sentence_piece():
    return trained(
        models.BPE(unk_token="<unk>"), pre.Metaspace(), trainers.BpeTrainer,
        vocab_size=500, special_tokens=["<unk>"], initial_alphabet=[*"TAU:[]/<>|_\n."],
    )  # fmt: skip


def word_level():
    """Every word a token, as large vocabularies have the common ones."""
    vocabulary = {word: n for n, word in enumerate(["[UNK]", *COMMON, *WORDS])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre.Whitespace()
    return tokenizer


MAKERS = {
    "bytes": lambda: None,
    "byte_level_300": lambda: byte_level(300),
    "byte_level_900": lambda: byte_level(900),
    "sentence_piece": sentence_piece,
    "word_level": word_level,
}


@pytest.fixture(scope="module", params=MAKERS)
def server(request):
    """(name, how it counts)."""
    tokenizer = MAKERS[request.param]()
    if tokenizer is None:
        return request.param, lambda text: len(text.encode())
    return request.param, lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def chat(messages):
    """A template that strips contents and leaves no blank between them and its own words."""
    said = "".join(f"<|{role}|>\n{content.strip()}</s>\n" for role, content in messages)
    return f"<s>{said}<|assistant|>\n"


def calibrated(schedule, count, kind=None, limit_tokens=2000):
    """A calibration driven by what a server counts; also what it was asked, and its last line."""
    calibration = Calibration(Prompts(kind or Synthetic(), 1, b"preflight"), schedule)
    first, shorter, longer = (calibration.sample(n) for n in (76, 128, 2000))
    assert len(first) == 76
    slope = (count(longer) - count(shorter)) / (len(longer) - len(shorter))
    line = count(shorter) - slope * len(shorter), slope
    steps = calibration.steps(line, limit_tokens)
    asked: list[Any] = []
    try:
        questions = next(steps)
        while True:
            asked += questions
            questions = steps.send(tuple(map(count, questions)))
    except StopIteration as end:
        return calibration, asked, end.value


def counter(tokens_of):
    def count(asked):
        if isinstance(asked, str):
            return tokens_of(chat([("user", asked)]))
        return tokens_of(chat(asked.as_messages()))

    return count


def plan(**changes):
    return make_plan(
        Scenario.model_validate(
            {
                "name": "x",
                "arrivals": {"kind": "poisson", "rate": "40/s"},
                "requests": {
                    "input_tokens": {"kind": "uniform", "min": 120, "max": 1500},
                    "output_tokens": 30,
                    "shared_prefix": {"tokens": 70, "groups": 3},
                },
                "phases": {"measure": "3s"},
                **changes,
            }
        )
    )


def test_prompts_are_exact_on_every_tokenizer_that_splits_at_blanks(server):
    name, tokens_of = server
    schedule, count = plan().schedule, counter(tokens_of)
    calibration, asked, (ok, line) = calibrated(schedule, count)
    prompts = Prompts(Synthetic(), 1, b"the run's")
    off = np.array([count(prompts.prompt(row, calibration.fit)) for row in schedule])
    off -= schedule["input_tokens"]
    assert ok
    assert line.startswith("prompt lengths exact to ≤ 1 token (calibrated on ")
    assert np.abs(off).max() <= 1, name
    assert len(asked) + 2 <= 12
    assert sum(map(count, asked)) < 5000
    assert (calibration.fit.words is None) == (name == "bytes")


def test_where_tokens_reach_over_blanks_lengths_hold_on_average_and_it_says_so():
    tokenizer = byte_level(900, [" ".join([*COMMON] * 9)], use_regex=False)
    count = counter(lambda text: len(tokenizer.encode(text).ids))
    schedule = plan().schedule
    calibration, asked, (ok, line) = calibrated(schedule, count)
    assert ok is None
    assert "lengths hold on average (at " in line
    assert "add up" in line
    assert calibration.fit.words is None
    assert len(asked) + 2 <= 13
    prompts = Prompts(Synthetic(), 1, b"the run's")
    off = np.array([count(prompts.prompt(row, calibration.fit)) for row in schedule])
    off -= schedule["input_tokens"]
    assert abs(off.mean()) < 0.1 * schedule["input_tokens"].mean()


def test_a_group_shares_its_prefix_and_nothing_after_it(server):
    name, tokens_of = server
    schedule = plan().schedule
    calibration, _, _ = calibrated(schedule, counter(tokens_of))
    prompts = Prompts(Synthetic(), 1, b"the run's")
    texts = [prompts.prompt(row, calibration.fit).prompt for row in schedule]
    for group in (1, 2, 3):
        mine = [t for t, row in zip(texts, schedule, strict=True) if row["prefix_id"] == group]
        shared = os.path.commonprefix(mine)  # noqa: RUF071 - characters are meant
        # 70 tokens declared; the opening word and a first word in common come on top
        assert 70 <= tokens_of(shared.strip()) <= 70 + 8, name
    assert len({text[-200:] for text in texts}) == len(texts)


def test_later_turns_have_their_planned_length_with_the_template_in_it(server):
    name, tokens_of = server
    planned = plan(
        requests={"input_tokens": 150, "output_tokens": 30}, session={"turns": 3}
    )  # scripted answers
    count = counter(tokens_of)
    calibration, asked, (ok, _) = calibrated(planned.schedule, count)
    assert ok
    assert len(asked) + 2 <= 13
    talk = Dialogue(
        planned.schedule, planned.edges, Prompts(Synthetic(), 1, b"run"), calibration.fit
    )
    off = [
        count(talk.prompt(row)) - int(planned.schedule["input_tokens"][row])
        for row in range(len(planned.schedule))
    ]
    assert np.abs(off).max() <= 1, name


def test_a_large_vocabulary_gives_many_words():
    tokenizer = word_level()
    count = counter(lambda text: len(tokenizer.encode(text).ids))
    calibration, asked, _ = calibrated(plan().schedule, count)
    assert calibration.fit.words is not None
    assert set(calibration.fit.words.tokens) == {1}
    assert len(calibration.fit.words.words) == 64 + 192
    assert len(asked) == 6  # the frame, short words, all words, more words, two lengths


@pytest.mark.parametrize("per_char", [0.25, 0.2, 0.31])
def test_a_server_that_counts_characters_is_followed_by_its_line(per_char):
    def count(asked):
        text = asked if isinstance(asked, str) else asked.prompt
        return round(len(text) * per_char) + 8

    calibration, _, (ok, line) = calibrated(plan().schedule, count)
    assert ok, line
    assert calibration.fit.words is None
    assert calibration.fit.tokens_per_char == pytest.approx(per_char, abs=1e-3)


def test_a_server_that_stops_counting_leaves_the_line():
    calibration, _, (ok, line) = calibrated(
        plan().schedule, lambda asked: len(asked) // 3 if isinstance(asked, str) else None
    )
    assert ok is None
    assert line.endswith("overhead; the server stopped counting")
    assert calibration.fit.words is None


def test_without_a_line_lengths_are_estimates():
    calibration = Calibration(Prompts(Synthetic(), 1, b""), plan().schedule)
    with pytest.raises(StopIteration) as end:
        next(calibration.steps(None, 2000))
    assert end.value.value == (None, "not possible: prompt lengths are estimates")
    assert calibration.fit.tokens_per_char == 0.25


def test_a_short_context_is_not_filled_with_questions():
    tokenizer = byte_level(300)
    count = counter(lambda text: len(tokenizer.encode(text).ids))
    schedule = plan(requests={"input_tokens": 90, "output_tokens": 8}).schedule
    _, asked, (_, line) = calibrated(schedule, count, limit_tokens=200)
    assert max(map(count, asked)) <= 200
    assert "too short to count words in" in line or "exact" in line


def test_somebodys_own_text_is_cut_by_the_line_and_says_so(tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(CORPUS))
    tokenizer = byte_level(900)
    count = counter(lambda text: len(tokenizer.encode(text).ids))
    kind = TextFile(path=str(tmp_path / "text.txt"))
    calibration, asked, (ok, line) = calibrated(plan().schedule, count, kind)
    assert calibration.fit.words is None
    assert len(asked) == 2
    assert ok is None
    assert "lengths hold on average (at " in line


def test_what_is_asked_is_no_request_of_the_run():
    unsalted = Synthetic(salt="none")
    rows = np.zeros(2, SCHEDULE)
    rows["input_tokens"], rows["prompt_seed"] = (60, 300), (1, 2)
    rows["prefix_id"], rows["prefix_tokens"] = 1, 20
    _, asked, _ = calibrated(rows, counter(lambda text: len(text.encode())), unsalted)
    prompts = Prompts(unsalted, 1, b"")
    calibration, _, _ = calibrated(rows, counter(lambda text: len(text.encode())), unsalted)
    sent = {prompts.prompt(row, calibration.fit).prompt[:20] for row in rows}
    assert not sent & {question.prompt[:20] for question in asked}
