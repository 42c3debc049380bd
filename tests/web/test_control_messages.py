"""Messages on the wire: the schema, the limits, and loads in pieces."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.web import control_messages
from loadgen.web.control_messages import (
    Bad,
    Go,
    LoadPiece,
    PieceAssembler,
    Ping,
    StopShard,
    encode,
    pieces,
    read_down,
    read_up,
)


@given(st.binary(max_size=40), st.randoms(use_true_random=False))
def test_pieces_in_any_order_and_repeated_make_the_whole_load(data, random):
    cut = [
        LoadPiece("r", 0, k, max(1, len(data)), data[k : k + 1]) for k in range(max(1, len(data)))
    ]
    arriving = cut + cut[: len(cut) // 2]
    random.shuffle(arriving)
    load = PieceAssembler(len(cut))
    for piece in arriving:
        load.add(piece)
    assert load.is_whole
    assert load.data() == data


def test_large_data_is_cut_into_pieces_of_allowed_size():
    data = bytes(range(256)) * 12_000  # 3.07 MB
    cut = pieces("r", 3, data)
    assert [piece.k for piece in cut] == [0, 1, 2]
    assert all(len(encode(piece)) <= control_messages.MAX_BYTES for piece in cut)
    assert b"".join(piece.data for piece in cut) == data
    assert len(pieces("r", 3, b"")) == 1


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("GO", "a message must be bytes"),
        (None, "a message must be bytes"),
        (b"\xc1", "invalid"),
        (bytes(control_messages.MAX_BYTES + 1), "exceeds the limit of 4194304 bytes"),
        (msgspec.msgpack.encode({"type": "Go", "run": "r"}), "missing required field `epoch_ns`"),
        (msgspec.msgpack.encode({"type": "Format", "run": "r"}), "Invalid value 'Format'"),
        (
            msgspec.msgpack.encode({"type": "Lease", "run": "r", "command": "rm"}),
            "unknown field `command`",
        ),
        (encode(control_messages.Pong("r", 1, 2)), "Invalid value 'Pong'"),
    ],
)
def test_anything_else_is_refused_with_the_reason(data, why):
    with pytest.raises(Bad, match=why):
        read_down(data)


def test_both_directions_come_back_as_they_went():
    for down in (Ping("r", 5), Go("r", -7), StopShard("r", 0.5, "the user")):
        assert read_down(encode(down)) == down
    with pytest.raises(Bad):
        read_up(encode(Go("r", 1)))


def test_a_piece_of_another_load_is_refused():
    load = PieceAssembler(2)
    with pytest.raises(Bad, match="piece 0 of 3"):
        load.add(LoadPiece("r", 0, 0, 3, b""))
    with pytest.raises(Bad, match="1048576 pieces exceed the limit of 8192"):
        PieceAssembler(1 << 20)
