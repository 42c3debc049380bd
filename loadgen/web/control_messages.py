"""What the conductor and the workers say to each other: MessagePack with a schema.

    down   ping · assign · piece · go · lease · stop · got · release      conductor → worker
    up     pong · refused · ready · frame · piece · done · died           worker → conductor

A frame is cumulative and numbered, so that one that is lost, doubled or late does no harm. Pieces
are parts of what is large: the share of the schedule on its way down, its recorded rows on the way
up. Times of clocks are integer nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any

import msgspec

from loadgen.records import Status

MAX_BYTES = 4 << 20
"""A longer message is refused unread; what is larger goes in pieces."""
PIECE_BYTES = 1 << 20
MAX_LOAD_BYTES = 8 << 30
"""Of all pieces of one load together."""
WINDOW = 2
"""Pieces that may be on their way at once without a confirmation."""

METRICS = ("ttft", "tpot", "itl", "e2e", "lateness")
"""Metrics that workers count in histograms; latencies count from the scheduled send time."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
ByStatus = Annotated[list[Count], msgspec.Meta(min_length=len(Status), max_length=len(Status))]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Bad(ValueError):
    """A message that is too long or not of the schema; says why."""


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Ping(_Message, frozen=True):
    """Which clock do you have? `sent_ns` is the conductor's."""

    run: str
    sent_ns: int


class Pong(_Message, frozen=True):
    """`monotonic_ns` is the worker's clock when the ping came."""

    run: str
    sent_ns: int
    monotonic_ns: int


class PromptFitMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A PromptFit: how many tokens the server makes of a prompt; words as (word, tokens)."""

    overhead_tokens: float
    tokens_per_char: float
    turn_overhead_tokens: float
    word_overhead_tokens: int = 0
    words: list[tuple[str, int]] = []


class Assign(_Message, frozen=True):
    """Your share of a run. Holds no secret: the worker finds the key in its own environment.

    `target` is a target file's text, `headers` the names of those it must have values for,
    `needs_ca_cert` whether it must have a certificate, `adapter` the codec's fields; the share
    itself follows in `n_pieces` pieces, and its fingerprint must come out as the one that the
    conductor has.
    """

    run: str
    shard: Count
    n_shards: Count
    n_requests: Count
    scenario: str
    target: str
    headers: list[str]
    adapter: dict[str, Any]
    fit: PromptFitMessage
    salt: bytes
    transport: str
    promises: dict[str, list[str]]
    n_pieces: Count
    needs_ca_cert: bool = False


class LoadPiece(_Message, frozen=True):
    """The `k`-th of `n` pieces of a load."""

    run: str
    shard: Count
    k: Count
    n: Count
    data: bytes


class ShareRefused(_Message, frozen=True):
    """The share cannot be worked on; nothing was sent."""

    run: str
    shard: Count
    reason: Text


class ShareReady(_Message, frozen=True):
    """The share is understood and its connections are open."""

    run: str
    shard: Count
    sha256: Sha256
    host: Text
    slobench: Text


class Go(_Message, frozen=True):
    """Start at `epoch_ns` of the worker's own monotonic clock."""

    run: str
    epoch_ns: int


class Lease(_Message, frozen=True):
    """The conductor is still there."""

    run: str


class StopShard(_Message, frozen=True):
    """Release nothing more; requests in flight have `drain_s` to finish."""

    run: str
    drain_s: float
    reason: Text


class Got(_Message, frozen=True):
    """The `k`-th piece of the rows is here: another one may come."""

    run: str
    k: Count


class Release(_Message, frozen=True):
    """The rows have arrived, or are not wanted: forget the run."""

    run: str


class ClassCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one traffic class so far: how many ended, kept every promise, and brought events."""

    by_status: ByStatus
    kept: Count
    events: Count


class Frame(_Message, frozen=True):
    """All that a shard has counted so far; `histograms` are HdrHistograms in microseconds, in their
    own compressed encoding, by metric."""

    run: str
    shard: Count
    seq: Count
    now_s: float
    released: Count
    sent: Count
    in_flight: Count
    waiting: Count
    by_status: ByStatus
    withdrawn: Count
    histograms: dict[str, bytes]
    classes: dict[str, ClassCounts]


class Done(_Message, frozen=True):
    """The shard's rows are written and follow in `n_pieces` pieces; what it measured of itself."""

    run: str
    shard: Count
    n_pieces: Count
    sha256: Sha256
    instrument: dict[str, Any]


class Died(_Message, frozen=True):
    """The generating process ended before it was done."""

    run: str
    shard: Count
    words: Text


Down = Ping | Assign | LoadPiece | Go | Lease | StopShard | Got | Release
Up = Pong | ShareRefused | ShareReady | Frame | LoadPiece | Done | Died

_ENCODER = msgspec.msgpack.Encoder()
_DOWN: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)
_UP: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)


def encode(message: Down | Up) -> bytes:
    data = _ENCODER.encode(message)
    assert len(data) <= MAX_BYTES, f"a {type(message).__name__} of {len(data)} bytes"
    return data


def read_down(data: object) -> Down:
    """What a worker was told. Raises Bad."""
    found: Down = _read(_DOWN, data)
    return found


def read_up(data: object) -> Up:
    """What a worker said. Raises Bad."""
    found: Up = _read(_UP, data)
    return found


def _read(decoder: msgspec.msgpack.Decoder[Any], data: object) -> Any:
    if not isinstance(data, bytes):
        raise Bad(f"a message is bytes, not {type(data).__name__}")
    if len(data) > MAX_BYTES:
        raise Bad(f"a message of {len(data)} bytes; at most {MAX_BYTES} are read")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Bad(str(error)) from None


def pieces(run: str, shard: int, data: bytes) -> list[LoadPiece]:
    """What is large, cut; at least one piece."""
    cuts = range(0, max(1, len(data)), PIECE_BYTES)
    return [
        LoadPiece(run, shard, k, len(cuts), data[start : start + PIECE_BYTES])
        for k, start in enumerate(cuts)
    ]


class PieceAssembler:
    """Pieces put together again, in whatever order they come. Raises Bad for one that cannot be
    part of it."""

    def __init__(self, n: int) -> None:
        if n * PIECE_BYTES > MAX_LOAD_BYTES:
            raise Bad(f"{n} pieces; at most {MAX_LOAD_BYTES // PIECE_BYTES} are taken")
        self._n, self._found = n, dict[int, bytes]()

    @property
    def n(self) -> int:
        """How many pieces it has."""
        return self._n

    def add(self, piece: LoadPiece) -> None:
        if piece.n != self._n or piece.k >= self._n:
            raise Bad(f"piece {piece.k} of {piece.n}, where {self._n} are expected")
        self._found[piece.k] = piece.data

    @property
    def is_whole(self) -> bool:
        return len(self._found) == self._n

    def data(self) -> bytes:
        assert self.is_whole, f"{len(self._found)} of {self._n} pieces"
        return b"".join(self._found[k] for k in range(self._n))


class Upload:
    """Says what may be sent next; every confirmed piece lets another one go."""

    def __init__(self, parts: Sequence[LoadPiece]) -> None:
        self._waiting = iter(parts)
        self._on_their_way = set[int]()

    def begin(self) -> list[LoadPiece]:
        """The first ones."""
        return self._fill()

    def got(self, k: int) -> list[LoadPiece]:
        """Piece `k` has arrived; what goes next. A doubled confirmation changes nothing."""
        self._on_their_way.discard(k)
        return self._fill()

    def _fill(self) -> list[LoadPiece]:
        parts = list(islice(self._waiting, WINDOW - len(self._on_their_way)))
        self._on_their_way.update(part.k for part in parts)
        return parts
