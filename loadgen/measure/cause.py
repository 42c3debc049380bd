"""Why requests were missed: a cause that lies outside of the SLOs, found in the recorded rows.

A rate limit, a payment, a length or a frozen server look like a slow server if only the misses are
counted, and no other load would change most of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from loadgen.measure.attainment import MeasuredWindow
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.server_load import Backend, points
from loadgen.measure.silence import last_heard, silent_at_end
from loadgen.measure.wording import format_count, format_number, format_value
from loadgen.records import INSIDE, Run, Status

CauseKind = Literal[
    "stopped_answering",
    "sick_replica",
    "dropped",
    "payment",
    "rate_limit",
    "too_long",
    "unavailable",
    "no_connection",
    "failed_alike",
    "gateway_queue",
    "overload",
]
_FAILED = (Status.http_error, Status.stream_error, Status.connect_error)
_LEAST_SHARE = 0.01  # of the requests
_LEAST_MISSED = 0.5  # of the missed requests
_MOST_SHOWN = 200  # characters of a server's own sentence
_CODES: dict[int, CauseKind] = {
    402: "payment",
    429: "rate_limit",
    503: "unavailable",
    529: "unavailable",
}
_LENGTH_CODES = (0, 200, 400, 413, 422)
_PAYMENT = re.compile(
    r"insufficient[ _-](?:quota|balance|funds|credits?)|exceeded your current quota|"
    r"payment required|\bbilling\b",
    re.IGNORECASE,
)
_TOO_LONG = re.compile(
    r"context[ _-]?(?:length|window|size)|max_model_len|"
    r"maximum (?:model|sequence|input|prompt|context|allowed)[ _-](?:length|tokens)|"
    r"(?:prompt|input|request|sequence|tokens?)\b.{0,60}\b(?:too long|longer than|exceeds?)\b|"
    r"too many (?:input |prompt )?tokens|max_(?:new_|completion_)?tokens\b.{0,60}must be <=",
    re.IGNORECASE,
)
_BUSY = re.compile(r"\b(?:queue|overload(?:ed)?|busy|at capacity|saturated)\b", re.IGNORECASE)
_LIMITED = re.compile(r"rate[ _-]?limit|too many requests", re.IGNORECASE)
_LIMIT = re.compile(r" \(([^()]*rate-?limit[^()]*: [^()]*)\)$", re.IGNORECASE)
_LEAST_EACH = 5  # requests per address
_SICK_BY = 3.0  # times the share of misses at the other addresses
_UNLIKELY = 3.5  # standard deviations
_LEAST_SCRAPES, _QUEUED_BY, _LEAST_QUEUED = 5, 2.0, 4.0
_LEAST_PASSED = 5  # requests in each half, before a rate is stated
_STEADY = 0.2


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of most misses of a run.

    `sentence` is for people, `advice` is a step that follows from it ("" for none); the other
    fields are facts for programs. `n`: the requests it explains. `message` is the server's own
    sentence, on one line and of at most 200 characters; `limit` the headers that state a rate
    limit. `retry_after_s` is the median Retry-After, `passed_per_s` the rate at which requests got
    past a rate limit, from the first that did not (None where it was not steady); `since_s` when
    a server fell silent, in seconds since the start; `address` that of a sick replica; `places`
    the `file:line` of prompts that are too long. `is_about_load`: whether a search for another load
    is the next step.
    """

    kind: CauseKind
    sentence: str
    n: int
    advice: str = ""
    is_about_load: bool = False
    http_status: int | None = None
    message: str = ""
    limit: str = ""
    retry_after_s: float | None = None
    passed_per_s: float | None = None
    since_s: float | None = None
    address: str = ""
    places: tuple[str, ...] = ()


