"""The server's own metrics during the measured window, and the server addresses that requests went
to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import MeasuredWindow
from loadgen.measure.load import tokens_received
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.wording import format_count, format_number, format_share, format_value
from loadgen.records import Run, Times

TOKENS_APART = (
    0.02  # difference between the server's token count and ours, over a run, for a finding
)
_LEAST_APART_TOKENS = 100

Points = tuple[Times, NDArray[np.float64]]  # instants and values of a series


@dataclass(frozen=True, slots=True)
class ServerSummary:
    """Over the scrapes inside the window; None where the server does not report a metric.

    Counters are differences between the first and the last scrape, at `from_s` and `to_s`;
    `received_tokens` is the number that the client received between the same times.
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
    """None where no scrape falls into the window."""
    times_s = np.unique(run.server_rows["t_s"])
    times_s = times_s[(times_s >= window.start_s) & (times_s <= window.end_s)]
    if not len(times_s):
        return None
    begin_s, end_s = float(times_s[0]), float(times_s[-1])

    def largest(name: str) -> float | None:
        _, values = _between(run, name, begin_s, end_s)
        return float(values.max()) if len(values) else None

    def growth(name: str) -> float | None:
        return _growth(_between(run, name, begin_s, end_s)[1])

    return ServerSummary(
        n_scrapes=len(times_s),
        from_s=begin_s,
        to_s=end_s,
        running_max=largest("running"),
        waiting_max=largest("waiting"),
        kv_usage_max=largest("kv_usage"),
        preemptions=growth("preemptions"),
        cache_hit_rate=_hit_rate(run, begin_s, end_s),
        prompt_tokens=growth("prompt_tokens"),
        generation_tokens=growth("generation_tokens"),
        received_tokens=tokens_received(run, columns, MeasuredWindow(begin_s, end_s)),
    )


def points(run: Run, name: str) -> Points:
    """A series over the run, in order of time; empty where the server does not report it."""
    if name not in run.names.series:
        return np.empty(0), np.empty(0)
    mine = run.server_rows["series_id"] == run.names.series.index(name)
    rows = run.server_rows[mine]
    return np.ascontiguousarray(rows["t_s"]), np.ascontiguousarray(rows["value"])


def server_findings(run: Run, columns: PerRequest) -> list[str]:
    """Findings on scrapes that failed, and on tokens that were generated for other clients."""
    return [sentence for sentence in (_failed(run), _other_tokens(run, columns)) if sentence]


def describe_server(server: ServerSummary) -> str:
    """The server's metrics as a line of text, as far as it reports them."""
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
        parts.append(
            f"{made} tokens generated, {format_count(round(server.received_tokens))} received"
        )
    return ", ".join(parts) or "none of the metrics that are shown here"


def _between(run: Run, name: str, begin_s: float, end_s: float) -> Points:
    times_s, values = points(run, name)
    inside = (times_s >= begin_s) & (times_s <= end_s)
    return times_s[inside], values[inside]


def _growth(values: NDArray[np.float64]) -> float | None:
    """The growth of a counter; None with fewer than two readings, or if the counter was ever
    reset."""
    if len(values) < 2 or (np.diff(values) < 0).any():
        return None
    return float(values[-1] - values[0])


def _hit_rate(run: Run, begin_s: float, end_s: float) -> float | None:
    """From the counters if the server has them, else the mean of the server's own figure."""
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
    """The server's count of output tokens over the whole run against ours. Servers that count a
    request when it ends are right over a run, not over a window."""
    made = _growth(points(run, "generation_tokens")[1])
    if made is None:
        return ""
    received = float(np.nansum(columns.output_tokens))
    apart = made - received
    if abs(apart) <= max(TOKENS_APART * received, _LEAST_APART_TOKENS):
        return ""
    n_failed = int(np.count_nonzero(np.isfinite(run.request_rows["sent_s"]) & ~columns.is_ok))
    cause = (
        "other clients used it"
        if apart > 0
        else "its metrics do not cover every process that answered"
    )
    if apart > 0 and n_failed:
        cause = f"{format_count(n_failed)} requests failed, or other clients used it"
    return (
        f"The server counted {format_number(made)} output tokens during the run, but "
        f"{format_number(received)} were received: {cause}."
    )


UNEVEN = 1.5  # times its even share of the requests, from which on an address had too many

LEAST_EACH = 10  # requests per address before a share of them means anything


@dataclass(frozen=True, slots=True)
class Backend:
    """An address: the due requests sent there, the successful requests among them, their tokens and
    their median TTFT from send (seconds, NaN without any)."""

    address: str
    requests: int
    ok: int
    output_tokens: int
    ttft_from_send_s: float


def backends(run: Run, columns: PerRequest, due: Mask) -> list[Backend]:
    """Every address that due requests were sent to, busiest first. Behind a proxy or a virtual
    address the client sees only that address."""
    found = []
    for number, address in enumerate(run.names.remotes):
        mine = due & (run.request_rows["remote_id"] == number)
        if not number or not mine.any():
            continue
        ttft_s = columns.ttft_from_send_s[mine & columns.is_ok & columns.has_token]
        found.append(
            Backend(
                address=address,
                requests=int(np.count_nonzero(mine)),
                ok=int(np.count_nonzero(mine & columns.is_ok)),
                output_tokens=int(columns.output_tokens[mine].sum()),
                ttft_from_send_s=float(np.median(ttft_s)) if len(ttft_s) else float("nan"),
            )
        )
    return sorted(found, key=lambda backend: (-backend.requests, backend.address))


def pinned(run: Run, found: Sequence[Backend]) -> str:
    """A finding where reused connections kept the load on some of the addresses of the server's
    name."""
    known = {a for shard in run.instrument.shards for a in shard.connections.known}
    addresses = known | {backend.address for backend in found}
    keeps = run.manifest.target.connections in (None, "reuse")
    total = sum(backend.requests for backend in found)
    if not keeps or len(addresses) < 2 or total < LEAST_EACH * len(addresses):
        return ""
    busiest, n_unused = found[0], len(addresses) - len(found)
    share = busiest.requests / total
    if not n_unused and share <= UNEVEN / len(addresses):
        return ""
    unused = f", {format_count(n_unused)} received none" if n_unused else ""
    return (
        f"{format_share(share)} of the requests went to {busiest.address}, one of "
        f"{format_count(len(addresses))} addresses of the target{unused}, because connections are "
        "reused. Spread the load with `connections: never` or `per_session` in a target file."
    )
