"""The records of `aiperf profile`: `profile_export.jsonl`, a JSON line per request, and the summary
`profile_export_aiperf.json` next to it, which states the load.

Source: aiperf 0.13.0, common/models/record_models.py (`MetricRecordInfo`) and config/phases.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from loadgen.errors import UsageError
from loadgen.foreign.foreign_run import (
    MOST_PER_S,
    MOST_TOKENS,
    NO_CLIENT,
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
from loadgen.units import write_rate

TOOL = "aiperf"
_FROM_CREDIT = (
    "no scheduled time: latency counts from when its rate limiter issued the request, and arrivals "
    "that it skipped or moved are not in the file"
)
_NO_LOAD = "no load: the summary (…_aiperf.json) is not next to it, so nothing states the rate"
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "sec": 1.0, "s": 1.0}
_MOST_IN_CHUNK = 65_535
_APIS = {"chat": "chat", "completions": "completions"}


class AiperfNumber(JsonSection, frozen=True):
    """A metric of a request."""

    value: float
    unit: str


class AiperfNumbers(JsonSection, frozen=True):
    """A metric with several values for a request."""

    value: tuple[float, ...]
    unit: str


class AiperfMetrics(JsonSection, frozen=True):
    """The metrics that are read; None where a request has none."""

    request_latency: AiperfNumber | None = None
    time_to_first_token: AiperfNumber | None = None
    time_to_first_output_token: AiperfNumber | None = None
    inter_token_latency: AiperfNumber | None = None
    inter_chunk_latency: AiperfNumbers | None = None
    output_sequence_length: AiperfNumber | None = None
    input_sequence_length: AiperfNumber | None = None
    usage_prompt_tokens: AiperfNumber | None = None
    usage_completion_tokens: AiperfNumber | None = None
    usage_prompt_cache_read_tokens: AiperfNumber | None = None
    osl_mismatch_diff_pct: AiperfNumber | None = None


class AiperfMetadata(JsonSection, frozen=True):
    """Times of the wall clock, ns."""

    request_start_ns: int
    request_end_ns: int
    credit_issued_ns: int | None = None
    benchmark_phase: str = "profiling"
    was_cancelled: bool = False


class AiperfError(JsonSection, frozen=True):
    """The error of a failed request; `code` is that of HTTP, if there is one."""

    message: str
    code: int | None = None
    type: str | None = None


class AiperfRecord(JsonSection, frozen=True):
    """A line of the file."""

    metadata: AiperfMetadata
    metrics: AiperfMetrics
    error: AiperfError | None = None


class AiperfPhase(JsonSection, frozen=True):
    """A phase of the load; `kind` is `warmup` or `profiling`, `type` that of its arrivals."""

    type: str
    kind: str = "profiling"
    rate: Any = None
    concurrency: Any = None
    smoothness: float | None = None


class AiperfEndpoint(JsonSection, frozen=True):
    """The server."""

    urls: tuple[str, ...] = ()
    type: str = ""


class AiperfModel(JsonSection, frozen=True):
    """A model that was requested."""

    name: str


class AiperfModels(JsonSection, frozen=True):
    """The models that were requested."""

    items: tuple[AiperfModel, ...] = ()


class AiperfConfig(JsonSection, frozen=True):
    """The settings of a run."""

    phases: tuple[AiperfPhase, ...] = ()
    endpoint: AiperfEndpoint = AiperfEndpoint()
    models: AiperfModels = AiperfModels()


class AiperfAverage(JsonSection, frozen=True):
    """A metric of the run."""

    avg: float
    unit: str


class AiperfSummary(JsonSection, frozen=True):
    """The keys of the summary that are read. Older versions lack those with defaults."""

    aiperf_version: str = ""
    start_time: str | None = None
    end_time: str | None = None
    benchmark_duration: AiperfAverage | None = None
    input_config: AiperfConfig = AiperfConfig()


def is_aiperf(content: Mapping[str, Any]) -> bool:
    """Whether a JSON object has the form of a line."""
    metadata = content.get("metadata")
    return isinstance(metadata, dict) and "request_start_ns" in metadata and "metrics" in content


def read_aiperf(
    values: Sequence[JsonValue], where: str, beside: JsonValue | None, beside_where: str
) -> Iterator[ForeignRun]:
    """The result of a file; `beside` is the content of the summary, None without one."""
    places = [f"{where}:{value.line}" for value in values]
    records = [
        as_section(value.content, AiperfRecord, place)
        for value, place in zip(values, places, strict=True)
    ]
    content = {} if beside is None else beside.content
    summary = as_section(content, AiperfSummary, beside_where)
    config = summary.input_config
    phase = next((phase for phase in config.phases if phase.kind != "warmup"), None)
    is_loop = phase is not None and phase.type == "concurrency"
    zero_ns = min(record.metadata.request_start_ns for record in records)
    requests = [
        _request(record, zero_ns, is_loop, place)
        for record, place in zip(records, places, strict=True)
    ]
    models = config.models.items
    yield ForeignRun(
        tool=TOOL,
        requests=requests,
        missing=(
            NO_SCHEDULE if is_loop else _FROM_CREDIT,
            *([] if phase else [_NO_LOAD]),
            NO_CLIENT,
        ),
        version=summary.aiperf_version,
        duration_s=_duration_s(summary, beside_where),
        model=models[0].name if models else "",
        url=next(iter(config.endpoint.urls), ""),
        api=_APIS.get(config.endpoint.type),
        is_streamed=any(math.isfinite(request.first_token_s) for request in requests),
        started=summary.start_time or "",
        rate_per_s=None if is_loop else _rate_per_s(phase),
        users=_concurrency(phase) if is_loop else None,
        arrivals=_arrivals(phase),
        limits={}
        if is_loop or not _concurrency(phase)
        else {"max_concurrency": _concurrency(phase), "when_full": "wait"},
    )


def _duration_s(summary: AiperfSummary, where: str) -> float | None:
    """The time that its rates cover: from start to end, in older versions the duration."""
    if summary.start_time and summary.end_time:
        times = []
        for key in ("start_time", "end_time"):
            text = getattr(summary, key)
            try:
                times.append(datetime.fromisoformat(text).replace(tzinfo=UTC))
            except ValueError:
                raise UsageError(
                    f"{where}: {key}: expected an ISO 8601 time, found {text!r}"
                ) from None
        seconds = (times[1] - times[0]).total_seconds()
        return check_time(seconds, where, "end_time, less start_time")
    duration = summary.benchmark_duration
    return None if duration is None else duration.avg * _scale(duration.unit, where)


def _request(record: AiperfRecord, zero_ns: int, is_loop: bool, where: str) -> ForeignRequest:
    data, metrics = record.metadata, record.metrics
    sent_s, done_s = (
        1e-9 * (at_ns - zero_ns) for at_ns in (data.request_start_ns, data.request_end_ns)
    )
    due_s = math.nan
    if data.credit_issued_ns is not None and not is_loop:
        due_s = 1e-9 * (data.credit_issued_ns - zero_ns)
    is_warmup = data.benchmark_phase == "warmup"
    latency_s = _seconds(metrics, "request_latency", where)
    if record.error is not None or data.was_cancelled or math.isnan(latency_s):
        status, http_status = _failure(record)
        return ForeignRequest(
            sent_s=sent_s,
            due_s=due_s,
            done_s=done_s,
            token_source=TokenSource.none,
            status=status,
            http_status=http_status,
            error=_message(record),
            is_warmup=is_warmup,
        )
    ttft_s = _seconds(metrics, "time_to_first_token", where)
    n = _count(metrics, "output_sequence_length", where)
    is_by_server = n == _count(metrics, "usage_completion_tokens", where)
    return ForeignRequest(
        sent_s=sent_s,
        due_s=due_s,
        first_token_s=sent_s + ttft_s,
        first_answer_s=sent_s + _seconds(metrics, "time_to_first_output_token", where),
        last_token_s=sent_s + latency_s,
        done_s=max(done_s, sent_s + latency_s),
        gaps_s=_gaps_s(metrics, where),
        input_tokens=_count(metrics, "usage_prompt_tokens", where)
        or _count(metrics, "input_sequence_length", where),
        cached_tokens=_count(metrics, "usage_prompt_cache_read_tokens", where),
        output_tokens=n,
        requested_tokens=_requested(metrics, n),
        first_chunk_tokens=_first_chunk_tokens(
            n, latency_s - ttft_s, _seconds(metrics, "inter_token_latency", where)
        ),
        token_source=TokenSource.usage if is_by_server else TokenSource.tokenizer,
        is_warmup=is_warmup,
    )


def _failure(record: AiperfRecord) -> tuple[Status, int]:
    if record.metadata.was_cancelled:
        return Status.cancelled, 0
    kind = record.error.type if record.error is not None else None
    code = record.error.code if record.error is not None else None
    if code is not None and 400 <= code < 600 and code != 499:
        return Status.http_error, code
    return (Status.timeout if kind and "Timeout" in kind else Status.stream_error), 0


def _message(record: AiperfRecord) -> str:
    if record.error is None:
        return "cancelled" if record.metadata.was_cancelled else "failed without a message"
    kind = record.error.type
    return f"{kind}: {record.error.message}" if kind else record.error.message


def _seconds(metrics: AiperfMetrics, name: str, where: str) -> float:
    """A duration; NaN where the request has none."""
    found: AiperfNumber | None = getattr(metrics, name)
    if found is None:
        return math.nan
    place = f"{where}: metrics.{name}"
    return check_time(found.value * _scale(found.unit, place), place, "value")


def _gaps_s(metrics: AiperfMetrics, where: str) -> list[float]:
    """The gaps between chunks, 0 for two of one read; none of an answer in a single chunk."""
    found, place = metrics.inter_chunk_latency, f"{where}: metrics.inter_chunk_latency"
    if found is None:
        return []
    scale = _scale(found.unit, place)
    return [check_time(gap * scale, place, f"value[{k}]") for k, gap in enumerate(found.value)]


def _scale(unit: str, where: str) -> float:
    if unit not in _SECONDS:
        raise UsageError(f"{where}: unit: expected one of {', '.join(_SECONDS)}, found {unit!r}")
    return _SECONDS[unit]


def _count(metrics: AiperfMetrics, name: str, where: str) -> int:
    """A number of tokens; 0 where the request has none."""
    found: AiperfNumber | None = getattr(metrics, name)
    return 0 if found is None else check_tokens(found.value, f"{where}: metrics.{name}", "value")


def _requested(metrics: AiperfMetrics, n: int) -> int:
    """The requested length: the answer has so many percent more. 0 where it is not known."""
    found = metrics.osl_mismatch_diff_pct
    share = 1.0 if found is None else 1 + found.value / 100
    is_known = found is not None and share > 0 and n / share <= MOST_TOKENS
    return round(n / share) if is_known else 0


def _first_chunk_tokens(n: int, decode_s: float, itl_s: float) -> int:
    """The tokens of the first chunk: aiperf's ITL is the decode time over the tokens after it. 0
    where a request has none, or no such number."""
    tokens = n - decode_s / itl_s if decode_s > 0 and itl_s > 0 else 0.0
    return round(tokens) if 0 < tokens <= min(n, _MOST_IN_CHUNK) else 0


def _rate_per_s(phase: AiperfPhase | None) -> float | None:
    rate = None if phase is None else phase.rate
    return float(rate) if isinstance(rate, int | float) and 0 < rate <= MOST_PER_S else None


def _concurrency(phase: AiperfPhase | None) -> int | None:
    n = None if phase is None else phase.concurrency
    return n if isinstance(n, int) and n > 0 else None


def _arrivals(phase: AiperfPhase | None) -> dict[str, Any]:
    """The arrivals as a scenario states them; those of other kinds by the name of their kind."""
    rate_per_s = _rate_per_s(phase)
    if phase is None:
        return {"kind": "recorded"}
    if phase.type == "concurrency":
        return {"kind": "users", "users": _concurrency(phase) or 1}
    stated = {} if rate_per_s is None else {"rate": write_rate(rate_per_s)}
    if phase.type == "gamma" and phase.smoothness:
        return {"kind": "gamma", **stated, "cv": round(1 / math.sqrt(phase.smoothness), 6)}
    return {"kind": phase.type, **stated}
