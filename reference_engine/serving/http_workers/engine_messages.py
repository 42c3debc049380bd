"""What a worker and the engine tell each other, as MessagePack; a request has the number that its
worker gave it.

    worker → engine   Listening · Submit · Closed · CutOff
    engine → worker   Open · Admitted · Refused · Broken · Step · Bye

To a `Submit` the answer is Refused, or Admitted and then Steps; Broken may end it at any time.
Whatever became of it, the HTTP worker's last word on a number is Closed or CutOff.
"""

from __future__ import annotations

import msgspec

from reference_engine.serving.identity import ServerIdentity
from reference_engine.serving.streams import StreamDelta, StreamProgress
from reference_engine.serving.wire.call import Call
from reference_engine.serving.wire.wire_errors import WireError


class Message(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag=True):
    """One of them; the name of its class goes with it."""


class Listening(Message, frozen=True):
    """Connections are accepted."""


class Submit(Message, frozen=True):
    """`arrived_s` is an instant of the engine's clock."""

    number: int
    call: Call
    request_id: str | None
    arrived_s: float


class Closed(Message, frozen=True):
    """Nobody reads the answer any more: cancel what is not over."""

    number: int


class CutOff(Message, frozen=True):
    """Its reader was too slow."""

    number: int


class Open(Message, frozen=True):
    """The engine is ready, accept connections. `worker` counts from 1, `epoch_ns` is the
    engine's clock's, `engine_path` the Unix socket where it answers what is no completion."""

    about: ServerIdentity
    worker: int
    epoch_ns: int
    engine_path: str
    outbox: int
    max_body_bytes: int
    api_key: str | None


class Admitted(Message, frozen=True):
    """The engine has taken the request."""

    number: int
    told: StreamProgress


class RequestRefused(Message, frozen=True):
    """A `WireError`."""

    number: int
    message: str
    param: str | None
    code: str | None
    status: int
    type: str
    more: dict[str, object]
    retry_after_s: int | None

    @classmethod
    def of(cls, number: int, error: WireError) -> RequestRefused:
        return cls(
            number,
            error.message,
            error.param,
            error.code,
            error.status,
            error.type,
            error.more,
            error.retry_after_s,
        )

    def error(self) -> WireError:
        return WireError(
            self.message,
            param=self.param,
            code=self.code,
            status=self.status,
            type_=self.type,
            more=self.more,
            retry_after_s=self.retry_after_s,
        )


class Broken(Message, frozen=True):
    """A `StreamBroken`."""

    number: int
    why: str
    status: int


class StepOutput(Message, frozen=True):
    """What a step brought to each number, and, to be known first, how far those requests are that
    began or ended with it."""

    told: list[tuple[int, StreamProgress]]
    deltas: list[tuple[int, StreamDelta]]


class Bye(Message, frozen=True):
    """The server stops: every answer is said or broken off."""


FromWorker = Listening | Submit | Closed | CutOff
FromEngine = Open | Admitted | RequestRefused | Broken | StepOutput | Bye