def find_cause(
    run: Run,
    columns: PerRequest,
    due: Mask,
    missed: Mask,
    window: MeasuredWindow,
    addresses: Sequence[Backend],
    overload: str,
    *,
    is_missed: bool,
) -> Cause | None:
    """The cause of most of the `missed` among the `due` requests; None where the latencies are all
    there is to say. `overload` is the sentence on a growing queue, "" for none; `is_missed`:
    whether an SLO is missed. A run without due requests is explained by all that were sent."""
    if not due.any():
        due = np.isfinite(run.request_rows["sent_s"])
        missed = due & ~columns.is_ok
    silent_since_s = run.manifest.silent_since_s
    if silent_since_s is None:
        silent_since_s = silent_at_end(run)
    if silent_since_s is not None:
        return _stopped(run, missed, silent_since_s)
    n, n_missed = int(np.count_nonzero(due)), int(np.count_nonzero(missed))
    if n_missed > _LEAST_SHARE * n:
        cause = (
            (None if overload else _dropped(run, due, n_missed))
            or _sick_replica(run, due, missed, addresses)
            or _failures(run, due, missed)
        )
        if cause is not None:
            return cause
    if is_missed or overload:
        cause = _gateway_queue(run, window, n_missed)
        if cause is not None:
            return cause
    return Cause("overload", overload, n_missed, is_about_load=True) if overload else None


def is_too_long(http_status: int, error: str) -> bool:
    """Whether a failure says that a request is longer than the server accepts."""
    return http_status in _LENGTH_CODES and _TOO_LONG.search(error) is not None


def kind_of(status: Status, http_status: int, error: str) -> CauseKind | None:
    """The kind of cause of a failed request; None for a failure that says nothing about its cause,
    such as a time-out."""
    if status is Status.connect_error:
        return "no_connection"
    if status not in (Status.http_error, Status.stream_error):
        return None
    is_inside = status is Status.stream_error and error.startswith(INSIDE)
    if status is Status.http_error or is_inside:
        if http_status in (402, 403, 429, 200) and _PAYMENT.search(error):
            return "payment"
        if is_too_long(http_status, error):
            return "too_long"
        if is_inside and _LIMITED.search(error):
            return "rate_limit"
    if http_status == 429 and _BUSY.search(error) and not _LIMIT.search(error):
        return "unavailable"
    return _CODES.get(http_status, "failed_alike")


def shown(text: str) -> str:
    """A server's sentence on one line, without control characters, of at most 200 characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _MOST_SHOWN else f"{line[: _MOST_SHOWN - 1]}…"


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that failed in the same way, and the most frequent error among them."""

    kind: CauseKind
    rows: Mask
    n: int
    http_status: int
    error: str

    @property
    def message(self) -> str:
        """The server's own sentence."""
        text = self.error
        for before in (f"HTTP {self.http_status}: ", *INSIDE):
            text = text.removeprefix(before)
        return shown(_LIMIT.sub("", text))

    @property
    def limit(self) -> str:
        found = _LIMIT.search(self.error)
        return shown(found[1]) if found else ""


def _groups(run: Run, among: Mask) -> list[_Group]:
    """The failures among some rows by their cause, the most frequent first. Errors that differ in
    their numbers only are the same."""
    rows = run.request_rows
    among = among & np.isin(rows["status"], _FAILED)  # late answers may be many
    kinds, which, counts = np.unique(
        rows[["status", "http_status", "error_id"]][among], return_inverse=True, return_counts=True
    )
    groups: dict[tuple[CauseKind, int, str], list[int]] = {}
    for number, (status, http_status, error_id) in enumerate(kinds.tolist()):
        error = run.names.errors[error_id]
        kind = kind_of(Status(status), http_status, error)
        if kind is not None and error_id not in run.names.client_limits:
            text = re.sub(r"\d+", "0", error) if kind == "failed_alike" else ""
            groups.setdefault((kind, http_status, text), []).append(number)
    found = []
    places = np.flatnonzero(among)
    for (kind, http_status, _), numbers in groups.items():
        mine = np.zeros(len(rows), bool)
        mine[places[np.isin(which, numbers)]] = True
        usual = max(numbers, key=lambda number: counts[number])
        error = run.names.errors[int(kinds["error_id"][usual])]
        found.append(_Group(kind, mine, int(counts[numbers].sum()), http_status, error))
    return sorted(found, key=lambda group: -group.n)


