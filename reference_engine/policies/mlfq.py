"""Multi-level feedback queue: a request that has used up its quantum goes down a level."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import Annotated, ClassVar

from pydantic import Field, PrivateAttr

from loadgen.fields import Seconds
from loadgen.manifest.json_section import JsonObject
from reference_engine.policies.ranked import (
    BlockedRequest,
    Preempts,
    RankedPolicy,
    Ranking,
    plan_by_rank,
    prefill_s,
)
from reference_engine.policies.sorted_queue import Key
from reference_engine.state.plan import Plan, View
from reference_engine.state.sequence import Request
from reference_engine.state.steps import StepRecord


class Mlfq(RankedPolicy):
    """Level i has a quantum of `base_quantum` (seconds) · `ratio`^i of step time; there are
    `n_levels`. A request joins the first level with a quantum long enough for its prefill
    (skip-join). Each time it has used up its quantum it goes to the end of the next lower level.
    All decodes run; prompts are continued and requests admitted by level, within a level in the
    order of joining it. Only the time of a prefill is predicted.

    With `preempt`, a blocked request preempts decoding requests that are behind it: of lower
    levels, lowest level first, or of its own level if they joined it later. It takes their place in
    the same step; they keep their places in their levels. Their KV is swapped or recomputed,
    whichever is cheaper. A request that has waited `starvation` (seconds) since its arrival or its
    last preemption goes first, and starts at the top level again. `token_budget`, `max_num_seqs`
    and `watermark` are as in `chunked`.

    Source: FastServe (arXiv 2305.05920) §4.1, without its proactive swapping.
    """

    kind: ClassVar[str] = "mlfq"

    base_quantum: Annotated[Seconds, Field(gt=0)] = 0.01
    ratio: float = Field(default=2.0, gt=1, le=1000)
    n_levels: int = Field(default=10, ge=1, le=64)
    starvation: Annotated[Seconds, Field(gt=0)] = 3.0
    preempt: Preempts = True

    _levels: Levels = PrivateAttr()
    _step_s: float = PrivateAttr(default=0.0)  # duration of the last step
    _started: list[Request] = PrivateAttr(default_factory=list)
    _skipped: list[str] = PrivateAttr(default_factory=list)

    def model_post_init(self, context: object) -> None:
        self._levels = Levels(self._ranking, self.base_quantum, self.ratio, self.n_levels)

    def on_arrival(self, request: Request, view: View) -> None:
        self._levels.enter(request, self._prefill_s(request, view), self._overdue_s(request, view))
        if view.is_running(request.id):  # taken over from another policy
            self._started.append(request)

    def on_requeue(self, request: Request, view: View) -> None:
        self._levels.wait(request, self._overdue_s(request, view))

    def on_finish(self, request: Request, view: View) -> None:
        self._levels.drop(request.id)

    def plan(self, view: View) -> Plan:
        budget, ranking = self.budget_after_decodes(view), self._ranking
        prefills, waiting = ranking.prefills(view), ranking.waiting(view)
        plan = plan_by_rank(budget, view, prefills, waiting, self.candidates)
        named = {item.request_id for item in plan.items}
        ranking.waits.start(budget.admitted, view.now_s)
        self._started += budget.admitted
        self._skipped = [other.id for other in view.prefilling if other.id not in named]
        return plan

    def candidates(self, view: View, blocked: BlockedRequest) -> Iterable[Request]:
        if not self.preempt:
            return ()
        head = blocked.request.id
        is_overdue = self._ranking.overdue_s(head) <= view.now_s
        key = (0.0, inf) if is_overdue else self._ranking.key(head)
        # Each of them has produced a token since its admission, so preempting cannot go on for
        # ever.
        return self._levels.decoding_behind(key, view)

    def on_step_end(self, record: StepRecord, view: View) -> None:
        levels = self._levels
        for request in self._started:
            if view.is_running(request.id):
                is_overdue = self._ranking.overdue_s(request.id) <= record.t_s
                levels.begin(request, self._prefill_s(request, view), is_at_top=is_overdue)
        levels.serve(record.duration_s, self._skipped)
        self._started, self._step_s = [], record.duration_s

    def explain(self, request_id: str, view: View) -> JsonObject:
        if request_id not in self._ranking:
            return {}
        levels = self._levels
        level = levels.level(request_id)
        return {
            "level": level,
            "quantum_s": levels.quanta_s[level],
            "quantum_left_s": levels.left_s(request_id),
        }

    def _overdue_s(self, request: Request, view: View) -> float:
        waits = self._ranking.waits
        waits.enter(request, view.now_s)
        return waits.queued_s(request.id) + self.starvation

    def _prefill_s(self, request: Request, view: View) -> float:
        """Seconds to compute all tokens of a request without KV: by the cost model, but at least
        the time of that many steps."""
        n_steps = -(-request.n_tokens // self.token_budget)
        return max(prefill_s(request.n_tokens, view.cost), n_steps * self._step_s)


_MOST_VOID = 64  # ends of stays that are over, beyond one for each stay


@dataclass(slots=True)
class _Stay:
    """A stay in the batch: its number, and the end of its quantum on the clock `served_s`."""

    n: int
    end_s: float


class Levels:
    """Levels of live requests, and the quanta of those that run.

    Level i has a quantum of `base_s` · `ratio`^i seconds. Requests of a level are in the order in
    which they joined it, and `ranking` holds level and position as their key. All running requests
    are served at the same rate, so the end of a quantum is an instant on a clock that adds up step
    durations, `served_s`: a step costs only the requests whose quantum it ends.
    """

    def __init__(self, ranking: Ranking, base_s: float, ratio: float, n_levels: int) -> None:
        self.quanta_s = [base_s * ratio**level for level in range(n_levels)]
        self.served_s = 0.0
        self._ranking = ranking
        self._level_of: dict[str, int] = {}
        self._running: list[dict[str, Request]] = [{} for _ in range(n_levels)]
        # By level: no running request joined it after this, which may be later than necessary.
        self._last_joined = [0.0] * n_levels
        self._stays: dict[str, _Stay] = {}
        self._ends: list[tuple[float, int, Request]] = []  # a heap; may be too early, or void
        self._n_stays = self._n_joined = 0

    def level(self, request_id: str) -> int:
        return self._level_of[request_id]

    def left_s(self, request_id: str) -> float | None:
        """Seconds left of the request's quantum; None while it does not run."""
        stay = self._stays.get(request_id)
        return None if stay is None else stay.end_s - self.served_s

    def enter(self, request: Request, prefill_time_s: float, overdue_s: float) -> None:
        """Put a new request on the first level with a quantum long enough for its prefill."""
        fits = (
            level for level, quantum_s in enumerate(self.quanta_s) if quantum_s >= prefill_time_s
        )
        self._level_of[request.id] = next(fits, len(self.quanta_s) - 1)
        self.wait(request, overdue_s)

    def wait(self, request: Request, overdue_s: float) -> None:
        """Put a request into the queue, at the place in its level that it has, or else at the end
        of its level."""
        self._stop(request.id)
        is_known = request.id in self._ranking
        level = self._level_of[request.id]
        key = self._ranking.key(request.id) if is_known else self._end_of(level)
        self._ranking.put(request, key, overdue_s)

    def begin(self, request: Request, prefill_time_s: float, is_at_top: bool) -> None:
        """Start the quantum of an admitted request, at least its prefill time; `is_at_top` moves it
        to the first level."""
        if is_at_top and self._level_of[request.id]:
            self._level_of[request.id] = 0
            self._ranking.move(request.id, self._end_of(0))
        level = self._level_of[request.id]
        self._run(request, level)
        self._n_stays += 1
        end_s = self.served_s + max(self.quanta_s[level], prefill_time_s)
        self._stays[request.id] = _Stay(self._n_stays, end_s)
        heappush(self._ends, (end_s, self._n_stays, request))
        if len(self._ends) > 2 * len(self._stays) + _MOST_VOID:
            self._forget_void()

    def _forget_void(self) -> None:
        """Drop the ends of stays that are over: a quantum of the last level can take hours, and
        each end holds a request."""
        stays = self._stays
        self._ends = [
            (end_s, n, request)
            for end_s, n, request in self._ends
            if (stay := stays.get(request.id)) is not None and stay.n == n
        ]
        heapify(self._ends)

    def drop(self, request_id: str) -> None:
        self._ranking.drop(request_id)
        self._stop(request_id)
        self._level_of.pop(request_id, None)

    def serve(self, duration_s: float, skipped: Iterable[str]) -> None:
        """Charge a step to all running requests except `skipped`. Requests that have used up their
        quantum go to the end of the next level."""
        for request_id in skipped:
            if request_id in self._stays:
                self._stays[request_id].end_s += duration_s
        self.served_s += duration_s
        ends = self._ends
        while ends and ends[0][0] <= self.served_s:
            _, n, request = heappop(ends)
            stay = self._stays.get(request.id)
            if stay is None or stay.n != n:
                continue
            if stay.end_s <= self.served_s and not self._demote(request, stay):
                continue
            heappush(ends, (stay.end_s, n, request))

    def decoding_behind(self, key: Key, view: View) -> Iterator[Request]:
        """Decoding requests that stand behind the place `key`: of lower levels, or of the same
        level and joined later. Lowest level first, last started first."""
        level, joined = int(key[0]), key[1]
        for running in reversed(self._running[level + 1 :]):
            for request in reversed(running.values()):
                if view.is_decoding(request.id):
                    yield request
        if self._last_joined[level] <= joined:
            return
        last = 0.0
        for request in reversed(self._running[level].values()):
            own = self._ranking.key(request.id)[1]
            last = max(last, own)
            if own > joined and view.is_decoding(request.id):
                yield request
        self._last_joined[level] = last

    def _demote(self, request: Request, stay: _Stay) -> bool:
        """Move a running request down a level; False on the last level, where it stays."""
        level = self._level_of[request.id]
        if level + 1 == len(self.quanta_s):
            return False
        del self._running[level][request.id]
        self._level_of[request.id] = level + 1
        self._ranking.move(request.id, self._end_of(level + 1))
        self._run(request, level + 1)
        stay.end_s += self.quanta_s[level + 1]
        return True

    def _run(self, request: Request, level: int) -> None:
        self._running[level][request.id] = request
        joined = self._ranking.key(request.id)[1]
        self._last_joined[level] = max(self._last_joined[level], joined)

    def _end_of(self, level: int) -> tuple[float, float]:
        """The key of the next request to join a level."""
        self._n_joined += 1
        return float(level), float(self._n_joined)

    def _stop(self, request_id: str) -> None:
        if self._stays.pop(request_id, None) is not None:
            del self._running[self._level_of[request_id]][request_id]
