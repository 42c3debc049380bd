"""The result file of `vllm bench serve --save-result --save-detailed`, of its clients in Python and
in Rust.

Source: vLLM, vllm/benchmarks/serve.py (`benchmark`, `main_async`) and lib/endpoint_request_func.py;
files of `vllm-rs bench serve` 0.33.0.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from http import HTTPStatus
from typing import Any

from loadgen.errors import UsageError
from loadgen.foreign.foreign_run import (
    NO_CLIENT,
    NO_LENGTHS,
    NO_READS,
    NO_SCHEDULE,
    NO_SEND_TIMES,
    ForeignRequest,
    ForeignRun,
    JsonValue,
    as_section,
    check_rate,
    check_time,
    check_tokens,
    check_users,
)
from loadgen.manifest.json_section import JsonSection
from loadgen.records import Status, TokenSource
from loadgen.units import write_rate

TOOL = "vllm bench serve"
RUST_TOOL = "vllm-rs bench serve"
_NO_TOKENS = (
    "no mark of chunks without a token: TTFT may be that of an empty first chunk, and the last gap "
    "that of a finish reason"
)
_LEAST_BURSTINESS = 1e-9
_HTTP = {status.phrase: status.value for status in HTTPStatus}
_RUST_HTTP = re.compile(r"HTTP (\d{3}) [^:]*: (.*)", re.DOTALL)
_COLUMNS = ("input_lens", "output_lens", "ttfts", "itls", "errors")


class VllmResult(JsonSection, frozen=True):
    """The keys that are read. `start_times` are on the client's monotonic clock; `queue_times` are
    the waits for `--max-concurrency`. Older versions lack the keys with defaults, and the client in
    Rust lacks `queue_times`."""

    completed: int
    duration: float
    input_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    ttfts: tuple[float, ...]
    itls: tuple[tuple[float, ...], ...]
    errors: tuple[str, ...]
    start_times: tuple[float, ...] | None = None
    latencies: tuple[float, ...] | None = None
    queue_times: tuple[float, ...] | None = None
    date: str = ""
    backend: str = ""
    model_id: str = ""
    request_rate: float | str | None = None
    burstiness: float | None = None
    max_concurrency: int | None = None


def is_vllm(content: Mapping[str, Any]) -> bool:
    """Whether a JSON object has the form of this file, with or without the details."""
    return {"duration", "completed", "num_prompts", "request_rate"} <= content.keys()


def read_vllm(values: Sequence[JsonValue], where: str) -> Iterator[ForeignRun]:
    """The results of a file: one, or several after `--append-result`."""
    for part, value in enumerate(values):
        yield result_of(value.content, value.place(where), part)


def result_of(
    content: Any, where: str, part: int, flags: str = "--save-result --save-detailed"
) -> ForeignRun:
    """A result in one list per column; `flags` are those that put the lists into the file."""
    absent = [key for key in _COLUMNS if not isinstance(content, dict) or key not in content]
    if absent:
        raise UsageError(
            f"{where}: no key {absent[0]}: the requests are in the file only with {flags}, and "
            "only of generated text"
        )
    result = as_section(content, VllmResult, where)
    _check(result, where)
    rate_per_s = _rate_per_s(result, where)
    cap = check_users(result.max_concurrency, where, "max_concurrency")
    users = cap if rate_per_s is None else None
    has_due = rate_per_s is not None and None not in (result.queue_times, result.start_times)
    sent_s = _sent_s(result, rate_per_s, users, where)
    requests = [_request(result, k, sent_s[k], where, has_due) for k in range(len(sent_s))]
    n_ok = sum(request.status == Status.ok for request in requests)
    if n_ok != result.completed:
        raise UsageError(
            f"{where}: completed: {result.completed} requests, but {n_ok} have a first token and "
            "no error"
        )
    return ForeignRun(
        tool=RUST_TOOL if "failed_requests" in content else TOOL,
        requests=requests,
        missing=_missing(result, has_due),
        part=part,
        has_send_times=result.start_times is not None,
        duration_s=check_time(result.duration, where, "duration"),
        model=result.model_id,
        api="chat" if "chat" in result.backend else "completions",
        started=started(result.date),
        rate_per_s=rate_per_s,
        users=users,
        arrivals=_arrivals(result, rate_per_s, users, where),
        limits={}
        if users is not None or result.max_concurrency is None
        else {"max_concurrency": result.max_concurrency, "when_full": "wait"},
    )


def _check(result: VllmResult, where: str) -> None:
    n = len(result.ttfts)
    lists = {
        key: getattr(result, key) for key in (*_COLUMNS, "start_times", "latencies", "queue_times")
    }
    for key, values in lists.items():
        if values is not None and len(values) != n:
            raise UsageError(
                f"{where}: {key}: {len(values)} values, but ttfts has {n}: the file is damaged"
            )
    if not n:
        raise UsageError(f"{where}: ttfts: no request in the file")


def _sent_s(
    result: VllmResult, rate_per_s: float | None, users: int | None, where: str
) -> Sequence[float]:
    """The send times. Older versions do not write them: then equal gaps of the requested rate, or
    in a closed loop when the request of a user before had ended."""
    if result.start_times is not None:
        return [
            check_time(at, where, f"start_times[{k}]") for k, at in enumerate(result.start_times)
        ]
    n = len(result.ttfts)
    if users is None:
        return [0.0 if rate_per_s is None else k / rate_per_s for k in range(n)]
    free, sent_s = [0.0] * min(users, n), []
    for k in range(n):
        sent_s.append(heapq.heappop(free))
        heapq.heappush(free, sent_s[k] + result.ttfts[k] + sum(result.itls[k]))
    return sent_s


def _request(
    result: VllmResult, k: int, sent_s: float, where: str, has_due: bool
) -> ForeignRequest:
    ttft_s = check_time(result.ttfts[k], where, f"ttfts[{k}]")
    gaps_s = [check_time(gap, where, f"itls[{k}][{n}]") for n, gap in enumerate(result.itls[k])]
    due_s = math.nan
    if has_due and result.queue_times is not None:
        due_s = sent_s - check_time(result.queue_times[k], where, f"queue_times[{k}]")
    n_input = check_tokens(result.input_lens[k], where, f"input_lens[{k}]")
    latency_s = ttft_s + sum(gaps_s)
    if result.latencies is not None:
        latency_s = check_time(result.latencies[k], where, f"latencies[{k}]")
    error = result.errors[k].strip()
    if error or not ttft_s:
        http_status, message = _failure(error)
        return ForeignRequest(
            sent_s=sent_s,
            due_s=due_s,
            done_s=sent_s + latency_s,
            input_tokens=n_input,
            token_source=TokenSource.none,
            status=Status.http_error if http_status else Status.stream_error,
            http_status=http_status,
            error=message,
        )
    first_s, last_s = sent_s + ttft_s, sent_s + latency_s
    return ForeignRequest(
        sent_s=sent_s,
        due_s=due_s,
        first_token_s=first_s,
        first_answer_s=first_s,
        last_token_s=last_s,
        done_s=last_s,
        gaps_s=gaps_s,
        input_tokens=n_input,
        output_tokens=check_tokens(result.output_lens[k], where, f"output_lens[{k}]"),
    )


def _failure(error: str) -> tuple[int, str]:
    """HTTP status, 0 without one, and message of a failed request. Of a request that the server
    refused, the client in Python writes the reason phrase, that in Rust status, phrase and body; of
    others, the former writes a traceback."""
    if refused := _RUST_HTTP.fullmatch(error):
        return int(refused[1]), error.splitlines()[0]
    return _HTTP.get(error, 0), error.splitlines()[-1] if error else "failed without a message"


def _missing(result: VllmResult, has_due: bool) -> tuple[str, ...]:
    if has_due:
        schedule = (
            "no scheduled time: latency counts from when its loop released a request, and the "
            "loop's own delay is invisible"
        )
    else:
        schedule = NO_SCHEDULE
    clauses = [schedule, NO_CLIENT, _NO_TOKENS, NO_READS, NO_LENGTHS]
    if result.start_times is None:
        clauses.insert(0, NO_SEND_TIMES)
    return tuple(clauses)


def _rate_per_s(result: VllmResult, where: str) -> float | None:
    """The requested rate; None for `inf`."""
    rate = result.request_rate
    if rate is None or rate == "inf" or rate == math.inf:
        return None
    if not isinstance(rate, float):
        raise UsageError(f'{where}: request_rate: expected a rate or "inf", found {rate}')
    return check_rate(rate, where, "request_rate")


def _arrivals(
    result: VllmResult, rate_per_s: float | None, users: int | None, where: str
) -> dict[str, Any]:
    burstiness = 1.0 if result.burstiness is None else result.burstiness
    if not _LEAST_BURSTINESS <= burstiness <= 1 / _LEAST_BURSTINESS:
        raise UsageError(f"{where}: burstiness: expected a positive number, found {burstiness}")
    if users is not None:
        return {"kind": "users", "users": users}
    if rate_per_s is None:
        return {}
    if burstiness == 1.0:
        return {"kind": "poisson", "rate": write_rate(rate_per_s)}
    cv = round(1 / math.sqrt(burstiness), 6)
    return {"kind": "gamma", "rate": write_rate(rate_per_s), "cv": cv}


def started(date: str) -> str:
    """The file's date: that of its end, in the local time of the client in Python, in UTC of that
    in Rust; "" for another form."""
    for form in ("%Y%m%d-%H%M%S", "%Y-%m-%dT%H:%M:%SZ"):
        with suppress(ValueError):
            return datetime.strptime(date, form).isoformat()
    return ""