def dropped_text(run: Run, due: Mask) -> str:
    """How many requests were not sent because of `limits.max_concurrency`; "" for none."""
    n = int(np.count_nonzero(due & (run.request_rows["status"] == Status.dropped)))
    if not n:
        return ""
    limit = run.manifest.scenario.limits.max_concurrency
    in_flight = "the most allowed" if limit is None else format_count(limit)
    return (
        f"{format_count(n)} of {format_count(int(np.count_nonzero(due)))} requests were dropped, "
        f"because {in_flight} were in flight when they were due (limits.max_concurrency); they "
        "count as failed."
    )


def _dropped(run: Run, due: Mask, n_missed: int) -> Cause | None:
    """Most missed requests were not sent, because too many were in flight."""
    n = int(np.count_nonzero(due & (run.request_rows["status"] == Status.dropped)))
    if n < _LEAST_MISSED * n_missed:
        return None
    limit = run.manifest.scenario.limits.max_concurrency or "N"
    return Cause(
        "dropped",
        dropped_text(run, due),
        n,
        advice=(
            "Remove limits.max_concurrency (--max-concurrency) to send every request when it is "
            f"due; to keep {limit} requests in flight instead, each started when another ends: "
            f"--concurrency {limit} without --rate and --max-concurrency."
        ),
    )


def _failures(run: Run, due: Mask, missed: Mask) -> Cause | None:
    """The cause that most missed requests state in their errors."""
    groups = _groups(run, missed)
    n_missed = int(np.count_nonzero(missed))
    if not groups or groups[0].n < _LEAST_MISSED * n_missed:
        return None
    group, n_due = groups[0], int(np.count_nonzero(due))
    of = f"{format_count(group.n)} of {format_count(n_due)} requests"
    write = {
        "payment": _payment,
        "rate_limit": _rate_limit,
        "too_long": _too_long,
        "unavailable": _unavailable,
        "no_connection": _no_connection,
        "failed_alike": _failed_alike,
    }[group.kind]
    return write(run, due, group, of)


def _how(group: _Group) -> str:
    """`HTTP 429`, or what it is inside a successful answer."""
    return f"HTTP {group.http_status}" if group.http_status != 200 else "an error inside the answer"


def _said(group: _Group) -> str:
    return f': "{group.message}"' if group.message else ""


def _payment(run: Run, due: Mask, group: _Group, of: str) -> Cause:
    return Cause(
        "payment",
        f"The account, not the server, was the limit: {of} were refused with {_how(group)}"
        f"{_said(group)}.",
        group.n,
        advice="Top up the account or raise its quota, and measure again; no load changes this.",
        http_status=group.http_status,
        message=group.message,
    )


def _rate_limit(run: Run, due: Mask, group: _Group, of: str) -> Cause:
    retry_s = _retry_after_s(run, group)
    passed = _passed_per_s(run, due, group.rows)
    rate = f"; about {format_number(passed)} per second got through" if passed else ""
    below = f" ({format_number(passed)}/s)" if passed else ""
    return Cause(
        "rate_limit",
        f"A rate limit, not latency: {of} were refused with {_how(group)}"
        f"{_stated(group, retry_s)}{rate}"
        f"{_said(group)}.",
        group.n,
        advice=f"Offer less than the limit{below}, or have it raised: latencies of answered "
        "requests are those below the limit.",
        http_status=group.http_status,
        message=group.message,
        limit=group.limit,
        retry_after_s=retry_s,
        passed_per_s=passed,
    )


def _retry_after_s(run: Run, group: _Group) -> float | None:
    waits_s = run.request_rows["retry_after_s"][group.rows]
    waits_s = waits_s[np.isfinite(waits_s)]
    return float(np.median(waits_s)) if len(waits_s) else None


