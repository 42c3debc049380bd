"""Makes the run that slobench would have recorded of a result of another load generator, as far as
its file allows."""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loadgen.archive.store import Ids
from loadgen.foreign.foreign_run import ForeignRequest, ForeignRun
from loadgen.manifest.sections import (
    ClassSection,
    HostSection,
    ImportedSection,
    InstrumentLimits,
    LabelsSection,
    Manifest,
    NamesSection,
    ScenarioSection,
    TargetSection,
    WindowSection,
    text_sha256,
)
from loadgen.records import (
    CHUNKS,
    SCHEDULE,
    Chunks,
    Names,
    Phase,
    Requests,
    Run,
    Schedule,
    Times,
    empty_requests,
    schedule_sha256,
)

_LIMITS = InstrumentLimits(
    lateness_s=None,
    loop_lag_s=0.005,
    read_backlog_s=0.0025,
    cpu_share=0.9,
    run_delay_share=0.01,
)
_APART_S = 1e-6  # of the end of the window from the last request in it
_SHORTEST_S = 1e-3
_EARLIEST = "1970-01-01T00:00:00"


class Origin(NamedTuple):
    """The file of a result, its SHA-256, and the command and the version that import it."""

    file: str
    sha256: str
    command: tuple[str, ...]
    slobench: str


def build(found: ForeignRun, name: str, origin: Origin, slo: Sequence[str] = ()) -> Run:
    """The run `name` of a result, with the SLOs `slo`. The schedule holds the times at which
    requests were due or, where the tool does not record these, were sent."""
    requests = sorted(found.requests, key=_due_s)
    zero_s = _due_s(requests[0])
    due_s = np.array([_due_s(request) for request in requests]) - zero_s
    schedule = _schedule(requests, due_s, _users_of(requests, found.users))
    errors, chunks = Ids(), _chunks(requests, zero_s)
    rows = _rows(schedule, requests, zero_s, chunks, errors)
    return Run(
        manifest=_manifest(found, name, origin, slo, schedule, rows),
        schedule_rows=schedule,
        request_rows=rows,
        chunk_rows=chunks,
        names=Names(errors=errors.texts()),
    )


def _due_s(request: ForeignRequest) -> float:
    return request.sent_s if np.isnan(request.due_s) else request.due_s


def _schedule(requests: Sequence[ForeignRequest], due_s: Times, users: Sequence[int]) -> Schedule:
    schedule = np.zeros(len(requests), SCHEDULE)
    schedule["request_id"], schedule["session_id"] = np.arange(len(requests)), users
    schedule["scheduled_s"] = due_s
    schedule["input_tokens"] = [request.input_tokens for request in requests]
    schedule["output_tokens"] = [request.requested_tokens for request in requests]
    is_warmup = np.array([request.is_warmup for request in requests], bool)
    schedule["phase"] = np.where(is_warmup, Phase.warmup, Phase.measure)
    return schedule


def _users_of(requests: Sequence[ForeignRequest], n_users: int | None) -> list[int]:
    """The user of each request: in a closed loop the user who has been free for longest, else a
    user of its own. Which request followed which is not recorded, only that one had ended."""
    if n_users is None:
        return list(range(len(requests)))
    free = [(-np.inf, user) for user in range(min(n_users, len(requests)))]
    users = []
    for request in requests:
        _, user = heapq.heappop(free)
        users.append(user)
        heapq.heappush(free, (request.done_s, user))
    return users


def _chunks(requests: Sequence[ForeignRequest], zero_s: float) -> Chunks:
    """A chunk at the first token and after each gap; none of requests without recorded gaps."""
    parts = []
    for number, request in enumerate(requests):
        if request.gaps_s is None or np.isnan(request.first_token_s):
            continue
        part = np.zeros(1 + len(request.gaps_s), CHUNKS)
        part["request_id"] = number
        part["received_s"] = request.first_token_s - zero_s
        part["received_s"][1:] += np.cumsum(request.gaps_s)
        parts.append(part)
    return np.concatenate([np.empty(0, CHUNKS), *parts])


