"""Answers under load against the answer at idle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from targets.canary import is_repeating, kind_of

IDLE = "one, two, three, four, five, six, seven, eight"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (IDLE, "same"),
        ("one, two, three, four, five, six, seven, nine", "late"),
        ("one, two, three, five, six, seven, eight, nine", "early"),
        ("Uno, dos, tres, cuatro, cinco, seis, siete, ocho", "early"),
        ("one, two, three, four, five", "shorter"),
        ("one", "shorter"),
        ("one, two, three, four, four, four, four, four, four, four,", "repeating"),
        ("!" * 40, "repeating"),
        ("", "empty"),
        (" \n\n", "empty"),
    ],
)
def test_an_answer_under_load_is_of_one_kind(answer, kind):
    assert kind_of(answer, IDLE) == kind


def test_a_loop_that_was_there_at_idle_is_no_finding():
    assert kind_of("ha " * 20, "ha " * 22) == "shorter"
    assert kind_of("ho " * 20, "ha " * 22) == "early"


@given(st.text(max_size=40), st.text(min_size=1, max_size=12), st.integers(0, 30))
def test_a_text_repeats_where_its_end_is_four_equal_pieces_of_24_characters(before, piece, n):
    tail = piece * n
    if n >= 4 and len(tail) >= 24:
        assert is_repeating(before + tail)
    found = any(
        len(tail) >= max(24, 4 * period)
        and all(tail[-k - 1] == tail[-k - 1 - period] for k in range(max(24, 4 * period) - period))
        for period in range(1, len(tail) // 4 + 1)
    )
    assert is_repeating(tail) == found


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz", max_size=23))
def test_a_short_text_never_repeats(text):
    assert not is_repeating(text)
