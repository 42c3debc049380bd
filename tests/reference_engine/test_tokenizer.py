"""Text to ids and back: nothing lost, nothing shown before it is certain."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import MissingDependency
from reference_engine.state.tokenizer import (
    ByteTokenizer,
    Detokenizer,
    Printable,
    Utf8Stream,
    load_tokenizer,
)


def texts(stream: Detokenizer, tokens) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.flush()]


@settings(deadline=None)
@given(st.text())
def test_bytes_come_back_as_the_same_text(text):
    tokens = ByteTokenizer(printable=False).encode(text)
    assert len(tokens) == max(1, len(text.encode()))
    assert "".join(texts(Utf8Stream(), tokens)) == text


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_stream_to_what_they_decode_to_at_once(data):
    assert "".join(texts(Utf8Stream(), data)) == data.decode("utf-8", errors="replace")


def test_an_incomplete_character_is_held_back():
    assert texts(Utf8Stream(), "aé€".encode()) == ["a", "", "é", "", "", "€", ""]


def test_a_cut_character_becomes_a_replacement_at_the_end():
    assert texts(Utf8Stream(), b"a\xe2\x82") == ["a", "", "", "\ufffd"]


def test_special_ids_have_no_text():
    assert texts(Utf8Stream(), [256, 65, 257, 319]) == ["", "A", "", "", ""]


@settings(deadline=None)
@given(st.integers(0, 200_000))
def test_a_printable_token_is_exactly_one_printable_ascii_character(token):
    text, rest = texts(Printable(), [token])
    assert len(text) == 1
    assert " " <= text <= "~"
    assert rest == ""


def test_printable_bytes_are_themselves():
    assert "".join(texts(Printable(), b"Hello, world")) == "Hello, world"


def test_a_chat_is_one_line_per_message_and_the_assistants_opening():
    ids = ByteTokenizer(printable=True).render([("system", "Be brief."), ("user", "Hi")])
    assert bytes(ids) == b"system: Be brief.\nuser: Hi\nassistant: "


def test_an_empty_prompt_is_one_token():
    assert ByteTokenizer(printable=True).encode("") == [256]


def test_a_lone_surrogate_is_no_crash():
    assert ByteTokenizer(printable=True).encode("a\ud800b") == [97, 63, 98]


@pytest.fixture
def hf_directory(tmp_path):
    """A byte-level BPE without merges, made with the `tokenizers` package."""
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers package is not here")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_local_tokenizer_streams_the_text_it_decodes_to(hf_directory):
    tokenizer = load_tokenizer(hf_directory, printable=False)
    for text in ("plain words here", "é€😀 mixed 中文 end", "  two  spaces\n"):
        ids = tokenizer.encode(text)
        pieces = texts(tokenizer.detokenizer(), ids)
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_local_tokenizer_shows_a_cut_character_only_at_the_end(hf_directory):
    tokenizer = load_tokenizer(hf_directory, printable=False)
    pieces = texts(tokenizer.detokenizer(), tokenizer.encode("a€")[:-1])
    assert pieces[:-1] == ["a", "", ""]
    assert set(pieces[-1]) == {"\ufffd"}


def test_a_local_chat_template_is_used(hf_directory):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    (hf_directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "eos_token": {"content": "<eos>"}})
    )
    tokenizer = load_tokenizer(hf_directory, printable=False)
    assert tokenizer.render([("user", "Hi")]) == tokenizer.encode("[user]Hi<eos>")
    assert len(tokenizer.render([("user", "Hi")])) == 9


def test_without_the_tokenizers_package_the_message_says_what_to_install(hf_directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependency, match="pip install tokenizers"):
        load_tokenizer(hf_directory, printable=False)


def test_a_directory_without_a_tokenizer_is_served_in_bytes(tmp_path):
    assert isinstance(load_tokenizer(tmp_path, printable=False), ByteTokenizer)
