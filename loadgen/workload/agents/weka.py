"""Conversations of coding agents in the format of Weka's kv-cache-tester, one JSON object each.

Source: github.com/callanjfox/kv-cache-tester (files `trace_*.json`); SemiAnalysis' corpora are
lines of the same objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from loadgen.errors import TraceFileError
from loadgen.workload.agents.corpus import Notes, RecordedTree
from loadgen.workload.agents.trees import RecordedRequest
from loadgen.workload.lengths import MAX_TOKENS
from loadgen.workload.traces.json_lines import decode_line

_INSTANT_S = 1e-6


class _Request(msgspec.Struct, gc=False, rename={"input_tokens": "in", "output_tokens": "out"}):
    """A request or, with `requests`, the marker of a subagent."""

    t: float
    input_tokens: int = 0
    output_tokens: int = 0
    type: str = ""
    model: str = ""
    hash_ids: Sequence[int] = ()
    api_time: float | None = None
    requests: Sequence[_Request] | None = None


class _Conversation(msgspec.Struct, gc=False):
    requests: Sequence[_Request]
    id: str = ""
    block_size: int = 64
    hash_id_scope: str = "local"


def is_weka(content: bytes) -> bool:
    """Whether a file begins like such a conversation."""
    head = content[: 1 << 16]
    return b'"requests"' in head and b'"t"' in head


def read_weka(content: bytes, source: str, notes: Notes) -> Iterator[RecordedTree]:
    """The conversations of a file, one object or one a line. Raises TraceFileError with
    `source:line: reason` for any other content."""
    decoder = msgspec.json.Decoder(_Conversation)
    lines = [content]
    if content.lstrip().startswith(b"{") and b"\n{" in content:
        lines = content.splitlines()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{source}:{number}"
            yield from _tree(decode_line(decoder, line, source, number), where, notes)


def _tree(conversation: _Conversation, where: str, notes: Notes) -> Iterator[RecordedTree]:
    """The requests of a conversation; none if no request of it can be sent."""
    size = conversation.block_size
    if not 1 <= size <= MAX_TOKENS:
        raise TraceFileError(f"{where}: block_size: expected a number of tokens, got {size}")
    if conversation.hash_id_scope != "local":
        notes.add(
            "conversations whose hash_ids mean the same text in other conversations; text is "
            "shared within each only"
        )
    plain = [request for request in conversation.requests if request.requests is None]
    markers = [request for request in conversation.requests if request.requests]
    kept = _kept(plain, where, notes)
    if not kept:
        notes.add("conversations left out: no request with input and output tokens")
        return
    recorded = [*_timed(kept, 0.0, notes)]
    requests = [*zip(kept, recorded, strict=True)]
    is_relative = any(
        min(inner.t for inner in marker.requests or ()) < marker.t - _INSTANT_S
        for marker in markers
    )
    if markers:
        start = "their own start" if is_relative else "the start of the conversation"
        notes.add(f"conversations with subagents, whose times count from {start}")
    spawning: list[RecordedRequest] = []
    for marker in markers:
        before = [own for _, own in requests if not own.agent and own.start_s <= marker.t]
        inner = _kept(marker.requests or (), where, notes)
        if not before:
            notes.add("subagents left out: no request before them")
        elif not inner:
            notes.add("subagents left out: no request with input and output tokens")
        else:
            spawning.append(max(before, key=lambda own: own.start_s))
            times = _timed(inner, marker.t if is_relative else 0.0, notes)
            own = [replace(request, agent=len(spawning)) for request in times]
            requests += zip(inner, own, strict=True)
    requests.sort(key=lambda pair: pair[1].start_s)
    places = {id(own): k for k, (_, own) in enumerate(requests)}
    yield RecordedTree(
        conversation.id or where,
        [own for _, own in requests],
        [places[id(own)] for own in spawning],
        np.array([(raw.input_tokens, raw.output_tokens) for raw, _ in requests], np.int64),
        size,
    )


def _kept(requests: Sequence[_Request], where: str, notes: Notes) -> list[_Request]:
    """The requests that can be sent, in order of time."""
    kept = []
    for request in sorted(requests, key=lambda request: request.t):
        tokens = request.input_tokens, request.output_tokens
        if not (0 <= min(tokens) <= max(tokens) <= MAX_TOKENS):
            raise TraceFileError(
                f"{where}: the request at t = {request.t:g}: in and out: expected numbers of"
                f" tokens, got {tokens[0]} and {tokens[1]}"
            )
        if min(tokens):
            kept.append(request)
        else:
            notes.add("requests left out: zero input or output tokens (no answer)")
    return kept


def _timed(requests: Sequence[_Request], from_s: float, notes: Notes) -> Iterator[RecordedRequest]:
    """The requests of an agent with their starts and ends. An answer without `api_time` takes the
    median time per output token of the others, and ends before the next request."""
    paces = [r.api_time / r.output_tokens for r in requests if r.api_time is not None]
    pace_s = float(np.median(paces)) if paces else 0.0
    for request, later in zip(requests, (*requests[1:], None), strict=True):
        took_s = request.api_time
        if took_s is None:
            took_s = pace_s * request.output_tokens
            if later is not None:
                took_s = min(took_s, later.t - request.t)
            notes.add("requests without api_time, whose end is estimated")
        start_s = from_s + request.t
        ids = np.array(request.hash_ids, np.int64)
        yield RecordedRequest(start_s, start_s + max(0.0, took_s), request.model, ids)
