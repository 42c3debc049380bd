"""Bodies whose events have names: however their bytes come, they have the same content."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.archive.decode import Decoded, decode
from loadgen.archive.exchange import Exchange
from loadgen.archive.sse import without_names
from loadgen.records import Status
from targets.base import TARGETS
from targets.mock_named_events import FORMS
from targets.mock_script import Script

EITHER = pytest.mark.parametrize("api", sorted(FORMS))


def parts_of(api, tokens=48, **script):
    """The reply of the mock, a part per event."""
    reply = FORMS[api](
        script=Script(**script), number=5, key=0, is_chat=True, model="m", prompt_tokens=20,
        tokens=tokens, finish="length", has_usage=True, continuous=False,
    )  # fmt: skip
    return [reply.role(), *map(reply.event, range(reply.n_events)), reply.tail()]


def decoded(api, parts, *, is_plain=True):
    """`is_plain` False: with a comment, which only the reader of every form understands."""
    made = Exchange(0, sent_ns=1, headers_ns=2, http_status=200, done_ns=9_000)
    made.content_type = "text/event-stream"
    made.parts = list(parts) if is_plain else [*parts[:-1], parts[-1] + b": a comment\n\n"]
    made.times = list(range(10, 10 + len(parts)))
    return decode(made, TARGETS.get(api)(model="m"))


def content(found):
    names = {field.name for field in fields(Decoded)} - {"n_bytes"}
    return {name: getattr(found, name) for name in names}


@EITHER
@pytest.mark.parametrize(
    "script", [{}, {"reasoning": 7}, {"coalesce": 3}, {"usage": "off"}], ids=str
)
@pytest.mark.parametrize("tokens", [1, 12, 48])  # below and above the length from which shapes pay
def test_the_fast_way_reads_the_same_as_the_way_for_every_form(api, script, tokens):
    parts = parts_of(api, tokens, **script)
    fast = decoded(api, parts)
    assert content(fast) == content(decoded(api, parts, is_plain=False))
    assert (fast.status, len(fast.chunk_ns)) == (Status.ok, -(-tokens // script.get("coalesce", 1)))
    assert fast.chunk_ns[0] == 11


@EITHER
@given(data=st.data())
def test_where_the_bytes_are_cut_changes_the_times_only(api, data):
    body = b"".join(parts_of(api, 12))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(body) - 1), max_size=6)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    found = decoded(api, pieces)
    assert (found.status, found.output_tokens, len(found.chunk_ns)) == (Status.ok, 12, 12)
    ends = [body.index(b"\n\n", at) + 2 for at in starts_of_tokens(body)]
    assert found.chunk_ns == [10 + sum(cut < end for cut in cuts) for end in ends]


def starts_of_tokens(body):
    """The place of each event with a token."""
    names = (b"event: response.output_text.delta\n", b"event: content_block_delta\n")
    return [at for at in range(len(body)) if body.startswith(names, at)]


@EITHER
@pytest.mark.parametrize("name", [b"error", b"Error", b"response.error"])
def test_an_event_whose_name_alone_is_an_error_is_a_failure(api, name):
    parts = parts_of(api)
    fault = b"event: " + name + b'\ndata: {"reason":"no GPU"}\n\n'
    found = decoded(api, [*parts[:20], fault, *parts[20:]])
    assert (found.status, found.error) == (
        Status.stream_error, 'error in the stream: {"reason":"no GPU"}'
    )  # fmt: skip


def test_only_the_lines_of_names_are_left_out():
    part = (
        b"event: a\ndata: event: b\n\nevent: c\ndata: {}\n\nevent: error\ndata: {}\n\nevent: d\n\n"
    )
    assert without_names(part) == (
        b"data: event: b\n\ndata: {}\n\nevent: error\ndata: {}\n\nevent: d\n\n"
    )
