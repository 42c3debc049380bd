"""Release of each row of a schedule, by a single rule for open loop, closed loop and multi-turn.

A row without parents is released at `scheduled_s`, a row with parents at `max(done_s + delay_s of
its edges) + think_s`. A failed parent releases only children marked `after_failure` (the user of a
closed loop continues); their delay and think time count from the time at which the failure was
certain. A row with `cancel_after_s` is cancelled that long after its send if it is still running.
All times are absolute, so a late alarm delays a single row and none after it. A row that cannot be
sent is recorded with its cause; it is never shifted silently.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from loadgen.records import ON_PURPOSE, Edges, Schedule, Status
from loadgen.system.timer import Timer

_OK = Status.ok  # looking up an enum member takes 0.2 µs in Python 3.11


class Sender(Protocol):
    """Sends rows; calls `Dispatcher.ended` exactly once for each row sent."""

    def send(self, row: int) -> None: ...

    def sent_s(self, row: int) -> float:
        """Send time of a row in flight; may grow until its first byte is on a connection."""

    def abort(self, row: int, outcome: Status, reason: str) -> None: ...


class Recorder(Protocol):
    """Records releases, and rows that are never sent."""

    def released(self, row: int, release_s: float) -> None: ...
    def unsent(self, row: int, status: Status, reason: str) -> None: ...


@dataclass(frozen=True)
class Bounds:
    """Limits of a shard.

    `timeout_s` counts from the release. No row is released after `horizon_s`; every request ends by
    `horizon_s + drain_s`. A row released at `max_concurrency` requests in flight is dropped or
    waits, by `when_full`. A waiting row keeps its release time, so its wait counts as latency.
    Releasing also ends with the `n_measured`-th row released from `warmup_s` on (None: never).
    """

    timeout_s: float
    max_concurrency: int
    when_full: Literal["drop", "wait"]
    horizon_s: float
    drain_s: float
    warmup_s: float = 0.0
    n_measured: int | None = None


class _GivenUp(NamedTuple):
    """A row that will never be sent: its status, the reason, and the time it became certain (None:
    now)."""

    row: int
    status: Status
    reason: str
    ended_s: float | None


class Dispatcher:
    """Releases the rows of a shard; calls `on_finished` when every row has ended.

    Rows are indices into `schedule`. All methods run on the event loop's thread.
    """

    def __init__(
        self,
        schedule: Schedule,
        edges: Edges,
        *,
        sender: Sender,
        recorder: Recorder,
        timer: Timer,
        bounds: Bounds,
        on_finished: Callable[[], None],
    ) -> None:
        self._sender, self._recorder, self._timer = sender, recorder, timer
        self._bounds, self._on_finished = bounds, on_finished
        self._unaccounted = 0
        # Arrays, not lists: a list of a million floats takes 32 MB, its array 8 MB.
        self.families = Families(schedule, edges)
        self._n_waiting_for = array("i")
        self._think_s, self._cancel_after_s = array("d"), array("d")
        self._cancels: list[tuple[float, int]] = []  # heap of (cancel time, row)
        self._goes_on, self._is_orphan, self._parents_done_s = bytearray(), bytearray(), array("d")
        self._append(schedule)
        self._roots = rows_by_time(schedule)
        self._root_times_s = schedule["scheduled_s"][self._roots].data
        self._n_planned, self._next_root = 0, -1  # roots planned, and the last of them
        # Invariant: `_planned` is a heap of (release_s, row) that holds the first root not yet
        # released, and every row with parents whose release time is certain.
        self._planned: list[tuple[float, int]] = []
        self._plan_root()
        self._in_flight: set[int] = set()
        self._waiting: dict[int, float] = {}  # row: release_s, in order of release; no slot yet
        # In order of release, thus of time: every row has the same timeout.
        self._deadlines: deque[tuple[float, int]] = deque()
        self._stop_reason = ""
        self._end_s = bounds.horizon_s + bounds.drain_s
        self._last_release_s = bounds.horizon_s  # exclusive
        self.n_measured = 0  # rows released from `warmup_s` on
        self._finished = self._is_ticking = False

    @property
    def n_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        self._tick()

    def stop(
        self, reason: str, drain_s: float | None = None, *, sends_waiting: bool = False
    ) -> None:
        """Releases no further row; requests in flight, and with `sends_waiting` also the rows that
        wait for a slot, may finish within `drain_s` from now. A second call can only shorten that
        time."""
        if self._stop_reason:
            self._end_s = min(self._end_s, self._timer.now_s() + (drain_s or 0.0))
        else:
            self._stop_reason = reason
            left_s = self._bounds.drain_s if drain_s is None else drain_s
            self._end_s = min(self._end_s, self._timer.now_s() + left_s)
            self._give_up_unreleased(reason)
        if not sends_waiting:
            self._give_up_waiting(reason)
        self._tick()

    def add_rows(self, rows: Schedule, edges: Edges) -> None:
        """Adds rows after the last; each has a parent that has not ended yet."""
        self.families.add_rows(rows["request_id"].tolist(), edges)
        self._append(rows)

    def _append(self, rows: Schedule) -> None:
        self._n_waiting_for.frombytes(rows["n_parents"].astype(np.int32).tobytes())
        self._think_s.frombytes(rows["think_s"].astype(float).tobytes())
        self._cancel_after_s.frombytes(rows["cancel_after_s"].astype(float).tobytes())
        self._goes_on += rows["after_failure"].tobytes()
        self._is_orphan += (rows["n_parents"] > 0).tobytes()
        self._parents_done_s.frombytes(bytes(8 * len(rows)))
        self._unaccounted += len(rows)

    def ended(self, row: int, status: Status, done_s: float) -> None:
        """Ends a sent row: releases its children and sends rows that wait for a slot."""
        self._in_flight.discard(row)
        self._unaccounted -= 1
        for child, delay_s in self.families.links(row):
            for given_up in self._parent_ended(child, row, status, done_s, delay_s):
                self._unsent(*given_up)
        self._fill_slots()
        if self.families.has_edges or self._cancels or not self._unaccounted:
            self._tick()

    def _tick(self) -> None:
        """Handles everything due and arms the next alarm. `abort` calls `ended`, which calls
        `_tick` again; that inner call returns at once."""
        if self._finished or self._is_ticking:
            return
        self._is_ticking = True
        self._do_what_is_due()
        self._is_ticking = False
        if self._unaccounted:
            self._timer.arm(self._next_s(), self._tick)
        else:
            self._finished = True
            self._on_finished()

    def _do_what_is_due(self) -> None:
        now_s = self._timer.now_s()
        while self._planned and self._planned[0][0] <= now_s:
            release_s, row = heapq.heappop(self._planned)
            if row == self._next_root:
                self._plan_root()
            self._release(row, release_s)
            if release_s >= self._bounds.warmup_s:
                self.n_measured += 1
                if self.n_measured == self._bounds.n_measured:
                    self._end_window(release_s)
        while self._cancels and self._cancels[0][0] <= now_s:
            row = heapq.heappop(self._cancels)[1]
            if row in self._in_flight:
                self._cancel(row, now_s)
        self._expire(now_s)
        if now_s >= self._end_s:
            self._give_up_everything()

    def _plan_root(self) -> None:
        """Plans the next row without parents, if any."""
        if self._n_planned < len(self._roots):
            row = self._next_root = int(self._roots[self._n_planned])
            heapq.heappush(self._planned, (self._root_times_s[self._n_planned], row))
            self._n_planned += 1

    def _end_window(self, release_s: float) -> None:
        """Releases nothing after the last counted row; the requests in flight, and the rows that
        wait for a slot, have the drain to end."""
        self._last_release_s = -math.inf
        self._end_s = min(self._end_s, release_s + self._bounds.drain_s)
        self._give_up_unreleased(f"the run's {self.n_measured} measured requests were sent before")

    def _cancel(self, row: int, now_s: float) -> None:
        """Cancels a row; defers that if the client sent the row later than `_send` was called."""
        due_s = self._sender.sent_s(row) + self._cancel_after_s[row]
        if due_s > now_s:
            heapq.heappush(self._cancels, (due_s, row))
        else:
            self._sender.abort(row, Status.cancelled, ON_PURPOSE)

    def _next_s(self) -> float:
        while (
            self._deadlines and self._deadlines[0][1] not in self._in_flight and not self._waiting
        ):
            self._deadlines.popleft()
        while self._cancels and self._cancels[0][1] not in self._in_flight:
            heapq.heappop(self._cancels)
        next_s = self._end_s
        if self._cancels:
            next_s = min(next_s, self._cancels[0][0])
        if self._planned:
            next_s = min(next_s, self._planned[0][0])
        if self._deadlines:
            next_s = min(next_s, self._deadlines[0][0])
        return next_s

    def _release(self, row: int, release_s: float) -> None:
        self._recorder.released(row, release_s)
        if len(self._in_flight) < self._bounds.max_concurrency:
            self._deadlines.append((release_s + self._bounds.timeout_s, row))
            self._send(row)
        elif self._bounds.when_full == "wait":
            self._deadlines.append((release_s + self._bounds.timeout_s, row))
            self._waiting[row] = release_s
        else:
            limit = self._bounds.max_concurrency
            self._unsent(
                row, Status.dropped, f"{limit} requests in flight (limits.max_concurrency)"
            )

    def _send(self, row: int) -> None:
        self._in_flight.add(row)
        if self._cancel_after_s[row]:
            cancel_s = self._timer.now_s() + self._cancel_after_s[row]
            heapq.heappush(self._cancels, (cancel_s, row))
        self._sender.send(row)

    def _fill_slots(self) -> None:
        """Sends the rows that have waited longest. A row past its deadline ends as a timeout: sent
        now, it would only take the slot from a row that can still succeed."""
        now_s = self._timer.now_s()
        while self._waiting and len(self._in_flight) < self._bounds.max_concurrency:
            row = next(iter(self._waiting))
            release_s = self._waiting.pop(row)
            if release_s + self._bounds.timeout_s > now_s:
                self._send(row)
            else:
                self._unsent(row, Status.timeout, self._too_late())

    def _expire(self, now_s: float) -> None:
        due = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            due.append(self._deadlines.popleft()[1])
        for row in due:  # waiting rows first: the end of a row in flight would give them its slot
            if self._waiting.pop(row, None) is not None:
                self._unsent(row, Status.timeout, self._too_late())
        for row in due:
            if row in self._in_flight:
                limit_s = self._bounds.timeout_s
                reason = f"no complete response within {limit_s:g} s (limits.timeout)"
                self._sender.abort(row, Status.timeout, reason)

    def _too_late(self) -> str:
        return f"no free slot within {self._bounds.timeout_s:g} s (limits.timeout)"

    def _parent_ended(
        self, child: int, parent: int, status: Status, done_s: float, delay_s: float
    ) -> tuple[_GivenUp, ...]:
        """Plans a child whose last parent ended. Returns the child if it will never be sent, else
        nothing."""
        if not self._is_orphan[child]:
            return ()
        if status != _OK and not self._goes_on[child]:
            self._is_orphan[child] = 0
            cause = f"its parent, request {parent}, ended with {status.name}"
            return (_GivenUp(child, Status.not_released, cause, done_s),)
        self._parents_done_s[child] = max(self._parents_done_s[child], done_s + delay_s)
        self._n_waiting_for[child] -= 1
        if self._n_waiting_for[child]:
            return ()
        self._is_orphan[child] = 0
        release_s = self._parents_done_s[child] + self._think_s[child]
        if self._stop_reason or release_s >= self._last_release_s:
            cause = self._stop_reason or "its parent ended after the window"
            return (_GivenUp(child, Status.not_released, cause, release_s),)
        heapq.heappush(self._planned, (release_s, child))
        return ()

    def _unsent(self, row: int, status: Status, reason: str, ended_s: float | None = None) -> None:
        """Records a row that will never be sent, and its descendants. `ended_s` is the time it
        became certain (None: now). A loop instead of recursion: a chain can have thousands of rows.
        """
        todo = [_GivenUp(row, status, reason, ended_s)]
        while todo:
            row, status, reason, ended_s = todo.pop()
            self._recorder.unsent(row, status, reason)
            self._unaccounted -= 1
            links = self.families.links(row)
            if links and ended_s is None:
                ended_s = self._timer.now_s()
            for child, delay_s in links:
                todo += self._parent_ended(child, row, status, ended_s or 0.0, delay_s)

    def _give_up_unreleased(self, reason: str) -> None:
        planned, self._planned = self._planned, []
        roots, self._n_planned = self._roots[self._n_planned :], len(self._roots)
        for row in (*(row for _, row in planned), *roots.tolist()):
            self._unsent(row, Status.not_released, reason)

    def _give_up_waiting(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for row in waiting:
            self._unsent(row, Status.cancelled, f"no free slot before {reason}")

    def _give_up_everything(self) -> None:
        """Ends every remaining row at the end of the drain, so that no run outlasts it."""
        reason = self._stop_reason or "the run's end"
        self._give_up_unreleased(reason)
        self._give_up_waiting(reason)
        for row in sorted(self._in_flight):
            self._sender.abort(
                row, Status.cancelled, f"still running when the drain after {reason} ended"
            )
        for row in np.flatnonzero(np.frombuffer(self._is_orphan, bool)).tolist():
            if self._is_orphan[row]:
                self._is_orphan[row] = 0
                self._unsent(row, Status.not_released, "its parent did not finish in the window")
        self._end_s = float("inf") if self._unaccounted else self._end_s


class Families:
    """The children of each row of a schedule, which is sorted by request id. Rows are indices into
    it: edge k leads from `parent_rows[k]` to `child_rows[k]`. `add_rows` adds rows whose parents
    have no children so far; their edges have no delay."""

    def __init__(self, schedule: Schedule, edges: Edges) -> None:
        ids = schedule["request_id"]
        order = np.argsort(edges["after"], kind="stable")
        self.child_rows = np.searchsorted(ids, edges["request_id"][order])
        self.parent_rows = np.searchsorted(ids, edges["after"][order])
        # children of row k: _children[_first[k]] … _children[_first[k + 1] - 1]
        n_children = np.bincount(self.parent_rows, minlength=len(ids))
        self._first = np.cumsum([0, *n_children], dtype=np.int32).data if len(edges) else None
        self._children = self.child_rows.astype(np.int32).data
        delays_s = edges["delay_s"][order].astype(np.float64)
        self._delays_s = delays_s.data if delays_s.any() else None
        self._ids, self._added_rows = ids, dict[int, int]()  # the latter by request id
        self._added_children: dict[int, list[int]] = {}

    def add_rows(self, request_ids: Sequence[int], edges: Edges) -> None:
        first = len(self._ids) + len(self._added_rows)
        self._added_rows |= {request_id: first + k for k, request_id in enumerate(request_ids)}
        for child, parent in edges[["request_id", "after"]].tolist():
            self._added_children.setdefault(self.row(parent), []).append(self._added_rows[child])

    def row(self, request_id: int) -> int:
        """The row with a request id."""
        row = self._added_rows.get(request_id)
        return int(np.searchsorted(self._ids, request_id)) if row is None else row

    @property
    def has_edges(self) -> bool:
        return self._first is not None

    def children(self, row: int) -> Sequence[int]:
        if self._first is None:
            return ()
        if self._added_children and (added := self._added_children.get(row)) is not None:
            return added
        if row >= len(self._ids):
            return ()
        first, end = self._first[row], self._first[row + 1]
        return self._children[first:end].tolist() if end > first else ()

    def links(self, row: int) -> Sequence[tuple[int, float]]:
        """The children of a row, each with the delay from the end of the row, seconds."""
        children = self.children(row)
        if self._first is None or self._delays_s is None or row >= len(self._ids):
            return [(child, 0.0) for child in children]
        first = self._first[row]
        return [*zip(children, self._delays_s[first : first + len(children)], strict=True)]


def rows_by_time(schedule: Schedule) -> NDArray[np.int32]:
    """The rows without parents in order of their scheduled time, of equal times in row order."""
    roots = np.flatnonzero(schedule["n_parents"] == 0)
    order = np.argsort(schedule["scheduled_s"][roots], kind="stable")
    return roots[order].astype(np.int32)
