"""A multi-level feedback queue: whoever used up its time goes down a level."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from loadgen.units import Seconds
from reference_engine.policies.base import Policy
from reference_engine.policies.sharing import causes_of, displace, share_out
from reference_engine.policies.sorted_queue import Ranking
from reference_engine.policies.step_budget import StepBudget
from reference_engine.state.cost_model import StepShape
from reference_engine.state.plan import Plan, Preemption, View
from reference_engine.state.sequence import Request
from reference_engine.state.steps import StepRecord


class Mlfq(Policy):
    """Level i has a quantum of `base_quantum` · `ratio`^i seconds of steps. A request joins the
    first level whose quantum its prompt can be read in (skip-join), and goes down one level, to
    its end, each time it used up its quantum. All decodes run; prompts are read and requests
    admitted by level, then in the order of joining it. Nothing is predicted but the time to read a
    prompt.

    While a request is blocked, decoding ones of lower levels give way to it (`preempt`), lowest
    level first; their KV is swapped or recomputed, whichever is cheaper. Whoever waited
    `starvation` in the queue goes first, and starts again at the top.

    Source: FastServe (arXiv 2305.05920) §4.1, without its proactive swapping.
    """

    kind: ClassVar[str] = "mlfq"
    is_aged: ClassVar[bool] = True
    is_work_conserving: ClassVar[bool] = True

    token_budget: int = Field(default=2048, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    watermark: float = Field(default=0.01, ge=0, lt=1)
    base_quantum: Annotated[Seconds, Field(gt=0)] = 0.01
    ratio: float = Field(default=2.0, gt=1, le=1000)
    n_levels: int = Field(default=10, ge=1, le=64)
    starvation: Annotated[Seconds, Field(gt=0)] = 3.0
    preempt: bool = True

    _levels: Levels = PrivateAttr()
    _step_s: float = PrivateAttr(default=0.0)  # how long the last step took
    _started: list[Request] = PrivateAttr(default_factory=list)
    _skipped: list[str] = PrivateAttr(default_factory=list)

    def model_post_init(self, context: object) -> None:
        self._levels = Levels(self.base_quantum, self.ratio, self.n_levels)

    def on_arrival(self, request: Request, view: View) -> None:
        overdue_s = request.arrived_s + self.starvation
        self._levels.enter(request, self._read_s(request, view), overdue_s)
        if view.is_running(request.id):  # taken over from another policy
            self._started.append(request)

    def on_requeue(self, request: Request, view: View) -> None:
        self._levels.wait(request, view.now_s + self.starvation)

    def on_finish(self, request: Request, view: View) -> None:
        self._levels.drop(request.id)

    def plan(self, view: View) -> Plan:
        room = StepBudget.beside_decodes(
            view,
            tokens=self.token_budget,
            max_num_seqs=self.max_num_seqs,
            watermark=self.watermark,
        )
        levels = self._levels
        ranking = levels.ranking
        blocked = share_out(room, ranking.reading(view), ranking.waiting(view))
        causes, rest = causes_of(blocked)
        preempt: tuple[Preemption, ...] = ()
        if self.preempt and blocked is not None and blocked.is_full:
            head = blocked.request.id
            level = 0 if ranking.is_overdue(head, view.now_s) else levels.level(head)
            # They produced a token since they were admitted: giving way cannot go on for ever.
            preempt = displace(view, room, blocked, levels.running_below(level, view))
        named = {item.request_id for item in room.items}
        self._started += room.admitted
        self._skipped = [other.id for other in view.prefilling if other.id not in named]
        return Plan(tuple(room.items), decode_all=True, preempt=preempt, causes=causes, rest=rest)

    def on_step_end(self, record: StepRecord, view: View) -> None:
        levels = self._levels
        for request in self._started:
            if view.is_running(request.id):
                is_at_top = levels.ranking.is_overdue(request.id, record.t_s)
                levels.begin(request, self._read_s(request, view), is_at_top)
        levels.serve(record.duration_s, self._skipped)
        self._started, self._step_s = [], record.duration_s

    def victims(self, view: View, request: Request, need_blocks: int) -> Iterable[str]:
        return self._levels.ranking.worse(view, request)

    def explain(self, request_id: str, view: View) -> dict[str, Any]:
        if request_id not in self._levels.ranking:
            return {}
        levels = self._levels
        level = levels.level(request_id)
        return {
            "level": level,
            "quantum_s": levels.quanta_s[level],
            "quantum_left_s": levels.left_s(request_id),
        }

    def _read_s(self, request: Request, view: View) -> float:
        """Seconds to read all tokens of a request that holds none: as the cost model says, but
        not less than so many steps take."""
        n = request.n_tokens
        n_steps = -(-n // self.token_budget)
        return max(view.cost.estimate(StepShape(1, n, n * n / 2)), n_steps * self._step_s)


@dataclass(slots=True)
class _Stay:
    """A stay in the batch: its number, and when its quantum ends on the clock of served time."""

    n: int
    end_s: float


class Levels:
    """Level i has a quantum of `base_s` · `ratio`^i seconds. On a level, requests are in the order
    in which they joined it.

    Running requests are served at one rate, so that the end of a quantum is an instant on a clock
    that adds up step durations, `served_s`: a step costs only those whose quantum it ends.
    """

    def __init__(self, base_s: float, ratio: float, n_levels: int) -> None:
        self.quanta_s = [base_s * ratio**level for level in range(n_levels)]
        self.ranking = Ranking()
        self.served_s = 0.0
        self._level_of: dict[str, int] = {}
        self._running: list[dict[str, Request]] = [{} for _ in range(n_levels)]
        self._stays: dict[str, _Stay] = {}
        self._ends: list[tuple[float, int, Request]] = []  # a heap; may be too early, or void
        self._n_stays = self._n_joined = 0

    def level(self, request_id: str) -> int:
        return self._level_of[request_id]

    def left_s(self, request_id: str) -> float | None:
        """What is left of its quantum; None while it does not run."""
        stay = self._stays.get(request_id)
        return None if stay is None else stay.end_s - self.served_s

    def enter(self, request: Request, read_s: float, overdue_s: float) -> None:
        """A new request joins the first level in whose quantum its prompt can be read."""
        fits = (level for level, quantum_s in enumerate(self.quanta_s) if quantum_s >= read_s)
        self._level_of[request.id] = next(fits, len(self.quanta_s) - 1)
        self.wait(request, overdue_s)

    def wait(self, request: Request, overdue_s: float) -> None:
        """It waits, at the end of its level."""
        self._stop(request.id)
        self._n_joined += 1
        key = float(self._level_of[request.id]), float(self._n_joined)
        self.ranking.put(request, key, overdue_s)

    def begin(self, request: Request, read_s: float, is_at_top: bool) -> None:
        """It was admitted, with a quantum that is enough to read what there is; `is_at_top` moves
        it to the first level."""
        if is_at_top:
            self._level_of[request.id] = 0
        level = self._level_of[request.id]
        self._running[level][request.id] = request
        self._n_stays += 1
        end_s = self.served_s + max(self.quanta_s[level], read_s)
        self._stays[request.id] = _Stay(self._n_stays, end_s)
        heappush(self._ends, (end_s, self._n_stays, request))

    def drop(self, request_id: str) -> None:
        self.ranking.drop(request_id)
        self._stop(request_id)
        self._level_of.pop(request_id, None)

    def serve(self, duration_s: float, skipped: Iterable[str]) -> None:
        """All running requests but the skipped ones took part in a step. Those whose quantum is
        used up go to the end of the next level."""
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

    def running_below(self, level: int, view: View) -> Iterator[Request]:
        """Decoding requests of lower levels than this one, lowest first, last joined first."""
        for running in reversed(self._running[level + 1 :]):
            for request in reversed(running.values()):
                if view.is_decoding(request.id):
                    yield request

    def _demote(self, request: Request, stay: _Stay) -> bool:
        """One level down; False on the last, where it may stay."""
        level = self._level_of[request.id]
        if level + 1 == len(self.quanta_s):
            return False
        del self._running[level][request.id]
        self._level_of[request.id] = level + 1
        self._running[level + 1][request.id] = request
        self._n_joined += 1
        self.ranking.move(request.id, (float(level + 1), float(self._n_joined)))
        stay.end_s += self.quanta_s[level + 1]
        return True

    def _stop(self, request_id: str) -> None:
        if self._stays.pop(request_id, None) is not None:
            del self._running[self._level_of[request_id]][request_id]
