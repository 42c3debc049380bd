"""Contract of a batching policy: one method, optional hooks, parameters as fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import islice
from typing import ClassVar, Self

from pydantic import ConfigDict

from loadgen.manifest.json_section import JsonObject
from loadgen.registry import Plugin, Registry
from reference_engine.state.plan import How, Item, Plan, View
from reference_engine.state.sequence import Request
from reference_engine.state.steps import StepRecord


class Policy(Plugin, ABC):
    """A batching mode.

    A policy is deterministic: it reads no clock, draws no random numbers and imports no torch.
    Equal views give equal plans, so a live run can be replayed in the simulator. State that lasts
    from step to step is kept in pydantic `PrivateAttr`s. An engine plans with a `fresh` copy, so an
    instance can be passed to several engines.

    Three class variables are claims about the order of service. `is_work_conserving`: no step is
    idle while a request could run. `is_aged`: a request that has waited `starvation` (a field,
    seconds) goes before all that arrived later. `policy_check` tests these two. `is_in_order`:
    waiting requests are started in the order of the queue, as start forecasts assume.

    A fourth, `counts_decodes`, makes simulations faster: of decoding requests the policy reads only
    their number, their sums in the view, and fields that never change. Together with `is_steady`
    it spares the simulator to plan and update every request in every step.
    """

    # Scores and counters of infinity or NaN cannot be ordered.
    model_config = ConfigDict(allow_inf_nan=False)

    is_work_conserving: ClassVar[bool] = False
    is_aged: ClassVar[bool] = False
    is_in_order: ClassVar[bool] = False
    counts_decodes: ClassVar[bool] = False

    @property
    def keeps_order(self) -> bool:
        """`is_in_order` with the parameters of this instance."""
        return self.is_in_order

    @property
    def is_answering_at_end(self) -> bool:
        """Whether tokens are delivered only when the whole batch has ended. A request then ends
        with the last request of its batch, although its row and memory are free earlier."""
        return False

    @abstractmethod
    def plan(self, view: View) -> Plan:
        """The next step. Called whenever a request waits or runs; the plan must make progress (see
        `plan.NoProgress`)."""

    def is_steady(self, view: View) -> bool:
        """Whether the plan of all following steps is the plan of this step, which computes a token
        of every decoding request and nothing else, until a request arrives, ends or is preempted.
        A simulator then takes these steps at once; `on_step_end` must not be overridden."""
        return False

    def prompt_piece(self, view: View) -> int | None:
        """The most tokens of a prompt that each following step computes while that request is the
        only request; None where this follows from more. A simulator then takes these steps at once;
        `on_step_end` must not be overridden."""
        return None

    # Optional hooks: not abstract, and without effect by default.
    def check_arrival(self, request: Request, view: View) -> None:
        """Called before a request joins the queue. Raises AdmissionError with `retry_after_s` to
        refuse the request for now (HTTP 429)."""

    def on_arrival(self, request: Request, view: View) -> None:
        """A request has joined the queue. When this policy replaces another in a running engine,
        the hook is called once for each running and each waiting request."""

    def on_requeue(self, request: Request, view: View) -> None:
        """A request is back in the queue, or its place in the queue has changed: it was preempted,
        its tenant was resumed, or its priority was changed. Handled as a new arrival unless
        overridden."""
        self.on_arrival(request, view)

    def on_step_end(self, record: StepRecord, view: View) -> None:
        """A step is complete and its tokens are committed."""

    def on_finish(self, request: Request, view: View) -> None:
        """A request has finished or was cancelled."""

    def victims(self, view: View, request: Request, need_blocks: int) -> Iterable[str]:
        """Ids of running requests to preempt, in this order, until `request` has the blocks it
        needs.

        The core takes as many as it needs and skips those that may not be preempted. If they are
        not enough, it continues with the requests admitted after `request`, last admitted first; by
        default it takes only those.
        """
        return ()

    def explain(self, request_id: str, view: View) -> JsonObject:
        """The policy's own figures for a request (score, level, counter, …), in JSON types."""
        return {}

    def described(self) -> JsonObject:
        """`{"kind": …}` and the parameters, in JSON types: the input of `POLICIES.build`."""
        return {"kind": self.kind, **self.model_dump(mode="json", by_alias=True)}

    def fresh(self) -> Self:
        """A policy with the same parameters and no state."""
        return type(self).model_validate(self.model_dump(mode="json", by_alias=True))


def is_for_mode(mode: type[Policy], key: str, value: object) -> bool:
    """Whether a setting with a name that engine and mode share belongs to the mode: `preempt` is
    the treatment of preempted KV for the engine (`How`), and whether to preempt for the mode."""
    return key == "preempt" and key in mode.model_fields and value not in {*How}


POLICIES: Registry[Policy] = Registry("slobench.policies", "batching mode")


def first_come(view: View, *, admits: bool = True) -> Plan:
    """The plan of a step in which the policy's own cannot be carried out. It is always valid: all
    decodes, then unfinished prompts, then (if it `admits`) the head of the queue, up to the
    engine's step limit."""
    budget = view.limits.max_step_tokens
    if len(view.decoding) > budget:
        return Plan(tuple(Item(request.id, 1) for request in islice(view.decoding, budget)))
    budget -= len(view.decoding)
    items: list[Item] = []
    for request in view.prefilling:
        n_tokens = min(view.to_compute(request), budget)
        if n_tokens:
            items.append(Item(request.id, n_tokens))
            budget -= n_tokens
    head = next(iter(view.waiting), None) if admits else None
    if head is not None and budget and len(view.running) < view.limits.max_num_seqs:
        items.append(Item(head.id, min(view.to_compute(head), budget)))
    return Plan(tuple(items), decode_all=True, action="fallback")