def _rows(
    schedule: Schedule,
    requests: Sequence[ForeignRequest],
    zero_s: float,
    chunks: Chunks,
    errors: Ids,
) -> Requests:
    rows = empty_requests(schedule)
    rows["released_s"] = schedule["scheduled_s"]
    for column, name in (
        ("sent_s", "sent_s"),
        ("first_chunk_s", "first_token_s"),
        ("first_token_s", "first_token_s"),
        ("first_answer_s", "first_answer_s"),
        ("last_token_s", "last_token_s"),
        ("done_s", "done_s"),
    ):
        rows[column] = np.array([getattr(r, name) for r in requests], np.float64) - zero_s
    for name in ("input_tokens", "cached_tokens", "output_tokens", "first_chunk_tokens"):
        rows[name] = [getattr(request, name) for request in requests]
    for name in ("token_source", "status", "http_status"):
        rows[name] = [getattr(request, name) for request in requests]
    rows["error_id"] = [errors.id(request.error) for request in requests]
    rows["chunks"] = np.bincount(chunks["request_id"], minlength=len(requests))
    return rows


def _manifest(
    found: ForeignRun,
    name: str,
    origin: Origin,
    slo: Sequence[str],
    schedule: Schedule,
    rows: Requests,
) -> Manifest:
    load = _load(found, name, schedule)
    text = f"# The load of {found.tool}, as far as {origin.file} states it.\n{_yaml(load)}"
    return Manifest(
        run=name,
        slobench=origin.slobench,
        command=origin.command,
        scenario=ScenarioSection(
            name=name, source="", text=text, resolved=load, sha256=text_sha256(text)
        ),
        seed=0,
        salt="",
        schedule_sha256=schedule_sha256(schedule),
        n_requests=len(schedule),
        slo=tuple(slo),
        classes={
            "default": ClassSection(
                (), priority=0, tenant="default", is_closed_loop=found.users is not None
            )
        },
        target=TargetSection(
            kind="url",
            url=found.url,
            api=found.api,
            model=found.model,
            api_key_env=None,
            labels=LabelsSection(),
            stream=found.is_streamed,
        ),
        preflight=(),
        names=NamesSection(("default",), ("default",)),
        window=_window(found, schedule, rows),
        instrument_limits=_LIMITS,
        clock=f"of {found.tool}",
        host=HostSection("", None, "", "", ""),
        versions={found.tool: found.version} if found.version else {},
        git="",
        started_utc=found.started or _EARLIEST,
        ended="completed",
        end_reason="",
        requested_rate_per_s=found.rate_per_s,
        server_ended_s=None,
        imported=ImportedSection(
            tool=found.tool,
            file=origin.file,
            file_sha256=origin.sha256,
            missing=found.missing,
            version=found.version,
            part=found.part,
            duration_s=found.duration_s,
            has_send_times=found.has_send_times,
        ),
    )


def _window(found: ForeignRun, schedule: Schedule, rows: Requests) -> WindowSection:
    """From the first counted request to where the next one would have been due: a mean gap after
    the last. Of a closed loop to the last request; of requests that were due at once to the last
    end."""
    counted = schedule["phase"] == Phase.measure
    due_s = np.sort(schedule["scheduled_s"][counted])
    start_s, last_s = (float(due_s[0]), float(due_s[-1])) if len(due_s) else (0.0, 0.0)
    start_s = start_s if np.any(~counted) else 0.0
    ended_s = float(rows["done_s"].max())
    if found.users is not None:
        end_s = last_s
    elif last_s == start_s or not found.arrivals:
        end_s = ended_s
    else:
        end_s = last_s + (last_s - start_s) / (len(due_s) - 1)
    end_s = max(end_s, last_s + _APART_S, start_s + _SHORTEST_S)
    return WindowSection(start_s, end_s - start_s, max(0.0, ended_s - end_s))


def _load(found: ForeignRun, name: str, schedule: Schedule) -> dict[str, Any]:
    """The keys of a scenario that the file states or shows. Mean lengths are rounded to two digits,
    so that two draws of the same lengths compare."""
    lengths = {
        key: _length(schedule[key])
        for key in ("input_tokens", "output_tokens")
        if schedule[key].any()
    }
    return {
        "name": name,
        "arrivals": dict(found.arrivals),
        "requests": lengths,
        "limits": dict(found.limits),
        **found.settings,
    }


def _length(tokens: Any) -> int:
    mean, is_fixed = float(tokens.mean()), int(tokens.min()) == int(tokens.max())
    return int(tokens[0]) if is_fixed else int(float(f"{mean:.2g}"))


def _yaml(load: Mapping[str, Any]) -> str:
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in load.items() if value)
