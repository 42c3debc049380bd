"""How requests failed: kinds of failure, a few requests of each, and the like of them as curl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from loadgen.measure.per_request import Mask
from loadgen.records import Requests, Run, Schedule, Status
from reports.redaction import redact
from reports.run.repeat import curl

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
