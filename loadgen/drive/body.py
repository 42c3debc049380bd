"""A response's body without its framing."""

from __future__ import annotations

from types import SimpleNamespace

import httptools

from loadgen.drive.exchange import Exchange

_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Body:
    """`parts[i]` of the body came with the read that returned at `times[i]` (ns); each chunk's data
    is a part of its own, or several if it came in several reads. Where the framing breaks, which
    the transport has told, the body is over."""

    def __init__(self, exchange: Exchange) -> None:
        self.times: list[int] = exchange.times
        self.parts: list[bytes] = exchange.parts
        if exchange.is_chunked:
            self.times, self.parts = _unchunked(exchange.times, exchange.parts)
        elif exchange.length is not None and exchange.n_bytes > exchange.length:
            self.times, self.parts = _cut(exchange.times, exchange.parts, exchange.length)

    @property
    def data(self) -> bytes:
        return b"".join(self.parts)

    @property
    def n_bytes(self) -> int:
        return sum(map(len, self.parts))


def _unchunked(times: list[int], reads: list[bytes]) -> tuple[list[int], list[bytes]]:
    """What llhttp finds, as it would have while the reads came."""
    found_times: list[int] = []
    parts: list[bytes] = []
    parser = httptools.HttpResponseParser(SimpleNamespace(on_body=parts.append))
    parser.feed_data(_HEAD)
    try:
        for time, read in zip(times, reads, strict=True):
            parser.feed_data(read)
            found_times += [time] * (len(parts) - len(found_times))
    except httptools.HttpParserError:
        found_times += [time] * (len(parts) - len(found_times))
    return found_times, parts


def _cut(times: list[int], reads: list[bytes], length: int) -> tuple[list[int], list[bytes]]:
    """So much of them as the head promised: what is behind is none of the body."""
    found_times: list[int] = []
    parts: list[bytes] = []
    for time, read in zip(times, reads, strict=True):
        if length > 0:
            found_times.append(time)
            parts.append(read[:length])
            length -= len(read)
    return found_times, parts
