"""The report of guidellm (`--output kind=json`): a file with one or several benchmarks.

Source: guidellm 0.8.1, benchmark/schemas/report.py, schemas/base/request_stats.py and info.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
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
    check_rate,
    check_tokens,
    check_users,
)
from loadgen.manifest.json_section import JsonSection
from loadgen.records import Status, TokenSource
from loadgen.units import write_rate

TOOL = "guidellm"
_NO_GAPS = "no gaps between chunks: ITL and stalls inside an answer are not known"
_BAD_TARGETS = (
    "no scheduled time: its targeted_start is no time of the clock in this file, so that latency "
    "counts from the send, and queueing in the client is invisible"
)
_WITH_RATE = ("poisson", "constant")
_HTTP_ERROR = re.compile(r"(?:Client|Server) error '(\d{3}) ")
_LATEST_S = 1e11
_FAR_S = 1e6  # two times of one benchmark are never so far apart


class GuidellmTimings(JsonSection, frozen=True):
    """Times of a request, seconds of the wall clock; None: it never happened."""

    targeted_start: float | None = None
    resolve_start: float | None = None
    request_start: float | None = None
    first_token_iteration: float | None = None
    first_output_token_iteration: float | None = None
    last_token_iteration: float | None = None
    request_end: float | None = None
    resolve_end: float | None = None


class GuidellmInfo(JsonSection, frozen=True):
    """The course of a request."""

    timings: GuidellmTimings
    error: str | None = None


class GuidellmUsage(JsonSection, frozen=True):
    """Tokens of a prompt or an answer."""

    text_tokens: int | None = None
    cached_tokens: int | None = None


class GuidellmRequest(JsonSection, frozen=True):
    """A request of a benchmark."""

    info: GuidellmInfo
    input_metrics: GuidellmUsage = GuidellmUsage()
    output_metrics: GuidellmUsage = GuidellmUsage()


class GuidellmRequests(JsonSection, frozen=True):
    """The requests of a benchmark by their status; None where none was kept."""

    successful: tuple[GuidellmRequest, ...] | None = None
    errored: tuple[GuidellmRequest, ...] | None = None
    incomplete: tuple[GuidellmRequest, ...] | None = None


class GuidellmCounts(JsonSection, frozen=True):
    """Numbers of requests by their status."""

    successful: int = 0
    errored: int = 0
    incomplete: int = 0


class GuidellmScheduler(JsonSection, frozen=True):
    """Measurements of guidellm's scheduler."""

    requests_made: GuidellmCounts
    measure_start_time: float


class GuidellmStrategy(JsonSection, frozen=True):
    """The load of a benchmark."""

    type_: str
    rate: float | None = None
    streams: int | None = None
    max_concurrency: int | None = None


class GuidellmConfig(JsonSection, frozen=True):
    """The settings of a benchmark. `backend` is an object with the server."""

    strategy: GuidellmStrategy
    backend: Any = None


class GuidellmBenchmark(JsonSection, frozen=True):
    """A benchmark of a report."""

    config: GuidellmConfig
    scheduler_metrics: GuidellmScheduler
    requests: GuidellmRequests
    duration: float


def is_guidellm(content: Mapping[str, Any]) -> bool:
    """Whether a JSON object has the form of a report."""
    metadata = content.get("metadata")
    return isinstance(metadata, dict) and "guidellm_version" in metadata and "benchmarks" in content


def read_guidellm(values: Sequence[JsonValue], where: str) -> Iterator[ForeignRun]:
    """The benchmarks of a report."""
    report = values[0].content
    benchmarks = report["benchmarks"]
    if not isinstance(benchmarks, list) or not benchmarks:
        raise UsageError(f"{where}: benchmarks: expected a list with a benchmark")
    version = str(report["metadata"]["guidellm_version"])
    for part, content in enumerate(benchmarks):
        place = f"{where}: benchmarks[{part}]"
        yield _result(as_section(content, GuidellmBenchmark, place), place, part, version)


