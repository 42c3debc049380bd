"""Earliest deadline first, among those that can still be kept."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from loadgen.units import Seconds
from reference_engine.policies.base import Policy
from reference_engine.policies.sharing import causes_of, share_out
from reference_engine.policies.sorted_queue import Ranking, SortedQueue
from reference_engine.policies.step_budget import StepBudget
from reference_engine.state.cost_model import StepShape
from reference_engine.state.plan import Plan, View
from reference_engine.state.sequence import Request


class Deadline(Policy):
    """All decodes, then prompts by deadline. A request's deadline is `deadline_s`, for its last
    token; without one, its TTFT SLO (or else this policy's `ttft_slo`) after arrival, for its
    first.

    Each deadline has a latest start: by the cost model, less the time to read its prompt and, for
    a last token, to write the median predicted output at the pace of the batch it arrived at. Once
    the prompts being read now would take until after that, the request cannot be kept and goes
    behind all that can, in order of arrival, so that its lateness costs nobody else a deadline.
    Whoever waited `starvation` goes before all who came later, kept or not.

    Source: earliest deadline first (Liu and Layland, JACM 1973), which is optimal while all
    deadlines can be met, without the late jobs that make it collapse under overload.
    """

    kind: ClassVar[str] = "deadline"
    is_aged: ClassVar[bool] = True
    is_work_conserving: ClassVar[bool] = True

    token_budget: int = Field(default=2048, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    watermark: float = Field(default=0.01, ge=0, lt=1)
    ttft_slo: Annotated[Seconds, Field(gt=0)] = 1.0
    starvation: Annotated[Seconds, Field(gt=0)] = 30.0

    _ranking: Ranking = PrivateAttr(default_factory=Ranking)
    _latest: SortedQueue = PrivateAttr(
        default_factory=SortedQueue
    )  # by latest start: those that can be kept

    def on_arrival(self, request: Request, view: View) -> None:
        due_s = self._due_s(request)
        latest_s = due_s - _need_s(request, view)
        overdue_s = request.arrived_s + self.starvation
        self._ranking.put(request, (0.0, due_s), overdue_s)
        self._latest.put(request, (latest_s,))

    def on_finish(self, request: Request, view: View) -> None:
        self._ranking.drop(request.id)
        self._latest.drop(request.id)

    def plan(self, view: View) -> Plan:
        room = StepBudget.beside_decodes(
            view,
            tokens=self.token_budget,
            max_num_seqs=self.max_num_seqs,
            watermark=self.watermark,
        )
        self._give_up_late(view)
        ranking = self._ranking
        causes, rest = causes_of(share_out(room, ranking.reading(view), ranking.waiting(view)))
        return Plan(tuple(room.items), decode_all=True, causes=causes, rest=rest)

    def victims(self, view: View, request: Request, need_blocks: int) -> Iterable[str]:
        return self._ranking.worse(view, request)

    def explain(self, request_id: str, view: View) -> dict[str, Any]:
        request = view.find(request_id)
        if request is None or request_id not in self._ranking:
            return {}
        return {
            "due_in_s": self._due_s(request) - view.now_s,
            "can_be_kept": self._ranking.key(request_id)[0] == 0.0,
            "overdue_in_s": self._ranking.patience.until_s(request_id) - view.now_s,
        }

    def _due_s(self, request: Request) -> float:
        if request.deadline_s is not None:
            return request.deadline_s
        if request.first_token_s is not None:  # preempted; nothing more was promised
            return inf
        return request.arrived_s + (request.ttft_slo_s or self.ttft_slo)

    def _give_up_late(self, view: View) -> None:
        """Put those that cannot be kept any more behind; each once, so that a step costs little."""
        start_s = view.now_s + _ahead_s(view)
        late = []
        for (latest_s,), request in self._latest.walk(view):
            if latest_s >= start_s:
                break
            late.append(request)
        for request in late:
            self._latest.drop(request.id)
            overdue_s = self._ranking.patience.until_s(request.id)
            self._ranking.put(request, (1.0, request.arrived_s), overdue_s)


def _need_s(request: Request, view: View) -> float:
    """Seconds from the start to what is due: reading, and writing where the last token is."""
    n, cost = request.n_tokens, view.cost
    read_s = cost.estimate(StepShape(1, n, n * n / 2))
    if request.deadline_s is None:
        return read_s
    n_decode = len(view.decoding) + 1
    context_tokens = view.decode_context_tokens + n
    step_s = cost.estimate(StepShape(n_decode, 0, 0.0, n_decode, context_tokens))
    return read_s + view.predictor.predict(request).q50 * step_s


def _ahead_s(view: View) -> float:
    """Seconds to finish the prompts that are being read."""
    if not view.prefilling:
        return 0.0
    n_tokens, attention = 0, 0.0
    for request in view.prefilling:
        n = len(request.tokens) - request.n_computed
        n_tokens += n
        attention += n * (request.n_computed + n / 2)
    return view.cost.estimate(StepShape(len(view.prefilling), n_tokens, attention))