def _stated(group: _Group, retry_s: float | None) -> str:
    """` (x-ratelimit-limit-requests: 10; Retry-After 1 s)`."""
    facts = [group.limit] if group.limit else []
    facts += [f"Retry-After {format_value(retry_s, 's')}"] if retry_s is not None else []
    return f" ({'; '.join(facts)})" if facts else ""


def _passed_per_s(run: Run, due: Mask, refused: Mask) -> float | None:
    """The rate at which requests were not refused, from the first refusal on: what a token bucket
    lets through once its burst is used up. None where both halves of that time differ, as with a
    limit per minute."""
    sent_s = run.request_rows["sent_s"]
    sent = due & np.isfinite(sent_s)
    begin_s, end_s = float(sent_s[refused].min()), float(sent_s[sent].max())
    passed_s = sent_s[sent & ~refused & (sent_s >= begin_s)]
    middle_s = (begin_s + end_s) / 2
    early, late = int(np.sum(passed_s < middle_s)), int(np.sum(passed_s >= middle_s))
    is_steady = abs(early - late) <= max(2.0, _STEADY * (early + late) / 2)
    if min(early, late) < _LEAST_PASSED or not is_steady:
        return None
    return (early + late) / (end_s - begin_s)


def _too_long(run: Run, due: Mask, group: _Group, of: str) -> Cause:
    places = run.manifest.too_long_at
    more = f" and {len(places) - 3} more lines" if len(places) > 3 else ""
    named = ", ".join(places[:3]) + more
    where = f" ({named})" if places else ""
    remedy = "Remove these lines" if places else "Shorten prompts and answers"
    return Cause(
        "too_long",
        f"Refused for length: {of} are longer than the server accepts{where}, {_how(group)}"
        f"{_said(group)}.",
        group.n,
        advice=f"{remedy}, or start the server with a longer context; no load changes this.",
        http_status=group.http_status,
        message=group.message,
        places=tuple(places),
    )


def _unavailable(run: Run, due: Mask, group: _Group, of: str) -> Cause:
    rows = run.request_rows
    answered = due & (rows["status"] == Status.ok)
    first_s = rows["sent_s"][answered].min() if answered.any() else np.inf
    is_starting = not answered.any() or bool((rows["sent_s"][group.rows] < first_s).all())
    retry_s = _retry_after_s(run, group)
    why = "did not serve yet" if is_starting else "refused a part of the load"
    advice = "--wait-ready 5m waits until a server that is still loading answers."
    if not is_starting:
        advice = f"It serves less load than this. If it was restarting: {advice}"
    return Cause(
        "unavailable",
        f"The server, or a gateway in front of it, {why}: {of} were refused with {_how(group)}"
        f"{_stated(group, retry_s)}{_said(group)}.",
        group.n,
        advice=advice,
        is_about_load=not is_starting,
        http_status=group.http_status,
        message=group.message,
        retry_after_s=retry_s,
    )


def _no_connection(run: Run, due: Mask, group: _Group, of: str) -> Cause:
    return Cause(
        "no_connection",
        f"No connection: {of} did not reach the server{_said(group)}.",
        group.n,
        advice="Check whether the server still runs and listens at this address.",
        message=group.message,
    )


def _failed_alike(run: Run, due: Mask, group: _Group, of: str) -> Cause:
    return Cause(
        "failed_alike",
        f"{of[:1].upper()}{of[1:]} failed alike with {_how(group)}{_said(group)}.",
        group.n,
        advice="See the server's log at that time; the page shows a request like them.",
        http_status=group.http_status,
        message=group.message,
    )


def _stopped(run: Run, missed: Mask, silent_since_s: float) -> Cause:
    """A server that fell silent, and the run ended for it or meanwhile."""
    since_s, n = last_heard(run, silent_since_s)
    return Cause(
        "stopped_answering",
        f"The server stopped answering at second {since_s:.3g}: not a byte came after it, with "
        f"{format_count(n)} requests in flight.",
        int(np.count_nonzero(missed)),
        advice="See the server's log at that time; less load does not thaw a frozen server.",
        since_s=since_s,
    )


