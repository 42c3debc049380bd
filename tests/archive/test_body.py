"""Bodies without their framing, for every cut of the bytes."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from loadgen.archive.decode import Body
from loadgen.archive.exchange import Exchange

DATA = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.sampled_from([b"\r\n", b"\r\n0\r\n\r\n", b"0\r\n\r\n", b"data: x\n\n", b"\r", b"\n", b"0"]),
)
LINES = st.sampled_from([b"%x", b"%X", b"%08x", b"%x;name=value"])
TRAILERS = st.sampled_from([b"", b"x-trailer: 1\r\n", b"a: b\r\nc: d\r\n"])


def exchange(reads, **fields):
    made = Exchange(0, **fields)
    made.parts, made.times = list(reads), [100 + i for i in range(len(reads))]
    made.n_bytes = sum(map(len, reads))
    return made


def by_read(body):
    """The bytes that came with each read."""
    found: dict[int, bytes] = {}
    for at_ns, part in zip(body.times, body.parts, strict=True):
        found[at_ns] = found.get(at_ns, b"") + part
    return found


@st.composite
def streams(draw):
    """A chunked body cut into reads, and what each of these brought of the data."""
    line, wire, places = draw(LINES), b"", list[tuple[int, int]]()  # (offset in wire, byte)
    for data in draw(st.lists(DATA, max_size=8)):
        wire += line % len(data) + b"\r\n"
        places += [(len(wire) + k, byte) for k, byte in enumerate(data)]
        wire += data + b"\r\n"
    wire += draw(st.sampled_from([b"0", b"000", b"0;last"])) + b"\r\n" + draw(TRAILERS) + b"\r\n"
    cuts = draw(st.sets(st.integers(1, len(wire) - 1))) if draw(st.booleans()) else range(len(wire))
    edges = [0, *sorted({*cuts} - {0}), len(wire)]
    brought: dict[int, bytes] = {}
    for read, (start, end) in enumerate(pairwise(edges)):
        data = bytes(byte for place, byte in places if start <= place < end)
        if data:
            brought[100 + read] = data
    return [wire[a:b] for a, b in pairwise(edges)], brought


@given(streams())
def test_each_read_brought_the_data_that_lay_in_it(stream):
    reads, brought = stream
    body = Body(exchange(reads, is_chunked=True))
    assert by_read(body) == brought
    assert body.data == b"".join(brought.values())
    assert body.n_bytes == len(body.data)


def test_chunks_that_come_together_are_parts_with_the_same_instant():
    body = Body(exchange([b"1\r\na\r\n2\r\nbc\r\n", b"1\r\nd\r\n0\r\n\r\n"], is_chunked=True))
    assert (body.times, body.parts) == ([100, 100, 101], [b"a", b"bc", b"d"])


def test_a_body_ends_where_its_framing_breaks():
    body = Body(exchange([b"1\r\na\r\n", b"1\r\nb\r\nzz\r\n", b"1\r\nc\r\n"], is_chunked=True))
    assert by_read(body) == {100: b"a", 101: b"b"}


def test_what_is_behind_a_stated_length_is_none_of_the_body():
    body = Body(exchange([b"ab", b"cdef", b"gh"], length=3))
    assert (body.times, body.parts) == ([100, 101], [b"ab", b"c"])


def test_a_body_without_framing_is_what_came():
    body = Body(exchange([b"ab", b"1\r\nc"]))
    assert (body.times, body.parts, body.n_bytes) == ([100, 101], [b"ab", b"1\r\nc"], 6)
