"""The measurements of each request as columns (latencies by both clocks, gaps between chunks), and
the samples of each metric.

An entry per row of `run.request_rows`, failed and warm-up rows included; `attainment` and
`aggregate` select the rows that count. NaN means that the metric does not exist for the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import RunInvalid
from loadgen.measure.blocks import Blocks, blocks
from loadgen.measure.catalog import METRICS, NEEDS_STREAM, PASSES_UNDEFINED, Metric
from loadgen.measure.statistics.dependence import Dependence, Load, of_share
from loadgen.measure.statistics.population import (
    BLOCK,
    Population,
    group_sums,
    of_groups,
    of_requests,
)
from loadgen.records import OWN_SLO, Chunks, Requests, Run, Schedule, Status, TokenSource

Seconds = NDArray[np.float64]
Mask = NDArray[np.bool_]
_MOST_TOKENS = 2**16 - 1  # of an arrival


@dataclass(frozen=True, slots=True)
class TokenGaps:
    """Every gap between consecutive arrivals of the same request, in the order of `run.chunk_rows`.
    An arrival is all chunks that one read delivered.

    Group g holds the gaps of request row `rows[g]`, at least 1, from `starts[g]` on. `tokens` is
    the token count of the arrival that ends the gap (at least 1). `is_counted` means that the
    server stated every count; a chunk without a count is taken for 1 token, and its ITL is its ICL.
    """

    icl_s: Seconds
    rows: NDArray[np.intp]
    starts: NDArray[np.intp]
    tokens: NDArray[np.uint16]
    is_counted: bool

    @property
    def sizes(self) -> NDArray[np.intp]:
        """The number of gaps of each group."""
        return np.diff(self.starts, append=len(self.icl_s))

    @property
    def row(self) -> NDArray[np.intp]:
        """Each gap's request row. Computed on each call, since it is as long as the gaps
        themselves."""
        return np.repeat(self.rows, self.sizes)

    def of(self, selected: Mask) -> Mask:
        """The gaps that belong to the selected request rows."""
        return np.repeat(selected[self.rows], self.sizes)

    @property
    def itl_s(self) -> Seconds:
        """Seconds per token, a value per gap; it stands for `tokens` equal values."""
        return self.icl_s / self.tokens if self.has_several else self.icl_s

    @property
    def has_several(self) -> bool:
        """Whether any chunk carried several tokens."""
        return bool(self.tokens.strides[0]) and int(self.tokens.max(initial=1)) > 1


@dataclass(frozen=True, slots=True)
class PerRequest:
    """Columns of shape [n_requests], float64 seconds, named and defined as in the catalogue.

    `output_tokens` is n: counted as `token_source` states, else 1 per chunk. `chunk_starts` holds
    the index in `run.chunk_rows` of the first chunk of each request that received any.
    `streamed_tokens` is n without reasoning that was not streamed, and `first_tokens` the tokens of
    the first arrival. `is_unmeasured`: the answer has several tokens, or an unknown number, and all
    came in one arrival, so that it has neither TPOT nor ITL. Where the run's streams came in
    `blocks`, no answer of several tokens has an ITL (`has_no_itl`). Without a stream
    (`is_streamed`) no answer has a TTFT, TPOT or ITL, and none is missing.
    `release_order` lists the rows in order of release, unreleased rows last. `in_flight` is the
    number of requests that were released before and had not ended. `own_slo_s` holds, by metric,
    the limits that requests brought themselves, if any did (0: none).
    """

    is_ok: Mask
    has_token: Mask
    is_unmeasured: Mask
    has_no_itl: Mask
    output_tokens: NDArray[np.int64]
    streamed_tokens: NDArray[np.int64]
    first_tokens: NDArray[np.int64]
    ttft_s: Seconds
    ttft_from_send_s: Seconds
    ttfat_s: Seconds
    tpot_s: Seconds
    e2e_s: Seconds
    e2e_from_send_s: Seconds
    close_s: Seconds
    e2e_per_token_s: Seconds
    max_itl_s: Seconds
    max_stall_s: Seconds
    queue_client_s: Seconds
    connect_s: Seconds
    lateness_s: Seconds
    gaps: TokenGaps
    chunk_starts: NDArray[np.intp]
    release_order: NDArray[np.intp]
    in_flight: NDArray[np.float64]
    blocks: Blocks | None = None
    is_streamed: bool = True
    own_slo_s: Mapping[str, Seconds] = field(default_factory=dict)

    def column(self, metric: str) -> Seconds:
        """A per-request metric by its catalogue name."""
        values: Seconds = getattr(self, metric)
        return values


def per_request(run: Run) -> PerRequest:
    """All columns of a run. Raises RunInvalid when its tables do not name the same requests."""
    rows, schedule = run.request_rows, run.schedule_rows
    if not np.array_equal(rows["request_id"], schedule["request_id"]):
        raise RunInvalid(
            f"the run records {len(rows)} requests and {len(schedule)} scheduled requests,"
            " and their request_ids differ; each must appear once in both, in order"
        )
    released_s, sent_s = _column(rows, "released_s"), _column(rows, "sent_s")
    first_s, last_s = _column(rows, "first_token_s"), _column(rows, "last_token_s")
    output_tokens = _output_tokens(rows)
    streamed_tokens = output_tokens - rows["hidden_tokens"]
    starts = chunk_starts(run.chunk_rows)
    gaps = _gaps(run.chunk_rows, starts, rows)
    first_tokens = _first_tokens(run.chunk_rows, starts, rows, streamed_tokens)
    tpot_s = _tpot_s(last_s - first_s, streamed_tokens - first_tokens)
    max_stall_s = greatest(gaps.icl_s, gaps, len(rows))
    itl_s = gaps.itl_s
    found = _blocks(run, starts, gaps)
    is_streamed = run.manifest.target.stream
    has_several = is_streamed & _has_several(rows, schedule, streamed_tokens)
    is_unmeasured = np.isnan(tpot_s) & has_several
    has_no_itl = is_unmeasured if found is None else has_several
    max_itl_s = max_stall_s if itl_s is gaps.icl_s else greatest(itl_s, gaps, len(rows))
    opened = ~rows["reused_connection"]
    release_order = np.argsort(released_s, kind="stable")
    return PerRequest(
        is_ok=rows["status"] == Status.ok,
        has_token=np.isfinite(last_s),
        is_unmeasured=is_unmeasured,
        has_no_itl=has_no_itl,
        output_tokens=output_tokens,
        streamed_tokens=streamed_tokens,
        first_tokens=first_tokens,
        ttft_s=first_s - released_s,
        ttft_from_send_s=first_s - sent_s,
        ttfat_s=_column(rows, "first_answer_s") - released_s,
        tpot_s=tpot_s,
        e2e_s=last_s - released_s,
        e2e_from_send_s=last_s - sent_s,
        close_s=_column(rows, "done_s") - released_s,
        e2e_per_token_s=_divide(last_s - released_s, output_tokens),
        max_itl_s=max_itl_s if found is None else np.where(has_no_itl, np.nan, max_itl_s),
        max_stall_s=max_stall_s,
        queue_client_s=sent_s - released_s,
        connect_s=np.where(opened, _column(rows, "connected_s") - sent_s, np.nan),
        lateness_s=_lateness_s(schedule, sent_s - released_s),
        gaps=gaps,
        chunk_starts=starts,
        release_order=release_order,
        in_flight=_in_flight(released_s, _column(rows, "done_s"), release_order),
        blocks=found,
        is_streamed=is_streamed,
        own_slo_s={
            metric: _column(schedule, name)
            for metric, name in OWN_SLO.items()
            if schedule[name].any()
        },
    )


def without_own(run: Run) -> Run:
    """The run without the limits that requests brought themselves."""
    schedule = run.schedule_rows.copy()
    for name in OWN_SLO.values():
        schedule[name] = 0.0
    return replace(run, schedule_rows=schedule)


def _column(rows: Requests, name: str) -> Seconds:
    return np.ascontiguousarray(rows[name])


def _output_tokens(rows: Requests) -> NDArray[np.int64]:
    uncounted = rows["token_source"] == TokenSource.none
    return np.where(uncounted, rows["chunks"], rows["output_tokens"]).astype(np.int64)


def _tpot_s(decode_s: Seconds, later_tokens: NDArray[np.int64]) -> Seconds:
    """(last − first) / (n − n_first_arrival); NaN where all tokens came in one arrival."""
    return np.where(decode_s > 0, _divide(decode_s, later_tokens), np.nan)


def _has_several(rows: Requests, schedule: Schedule, tokens: NDArray[np.int64]) -> Mask:
    """Rows whose answers have several tokens, or may have: a chunk that the server did not count
    holds any number."""
    is_counted = rows["token_source"] == TokenSource.usage
    may_have = ~is_counted & (schedule["output_tokens"] > 1)
    several: Mask = np.isfinite(rows["last_token_s"]) & ((tokens > 1) | may_have)
    return several


def _divide(seconds: Seconds, counts: NDArray[np.int64]) -> Seconds:
    """The quotient; NaN where the count is not positive."""
    quotient = np.full(len(seconds), np.nan)
    np.divide(seconds, counts, out=quotient, where=counts > 0)
    return quotient


def _in_flight(
    released_s: Seconds, done_s: Seconds, release_order: NDArray[np.intp]
) -> NDArray[np.float64]:
    n_before = np.empty(len(released_s))
    n_before[release_order] = np.arange(len(released_s))
    ends_s = np.sort(done_s[np.isfinite(done_s)])
    return n_before - np.searchsorted(ends_s, released_s, side="left")


def _lateness_s(schedule: Schedule, queue_client_s: Seconds) -> Seconds:
    return np.where(schedule["n_parents"] == 0, queue_client_s, np.nan)


def chunk_starts(chunks: Chunks) -> NDArray[np.intp]:
    """The index of each request's first chunk; an entry per request that received any."""
    if not len(chunks):
        return np.empty(0, np.intp)
    ids = chunks["request_id"]
    firsts = [
        np.flatnonzero(ids[at + 1 : at + 1 + BLOCK] != ids[at : at + BLOCK][: len(ids) - 1 - at])
        + at
        + 1
        for at in range(0, len(ids) - 1, BLOCK)
    ]
    return np.concatenate([np.zeros(1, np.intp), *firsts])


