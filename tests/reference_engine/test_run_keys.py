"""Keys of simulated texts are equal where the texts are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_engine.state.run_keys import RunKeys, run_digest

# A text is a few runs, each of a token and a number of blocks; a run ends where the next has
# another token.
runs = st.lists(st.tuples(st.integers(1, 2), st.integers(1, 4)), min_size=1, max_size=4)


def keys_of(runs):
    """The keys of a text, and for each block the text up to its end."""
    starts, digests, before, at, text = [], [], b"tenant", 0, []
    for number, (token, n) in enumerate(runs):
        before = run_digest(before, 10 * number + token)
        starts.append(at)
        digests.append(before)
        text += [10 * number + token] * n
        at += n
    return RunKeys(starts, digests, at), [tuple(text[: k + 1]) for k in range(at)]


@given(a=runs, b=runs)
def test_two_keys_are_equal_where_the_texts_up_to_them_are(a, b):
    # Runs of equal length, as in a trace: a text is divided in only one way.
    (keys_a, texts_a), (keys_b, texts_b) = (keys_of([(t, 3) for t, _ in text]) for text in (a, b))
    for key_a, text_a in zip(keys_a, texts_a, strict=True):
        for key_b, text_b in zip(keys_b, texts_b, strict=True):
            assert (key_a == key_b) == (text_a == text_b)


@given(text=runs, n=st.integers(0, 20), hashes=st.lists(st.binary(min_size=16, max_size=16)))
def test_keys_are_read_like_a_list(text, n, hashes):
    keys, _ = keys_of(text)
    listed = [*keys, *hashes]
    for key in hashes:
        keys.append(key)
    assert list(keys) == listed
    assert [keys[k] for k in range(len(keys))] == listed
    assert (len(keys), keys[-1]) == (len(listed), listed[-1])
    assert list(keys[:n]) == listed[:n]
    keys[:n].append(b"")
    assert list(keys) == listed
    assert {len(key) for key in listed} == {16}


def test_only_a_beginning_is_cut_off():
    keys, _ = keys_of([(1, 4)])
    with pytest.raises(AssertionError, match="only a beginning"):
        keys[1:]
    with pytest.raises(IndexError):
        keys[4]
