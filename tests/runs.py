"""Runs for tests: one that looks like a measured run, and any run hypothesis can think of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from hypothesis import strategies as st

from loadgen.archive import checksums, store
from loadgen.manifest.json_section import JsonSection
from loadgen.manifest.sections import (
    ClassSection,
    HostSection,
    InstrumentLimits,
    LabelsSection,
    Manifest,
    NamesSection,
    PreflightLine,
    ScenarioSection,
    TargetSection,
    WindowSection,
)
from loadgen.manifest.self_report import (
    ClientReport,
    ConnectionsReport,
    CoreSeconds,
    DecodingReport,
    GcReport,
    LoopLag,
    ProcessorReport,
    SelfReport,
)
from loadgen.measure.attainment import derived
from loadgen.records import (
    CHUNKS,
    REQUESTS,
    SCHEDULE,
    Chunks,
    Names,
    Phase,
    Requests,
    Run,
    Schedule,
    Status,
    TokenSource,
    empty_requests,
    schedule_sha256,
)

MANIFEST = Manifest(
    run="evening-chat-1",
    slobench="0.1.0",
    command=("slobench", "run", "scenarios/quickstart.yaml"),
    scenario=ScenarioSection(
        name="quickstart",
        source="scenarios/quickstart.yaml",
        text="# A small chat load.\nschema: 1\nname: quickstart\n",
        resolved={"name": "quickstart", "limits": {"when_full": "drop"}},
        sha256="5f" * 32,
    ),
    seed=7,
    salt="b2c4",
    schedule_sha256="ab" * 32,
    n_requests=220,
    slo=(),
    classes={"default": ClassSection((), priority=0, tenant="default", is_closed_loop=False)},
    target=TargetSection(
        kind="reference",
        url="http://127.0.0.1:8000",
        api="chat",
        model="tiny-llama",
        api_key_env=None,
        labels=LabelsSection(gpu="none"),
    ),
    preflight=(PreflightLine("reachable", ok=True, detail="200 in 3 ms"),),
    names=NamesSection(("default",), ("default",)),
    window=WindowSection(2.0, 20.0, 10.0),
    instrument_limits=InstrumentLimits(
        lateness_s=None,
        loop_lag_s=0.005,
        read_backlog_s=0.0025,
        cpu_share=0.9,
        run_delay_share=0.01,
    ),
    clock="CLOCK_MONOTONIC",
    host=HostSection("bench-1", 4, "", "Linux-6.1", "3.11.7"),
    versions={"numpy": "2.1.0"},
    git="",
    started_utc="2026-01-05T10:00:00Z",
    ended="completed",
    end_reason="",
    epoch_monotonic_s=1000.0,
    epoch_utc="2026-01-05T10:00:00Z",
    server_ended_s=None,
)
SHARD = SelfReport(
    shard=0,
    broken="",
    window_s=32.0,
    cpu_share=0.21,
    run_delay_share=0.001,
    throttled_share=0.0,
    stolen_share=0.0,
    cores=CoreSeconds(
        allowed=(2, 3),
        online=4,
        own_s=6.7,
        idle_s=56.2,
        programs_s=7.6,
        total_s=64.0,
        most_stolen_s=0.0,
    ),
    loop_lag_s=LoopLag(n=320, p50=0.0001, p99=0.0008, max=0.002),
    stalls=None,
    backlog=None,
    processor=ProcessorReport(
        looks=3200, usual_s=1e-6, slow_s=0.0, slow_in_stalls_s=0.0, slow_speed=None
    ),
    gc=GcReport(collections=3, pause_max_s=0.0004),
    decoding=DecodingReport(cpu_s=0.02, wall_s=0.03),
    connections=ConnectionsReport(opened=12, reused=188, known=()),
    encoded_late=0,
    spilled_bytes=0,
)


def measured_run(
    n_requests: int = 220,
    rate_per_s: float = 10.0,
    ttft_s: float = 0.1,
    itl_s: float = 0.01,
    n_tokens: int = 20,
    n_failed: int = 0,
    seed: int = 7,
    slo: Sequence[str] = (),
    manifest: Mapping[str, Any] | None = None,
) -> Run:
    """A steady run at an exact rate; lognormal spread of 20 %; the last rows of the window fail."""
    rng = np.random.default_rng(seed)
    schedule = schedule_rows(np.arange(n_requests) / rate_per_s, warmup_s=2.0, tokens=n_tokens)
    rows = empty_requests(schedule)
    released_s = schedule["scheduled_s"]
    rows["released_s"], rows["sent_s"] = released_s, released_s + 0.0002
    rows["connected_s"], rows["headers_s"] = released_s + 0.0004, released_s + 0.002
    rows["reused_connection"], rows["remote_id"] = True, 1
    first_s = released_s + ttft_s * rng.lognormal(0.0, 0.2, n_requests)
    gaps_s = itl_s * rng.lognormal(0.0, 0.2, (n_requests, n_tokens - 1))
    received_s = np.c_[first_s, first_s[:, None] + np.cumsum(gaps_s, axis=1)]
    chunks = np.zeros(n_requests * n_tokens, CHUNKS)
    chunks["request_id"] = np.repeat(schedule["request_id"], n_tokens)
    chunks["received_s"] = received_s.ravel()
    rows["first_chunk_s"] = rows["first_token_s"] = rows["first_answer_s"] = first_s
    rows["last_token_s"], rows["done_s"] = received_s[:, -1], received_s[:, -1] + 0.0001
    rows["status"], rows["http_status"] = Status.ok, 200
    rows["output_tokens"] = rows["chunks"] = n_tokens
    rows["token_source"], rows["input_tokens"] = TokenSource.usage, schedule["input_tokens"]
    failed = np.arange(n_requests - n_failed, n_requests)
    _fail(rows, failed)
    return Run(
        manifest=changed(MANIFEST, slo=slo, **(manifest or {})),
        schedule_rows=schedule,
        request_rows=rows,
        chunk_rows=chunks[~np.isin(chunks["request_id"], failed)],
        names=Names(errors=("", "HTTP 503: overloaded"), remotes=("", "127.0.0.1:8000")),
        instrument=ClientReport((SHARD,)),
    )


def write_to(directory: Path, run: Run, columns: Mapping[str, Any] | None = None) -> Run:
    """Writes a run as a finished run is written, with the manifest of its own schedule; returns
    it."""
    whole = with_manifest(
        run,
        n_requests=len(run.schedule_rows),
        schedule_sha256=schedule_sha256(run.schedule_rows, run.edge_rows, run.piece_rows),
    )
    directory.mkdir(parents=True, exist_ok=True)
    store.write_schedule(directory, whole)
    store.write_run(directory, whole, dict(derived(whole) if columns is None else columns))
    return whole


def rewrite_manifest(directory: Path, change: Callable[[Any], Any]) -> None:
    """Replaces the content of manifest.json, and its checksum."""
    path = directory / "manifest.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    checksums.cover(directory, path)


def schedule_rows(
    scheduled_s: Sequence[float] | np.ndarray[Any, Any], warmup_s: float = 0.0, tokens: int = 20
) -> Schedule:
    rows = np.zeros(len(scheduled_s), SCHEDULE)
    rows["request_id"] = rows["session_id"] = np.arange(len(rows))
    rows["scheduled_s"], rows["input_tokens"], rows["output_tokens"] = scheduled_s, 100, tokens
    rows["phase"] = np.where(rows["scheduled_s"] < warmup_s, Phase.warmup, Phase.measure)
    return rows


S = TypeVar("S", bound=JsonSection)


def changed(section: S, **changes: Any) -> S:
    """A section with other values; a mapping changes the keys it names of a section inside. Raises
    for a key or a value that the file could not have."""
    inner = {
        name: changed(own, **value)
        for name, value in changes.items()
        if isinstance(own := getattr(section, name), JsonSection) and isinstance(value, Mapping)
    }
    content = msgspec.to_builtins(msgspec.structs.replace(section, **changes | inner))
    return msgspec.convert(content, type(section))


def with_manifest(run: Run, /, **changes: Any) -> Run:
    return replace(run, manifest=changed(run.manifest, **changes))


def traffic(*slo: str, is_closed_loop: bool = False) -> ClassSection:
    """A class of the manifest with SLOs of its own."""
    return ClassSection(slo, priority=0, tenant="default", is_closed_loop=is_closed_loop)


def replace_schedule(run: Run, **columns: Any) -> Run:
    """The run with some columns of its schedule replaced."""
    schedule = run.schedule_rows.copy()
    for name, values in columns.items():
        schedule[name] = values
    return replace(run, schedule_rows=schedule)


def with_shard(run: Run, **changes: Any) -> Run:
    """The run with some readings of its only shard replaced."""
    return with_shards(run, changed(run.instrument.shards[0], **changes))


def with_shards(run: Run, *shards: SelfReport) -> Run:
    return replace(run, instrument=ClientReport(shards, run.instrument.family_s))


def starved(run: Run) -> Run:
    """The run by a load generator of which any read may have been 9 s late."""
    lag = {"n": 2000, "p50": 0.0, "p99": 9.0, "max": 9.0}
    return with_shard(run, loop_lag_s=lag, stalls=None, cpu_share=0.99)


CLASSES = ("chat", "rag")


def with_reasoning(run, n_reasoning=8, n_unanswered=0, has_answer_after_s=0.5):
    """The run whose answers begin with so many tokens of reasoning; the last `n_unanswered` end in
    it."""
    rows = run.request_rows.copy()
    ok = np.isfinite(rows["first_token_s"])
    rows["reasoning_tokens"][ok] = n_reasoning
    rows["first_answer_s"] = rows["first_token_s"] + has_answer_after_s
    if n_unanswered:
        rows["first_answer_s"][-n_unanswered:] = np.nan
    return replace(run, request_rows=rows)


def two_classes(
    chat: Sequence[str] = (),
    rag: Sequence[str] = (),
    slo: Sequence[str] = (),
    n_failed: int = 0,
    seed: int = 7,
) -> Run:
    """220 requests at 10/s, 20 of them warm-up; every fourth is rag, ten times slower."""
    run = measured_run(slo=list(slo), n_failed=n_failed, seed=seed)
    is_rag = np.arange(220) % 4 == 3
    run.schedule_rows["class_id"][is_rag] = 1
    rows = run.request_rows
    for name in ("first_chunk_s", "first_token_s", "first_answer_s"):
        rows[name][is_rag] = rows["released_s"][is_rag] + 1.0
    return replace(
        with_manifest(run, classes={"chat": traffic(*chat), "rag": traffic(*rag)}),
        names=Names(classes=CLASSES, errors=run.names.errors, remotes=run.names.remotes),
    )


FROM_SERVER = ("first_chunk_s", "first_token_s", "first_answer_s", "last_token_s")


def cut_off(run: Run, rows: Any, end_s: float = 32.0, has_begun: bool = False) -> Run:
    """The run with some rows still running at the end of the drain; they have no token unless they
    have begun."""
    requests = run.request_rows
    requests["status"][rows], requests["http_status"][rows] = Status.cancelled, 0
    requests["error_id"][rows] = 2
    for name in () if has_begun else FROM_SERVER:
        requests[name][rows] = np.nan
    if not has_begun:
        requests["chunks"][rows] = 0
    requests["done_s"][rows] = end_s
    ids = [] if has_begun else run.schedule_rows["request_id"][rows]
    texts = ("", "HTTP 503: overloaded", "still running when the drain ended")
    return replace(
        run,
        chunk_rows=run.chunk_rows[~np.isin(run.chunk_rows["request_id"], ids)],
        names=replace(run.names, errors=texts),
    )


def _fail(rows: Requests, which: np.ndarray[Any, Any]) -> None:
    rows["status"][which], rows["http_status"][which] = Status.http_error, 503
    rows["error_id"][which] = 1
    for name in ("first_chunk_s", "first_token_s", "first_answer_s", "last_token_s"):
        rows[name][which] = np.nan
    rows["done_s"][which] = rows["released_s"][which] + 0.01
    for name in ("output_tokens", "chunks", "token_source", "input_tokens"):
        rows[name][which] = 0


_steps = st.floats(0.0, 2.0, allow_subnormal=False)


@st.composite
def requests(draw: st.DrawFn, scheduled_s: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One request row (as a dict) that got some way, and the chunks it received on that way."""
    row: dict[str, Any] = {"released_s": scheduled_s, "status": Status.not_released}
    if not draw(st.booleans() | st.just(True)):
        return {**row, "released_s": np.nan}, []
    row["sent_s"] = scheduled_s + draw(_steps)
    row["status"] = draw(st.sampled_from([s for s in Status if s is not Status.not_released]))
    row["reused_connection"] = draw(st.booleans())
    now_s = row["connected_s"] = row["sent_s"] + draw(_steps)
    chunks = []
    for _ in range(draw(st.integers(0, 5))):
        now_s += draw(_steps)
        chunks.append({"received_s": now_s, "tokens": draw(st.integers(0, 3))})
    row["chunks"] = len(chunks)
    row["token_source"] = draw(st.sampled_from([TokenSource.none, TokenSource.usage]))
    row["output_tokens"] = draw(st.integers(0, 12)) if row["token_source"] else 0
    if chunks:
        row["first_token_s"], row["last_token_s"] = chunks[0]["received_s"], now_s
        row["first_chunk_tokens"] = chunks[0]["tokens"]
        answer = draw(st.integers(0, len(chunks)))
        if answer < len(chunks):
            row["first_answer_s"] = chunks[answer]["received_s"]
        row["done_s"] = now_s + draw(_steps)
    return row, chunks


@st.composite
def runs(draw: st.DrawFn, max_requests: int = 8) -> Run:
    """Any consistent run of a few requests, with gaps in the ids, failures, and chunks or none."""
    n = draw(st.integers(0, max_requests))
    scheduled_s = sorted(draw(st.lists(st.floats(0, 21.9), min_size=n, max_size=n)))
    schedule = schedule_rows(scheduled_s, warmup_s=2.0)
    schedule["request_id"] = sorted(
        draw(st.lists(st.integers(0, 40), min_size=n, max_size=n, unique=True))
    )
    schedule["n_parents"] = draw(st.lists(st.sampled_from([0, 0, 1]), min_size=n, max_size=n))
    rows, chunks = empty_requests(schedule), []
    for position, id_ in enumerate(schedule["request_id"]):
        values, received = draw(requests(float(scheduled_s[position])))
        for name, value in values.items():
            rows[name][position] = value
        chunks += [(id_, chunk["received_s"], chunk["tokens"]) for chunk in received]
    chunk_rows: Chunks = np.array(chunks, CHUNKS)
    return Run(MANIFEST, schedule, rows.astype(REQUESTS), chunk_rows)
