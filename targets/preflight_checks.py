"""The checks of the extended preflight, each a pure function of readings, so that every answer of a
server can be a test; and the consequences of all checks for measuring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from loadgen.units import format_duration
from targets.preflight_result import PreflightCheck

EXTENDED_CHECKS = ("round_trip", "http", "connections", "chunking", "prefix_cache")

FAR_S = 0.02  # a round trip from which on TTFT is no longer the server's alone
UNSTEADY_S = 0.005
BLOCK = 2.0  # chunks per read, from which on the stream is held back on the way
_SINGLE = 1.05  # tokens per chunk or chunks per read that count as 1
_CACHED_TTFT = 0.7  # of the TTFT without a cache
_CACHED_TOKENS = 64  # of a prompt never sent before: a template's own blocks

CONSEQUENCES = {
    "reachable": "nothing can be measured",
    "models": "requests use this name as it is",
    "completion": "nothing can be measured",
    "fields": "a field that is not sent has the server's default: another temperature changes the "
    "answers, and without ignore_eos their lengths",
    "results": "nothing can be measured",
    "streaming": "TTFT is then the end-to-end time, and TPOT and ITL mean nothing: switch off "
    "buffering in the proxy in front of the server",
    "usage": "output tokens are counted as 1 per chunk: TPOT and throughput are wrong if a chunk "
    "holds several",
    "ignore_eos": "answers may be shorter than requested: two servers then do different work",
    "finish_reason": "an answer cut short counts as complete",
    "max_model_len": "every request that is too long fails",
    "prompt_fit": "prompt lengths are estimates, at four characters per token",
    "run_requests": "requests of the run may fail",
}
"""The effect on measuring of each check of the preflight that does not pass."""


@dataclass(frozen=True)
class ConnectionCounts:
    """The number of connections that sequential requests used, all of which could have shared a
    single connection: first small requests, then streams.
    """

    small_requests: int
    small_connections: int
    streams: int
    stream_connections: int
    keep_alive: str = ""  # the header, if the server sends it


@dataclass(frozen=True)
class Head:
    """The HTTP head of an answer to a request without compression."""

    version: str
    content_type: str
    content_encoding: str
    is_chunked: bool
    has_length: bool
    is_streamed: bool = True


@dataclass(frozen=True)
class Chunking:
    """A longer answer; `tokens` are the server's count, None if not stated or not possible."""

    tokens: int | None
    chunks: int
    reads: int
    is_counted: bool  # running counts came with the chunks


@dataclass(frozen=True)
class Repeats:
    """TTFT and cached tokens (None: not stated) of prompts sent twice in a row."""

    prompt_tokens: int | None
    cold_s: Sequence[float]
    warm_s: Sequence[float]
    cold_cached: Sequence[int | None]
    warm_cached: Sequence[int | None]


