"""The raw record of a request: times and bytes, before decoding."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from loadgen.records import AFTER_DONE, Status

DONE_MARK = b"[DONE]"
_DONE = re.compile(rb"(?:\A|[\r\n])data: ?\[DONE\]")
_OF_LIMITS = (b"retry-after", b"ratelimit", b"rate-limit")
_MOST_LIMITS, _MOST_VALUE = 1000, 100  # characters of all headers, and of one
_END_BYTES = 512
_FRAMING_BYTES = 32  # behind [DONE]
_TAIL_BYTES = 2 * _FRAMING_BYTES


@dataclass(slots=True, eq=False)
class Exchange:
    """Raw record of a request: times and bytes, nothing decoded.

    Times are CLOCK_MONOTONIC nanoseconds; 0 means "never". `row` is the request's index in the
    shard's schedule. `parts[i]` holds the body bytes of a socket read, and `times[i]` is the time
    at which that read returned. Parts are stored as received: still chunked if `is_chunked`, and
    possibly longer than the Content-Length `length`; `decode.Body` removes the framing. `outcome`
    and `error` are set only for failures of the transport (connect, timeout, cancel, cut);
    `decode` finds the errors inside the body.
    """

    row: int
    sent_ns: int = 0
    connected_ns: int = 0
    headers_ns: int = 0
    first_guess_ns: int = 0  # first read that looks like a token: for the live view only
    done_ns: int = 0
    reused: bool = False
    remote: str = ""
    http_status: int = 0
    content_type: str = ""
    content_encoding: str = ""
    limits: str = ""  # of a failed answer: headers with its rate limit (`add_limit`)
    n_bytes: int = 0  # of the parts
    is_chunked: bool = False
    length: int | None = None
    times: list[int] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    outcome: Status | None = None
    error: str = ""

    def fail(self, outcome: Status, error: str, now_ns: int) -> None:
        """Records a failure of the transport; a failure recorded earlier stays."""
        if self.outcome is None:
            self.outcome, self.error = outcome, error
        if not self.done_ns:
            self.done_ns = now_ns

    @property
    def read_ns(self) -> int:
        """When the last bytes of the answer came, 0 before any."""
        return self.times[-1] if self.times else self.headers_ns

    def add_limit(self, name: bytes, value: bytes) -> None:
        """Keeps a header of a failed answer if it states a rate limit, or when to come back."""
        if len(self.limits) < _MOST_LIMITS and any(word in name for word in _OF_LIMITS):
            text = value[:_MOST_VALUE].decode("latin-1").strip()
            self.limits += f"{name[:_MOST_VALUE].decode('latin-1')}: {text}\n"

    def end_bytes(self) -> bytes:
        """The last bytes received, 512 to 1 024 if there are so many."""
        end = b""
        for part in reversed(self.parts):
            end = part + end
            if len(end) >= _END_BYTES:
                break
        return end[-2 * _END_BYTES :]

    def is_done(self) -> bool:
        """Whether the last event received so far is [DONE]: the answer is complete, whatever
        becomes of its connection."""
        end = b""
        for part in reversed(self.parts):
            end = part + end
            if len(end) >= _TAIL_BYTES:
                break
        found = None if self.http_status != 200 else _DONE.search(end, len(end) - _TAIL_BYTES)
        return found is not None and len(end) - found.end() <= _FRAMING_BYTES

    def end(self, outcome: Status, error: str, now_ns: int) -> None:
        """Records a failure of the transport, or only a note if the answer was complete."""
        if self.outcome is None and self.is_done():
            self.error = f"{AFTER_DONE}{error}"
            self.done_ns = self.done_ns or now_ns
        else:
            self.fail(outcome, error, now_ns)
