"""Messages between the control process and the workers: MessagePack with a schema.

    down   ping · assign · piece · go · lease · stop · got · kept · release   control → worker
    up     pong · refused · ready · frame · piece · done · died            worker → control

A frame is cumulative and numbered, so a lost, repeated or late frame does no harm. Large data goes
in pieces: the share of the schedule on the way down, its recorded rows on the way up. Clock
readings are integer nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any

import msgspec

from loadgen.manifest.json_section import JsonObject
from loadgen.records import Status

MAX_BYTES = 4 << 20
"""A longer message is rejected before it is decoded; larger data goes in pieces."""
PIECE_BYTES = 1 << 20
MAX_LOAD_BYTES = 8 << 30
"""Largest total size of the pieces of a load."""
WINDOW = 2
"""Most unconfirmed pieces on the way at once."""

METRICS = ("ttft", "tpot", "itl", "e2e", "lateness")
"""Metrics that workers count in histograms; latencies count from the scheduled send time."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
ByStatus = Annotated[list[Count], msgspec.Meta(min_length=len(Status), max_length=len(Status))]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Bad(ValueError):
    """Raised for a message that is too long or breaks the schema; the text is the reason."""


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Ping(_Message, frozen=True):
    """Requests a clock reading. `sent_ns` is the control process's clock."""

    run: str
    sent_ns: int


class Pong(_Message, frozen=True):
    """`monotonic_ns` is the worker's clock at the arrival of the ping."""

    run: str
    sent_ns: int
    monotonic_ns: int


class PromptFitMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A PromptFit: the server's token counts for prompts; `words` are (word, tokens) pairs."""

    overhead_tokens: float
    tokens_per_char: float
    turn_overhead_tokens: float
    word_overhead_tokens: int = 0
    words: list[tuple[str, int]] = []


class Assign(_Message, frozen=True):
    """A worker's share of a run. Holds no secret: the worker reads the key from its own
    environment.

    `target` is the text of a target file, `headers` names the headers for which the worker needs
    values, `needs_ca_cert` is True if it needs a certificate, `adapter` holds the codec's fields.
    The share itself follows in `n_pieces` pieces. The worker's fingerprint of the share must equal
    that of the control process.
    """

    run: str
    shard: Count
    n_shards: Count
    n_requests: Count
    scenario: str
    target: str
    headers: list[str]
    adapter: JsonObject
    fit: PromptFitMessage
    salt: bytes
    transport: str
    slos: dict[str, list[str]]
    n_pieces: Count
    needs_ca_cert: bool = False


class LoadPiece(_Message, frozen=True):
    """Piece `k` of `n` of a load."""

    run: str
    shard: Count
    k: Count
    n: Count
    data: bytes


class ShareRefused(_Message, frozen=True):
    """The worker rejects the share; nothing was sent."""

    run: str
    shard: Count
    reason: Text


class ShareReady(_Message, frozen=True):
    """The share is decoded and its connections are open."""

    run: str
    shard: Count
    sha256: Sha256
    host: Text
    slobench: Text


class Go(_Message, frozen=True):
    """Start at `epoch_ns` on the worker's own monotonic clock."""

    run: str
    epoch_ns: int


class Lease(_Message, frozen=True):
    """Confirms that the control process is alive."""

    run: str


class StopShard(_Message, frozen=True):
    """Release no more requests; those in flight, and with `sends_waiting` also those that wait for
    a slot, have `drain_s` to finish."""

    run: str
    drain_s: float
    reason: Text
    sends_waiting: bool = False


class Got(_Message, frozen=True):
    """Piece `k` of the rows has arrived; the worker may send another."""

    run: str
    k: Count


class Kept(_Message, frozen=True):
    """The rows are on the master's disk: the worker need not keep them."""

    run: str


class Release(_Message, frozen=True):
    """The run is over for the worker. Recorded rows stay on its disk unless they are `Kept`."""

    run: str


class ClassCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counts of a traffic class so far: ended requests by status, requests that met every SLO,
    events with tokens."""

    by_status: ByStatus
    slo_met: Count = msgspec.field(name="kept")
    events: Count


class Frame(_Message, frozen=True):
    """All counts of a shard so far. `histograms` holds an HdrHistogram for each metric, in
    microseconds and in its own compressed encoding; `heard_s` is when the last byte came; `use` is
    the last `ThreadMeter.so_far`, empty before the first."""

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
    measured: Count = 0
    heard_s: float | None = None
    use: Annotated[list[float | None], msgspec.Meta(max_length=4)] = []


class Done(_Message, frozen=True):
    """The shard's rows are written and follow in `n_pieces` pieces. `instrument` is the load
    process's report on itself."""

    run: str
    shard: Count
    n_pieces: Count
    sha256: Sha256
    instrument: JsonObject


class Died(_Message, frozen=True):
    """The load process ended before its share was done."""

    run: str
    shard: Count
    words: Text


Down = Ping | Assign | LoadPiece | Go | Lease | StopShard | Got | Kept | Release
Up = Pong | ShareRefused | ShareReady | Frame | LoadPiece | Done | Died

_ENCODER = msgspec.msgpack.Encoder()
_DOWN: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)
_UP: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)


def encode(message: Down | Up) -> bytes:
    data = _ENCODER.encode(message)
    assert len(data) <= MAX_BYTES, f"a {type(message).__name__} of {len(data)} bytes"
    return data


def read_down(data: object) -> Down:
    """Decodes a message to a worker. Raises Bad."""
    message: Down = _read(_DOWN, data)
    return message


def read_up(data: object) -> Up:
    """Decodes a message of a worker. Raises Bad."""
    message: Up = _read(_UP, data)
    return message


def _read(decoder: msgspec.msgpack.Decoder[Any], data: object) -> Any:
    if not isinstance(data, bytes):
        raise Bad(f"a message must be bytes, not {type(data).__name__}")
    if len(data) > MAX_BYTES:
        raise Bad(f"a message of {len(data)} bytes exceeds the limit of {MAX_BYTES} bytes")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Bad(str(error)) from None


def pieces(run: str, shard: int, data: bytes) -> list[LoadPiece]:
    """Cuts data into pieces of at most PIECE_BYTES; at least one piece."""
    cuts = range(0, max(1, len(data)), PIECE_BYTES)
    return [
        LoadPiece(run, shard, k, len(cuts), data[start : start + PIECE_BYTES])
        for k, start in enumerate(cuts)
    ]


class PieceAssembler:
    """Joins pieces that arrive in any order. Raises Bad for a piece that does not belong."""

    def __init__(self, n: int) -> None:
        if n * PIECE_BYTES > MAX_LOAD_BYTES:
            raise Bad(f"{n} pieces exceed the limit of {MAX_LOAD_BYTES // PIECE_BYTES}")
        self._n, self._pieces = n, dict[int, bytes]()

    @property
    def n(self) -> int:
        """Number of pieces of the load."""
        return self._n

    def add(self, piece: LoadPiece) -> None:
        if piece.n != self._n or piece.k >= self._n:
            raise Bad(f"piece {piece.k} of {piece.n}; expected {self._n} pieces")
        self._pieces[piece.k] = piece.data

    @property
    def is_whole(self) -> bool:
        return len(self._pieces) == self._n

    def data(self) -> bytes:
        assert self.is_whole, f"{len(self._pieces)} of {self._n} pieces"
        return b"".join(self._pieces[k] for k in range(self._n))


class Upload:
    """A worker's rows on the way up: at most WINDOW pieces at a time, each further piece after a
    confirmation. Heartbeats use the same connection; behind gigabytes of rows they would be late
    and the worker would count as lost."""

    def __init__(self, parts: Sequence[LoadPiece]) -> None:
        self._waiting = iter(parts)
        self._unconfirmed = set[int]()

    def begin(self) -> list[LoadPiece]:
        """The first pieces to send."""
        return self._fill()

    def got(self, k: int) -> list[LoadPiece]:
        """The pieces to send after the arrival of piece `k`. A repeated confirmation changes
        nothing."""
        self._unconfirmed.discard(k)
        return self._fill()

    def _fill(self) -> list[LoadPiece]:
        parts = list(islice(self._waiting, WINDOW - len(self._unconfirmed)))
        self._unconfirmed.update(part.k for part in parts)
        return parts