def _result(found: GuidellmBenchmark, where: str, part: int, version: str) -> ForeignRun:
    _check_whole(found, where)
    strategy, kept = found.config.strategy, found.requests
    sent = [
        (request, status, request.info.timings)
        for requests, status in (
            (kept.successful, Status.ok),
            (kept.errored, Status.stream_error),
            (kept.incomplete, Status.cancelled),
        )
        for request in requests or ()
        if request.info.timings.request_start is not None
    ]
    if not sent:
        raise UsageError(f"{where}: requests: none was sent")
    zero_s = min(timings.request_start or 0.0 for _, _, timings in sent)
    if not 0 <= zero_s <= _LATEST_S:
        raise UsageError(f"{where}: request_start: expected a time of the clock, found {zero_s}")
    has_schedule = strategy.type_ in _WITH_RATE
    if strategy.rate is not None:
        check_rate(strategy.rate, where, "config.strategy.rate")
    has_due = has_schedule and all(_is_near(timings, zero_s) for _, _, timings in sent)
    measured_s = found.scheduler_metrics.measure_start_time
    users = check_users(_users(strategy), where, "config.strategy")
    return ForeignRun(
        tool=TOOL,
        requests=[
            _request(request, status, zero_s, has_due, measured_s, where)
            for request, status, _ in sent
        ],
        missing=(
            *([_BAD_TARGETS] if has_schedule and not has_due else []),
            *([NO_SCHEDULE] if not has_schedule else []),
            NO_CLIENT,
            _NO_GAPS,
            NO_LENGTHS,
        ),
        version=version,
        part=part,
        duration_s=found.duration,
        started=datetime.fromtimestamp(zero_s, UTC).isoformat(),
        rate_per_s=strategy.rate if has_schedule else None,
        users=users,
        arrivals=_arrivals(strategy, users),
        **_server(found.config.backend),
    )


def _check_whole(found: GuidellmBenchmark, where: str) -> None:
    """Raises UsageError for a report of a sample of its requests."""
    for status in ("successful", "errored"):
        made = getattr(found.scheduler_metrics.requests_made, status)
        n = len(getattr(found.requests, status) or ())
        if n < made:
            raise UsageError(
                f"{where}: requests.{status}: {n} of {made} requests; the report has a sample of "
                "its requests only (sample_size), so that its rates and its memory are not known"
            )


def _is_near(timings: GuidellmTimings, zero_s: float) -> bool:
    return timings.targeted_start is not None and abs(timings.targeted_start - zero_s) < _FAR_S


def _request(
    request: GuidellmRequest,
    status: Status,
    zero_s: float,
    has_due: bool,
    measured_s: float,
    where: str,
) -> ForeignRequest:
    timings = request.info.timings

    def at(time_s: float | None) -> float:
        return math.nan if time_s is None else time_s - zero_s

    def tokens(count: int | None) -> int:
        return check_tokens(count or 0, where, "text_tokens or cached_tokens")

    sent_s = at(timings.request_start)
    done_s = at(timings.resolve_end if timings.request_end is None else timings.request_end)
    is_ok = status == Status.ok
    error = (request.info.error or "").partition("\\n")[0]  # the text is a repr
    http_status = int(found[1]) if (found := _HTTP_ERROR.search(error)) else 0
    if status == Status.stream_error and http_status:
        status = Status.http_error
    answer_s = timings.first_output_token_iteration or timings.first_token_iteration
    return ForeignRequest(
        sent_s=sent_s,
        due_s=at(timings.targeted_start) if has_due else math.nan,
        first_token_s=at(timings.first_token_iteration) if is_ok else math.nan,
        first_answer_s=at(answer_s) if is_ok else math.nan,
        last_token_s=at(timings.last_token_iteration) if is_ok else math.nan,
        done_s=sent_s if math.isnan(done_s) else done_s,
        input_tokens=tokens(request.input_metrics.text_tokens),
        cached_tokens=tokens(request.input_metrics.cached_tokens),
        output_tokens=tokens(request.output_metrics.text_tokens) if is_ok else 0,
        token_source=TokenSource.usage if is_ok else TokenSource.none,
        status=status,
        http_status=200 if is_ok else http_status,
        error="" if is_ok else error or "unfinished when the benchmark ended",
        is_warmup=(timings.request_start or 0.0) < measured_s,
    )


def _users(strategy: GuidellmStrategy) -> int | None:
    """The requests in flight of a closed loop."""
    if strategy.type_ == "synchronous":
        return 1
    if strategy.type_ == "concurrent":
        return strategy.streams
    return strategy.max_concurrency if strategy.type_ == "throughput" else None


def _arrivals(strategy: GuidellmStrategy, users: int | None) -> dict[str, Any]:
    """The arrivals as a scenario states them; those of other kinds by the name of their kind."""
    if users is not None:
        return {"kind": "users", "users": users}
    if strategy.type_ == "throughput":
        return {}
    stated = {} if strategy.rate is None else {"rate": write_rate(strategy.rate)}
    return {"kind": strategy.type_, **stated}


def _server(backend: Any) -> dict[str, Any]:
    """Model, address and API, as far as the settings of the backend state them."""
    if not isinstance(backend, dict):
        return {}
    form = str(backend.get("request_format", ""))
    return {
        "model": str(backend.get("model") or ""),
        "url": str(backend.get("target") or ""),
        "api": "chat" if "chat" in form else "completions" if "completions" in form else None,
        "is_streamed": backend.get("stream") is not False,
    }
