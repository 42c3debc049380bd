"""Stop strings are found across tokens and never sent, not even in part."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.serving.active_request import StopText

texts = st.text("ab.", max_size=30)


def stream(stops, pieces):
    """The sent text and whether a stop string ended it."""
    stop, shown = StopText(stops), ""
    for piece in pieces:
        text, is_stopped = stop.push(piece)
        shown += text
        if is_stopped:
            return shown, True
    return shown + stop.flush(), False


def test_text_that_may_become_a_stop_string_is_held_back():
    stop = StopText(["END"])
    assert [stop.push(c) for c in "aENxEND"] == [
        ("a", False),
        ("", False),
        ("", False),
        ("ENx", False),
        ("", False),
        ("", False),
        ("", True),
    ]


def test_without_stop_strings_everything_passes():
    assert stream([], ["a", "", "b"]) == ("ab", False)


def test_of_two_stop_strings_the_earlier_in_the_text_counts():
    assert stream(["x", "yz"], ["ayzx"]) == ("a", True)


@settings(deadline=None)
@given(text=texts, stop=st.text("ab.", min_size=1, max_size=4), cuts=st.lists(st.integers(0, 30)))
def test_the_result_does_not_depend_on_where_tokens_are_cut(text, stop, cuts):
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    head, match, _ = text.partition(stop)
    assert stream([stop], pieces) == (head, bool(match))


@settings(deadline=None)
@given(text=texts, stops=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=4))
def test_the_sent_text_is_a_prefix_without_any_stop_string(text, stops):
    shown, is_stopped = stream(stops, list(text))
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert is_stopped == any(stop in text for stop in stops)
