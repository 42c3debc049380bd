"""Earliest deadline first, with requests that can no longer meet their deadline at the end."""

from __future__ import annotations

from math import inf
from typing import Annotated, ClassVar

from pydantic import Field, PrivateAttr

from loadgen.fields import Seconds
from reference_engine.policies.ranked import LatestStarts, RankedPolicy, prefill_s
from reference_engine.state.cost_model import StepShape
from reference_engine.state.plan import Plan, View
from reference_engine.state.sequence import Request


class Deadline(RankedPolicy):
    """All decodes, then prompts by deadline. The deadline of a request is its `deadline_s`, for the
    last token, or else its TTFT SLO after arrival, for the first token. Requests without either get
    `ttft_slo` (seconds).

    Each request has a latest start: its deadline less the time of its prefill by the cost model
    and, for a last token, of the median predicted output at the step time of the batch at arrival.
    When the prompts in prefill will take until after its latest start, a request can no longer meet
    its deadline. It then goes behind all that can, in order of arrival, so that it costs no other
    request a deadline. A request that has waited `starvation` (seconds) since its arrival or its
    last preemption goes before all that arrived later, whether it can meet its deadline or not.
    `token_budget`, `max_num_seqs` and `watermark` are as in `chunked`.

    Source: earliest deadline first (Liu and Layland, JACM 1973), which is optimal while all
    deadlines can be met, without the late jobs that make it collapse under overload.
    """

    kind: ClassVar[str] = "deadline"

    ttft_slo: Annotated[Seconds, Field(gt=0)] = 1.0
    starvation: Annotated[Seconds, Field(gt=0)] = 30.0

    _in_time: LatestStarts = PrivateAttr(default_factory=LatestStarts)

    def on_arrival(self, request: Request, view: View) -> None:
        due_s = self._due_s(request)
        waits = self._ranking.waits
        waits.enter(request, view.now_s)
        overdue_s = waits.queued_s(request.id) + self.starvation
        self._ranking.put(request, (0.0, due_s), overdue_s)
        self._in_time.put(request, due_s - _needed_s(request, view))

    def on_finish(self, request: Request, view: View) -> None:
        super().on_finish(request, view)
        self._in_time.drop(request.id)

    def plan(self, view: View) -> Plan:
        self._put_late_behind(view)
        return super().plan(view)

    def explain(self, request_id: str, view: View) -> dict[str, object]:
        request = view.find(request_id)
        if request is None or request_id not in self._ranking:
            return {}
        return {
            "due_in_s": self._due_s(request) - view.now_s,
            "can_be_kept": self._ranking.key(request_id)[0] == 0.0,
            "overdue_in_s": self._ranking.overdue_s(request_id) - view.now_s,
        }

    def _due_s(self, request: Request) -> float:
        if request.deadline_s is not None:
            return request.deadline_s
        if request.first_token_s is not None:  # preempted after its first token: nothing is due
            return inf
        return request.arrived_s + (request.ttft_slo_s or self.ttft_slo)

    def _put_late_behind(self, view: View) -> None:
        """Rank requests that can no longer meet their deadline behind the others; each only once,
        so that a step costs little."""
        start_s = view.now_s + _prefilling_s(view)
        for request in self._in_time.take_hopeless(view, start_s):
            overdue_s = self._ranking.overdue_s(request.id)
            self._ranking.put(request, (1.0, request.arrived_s), overdue_s)


def _needed_s(request: Request, view: View) -> float:
    """Seconds from the start to the token that is due: the prefill, and all decodes if that is the
    last token."""
    n_tokens, cost = request.n_tokens, view.cost
    if request.deadline_s is None:
        return prefill_s(n_tokens, cost)
    n_decode = len(view.decoding) + 1
    context_tokens = view.decode_context_tokens + n_tokens
    step_s = cost.estimate(StepShape(n_decode, 0, 0.0, n_decode, context_tokens))
    return prefill_s(n_tokens, cost) + view.predictor.predict(request).q50 * step_s


def _prefilling_s(view: View) -> float:
    """Seconds to finish the prompts in prefill."""
    if not view.prefilling:
        return 0.0
    n_tokens, attention = 0, 0.0
    for request in view.prefilling:
        n = len(request.tokens) - request.n_computed
        n_tokens += n
        attention += n * (request.n_computed + n / 2)
    return view.cost.estimate(StepShape(len(view.prefilling), n_tokens, attention))