def event_gaps(run: Run) -> TokenGaps:
    """The gaps between single chunks: 0 between two that came in the same read."""
    return _gaps(run.chunk_rows, chunk_starts(run.chunk_rows), run.request_rows, joins_reads=False)


def _gaps(
    chunks: Chunks, starts: NDArray[np.intp], rows: Requests, *, joins_reads: bool = True
) -> TokenGaps:
    """The gaps of all chunks, computed block by block: at 10⁸ chunks every whole intermediate
    column would take most of a gigabyte."""
    row = _row_of(chunks["request_id"][starts], rows["request_id"])
    n_gaps = np.diff(starts, append=len(chunks)) - 1
    is_first = np.zeros(len(chunks), bool)
    is_first[starts] = True
    if joins_reads and len(starts):
        n_gaps = n_gaps - group_sums(
            starts, len(chunks), lambda part: _joins(chunks, is_first, part)
        )
    total = int(n_gaps.sum())
    icl_s, tokens = np.empty(total), np.empty(total, np.uint16)
    done, is_stated, is_in_first = 0, bool(total), True
    for at in range(1, len(chunks), BLOCK):
        part = slice(at, at + BLOCK)
        continues, stated = ~is_first[part], chunks["tokens"][part]
        gap_s = np.diff(np.ascontiguousarray(chunks["received_s"][at - 1 : at + BLOCK]))
        opens = continues & (gap_s != 0) if joins_reads else continues
        more = gap_s[opens]
        into = slice(done, done + len(more))
        icl_s[into] = more
        is_stated = is_stated and bool(stated[continues].all())
        if len(more) == np.count_nonzero(continues):
            tokens[into] = stated[opens]
        else:
            before, tokens[into] = _tokens_of_arrivals(stated, continues, opens)
            if before and not is_in_first:
                tokens[done - 1] = min(_MOST_TOKENS, max(1, int(tokens[done - 1])) + before)
        begun = np.flatnonzero(opens | ~continues)[-1:]
        is_in_first = not opens[begun[0]] if len(begun) else is_in_first
        done += len(more)
    has_gaps = n_gaps > 0
    return TokenGaps(
        icl_s=icl_s,
        rows=row[has_gaps],
        starts=(np.cumsum(n_gaps) - n_gaps)[has_gaps],
        tokens=np.maximum(tokens, 1) if tokens.any() else np.broadcast_to(np.uint16(1), total),
        is_counted=is_stated,
    )


