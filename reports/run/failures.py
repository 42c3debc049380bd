"""Failed requests: kinds of failure, a few requests of each kind, and curl commands like them."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from loadgen.manifest.sections import TargetSection
from loadgen.measure.attainment import failed_rows
from loadgen.records import Requests, Run, Schedule, Status
from reports.redaction import redact

MAX_FAILURE_KINDS = 20
N_SAMPLES = 3  # of each kind of failure


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A failed request: its class, its release and the time from there to its end (s, NaN if not
    released), its planned prompt tokens, and a curl command like it ("" for none)."""

    request_id: int
    of_class: str
    released_s: float
    lasted_s: float
    input_tokens: int
    curl: str


@dataclass(frozen=True, slots=True)
class Failures:
    """Due requests that failed in the same way: status and error (without secrets), number, time of
    the first (s), number by class, and a few of them."""

    status: str
    http_status: int
    error: str
    n: int
    first_s: float
    by_class: Mapping[str, int]
    samples: tuple[FailedRequest, ...]


def failures(run: Run) -> list[Failures]:
    """Kinds of failure among due requests, the most frequent first."""
    failed = failed_rows(run)
    rows, plans = run.request_rows[failed], run.schedule_rows[failed]
    kinds, which, counts = np.unique(
        rows[["status", "http_status", "error_id"]], return_inverse=True, return_counts=True
    )
    found = []
    for kind in np.argsort(-counts, kind="stable")[:MAX_FAILURE_KINDS].tolist():
        alike = rows[which == kind]
        released_s = alike["released_s"][np.isfinite(alike["released_s"])]
        found.append(
            Failures(
                status=Status(kinds["status"][kind]).name,
                http_status=int(kinds["http_status"][kind]),
                error=redact(run.names.errors[int(kinds["error_id"][kind])]),
                n=int(counts[kind]),
                first_s=float(released_s.min()) if len(released_s) else math.nan,
                by_class=_by_class(run, plans[which == kind]),
                samples=_samples(run, alike[:N_SAMPLES], plans[which == kind][:N_SAMPLES]),
            )
        )
    return found


def _by_class(run: Run, plans: Schedule) -> dict[str, int]:
    counts = np.bincount(plans["class_id"], minlength=len(run.names.classes)).tolist()
    return {name: n for name, n in zip(run.names.classes, counts, strict=True) if n}


def _samples(run: Run, rows: Requests, plans: Schedule) -> tuple[FailedRequest, ...]:
    return tuple(
        FailedRequest(
            request_id=int(row["request_id"]),
            of_class=run.names.classes[int(plan["class_id"])],
            released_s=float(row["released_s"]),
            lasted_s=float(row["done_s"] - row["released_s"]),
            input_tokens=int(plan["input_tokens"]),
            curl=curl(run.manifest.target, int(plan["input_tokens"]), int(plan["output_tokens"])),
        )
        for row, plan in zip(rows, plans, strict=True)
    )


_PATHS = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "messages": "/messages",
    "responses": "/responses",
    "embeddings": "/embeddings",
    "rerank": "/rerank",
}
_PROMPT = "PROMPT-OF-THE-SAME-LENGTH"


def curl(target: TargetSection, input_tokens: int, output_tokens: int) -> str:
    """A curl command for a request like the failed request: to a manifest's `target`, with a prompt
    of about as many tokens (the page has no prompts); keys come from the environment or are
    redacted. "" for a target without a known HTTP API."""
    url, path = target.url, _PATHS.get(target.api or "")
    if path is None or not url.startswith(("http://", "https://")):
        return ""
    base = url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    prompt: dict[str, object] = {"prompt": _PROMPT}
    if target.api in ("chat", "messages"):
        prompt = {"messages": [{"role": "user", "content": _PROMPT}]}
    elif target.api in ("responses", "embeddings"):
        prompt = {"input": _PROMPT}
    elif target.api == "rerank":
        prompt = {"query": "hello", "documents": [_PROMPT]}
    limit = "max_output_tokens" if target.api == "responses" else "max_tokens"
    of_tokens = {} if target.results else {limit: output_tokens, "stream": True}
    body = json.dumps({"model": target.model, **of_tokens, **(target.extra_body or {}), **prompt})
    before, _, after = redact(body).rpartition(_PROMPT)
    words = f"yes hello | head -n {max(1, input_tokens)} | tr '\\n' ' '"
    printed = f"printf %s {shlex.quote(before)}; {words}; printf %s {shlex.quote(after)}"
    key = target.api_key_env or ""
    headers = [
        "-H 'content-type: application/json'",
        *(["-H 'anthropic-version: 2023-06-01'"] if target.api == "messages" else []),
        *([f'-H "authorization: Bearer ${key}"'] if key.isidentifier() else []),
        *(f"-H {shlex.quote(f'{name}: [redacted]')}" for name in target.headers or ()),
    ]
    to = f"{shlex.quote(redact(base + path))} {' '.join(headers)}"
    # Through a pipe: an argument is at most 128 KiB long, a prompt can be longer.
    return f"{{ {printed}; }} | curl -sSN {to} --data-binary @-"
