"""The event log of MLPerf Endpoints, `events.jsonl`: a JSON line per event.

The file holds the text of the answers, not their tokens, and nothing of the load.

Source: mlcommons/endpoints, core/record.py (`EventRecord`), core/types.py and
async_utils/services/event_logger/file_writer.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from loadgen.errors import UsageError
from loadgen.foreign.foreign_run import (
    NO_CLIENT,
    NO_LENGTHS,
    NO_SCHEDULE,
    ForeignRequest,
    ForeignRun,
    JsonValue,
    as_section,
    check_tokens,
)
from loadgen.manifest.json_section import JsonSection
from loadgen.records import Status, TokenSource

TOOL = "MLPerf Endpoints"
_NO_LOAD = "no load: the file does not state the arrivals"
_NO_TOKENS = "no numbers of tokens: a chunk counts as one"
_NO_GAPS = "no gaps between chunks: ITL and stalls inside an answer are not known"
_FARTHEST_NS = 10**18


class EndpointsEvent(JsonSection, frozen=True):
    """A line of the file. `timestamp_ns` is on the client's monotonic clock. `data` is a list with
    the name of its type: `PromptData`, `TextModelOutput` or `ErrorData`."""

    event_type: str
    timestamp_ns: int
    sample_uuid: str = ""
    data: Any = None


@dataclass(slots=True)
class _Sample:
    """A request as far as its events have been read; ns."""

    issued_ns: int
    is_warmup: bool
    input_tokens: int
    received_ns: list[int] = field(default_factory=list)
    complete_ns: int | None = None
    n_chunks: int = 0
    error: str = ""


def is_mlperf_endpoints(content: Mapping[str, Any]) -> bool:
    """Whether a JSON object has the form of a line."""
    return {"event_type", "timestamp_ns"} <= content.keys()


def read_mlperf_endpoints(values: Sequence[JsonValue], where: str) -> Iterator[ForeignRun]:
    """The run of a file. Requests before the start of performance tracking, or after its end, are
    warm-up."""
    samples: dict[str, _Sample] = {}
    is_tracking, is_any_tracked, last_ns = False, False, 0
    for value in values:
        place = f"{where}:{value.line}"
        event = as_section(value.content, EndpointsEvent, place)
        if not 0 <= event.timestamp_ns <= _FARTHEST_NS:
            raise UsageError(
                f"{place}: timestamp_ns: expected a time in ns, found {event.timestamp_ns}"
            )
        last_ns = max(last_ns, event.timestamp_ns)
        if event.event_type.endswith("_performance_tracking"):
            is_tracking = event.event_type == "session.start_performance_tracking"
            is_any_tracked |= is_tracking
        elif event.sample_uuid:
            _add(event, samples, not is_tracking, place)
    if not samples:
        raise UsageError(f"{where}: sample.issued: no request in the file")
    zero_ns = min(sample.issued_ns for sample in samples.values())
    has_gaps = any(len(sample.received_ns) > 1 for sample in samples.values())
    requests = [
        _request(sample, zero_ns, last_ns, has_gaps, is_any_tracked) for sample in samples.values()
    ]
    missing = (NO_SCHEDULE, _NO_LOAD, NO_CLIENT, _NO_TOKENS, NO_LENGTHS)
    yield ForeignRun(
        tool=TOOL,
        requests=requests,
        missing=missing if has_gaps else (*missing, _NO_GAPS),
        is_streamed=any(math.isfinite(request.first_token_s) for request in requests),
        arrivals={"kind": "recorded"},
    )


def _add(event: EndpointsEvent, samples: dict[str, _Sample], is_warmup: bool, place: str) -> None:
    """Adds an event to its request. Raises UsageError for an event before the request was issued,
    or earlier than that."""
    if event.event_type == "sample.issued":
        sample = samples.setdefault(
            event.sample_uuid, _Sample(0, is_warmup, _input_tokens(event.data, place))
        )
        sample.issued_ns = event.timestamp_ns
        return
    if event.sample_uuid not in samples:
        raise UsageError(f"{place}: {event.event_type}: request {event.sample_uuid} was not issued")
    sample = samples[event.sample_uuid]
    if event.timestamp_ns < sample.issued_ns:
        raise UsageError(f"{place}: timestamp_ns: before request {event.sample_uuid} was issued")
    if event.event_type in ("sample.recv_first", "sample.recv_non_first"):
        sample.received_ns.append(event.timestamp_ns)
    elif event.event_type == "sample.complete":
        sample.complete_ns = event.timestamp_ns
        sample.n_chunks = _n_chunks(event.data)
        sample.error = sample.error or _error(event.data)
    elif event.event_type.startswith("error."):
        sample.error = _error(event.data) or event.event_type


def _fields(data: Any, kind: str) -> list[Any]:
    """The fields of a value of that type, without those at its end that have their default; empty
    for another type."""
    is_kind = isinstance(data, list) and bool(data) and data[0] == kind
    return data[1:] if is_kind else []


def _input_tokens(data: Any, place: str) -> int:
    """The length of a prompt of token ids; 0 where it is a text."""
    fields = _fields(data, "PromptData")
    tokens = fields[1] if len(fields) > 1 else None
    n = len(tokens) if isinstance(tokens, list) else 0
    return check_tokens(n, place, "data")


def _n_chunks(data: Any) -> int:
    """The number of chunks of an answer that was streamed; 0 of one that came as a whole."""
    parts = _fields(data, "TextModelOutput")[:2]
    return sum(len(part) for part in parts if isinstance(part, list))


def _error(data: Any) -> str:
    """The error of a request; "" of an answer."""
    if isinstance(data, list) and data[:1] == ["TextModelOutput"]:
        return ""
    texts = [str(text) for text in _fields(data, "ErrorData") if text]
    return ": ".join(texts) or "failed without a message"


def _request(
    sample: _Sample, zero_ns: int, last_ns: int, has_gaps: bool, is_any_tracked: bool
) -> ForeignRequest:
    def at(time_ns: int) -> float:
        return 1e-9 * (time_ns - zero_ns)

    ended_ns = last_ns if sample.complete_ns is None else sample.complete_ns
    is_warmup = sample.is_warmup and is_any_tracked
    if sample.complete_ns is None or sample.error:
        status = Status.stream_error if sample.error else Status.cancelled
        return ForeignRequest(
            sent_s=at(sample.issued_ns),
            done_s=at(ended_ns),
            input_tokens=sample.input_tokens,
            token_source=TokenSource.none,
            status=status,
            http_status=0,
            error=sample.error or "unfinished when the session ended",
            is_warmup=is_warmup,
        )
    received_s = [at(time_ns) for time_ns in sorted(sample.received_ns)]
    last_s = received_s[-1] if len(received_s) > 1 else at(ended_ns)
    first_s = received_s[0] if received_s else math.nan
    gaps_s = [b - a for a, b in pairwise(received_s)]
    n_chunks = max(sample.n_chunks, len(received_s))
    return ForeignRequest(
        sent_s=at(sample.issued_ns),
        first_token_s=first_s,
        first_answer_s=first_s,
        last_token_s=last_s,
        done_s=at(ended_ns),
        gaps_s=gaps_s if has_gaps else None,
        input_tokens=sample.input_tokens,
        output_tokens=n_chunks,
        token_source=TokenSource.chunks if n_chunks else TokenSource.none,
        is_warmup=is_warmup,
    )