def _blocks(run: Run, starts: NDArray[np.intp], gaps: TokenGaps) -> Blocks | None:
    chunks, n_arrivals = run.chunk_rows, len(starts) + len(gaps.icl_s)
    if not n_arrivals or 2 * n_arrivals > len(chunks) + 2 * len(starts):
        return None  # too few events for two in most reads
    is_first = np.zeros(len(chunks), bool)
    is_first[starts] = True
    n_several, was_joined = 0, False
    for at in range(0, len(chunks), BLOCK):
        joins = _joins(chunks, is_first, slice(at, at + BLOCK))
        n_several += int(np.count_nonzero(joins & ~np.r_[was_joined, joins[:-1]]))
        was_joined = bool(joins[-1])
    per_event = max(1.0, _tokens_per_event(chunks))
    return blocks(
        events=np.rint(gaps.tokens / per_event).astype(np.int64),
        gap_s=gaps.icl_s,
        n_arrivals=n_arrivals,
        n_several=n_several,
        n_bytes=int(run.request_rows["bytes"].sum()),
        lag_s=max((shard.loop_lag_s.p99 or 0.0 for shard in run.instrument.shards), default=0.0),
    )


def _tokens_per_event(chunks: Chunks) -> float:
    return float(np.maximum(chunks["tokens"], 1).mean(dtype=np.float64))