def _sick_replica(run: Run, due: Mask, missed: Mask, addresses: Sequence[Backend]) -> Cause | None:
    """An address of several at which most requests were missed, while the others served."""
    remote_ids = run.request_rows["remote_id"]
    counts = np.bincount(remote_ids[due], minlength=len(run.names.remotes))
    misses = np.bincount(remote_ids[missed], minlength=len(run.names.remotes))
    known = [k for k in range(1, len(counts)) if counts[k] >= _LEAST_EACH]
    if len(known) < 2:
        return None
    worst = max(known, key=lambda k: misses[k] / counts[k])
    others = [k for k in known if k != worst]
    n, n_missed = int(counts[worst]), int(misses[worst])
    n_others, missed_others = int(counts[others].sum()), int(misses[others].sum())
    if n_missed < _LEAST_MISSED * n or n_missed < _LEAST_MISSED * int(np.count_nonzero(missed)):
        return None
    share, others_share = n_missed / n, missed_others / n_others
    pooled = (n_missed + missed_others) / (n + n_others)
    spread = (pooled * (1 - pooled) * (1 / n + 1 / n_others)) ** 0.5
    if share < _SICK_BY * others_share or share - others_share < _UNLIKELY * spread:
        return None
    mine = missed & (remote_ids == worst)
    groups = _groups(run, mine)
    group = groups[0] if groups and groups[0].n >= _LEAST_MISSED * n_missed else None
    address = run.names.remotes[worst]
    why = f": {_how(group)}{_said(group)}" if group else _slower(address, addresses)
    return Cause(
        "sick_replica",
        f"One of {format_count(len(known))} addresses is sick, {shown(address)}: "
        f"{format_count(n_missed)} of {format_count(n)} requests to it were missed, "
        f"{format_count(missed_others)} of {format_count(n_others)} to the others{why}.",
        n_missed,
        advice="Repair this replica or take it out, and measure again; no load changes this.",
        http_status=group.http_status if group else None,
        message=group.message if group else "",
        address=address,
    )


def _slower(address: str, addresses: Sequence[Backend]) -> str:
    """`: median TTFT 2 s against 50 ms`; "" where it is not known."""
    own = [b.ttft_from_send_s for b in addresses if b.address == address]
    others = [b.ttft_from_send_s for b in addresses if b.address != address]
    others = [seconds for seconds in others if np.isfinite(seconds)]
    if not own or not np.isfinite(own[0]) or not others:
        return ""
    usual = float(np.median(others))
    return f": median TTFT {format_value(own[0], 's')} against {format_value(usual, 's')}"


def _gateway_queue(run: Run, window: MeasuredWindow, n_missed: int) -> Cause | None:
    """Requests that wait in front of the server: far more are in flight here than it has, by its
    own metrics."""
    times_s, running = points(run, "running")
    inside = (times_s >= window.start_s) & (times_s <= window.end_s)
    if np.count_nonzero(inside) < _LEAST_SCRAPES:
        return None
    times_s, running = times_s[inside], running[inside]
    at_s, waiting = points(run, "waiting")
    has = running + (np.interp(times_s, at_s, waiting) if len(at_s) else 0.0)
    sent = np.sort(run.request_rows["sent_s"][np.isfinite(run.request_rows["sent_s"])])
    done = np.sort(run.request_rows["done_s"][np.isfinite(run.request_rows["sent_s"])])
    begun, ended = (np.searchsorted(ordered, times_s, side="right") for ordered in (sent, done))
    here, there = float((begun - ended).mean()), float(has.mean())
    if here < _QUEUED_BY * there + _LEAST_QUEUED:
        return None
    return Cause(
        "gateway_queue",
        f"Requests waited in front of the server: {format_number(here)} were in flight on average, "
        f"but the server had {format_number(there)} (running and waiting, by its own metrics): a "
        "gateway queues or limits them, or the metrics are those of one replica of several.",
        n_missed,
        advice="Look at the limits of the gateway (connections, concurrency) before the server's.",
        is_about_load=True,
    )
