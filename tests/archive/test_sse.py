import time
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadgen.archive.sse import SseDecoder, SseEvent, plain_events

STREAM = (
    b"\xef\xbb\xbfdata: one\n\n"
    b": a comment\r\n"
    b"event: error\rdata: two\r\r"
    b"data: first line\r\ndata:second line\r\n\r\n"
    b"id: 7\nretry: 10\ndata\n\n"
    b"event: nothing follows\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = [
    SseEvent(b"", b"one"),
    SseEvent(b"error", b"two"),
    SseEvent(b"", b"first line\nsecond line"),
    SseEvent(b"", b""),
    SseEvent(b"", b"[DONE]"),
]


def decode(pieces):
    decoder = SseDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)], decoder


def test_a_whole_stream_gives_its_events():
    events, decoder = decode([STREAM])
    assert events == EVENTS
    assert decoder.flush() is None


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
@example(list(range(len(STREAM))))
def test_the_events_do_not_depend_on_where_the_bytes_are_cut(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in pairwise(edges)]
    assert decode(pieces)[0] == EVENTS


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_arbitrary_bytes_decode_the_same_whole_and_cut(data, cuts):
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    pieces = [data[a:b] for a, b in pairwise(edges)]
    cut, whole = decode(pieces), decode([data])
    assert cut[0] == whole[0]
    assert cut[1].flush() == whole[1].flush()


def test_a_stream_that_stops_inside_an_event_gives_it_on_flush():
    events, decoder = decode([b'data: {"a": 1}\n\ndata: {"b"'])
    assert events == [SseEvent(b"", b'{"a": 1}')]
    assert decoder.flush() == SseEvent(b"", b'{"b"')


@given(st.lists(st.sampled_from([b"data: ", b"\n", b"\n\n", b"\r", b"x", b":", b"data:"])))
def test_a_body_of_the_plain_form_means_what_the_decoder_says(pieces):
    body = b"".join(pieces)
    plain = plain_events(body)
    if plain is not None:
        events, decoder = decode([body])
        assert events == [SseEvent(b"", data) for data in plain]
        assert decoder.flush() is None


def test_two_events_as_servers_send_them_are_of_the_plain_form():
    assert plain_events(b"data: a\n\ndata: b: c\n\n") == [b"a", b"b: c"]
    assert plain_events(b"data: a\n\ndata: b") is None


def test_an_error_line_of_llamacpp_is_data_that_holds_an_error():
    events, _ = decode([b'data: a\n\nerror: {"message":"no slot"}\n\n'])
    assert events[1] == SseEvent(b"", b'{"error": {"message":"no slot"}}')


@pytest.mark.parametrize(
    "body", [b'{"error":"full"}', b'{\n  "error": {\n    "message": "full"\n  }\n}']
)
def test_bare_json_in_a_stream_is_data(body):
    """Gateways append the JSON of a late failure to a stream that they have begun."""
    events, decoder = decode([b"data: a\n\n", body, b"\n\ndata: b\n\n", body])
    expected = SseEvent(b"", body)
    assert events == [SseEvent(b"", b"a"), expected, SseEvent(b"", b"b")]
    assert decoder.flush() == expected


def test_a_field_after_bare_json_begins_another_event():
    events, _ = decode([b'{"error":\n"full"}\ndata: b\n\n'])
    assert events == [SseEvent(b"", b'{"error":\n"full"}'), SseEvent(b"", b"b")]


def test_a_line_in_ten_thousand_pieces_is_copied_once():
    """Adding each piece to all that came before it would copy 50 GB."""
    pieces = [b"data: ", *([b"x" * 1000] * 10_000), b"\n\n"]
    before_s = time.process_time()
    events, _ = decode(pieces)
    assert time.process_time() - before_s < 2.0
    assert events == [SseEvent(b"", b"x" * 10_000_000)]
