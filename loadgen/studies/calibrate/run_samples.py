"""Timed steps of any server, from the requests and token chunks that a run recorded.

A client sees the ends of steps: a decoding request gets a token from each. The gap between two
tokens of a request is the time of a step. Its batch are the requests that have begun to answer and
have not ended; a request whose first token arrives with the second of the two tokens had its prompt
in the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.records import Run, Status
from loadgen.studies.calibrate.step_samples import Column, StepSamples

_MOST_GAPS = 200_000  # of a run; more are thinned out evenly
_TOGETHER_S = 2e-3  # tokens of a step arrive within this time, or a quarter of the step
_N_COLUMNS = 7
_FAILED = (
    *(Status.http_error, Status.timeout, Status.stream_error, Status.connect_error),
    Status.truncated,
)


@dataclass(frozen=True)
class Answers:
    """The answers of runs: `n` of several tokens, of which `n_without_steps` give no step, because
    each chunk holds several tokens or an unknown number; and requests that failed."""

    n: int = 0
    n_without_steps: int = 0
    n_failed: int = 0

    def plus(self, other: Answers) -> Answers:
        return Answers(
            self.n + other.n,
            self.n_without_steps + other.n_without_steps,
            self.n_failed + other.n_failed,
        )


def answers_of_run(run: Run) -> Answers:
    """The answers of a run that give steps, and those that do not."""
    rows, chunks = run.request_rows, run.chunk_rows
    several = rows["request_id"][(rows["status"] == Status.ok) & (rows["output_tokens"] > 1)]
    with_steps = np.unique(chunks["request_id"][_ends_gap(chunks)])
    n_failed = int(np.isin(rows["status"], _FAILED).sum())
    return Answers(len(several), int((~np.isin(several, with_steps)).sum()), n_failed)


def reports_cached_tokens(run: Run) -> bool:
    """Whether the server reported, for any request, that it had a part of the prompt in its prefix
    cache. Without, the cost of such a prompt would be charged to all of its tokens."""
    rows = run.request_rows
    return bool((rows["cached_tokens"][rows["status"] == Status.ok] > 0).any())


def samples_of_run(run: Run) -> StepSamples:
    """The gaps between tokens as steps, of which each is taken once however many requests had a
    token from it, and the TTFT of each request that was alone from its send to its first token as a
    step with the time of a request. Chunks of several tokens give no gap, because they can hold
    several steps."""
    rows = run.request_rows
    ok = rows[(rows["status"] == Status.ok) & np.isfinite(rows["first_token_s"])]
    schedule = run.schedule_rows
    planned = schedule["input_tokens"][np.searchsorted(schedule["request_id"], ok["request_id"])]
    n_input = np.where(ok["input_tokens"] > 0, ok["input_tokens"], planned).astype(np.float64)
    n_new = np.maximum(n_input - ok["cached_tokens"], 1.0)
    attention = n_new * (n_input - n_new + n_new / 2)
    gaps = _gaps(run, ok, n_input, n_new, attention)
    alone = _alone(rows, ok)
    zeros = np.zeros(len(alone))
    solo = np.column_stack(
        [
            (ok["first_token_s"] - ok["sent_s"])[alone],
            zeros + 1,
            n_new[alone],
            attention[alone],
            zeros,
            zeros,
            zeros + 1,
        ]
    )
    ends = np.concatenate([gaps[:, _N_COLUMNS], ok["first_token_s"][alone]])
    table = np.concatenate([gaps[:, :_N_COLUMNS], solo])[np.argsort(ends, kind="stable")]
    return StepSamples(*table[table[:, 0] > 0].T)


def request_s(run: Run) -> float | None:
    """The median time (s) that a request spends outside the server's own TTFT; None where the
    server does not report it."""
    rows = run.request_rows
    outside = (rows["first_token_s"] - rows["sent_s"] - rows["server_ttft_s"])[
        rows["status"] == Status.ok
    ]
    outside = outside[np.isfinite(outside)]
    return max(0.0, float(np.median(outside))) if len(outside) else None


def _gaps(
    run: Run,
    ok: NDArray[np.void],
    n_input: Column,
    n_new: Column,
    attention: Column,
) -> NDArray[np.float64]:
    """A row per step: the columns of `StepSamples`, and the instant (s) of its end."""
    chunks = run.chunk_rows
    chunks = chunks[np.isin(chunks["request_id"], ok["request_id"])]
    received_s = chunks["received_s"]
    ends = np.flatnonzero(_ends_gap(chunks))
    ends = ends[np.argsort(received_s[ends], kind="stable")]
    near_s = _near_s(received_s[ends] - received_s[ends - 1])
    ends = ends[np.diff(received_s[ends], prepend=-np.inf) > near_s]
    if len(ends) > _MOST_GAPS:
        ends = ends[np.linspace(0, len(ends) - 1, _MOST_GAPS).astype(np.int64)]
    begin_s, end_s = received_s[ends - 1], received_s[ends]
    middle_s = (begin_s + end_s) / 2
    near_s = _near_s(end_s - begin_s)
    first_s, last_s = ok["first_token_s"], ok["last_token_s"]
    n_decode = np.searchsorted(np.sort(first_s), middle_s) - np.searchsorted(
        np.sort(last_s), middle_s
    )
    # The KV of the decoding requests: a prompt enters with its first token and leaves with its
    # last, every further token adds one.
    instants = np.concatenate([first_s, received_s, last_s])
    n_tokens = np.maximum(chunks["tokens"], 1).astype(np.float64)
    per_request = np.zeros(int(ok["request_id"].max(initial=0)) + 1)
    np.add.at(per_request, chunks["request_id"], n_tokens)
    changes = np.concatenate([n_input, n_tokens, -n_input - per_request[ok["request_id"]]])
    order = np.argsort(instants, kind="stable")
    kv = np.concatenate([[0.0], np.cumsum(changes[order])])
    context = kv[np.searchsorted(instants[order], middle_s)]
    by_first = np.argsort(first_s, kind="stable")
    from_row = np.searchsorted(first_s[by_first], begin_s + near_s, side="right")
    to_row = np.searchsorted(first_s[by_first], end_s + near_s, side="right")

    def begun(values: Column) -> Column:
        total = np.concatenate([[0.0], np.cumsum(values[by_first])])
        joined: Column = total[to_row] - total[from_row]
        return joined

    return np.column_stack(
        [
            end_s - begin_s,
            begun(np.ones(len(ok))),
            begun(n_new),
            begun(attention),
            np.maximum(n_decode, 1),
            np.maximum(context, 0.0),
            np.zeros(len(ends)),
            end_s,
        ]
    )


def _near_s(gap_s: Column) -> Column:
    """The time (s) within which the tokens of a step arrive."""
    return np.minimum(gap_s / 4, _TOGETHER_S)


def _ends_gap(chunks: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which chunks end a step: those of a single token after another chunk of the request."""
    is_gap = np.zeros(len(chunks), dtype=bool)
    is_gap[1:] = (chunks["request_id"][1:] == chunks["request_id"][:-1]) & (
        chunks["tokens"][1:] == 1
    )
    return is_gap


def _alone(rows: NDArray[np.void], ok: NDArray[np.void]) -> NDArray[np.int64]:
    """The rows of `ok` without another request in flight between send and first token."""
    sent_s = np.sort(rows["sent_s"][np.isfinite(rows["sent_s"])])
    done_s = np.sort(rows["done_s"][np.isfinite(rows["sent_s"]) & np.isfinite(rows["done_s"])])
    n_begun = np.searchsorted(sent_s, ok["first_token_s"], side="right")
    n_ended = np.searchsorted(done_s, ok["sent_s"], side="right")
    return np.flatnonzero(n_begun - n_ended == 1)
