"""What the server said of itself while the window was measured, beside what the client saw."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import MeasuredWindow
from loadgen.measure.load import tokens_received
from loadgen.measure.per_request import PerRequest
from loadgen.measure.wording import format_count, format_number, format_value
from loadgen.records import Run, Times

TOKENS_APART = 0.02  # of the server's tokens and ours, over a whole run, above which it is told
_LEAST_APART_TOKENS = 100

Points = tuple[Times, NDArray[np.float64]]  # instants and values of one series


@dataclass(frozen=True, slots=True)
class ServerSummary:
    """Over the scrapes inside the window; None is what the server does not tell.

    Counters are differences between the first and the last of them, at `from_s` and `to_s`;
    `received_tokens` is what the client received between the same instants.
    """

    n_scrapes: int
    from_s: float
    to_s: float
    running_max: float | None
    waiting_max: float | None
    kv_usage_max: float | None
    preemptions: float | None
    cache_hit_rate: float | None
    prompt_tokens: float | None
    generation_tokens: float | None
    received_tokens: float


def server_summary(run: Run, columns: PerRequest, window: MeasuredWindow) -> ServerSummary | None:
    """None where nothing was read inside the window."""
    times_s = np.unique(run.server_rows["t_s"])
    times_s = times_s[(times_s >= window.start_s) & (times_s <= window.end_s)]
    if not len(times_s):
        return None
    begin_s, end_s = float(times_s[0]), float(times_s[-1])

    def most(name: str) -> float | None:
        _, values = _between(run, name, begin_s, end_s)
        return float(values.max()) if len(values) else None

    def grown(name: str) -> float | None:
        return _growth(_between(run, name, begin_s, end_s)[1])

    return ServerSummary(
        n_scrapes=len(times_s),
        from_s=begin_s,
        to_s=end_s,
        running_max=most("running"),
        waiting_max=most("waiting"),
        kv_usage_max=most("kv_usage"),
        preemptions=grown("preemptions"),
        cache_hit_rate=_hit_rate(run, begin_s, end_s),
        prompt_tokens=grown("prompt_tokens"),
        generation_tokens=grown("generation_tokens"),
        received_tokens=tokens_received(run, columns, MeasuredWindow(begin_s, end_s)),
    )


def points(run: Run, name: str) -> Points:
    """One series over the run, in order of time; empty where the server does not tell it."""
    if name not in run.names.series:
        return np.empty(0), np.empty(0)
    mine = run.server_rows["series_id"] == run.names.series.index(name)
    rows = run.server_rows[mine]
    return np.ascontiguousarray(rows["t_s"]), np.ascontiguousarray(rows["value"])


def server_findings(run: Run, columns: PerRequest) -> list[str]:
    """Sentences about scrapes that failed and tokens that somebody else got."""
    return [sentence for sentence in (_failed(run), _other_tokens(run, columns)) if sentence]


def describe_server(server: ServerSummary) -> str:
    """The block in one line, of what the server tells."""
    parts = []
    for name, value in (("waiting", server.waiting_max), ("running", server.running_max)):
        if value is not None:
            parts.append(f"up to {format_count(round(value))} {name}")
    if server.kv_usage_max is not None:
        parts.append(f"KV up to {format_value(server.kv_usage_max, 'share')}")
    if server.preemptions is not None:
        parts.append(f"{format_count(round(server.preemptions))} preemptions")
    if server.cache_hit_rate is not None:
        parts.append(f"cache hits {format_value(server.cache_hit_rate, 'share')}")
    if server.generation_tokens is not None:
        made = format_count(round(server.generation_tokens))
        parts.append(f"{made} tokens made, {format_count(round(server.received_tokens))} received")
    return ", ".join(parts) or "nothing that is known here"


def _between(run: Run, name: str, begin_s: float, end_s: float) -> Points:
    times_s, values = points(run, name)
    inside = (times_s >= begin_s) & (times_s <= end_s)
    return times_s[inside], values[inside]


def _growth(values: NDArray[np.float64]) -> float | None:
    """How much a counter grew; None with fewer than two readings, or if it was ever set back."""
    if len(values) < 2 or (np.diff(values) < 0).any():
        return None
    return float(values[-1] - values[0])


def _hit_rate(run: Run, begin_s: float, end_s: float) -> float | None:
    """By the counters where there are any, else the mean of the server's own figure."""
    hits, queries = (
        _growth(_between(run, name, begin_s, end_s)[1]) for name in ("cache_hits", "cache_queries")
    )
    if hits is not None and queries:
        return hits / queries
    _, stated = _between(run, "cache_hit_rate", begin_s, end_s)
    mean = float(stated.mean()) if len(stated) else math.nan
    return None if math.isnan(mean) else mean


def _failed(run: Run) -> str:
    scrapes = run.manifest.scrapes
    if scrapes is None or not scrapes.n_failed:
        return ""
    return (
        f"{format_count(scrapes.n_failed)} of {format_count(scrapes.n)} readings of the server's "
        f"metrics failed, the first because: {scrapes.reason or 'no reason was given'}."
    )


def _other_tokens(run: Run, columns: PerRequest) -> str:
    """The server's count of output tokens over the whole run against ours: servers that count a
    request when it ends are right over a run, not over a window."""
    made = _growth(points(run, "generation_tokens")[1])
    if made is None:
        return ""
    received = float(np.nansum(columns.output_tokens))
    apart = made - received
    if abs(apart) <= max(TOKENS_APART * received, _LEAST_APART_TOKENS):
        return ""
    n_failed = int(np.count_nonzero(np.isfinite(run.request_rows["sent_s"]) & ~columns.is_ok))
    why = "other clients use it" if apart > 0 else "its metrics are not those of all that answered"
    if apart > 0 and n_failed:
        why = f"{format_count(n_failed)} requests did not end well, or other clients use it"
    return (
        f"The server says that it made {format_number(made)} output tokens during the run, and"
        f" {format_number(received)} were received: {why}."
    )