def round_trip(connect_s: Sequence[float], request_s: Sequence[float]) -> PreflightCheck:
    """The distance of the server: the time to connect (TLS included) and of the smallest
    request."""
    middle_s = median(request_s)
    swing_s = sorted(request_s)[len(request_s) * 9 // 10] - min(request_s)
    detail = (
        f"connecting {format_duration(median(connect_s))}, "
        f"GET /v1/models {format_duration(middle_s)} (medians of {len(connect_s)} and "
        f"{len(request_s)}; p90 {format_duration(swing_s)} above the minimum)"
    )
    if middle_s > FAR_S:
        far = "every TTFT includes it: put the client near the server, or state it with results"
        return PreflightCheck("round_trip", False, detail, far)
    if swing_s > UNSTEADY_S:
        unsteady = "a smaller difference between two servers cannot be seen"
        return PreflightCheck("round_trip", None, detail, unsteady)
    return PreflightCheck("round_trip", True, detail)


def http(head: Head) -> PreflightCheck:
    """Whether the framing of a stream allows its reads to be stamped and its end to be detected."""
    findings = (
        (
            head.version != "1.1",
            f"HTTP/{head.version}",
            "no connection is kept alive; serve HTTP/1.1",
        ),
        (
            head.content_encoding not in ("", "identity"),
            f"{head.content_encoding} although identity was requested",
            "tokens wait in the compressor's blocks; exclude text/event-stream from it",
        ),
        (
            not head.is_chunked and not head.has_length,
            "neither chunked nor of stated length",
            "the body ends with its connection: a cut stream looks complete",
        ),
        (
            head.is_streamed and head.content_type != "text/event-stream",
            f"content-type {head.content_type or 'missing'}",
            "proxies recognize a stream only by text/event-stream and may buffer other types",
        ),
    )
    faults = [(detail, effect) for is_fault, detail, effect in findings if is_fault]
    if faults:
        details, effects = zip(*faults, strict=True)
        return PreflightCheck("http", False, "; ".join(details), "; ".join(effects))
    framing = "chunked" if head.is_chunked else "of stated length"
    return PreflightCheck("http", True, f"HTTP/1.1, {framing}, {head.content_type}, not compressed")


def connections(counts: ConnectionCounts) -> PreflightCheck:
    """Whether connections are kept alive, and for how many requests."""
    detail = (
        f"{counts.small_requests} small requests on {counts.small_connections} connections, "
        f"{counts.streams} streams on {counts.stream_connections}"
    )
    if counts.keep_alive:
        detail += f"; keep-alive: {counts.keep_alive}"
    if counts.stream_connections <= 1 and counts.small_connections <= 1:
        return PreflightCheck("connections", True, detail)
    if counts.stream_connections >= counts.streams:
        every = (
            "every request opens a connection, which adds to its TTFT; at high rates ports run "
            "out. Keep connections alive, or choose `connections: never` deliberately"
        )
        return PreflightCheck("connections", False, detail, every)
    some = "some requests open a new connection; raise the server's requests per connection"
    return PreflightCheck("connections", False, detail, some)


def chunking(answer: Chunking) -> PreflightCheck:
    """The number of tokens per chunk and of chunks per read."""
    per_read = chunks_per_read(answer.chunks, answer.reads)
    if answer.tokens is None:
        packed, is_counted = "an unknown number of tokens", False
    else:
        per_chunk = answer.tokens / max(1, answer.chunks)
        packed, is_counted = f"{per_chunk:.3g} tokens", answer.is_counted or per_chunk <= _SINGLE
    detail = (
        f"{packed} per chunk, {per_read:.3g} chunks per read ({answer.chunks} chunks in "
        f"{answer.reads} reads)"
    )
    consequences = []
    if not is_counted:
        consequences.append("ITL is per chunk, not per token; TPOT is right if usage is sent")
    if per_read > BLOCK:
        consequences.append(
            "chunks come in blocks: they are held back on the way (a proxy's buffer, a slow server "
            "loop, a busy client), or the server is faster than the network; ITL shows the blocks"
        )
    ok = False if not is_counted else None if consequences else True
    return PreflightCheck("chunking", ok, detail, "; ".join(consequences))


def chunks_per_read(chunks: int, reads: int) -> float:
    return chunks / max(1, reads)


def prefix_cache(repeats: Repeats) -> PreflightCheck:
    """Whether a repeated prompt is answered sooner, and whether the server states cached tokens."""
    cold_s, warm_s = median(repeats.cold_s), median(repeats.warm_s)
    times = (
        f"TTFT {format_duration(cold_s)} new, {format_duration(warm_s)} repeated "
        f"(medians of {len(repeats.cold_s)})"
    )
    of_prompt = f" of {repeats.prompt_tokens}" if repeats.prompt_tokens is not None else ""
    cold_cached = max((n for n in repeats.cold_cached if n is not None), default=0)
    if cold_cached > _CACHED_TOKENS:
        return PreflightCheck(
            "prefix_cache",
            False,
            f"the server states {cold_cached}{of_prompt} cached tokens for a prompt never sent "
            f"before; {times}",
            "cached tokens cannot reveal contamination here; check how the server counts them",
        )
    warm_cached = [n for n in repeats.warm_cached if n]
    if warm_cached:
        return PreflightCheck(
            "prefix_cache",
            True,
            f"present: {round(median(warm_cached))}{of_prompt} prompt tokens cached on repetition; "
            f"{times}",
            "prompts are salted per run, so runs do not warm each other; shared prefixes that a "
            "scenario declares will hit",
        )
    if max(repeats.warm_s) < _CACHED_TTFT * min(repeats.cold_s):
        return PreflightCheck(
            "prefix_cache",
            False,
            f"present, but cached tokens are not stated; {times}",
            "a contaminated run looks clean: leave `salt: run` as it is, and switch on "
            "the server's cached-token counts if it has them",
        )
    return PreflightCheck("prefix_cache", True, f"no sign of a cache: {times}")
