"""The requests of inference-perf: `per_request_lifecycle_metrics.json`, a list (`report:
request_lifecycle: per_request: true`).

Source: inference-perf 0.7.0, reportgen/base.py (`build_per_request_lifecycle_entry`) and
apis/base.py (`InferenceInfo`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from loadgen.errors import UsageError
from loadgen.foreign.foreign_run import (
    NO_CLIENT,
    NO_LENGTHS,
    NO_READS,
    NO_SCHEDULE,
    ForeignRequest,
    ForeignRun,
    JsonValue,
    as_section,
    check_time,
    check_tokens,
)
from loadgen.manifest.json_section import JsonSection
from loadgen.records import Status, TokenSource

TOOL = "inference-perf"
_NO_LOAD = "no load: the file does not state the arrivals"
_HTTP_ERROR = re.compile(r"HTTP Error (\d{3})")


class _Text(JsonSection, frozen=True):
    """The text of a prompt."""

    input_tokens: int = 0


class _Prompt(JsonSection, frozen=True):
    """A prompt."""

    text: _Text = _Text()


class _CachedTokens(JsonSection, frozen=True):
    """Details of the server's count."""

    cached_tokens: int | None = None


class _Usage(JsonSection, frozen=True):
    """The server's count of tokens; Anthropic's API has names of its own."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class _Answer(JsonSection, frozen=True):
    """An answer; `chunk_times` only of a stream, of chunks with content."""

    output_tokens: int = 0
    server_usage: _Usage | None = None
    chunk_times: tuple[float, ...] | None = None


class _Info(JsonSection, frozen=True):
    """The course of a request."""

    request_metrics: _Prompt = _Prompt()
    response_metrics: _Answer | None = None


class _Error(JsonSection, frozen=True):
    """The error of a failed request."""

    error_type: str
    error_msg: str = ""


class InferencePerfRequest(JsonSection, frozen=True):
    """An entry of the list. Times are on the client's monotonic clock, s."""

    start_time: float
    end_time: float
    info: _Info | None = None
    error: _Error | None = None


def is_inference_perf(content: object) -> bool:
    """Whether a JSON value has the form of the file."""
    first = content[0] if isinstance(content, list) and content else None
    return isinstance(first, Mapping) and {"start_time", "end_time", "error"} <= first.keys()


def read_inference_perf(values: Sequence[JsonValue], where: str) -> Iterator[ForeignRun]:
    """The run of a file. Raises UsageError for one without the details of the requests."""
    places = [f"{where}: [{k}]" for k in range(len(values[0].content))]
    found = [
        as_section(content, InferencePerfRequest, place)
        for content, place in zip(values[0].content, places, strict=True)
    ]
    if not any(request.info for request in found):
        raise UsageError(
            f"{where}: no key info: tokens and times of chunks are in the file only with "
            "report.request_lifecycle.per_request_fields.info"
        )
    for request, place in zip(found, places, strict=True):
        check_time(request.start_time, place, "start_time")
        check_time(request.end_time - request.start_time, place, "end_time, less start_time")
    zero_s = min(request.start_time for request in found)
    requests = [
        _request(request, zero_s, place) for request, place in zip(found, places, strict=True)
    ]
    yield ForeignRun(
        tool=TOOL,
        requests=requests,
        missing=(NO_SCHEDULE, _NO_LOAD, NO_CLIENT, NO_READS, NO_LENGTHS),
        is_streamed=any(math.isfinite(request.first_token_s) for request in requests),
        arrivals={"kind": "recorded"},
    )


def _request(request: InferencePerfRequest, zero_s: float, where: str) -> ForeignRequest:
    sent_s, done_s = request.start_time - zero_s, request.end_time - zero_s
    info = request.info or _Info()
    answer, n_prompt = info.response_metrics, info.request_metrics.text.input_tokens
    input_tokens = check_tokens(n_prompt, where, "info.request_metrics.text.input_tokens")
    if request.error is not None or answer is None:
        status, http_status, message = _failure(request.error)
        return ForeignRequest(
            sent_s=sent_s,
            done_s=done_s,
            input_tokens=input_tokens,
            token_source=TokenSource.none,
            status=status,
            http_status=http_status,
            error=message,
        )
    usage = answer.server_usage or _Usage()
    counted = usage.completion_tokens if usage.output_tokens is None else usage.output_tokens
    n = answer.output_tokens if counted is None else counted
    cached = usage.prompt_tokens_details
    times_s = [
        check_time(at_s - zero_s, where, f"chunk_times[{k}], less the first start_time")
        for k, at_s in enumerate(answer.chunk_times or ())
    ]
    gaps_s = [check_time(b - a, where, "gap of chunk_times") for a, b in pairwise(times_s)]
    first_s = times_s[0] if times_s else math.nan
    return ForeignRequest(
        sent_s=sent_s,
        first_token_s=first_s,
        first_answer_s=first_s,
        last_token_s=times_s[-1] if times_s else done_s,
        done_s=max(done_s, times_s[-1]) if times_s else done_s,
        gaps_s=gaps_s,
        input_tokens=input_tokens,
        cached_tokens=check_tokens(
            (cached and cached.cached_tokens) or 0, where, "prompt_tokens_details.cached_tokens"
        ),
        output_tokens=check_tokens(n, where, "info.response_metrics.output_tokens"),
        token_source=TokenSource.tokenizer if counted is None else TokenSource.usage,
    )


def _failure(error: _Error | None) -> tuple[Status, int, str]:
    if error is None:
        return Status.stream_error, 0, "no answer"
    message = f"{error.error_type}: {error.error_msg}" if error.error_msg else error.error_type
    if refused := _HTTP_ERROR.fullmatch(error.error_type):
        return Status.http_error, int(refused[1]), message
    return (Status.timeout if "Timeout" in error.error_type else Status.stream_error), 0, message
