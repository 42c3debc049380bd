"""Counting here: prompts with exactly the tokens asked for, whatever the tokenizer merges."""

import pickle
import sys
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import MissingDependency, ScenarioError
from loadgen.records import SCHEDULE
from loadgen.workload.client_tokenizer import Utf8Tokenizer, cut_to_tokens, load_tokenizer
from loadgen.workload.prompts import PromptFit, Prompts
from loadgen.workload.texts import Synthetic
from loadgen.workload.vocabulary import WORDS


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A model directory with a byte-pair tokenizer trained here on our own words."""
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    folder = tmp_path_factory.mktemp("model")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, show_progress=False
    )
    rng = np.random.default_rng(1)
    lines = [" ".join(WORDS[i] for i in rng.integers(0, len(WORDS), 12)) for _ in range(600)]
    inner.train_from_iterator(lines, trainer)
    inner.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def prompts(model_dir):
    return Prompts(Synthetic(tokenizer=str(model_dir)), 3, b"salt")


@cache
def tokenizer(model_dir):
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def count(model_dir, text):
    """The independent count: the library itself."""
    return len(tokenizer(model_dir).encode(text, add_special_tokens=False).ids)


def row(input_tokens, prompt_seed=1, prefix_id=0, prefix_tokens=0):
    rows = np.zeros(1, SCHEDULE)
    rows["input_tokens"], rows["prompt_seed"] = input_tokens, prompt_seed
    rows["prefix_id"], rows["prefix_tokens"] = prefix_id, prefix_tokens
    return rows[0]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**64 - 1), st.integers(0, 40))
def test_a_prompt_has_exactly_the_tokens_asked_for(
    prompts, model_dir, n_tokens, prompt_seed, overhead
):
    text = prompts.render(row(n_tokens, prompt_seed), PromptFit(overhead, 0.25))
    assert count(model_dir, text) == max(1, n_tokens - overhead)
    assert text == text.strip()


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 300), st.integers(1, 200), st.integers(0, 2**64 - 1))
def test_a_shared_prefix_is_counted_in_and_really_shared(
    prompts, model_dir, own, prefix_tokens, prompt_seed
):
    asked = row(own + prefix_tokens, prompt_seed, 5, prefix_tokens)
    text = prompts.render(asked, PromptFit(0, 0.25))
    assert count(model_dir, text) == own + prefix_tokens
    other = prompts.render(row(own + prefix_tokens, 77, 5, prefix_tokens), PromptFit(0, 0.25))
    shared = next(
        (k for k, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), len(other)
    )
    assert count(model_dir, text[:shared]) >= prefix_tokens - 1  # the last may merge onwards


def test_two_requests_begin_differently(prompts):
    texts = [prompts.render(row(50, seed), PromptFit(0, 0.25)) for seed in range(200)]
    assert len({text[:16] for text in texts}) == 200


def test_a_turn_and_an_answer_have_exactly_their_tokens(prompts, model_dir):
    for n in (1, 2, 17, 400):
        text = prompts.write(b"answer", 9, n, PromptFit(12, 0.25))
        assert count(model_dir, text) == n


def test_a_tokenizer_travels_to_the_load_generators(prompts):
    copy = pickle.loads(pickle.dumps(prompts))
    assert copy.render(row(99), PromptFit()) == prompts.render(row(99), PromptFit())


@given(st.text(min_size=1, max_size=200).filter(str.strip), st.integers(1, 60))
def test_bytes_are_cut_between_characters(text, n_tokens):
    tokenizer = Utf8Tokenizer()
    fitted = cut_to_tokens(tokenizer, text, n_tokens)
    least = len(text[0].encode())
    if tokenizer.count(text) >= n_tokens >= least:
        assert abs(len(fitted.encode()) - n_tokens) <= 4
    assert tokenizer.count(text) == len(text.encode())
    assert len(tokenizer.ends(text)) == tokenizer.count(text)


def test_the_byte_tokenizer_needs_no_package():
    prompts = Prompts(Synthetic(tokenizer="bytes"), 0, b"")
    assert len(prompts.render(row(321), PromptFit(21, 0.25)).encode()) == 300


def test_a_directory_without_a_tokenizer_is_told(tmp_path):
    with pytest.raises(ScenarioError, match=r"has no tokenizer\.json; give a model's directory"):
        load_tokenizer(str(tmp_path))


def test_a_broken_tokenizer_file_is_told(tmp_path):
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ScenarioError, match=r"prompts\.tokenizer: .*tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependency, match=r"pip install 'slobench\[tokenizers\]'"):
        load_tokenizer(str(tmp_path))
