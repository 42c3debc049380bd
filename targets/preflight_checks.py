"""What an examination's readings say about a server, one check each; pure, so that every answer a
server can give is a test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from loadgen.units import format_duration as told
from targets.preflight_result import PreflightCheck

EXAMINED = ("round_trip", "http", "connections", "chunking", "prefix_cache")

FAR_S = 0.02  # a round trip from which TTFT is no longer the server's alone
UNSTEADY_S = 0.005
BLOCK = 2.0  # chunks per read, from which on something holds them back
_ONE = 1.05  # tokens per chunk, chunks per read: as good as one
_CACHED_TTFT = 0.7  # of the TTFT without a cache
_CACHED_TOKENS = 64  # of a prompt never sent before: a template's own blocks

CONSEQUENCES = {
    "reachable": "nothing can be measured",
    "models": "requests ask for this name as it is",
    "completion": "nothing can be measured",
    "streaming": "TTFT is then the end-to-end time, and TPOT and ITL mean nothing: switch off "
    "buffering in the proxy before it",
    "usage": "output tokens are counted one per chunk: TPOT and throughput are off where a chunk "
    "holds several",
    "ignore_eos": "answers may be shorter than asked: two servers then do different work",
    "finish_reason": "an answer cut short counts as a whole one",
    "max_model_len": "requests that are too long fail one by one",
    "prompt_fit": "prompt lengths are estimates, at four characters a token",
}
"""What it means for measuring when a check of the preflight does not pass."""


@dataclass(frozen=True)
class ConnectionCounts:
    """How many connections so many requests took, one after another, that could all have used one;
    first small ones, then streamed answers.
    """

    small_requests: int
    small_connections: int
    streams: int
    stream_connections: int
    keep_alive: str = ""  # the header, where the server sends one


@dataclass(frozen=True)
class Head:
    """How a streamed answer came, by its HTTP head; the request asked for no compression."""

    version: str
    content_type: str
    content_encoding: str
    is_chunked: bool
    has_length: bool


@dataclass(frozen=True)
class Chunking:
    """One longer answer; `tokens` as the server counts them, None where it does not."""

    tokens: int | None
    chunks: int
    reads: int
    is_counted: bool  # running counts came with the chunks


@dataclass(frozen=True)
class Repeats:
    """TTFT and cached tokens of prompts sent twice in a row, in pairs; None: not stated."""

    prompt_tokens: int | None
    cold_s: Sequence[float]
    warm_s: Sequence[float]
    cold_cached: Sequence[int | None]
    warm_cached: Sequence[int | None]


def round_trip(connect_s: Sequence[float], request_s: Sequence[float]) -> PreflightCheck:
    """How far away the server is: connecting (TLS included), and the smallest request there is."""
    middle_s = median(request_s)
    swing_s = sorted(request_s)[len(request_s) * 9 // 10] - min(request_s)
    detail = (
        f"connecting {told(median(connect_s))}, GET /v1/models {told(middle_s)} "
        f"(medians of {len(connect_s)} and {len(request_s)}; p90 {told(swing_s)} above the least)"
    )
    if middle_s > FAR_S:
        far = "every TTFT includes this way: put the client near the server, or say so with results"
        return PreflightCheck("round_trip", False, detail, far)
    if swing_s > UNSTEADY_S:
        unsteady = "a difference between two servers of less than this cannot be seen"
        return PreflightCheck("round_trip", None, detail, unsteady)
    return PreflightCheck("round_trip", True, detail)


def http(head: Head) -> PreflightCheck:
    """Whether a stream is framed so that its reads can be stamped and its end be told."""
    faults = []
    if head.version != "1.1":
        faults.append((f"HTTP/{head.version}", "no connection is kept alive; serve HTTP/1.1"))
    if head.content_encoding not in ("", "identity"):
        faults.append(
            (
                f"{head.content_encoding} although identity was asked for",
                "tokens wait in the compressor's blocks; exclude text/event-stream from it",
            )
        )
    if not head.is_chunked and not head.has_length:
        faults.append(
            (
                "neither chunked nor of stated length",
                "the body ends with its connection: a cut stream looks like a whole one",
            )
        )
    if head.content_type != "text/event-stream":
        faults.append(
            (
                f"content-type {head.content_type or 'missing'}",
                "proxies only know a stream by text/event-stream, and may hold others back",
            )
        )
    if faults:
        return PreflightCheck(
            "http", False, "; ".join(what for what, _ in faults), "; ".join(w for _, w in faults)
        )
    framing = "chunked" if head.is_chunked else "of stated length"
    return PreflightCheck("http", True, f"HTTP/1.1, {framing}, text/event-stream, not compressed")


def connections(seen: ConnectionCounts) -> PreflightCheck:
    """Whether connections are kept alive, and for how many requests."""
    detail = (
        f"{seen.small_requests} small requests on {seen.small_connections} connections, "
        f"{seen.streams} streams on {seen.stream_connections}"
    )
    if seen.keep_alive:
        detail += f"; keep-alive: {seen.keep_alive}"
    if seen.stream_connections <= 1 and seen.small_connections <= 1:
        return PreflightCheck("connections", True, detail)
    if seen.stream_connections >= seen.streams:
        every = (
            "every request opens a connection, and its TTFT pays for that; at high rates ports run "
            "out. Keep connections alive, or measure with `connections: never` knowingly"
        )
        return PreflightCheck("connections", False, detail, every)
    some = "some requests pay for a new connection; raise the server's requests per connection"
    return PreflightCheck("connections", False, detail, some)


def chunking(seen: Chunking) -> PreflightCheck:
    """How tokens are packed into chunks, and chunks into reads."""
    each_read = per_read(seen.chunks, seen.reads)
    if seen.tokens is None:
        packed, counted = "an unknown number of tokens", False
    else:
        each = seen.tokens / max(1, seen.chunks)
        packed, counted = f"{each:.3g} tokens", seen.is_counted or each <= _ONE
    detail = (
        f"{packed} per chunk, {each_read:.3g} chunks per read ({seen.chunks} chunks in "
        f"{seen.reads} reads)"
    )
    consequences = []
    if not counted:
        consequences.append("ITL is per chunk, not per token; TPOT is right where usage is sent")
    if each_read > BLOCK:
        consequences.append(
            "chunks come in blocks: something on the way holds them back (a proxy's buffer, a slow "
            "server loop, a busy client), or the server is faster than the network; ITL shows the "
            "blocks"
        )
    ok = False if not counted else None if consequences else True
    return PreflightCheck("chunking", ok, detail, "; ".join(consequences))


def per_read(chunks: int, reads: int) -> float:
    """Chunks that came in one read."""
    return chunks / max(1, reads)


def prefix_cache(seen: Repeats) -> PreflightCheck:
    """Whether a prompt that was sent before is answered sooner, and whether the server says so."""
    cold_s, warm_s = median(seen.cold_s), median(seen.warm_s)
    times = f"TTFT {told(cold_s)} new, {told(warm_s)} repeated (medians of {len(seen.cold_s)})"
    of_prompt = f" of {seen.prompt_tokens}" if seen.prompt_tokens is not None else ""
    fresh = max((n for n in seen.cold_cached if n is not None), default=0)
    if fresh > _CACHED_TOKENS:
        return PreflightCheck(
            "prefix_cache",
            False,
            f"{fresh}{of_prompt} tokens of a prompt never sent before are said to be cached; "
            f"{times}",
            "cached tokens cannot tell contamination here; look into how the server counts them",
        )
    stated = [n for n in seen.warm_cached if n]
    if stated:
        return PreflightCheck(
            "prefix_cache",
            True,
            f"present: {round(median(stated))}{of_prompt} prompt tokens cached on repetition; "
            f"{times}",
            "prompts are salted per run, so runs do not warm each other; shared prefixes that a "
            "scenario declares will hit",
        )
    if max(seen.warm_s) < _CACHED_TTFT * min(seen.cold_s):
        return PreflightCheck(
            "prefix_cache",
            False,
            f"present, but cached tokens are not stated; {times}",
            "a contaminated run cannot be told from a clean one: leave `salt: run` as it is, and "
            "turn on the server's cached-token counts if it has them",
        )
    return PreflightCheck("prefix_cache", True, f"no sign of one: {times}")
