"""Text of counted words: exact in tokens, different from the first words on."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.workload.vocabulary import COMMON
from loadgen.workload.word_text import (
    CLOSING,
    DIGEST_BYTES,
    OPENING,
    WordCounts,
    WordText,
    framed,
    unframed,
)

digests = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)
counts = st.lists(st.integers(1, 4), min_size=16, max_size=40).map(
    lambda tokens: WordCounts(20, COMMON[: len(tokens)], tuple(tokens))
)


def tokens_of(piece, known):
    """Counted by hand: the sum over its words."""
    return sum(known.tokens[known.words.index(word)] for word in piece.split())


@settings(max_examples=60)
@given(counts, digests, st.integers(0, 4000))
def test_a_piece_has_the_asked_tokens_wherever_words_can_make_them(known, digest, n_tokens):
    piece, told = WordText(known, 7).piece(digest, n_tokens)
    assert piece.startswith(" ")
    assert told == tokens_of(piece, known)
    if n_tokens < min(known.tokens):
        assert told == min(known.tokens)
    elif 1 in known.tokens:
        assert told == n_tokens
    else:
        assert n_tokens - min(known.tokens) < told <= n_tokens


def test_words_of_two_and_three_tokens_make_every_length_but_one():
    known = WordCounts(0, COMMON[:20], (2, 3) * 10)
    words = WordText(known, 0)
    told = [words.piece(n.to_bytes(DIGEST_BYTES, "big"), n)[1] for n in range(2, 300)]
    assert told == list(range(2, 300))


def test_a_piece_longer_than_the_corpus_is_exact():
    known = WordCounts(0, COMMON[:64], (1,) * 64)
    piece, told = WordText(known, 0).piece(b"\x05" * DIGEST_BYTES, 100_000)
    assert told == len(piece.split()) == 100_000


def test_pieces_differ_within_their_first_sixteen_words():
    words = WordText(WordCounts(0, COMMON[:32], (1,) * 32), 3)
    heads = {
        tuple(words.piece(n.to_bytes(DIGEST_BYTES, "little"), 200)[0].split()[:16])
        for n in range(3000)
    }
    assert len(heads) == 3000


def test_a_head_is_made_of_the_shortest_words_where_there_are_enough():
    known = WordCounts(0, COMMON[:40], (1,) * 20 + (3,) * 20)
    piece, _ = WordText(known, 3).piece(bytes(range(DIGEST_BYTES)), 200)
    assert set(piece.split()[:16]) <= set(COMMON[:20])


def test_a_frame_stands_around_a_piece_and_comes_off_again():
    assert framed(" the of") == f"{OPENING} the of {CLOSING}"
    assert unframed(framed(" the of")) == "the of"
    assert framed("") == f"{OPENING} {CLOSING}"


@pytest.mark.parametrize(("words", "tokens"), [((), ()), (("a",), (0,)), (("a", "b"), (1,))])
def test_counts_that_no_server_gives_are_refused(words, tokens):
    with pytest.raises(AssertionError):
        WordCounts(0, words, tokens)


def test_every_word_of_the_vocabulary_can_be_counted():
    assert len(set(COMMON)) == len(COMMON) >= 64
    assert all(word.isascii() and word.isalpha() and word.islower() for word in COMMON)
    assert len([word for word in COMMON if len(word) <= 3]) >= 20
    assert all(a != b for a, b in itertools.pairwise(COMMON))
