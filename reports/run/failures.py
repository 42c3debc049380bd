"""How requests failed: kinds of failure, a few requests of each, and the like of them as curl."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadgen.measure.per_request import Mask
from loadgen.records import Requests, Run, Schedule, Status
from reports.redaction import redact

MAX_FAILURE_KINDS = 20
N_SAMPLES = 3  # of each kind of failure


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """One request that failed: its class, when it was released and after how long it was over (s,
    NaN where it never was), how many prompt tokens were planned for it, and the like of it as a
    curl command ("" where there is none)."""

    request_id: int
    of_class: str
    released_s: float
    lasted_s: float
    input_tokens: int
    curl: str


@dataclass(frozen=True, slots=True)
class Failures:
    """Due requests that ended alike: how (secrets taken out), how many, when first, how many of
    which class, and a few of them."""

    status: str
    http_status: int
    error: str
    n: int
    first_s: float
    by_class: Mapping[str, int]
    samples: tuple[FailedRequest, ...]


def failures(run: Run, due: Mask) -> list[Failures]:
    """Kinds of failure among due requests, the most frequent first."""
    failed = due & (run.request_rows["status"] != Status.ok)
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
    target = run.manifest.get("target") or {}
    return tuple(
        FailedRequest(
            request_id=int(row["request_id"]),
            of_class=run.names.classes[int(plan["class_id"])],
            released_s=float(row["released_s"]),
            lasted_s=float(row["done_s"] - row["released_s"]),
            input_tokens=int(plan["input_tokens"]),
            curl=curl(target, int(plan["input_tokens"]), int(plan["output_tokens"])),
        )
        for row, plan in zip(rows, plans, strict=True)
    )


_PATHS = {"chat": "/chat/completions", "completions": "/completions"}
_PROMPT = "PROMPT-OF-THE-SAME-LENGTH"


def curl(target: Mapping[str, Any], input_tokens: int, output_tokens: int) -> str:
    """The request as curl would send it to a manifest's `target`, with a prompt of about as many
    tokens (the page holds no prompts) and keys from the environment or redacted; "" where the
    target is no HTTP API that is known here."""
    url, path = str(target.get("url") or ""), _PATHS.get(str(target.get("api")))
    if path is None or not url.startswith(("http://", "https://")):
        return ""
    base = url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    asked: dict[str, Any] = {
        "model": str(target.get("model") or ""),
        "max_tokens": output_tokens,
        "stream": True,
        **(target.get("extra_body") or {}),
    }
    prompt = {"messages": [{"role": "user", "content": _PROMPT}]}
    body = json.dumps({**asked, **(prompt if target["api"] == "chat" else {"prompt": _PROMPT})})
    before, _, after = redact(body).rpartition(_PROMPT)
    words = f"yes hello | head -n {max(1, input_tokens)} | tr '\\n' ' '"
    said = f"printf %s {shlex.quote(before)}; {words}; printf %s {shlex.quote(after)}"
    key = str(target.get("api_key_env") or "")
    names = [str(name) for name in target.get("headers") or []]
    headers = [
        "-H 'content-type: application/json'",
        *([f'-H "authorization: Bearer ${key}"'] if key.isidentifier() else []),
        *(f"-H {shlex.quote(f'{name}: [redacted]')}" for name in names),
    ]
    to = f"{shlex.quote(redact(base + path))} {' '.join(headers)}"
    # By a pipe: one argument of a command may hold 128 KiB, a long prompt is longer.
    return f"{{ {said}; }} | curl -sSN {to} --data-binary @-"