def _joins(chunks: Chunks, is_first: NDArray[np.bool_], part: slice) -> NDArray[np.bool_]:
    """The chunks of a stretch that came in the same read as the chunk before them."""
    received_s = chunks["received_s"][max(0, part.start - 1) : part.stop]
    same = np.diff(received_s, prepend=np.nan if part.start == 0 else received_s[:0]) == 0
    joins: NDArray[np.bool_] = same & ~is_first[part]
    return joins


def _tokens_of_arrivals(
    stated: NDArray[np.uint16], continues: NDArray[np.bool_], opens: NDArray[np.bool_]
) -> tuple[int, NDArray[np.int64]]:
    """The tokens that a stretch of chunks adds to the arrival before it, and the tokens of each
    arrival that `opens` in it after a gap; a chunk of unknown size counts as 1."""
    each = np.maximum(stated, 1)
    begins = np.flatnonzero(opens | ~continues)
    if not len(begins):
        return int(each.sum(dtype=np.int64)), np.empty(0, np.int64)
    sums = np.add.reduceat(each, begins, dtype=np.int64)[opens[begins]]
    return int(each[: begins[0]].sum(dtype=np.int64)), np.minimum(sums, _MOST_TOKENS)


def _first_tokens(
    chunks: Chunks, starts: NDArray[np.intp], rows: Requests, tokens: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The tokens of each request's first arrival, at least 1. Where the server states only their
    total, the chunks after the first share the rest evenly."""
    first = np.maximum(rows["first_chunk_tokens"].astype(np.int64), 1)
    ends = np.append(starts, len(chunks))[1:]
    open_, at = np.arange(len(starts)), starts + 1
    row = _row_of(chunks["request_id"][starts], rows["request_id"])
    extra, added = np.zeros(len(starts)), np.zeros(len(starts), bool)
    later = np.maximum(ends - starts - 1, 1)
    share = np.maximum(tokens[row] - first[row], 0) / later
    while len(open_):
        inside = at < ends[open_]
        open_, at = open_[inside], at[inside]
        same = chunks["received_s"][at] == chunks["received_s"][at - 1]
        open_, at = open_[same], at[same]
        stated = chunks["tokens"][at]
        extra[open_] += np.where(stated > 0, stated, np.maximum(share[open_], 1))
        added[open_] = True
        at = at + 1
    first[row[added]] += np.rint(extra[added]).astype(np.int64)
    return first


def _row_of(ids: NDArray[np.uint32], request_ids: NDArray[np.uint32]) -> NDArray[np.intp]:
    """The position of each id in `request_ids` (ascending). Raises RunInvalid for an id that is not
    in it."""
    row = np.searchsorted(request_ids, ids)
    is_known = row < len(request_ids)
    if not is_known.all() or not np.array_equal(request_ids[row], ids):
        raise RunInvalid("the run holds chunks of a request that was never scheduled")
    return row


def greatest(values: Seconds, gaps: TokenGaps, n_rows: int) -> Seconds:
    """The greatest value of each request row; NaN for rows without any gap."""
    most = np.full(n_rows, np.nan)
    if len(values):
        most[gaps.rows] = np.maximum.reduceat(values, gaps.starts)
    return most


class Samples:
    """The populations of a run's metrics, each computed once.

    `of(metric)` holds the successful requests. With failures it also holds +inf for each due
    request that failed (gap metrics: a gap that never ended) or that lacks a value which an SLO
    needs. Metrics of the load generator's own delays hold every due request that has a value;
    failures add nothing there.
    """

    def __init__(self, columns: PerRequest, due: Mask) -> None:
        self._columns, self._due = columns, due
        self._ok = due & columns.is_ok
        self._populations: dict[tuple[str, bool], Population] = {}
        self._loads: dict[bytes, Load] = {}

    def of(self, metric: Metric, with_failures: bool = False) -> Population:
        is_plain = not self._columns.gaps.has_several and self._columns.blocks is None
        if metric.name == "itl_s" and is_plain:
            metric = METRICS["icl_s"]  # a token per chunk: the same samples, sorted once
        key = (metric.name, with_failures)
        if key not in self._populations:
            self._populations[key] = (
                self._with_failures(metric) if with_failures else self._successful(metric)
            )
        return self._populations[key]

    def forget(self, metric: Metric) -> None:
        """Frees the populations of a metric."""
        for with_failures in (False, True):
            self._populations.pop((metric.name, with_failures), None)

    def share(self, hits: Mask, metrics: Sequence[str] = ()) -> Dependence:
        """The dependence of the share of due rows that are in `hits`; the latencies `metrics` are
        its companions (`dependence.of_share`)."""
        order = self._columns.release_order
        series = [self.of(METRICS[name], with_failures=True).series for name in metrics]
        rows = order[self._due[order]]
        return of_share(hits[rows], [one for one in series if one is not None])

    def _successful(self, metric: Metric) -> Population:
        if metric.scope != "gap":
            rows = self._ok if metric.slo else self._due
            return self._of_rows(rows, self._columns.column(metric.name))
        return self._gaps(metric)

    def _is_absent(self, metric: Metric) -> bool:
        return metric.name in NEEDS_STREAM and not self._columns.is_streamed

    def _with_failures(self, metric: Metric) -> Population:
        if not metric.slo or self._is_absent(metric):
            return self.of(metric)
        missing = self._due & ~self._columns.is_ok
        if metric.scope != "gap":
            missing |= self._due & ~self._columns.has_token
            if metric.name not in PASSES_UNDEFINED:
                missing |= self._due & np.isnan(self._columns.column(metric.name))
        n_missing = int(np.count_nonzero(missing))
        if not n_missing:
            return self.of(metric)
        if metric.scope == "gap":
            return replace(self.of(metric), n_infinite=n_missing, _dependences={})
        values = np.where(missing, math.inf, self._columns.column(metric.name))
        return self._of_rows(missing | self._ok, values)

    def _of_rows(self, rows: Mask, values: Seconds) -> Population:
        order = self._columns.release_order
        kept, key = order[rows[order]], rows.tobytes()
        if key not in self._loads:
            self._loads[key] = Load(self._columns.in_flight[kept])
        return of_requests(values[kept], self._loads[key])

    def _gaps(self, metric: Metric) -> Population:
        gaps = self._columns.gaps
        if metric.name == "itl_s" and self._columns.blocks is not None:
            return Population(np.empty(0))
        kept = self._ok[gaps.rows]
        place = np.empty(len(self._ok), np.intp)
        place[self._columns.release_order] = np.arange(len(place))
        order = np.argsort(place[gaps.rows[kept]])
        if metric.name == "icl_s":
            return of_groups(gaps.icl_s, gaps.starts, kept, order, None)
        return of_groups(gaps.itl_s, gaps.starts, kept, order, gaps.tokens)
