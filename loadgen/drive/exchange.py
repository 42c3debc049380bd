"""What one request looked like on the wire: instants and raw bytes, nothing interpreted yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from loadgen.records import Status


@dataclass(slots=True, eq=False)
class Exchange:
    """Written on the hot path, read after it. Instants are CLOCK_MONOTONIC nanoseconds, 0 = never.

    `row` is the shard's row index. `times[i]` is when the socket read that brought `parts[i]` of
    the body returned. The parts are as they came: chunked where `is_chunked` says so, and perhaps
    longer than the `length` that the head stated (`Body` reads them). `outcome` is set only where
    the transport itself failed (connect, timeout, cancel, cut); what the body says is found out by
    `decode`.
    """

    row: int
    sent_ns: int = 0
    connected_ns: int = 0
    headers_ns: int = 0
    first_guess_ns: int = 0  # first read that looked like a token: for the live view only
    done_ns: int = 0
    reused: bool = False
    remote: str = ""
    http_status: int = 0
    content_type: str = ""
    content_encoding: str = ""
    n_bytes: int = 0  # of the parts
    is_chunked: bool = False
    length: int | None = None
    times: list[int] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    outcome: Status | None = None
    error: str = ""

    def fail(self, outcome: Status, error: str, now_ns: int) -> None:
        """Record how the transport ended it; the first reason stays."""
        if self.outcome is None:
            self.outcome, self.error = outcome, error
        if not self.done_ns:
            self.done_ns = now_ns
