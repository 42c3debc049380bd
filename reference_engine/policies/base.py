"""What a batching policy is: one method, optional hooks, parameters as fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Self

from pydantic import ConfigDict

from loadgen.registry import Plugin, Registry
from reference_engine.state.plan import Plan, View
from reference_engine.state.sequence import Request
from reference_engine.state.steps import StepRecord


class Policy(Plugin, ABC):
    """A batching mode. Deterministic: no clock, no randomness, no torch; the same view gives the
    same plan, so a live run can be replayed in the simulator.

    What it remembers between steps lives in pydantic `PrivateAttr`s; an engine works with a
    `fresh` copy, so that one instance may be given to many.

    Two claims may be made, and `policy_check` holds a policy to them: `is_work_conserving`, no step
    is idle while a request could run; `is_aged`, whoever has waited `starvation` (a field, seconds)
    goes before all who came later. `is_in_order` says that waiting requests are started in the
    order of the queue, which is what forecasts assume.
    """

    # Scores and counters of infinity or NaN cannot be ordered.
    model_config = ConfigDict(allow_inf_nan=False)

    is_work_conserving: ClassVar[bool] = False
    is_aged: ClassVar[bool] = False
    is_in_order: ClassVar[bool] = False

    @abstractmethod
    def plan(self, view: View) -> Plan:
        """The next step. Called whenever a request waits or runs; must make progress (see
        `plan.NoProgress`)."""

    # The hooks are optional, hence neither abstract nor doing anything.
    def check_arrival(self, request: Request, view: View) -> None:
        """Asked before a request joins the queue. Raises AdmissionError with `retry_after_s` to
        refuse it for now (a 429)."""

    def on_arrival(self, request: Request, view: View) -> None:
        """A request joined the queue. Also called once for every waiting and running request when
        this policy takes over a working engine."""

    def on_requeue(self, request: Request, view: View) -> None:
        """A request is back in the queue, or its place in it changed: preempted, its tenant
        resumed, its priority changed. As a new arrival unless overridden."""
        self.on_arrival(request, view)

    def on_step_end(self, record: StepRecord, view: View) -> None:
        """A step was carried out and its tokens are committed."""

    def on_finish(self, request: Request, view: View) -> None:
        """A request is over, whichever way."""

    def victims(self, view: View, request: Request, need_blocks: int) -> Iterable[str]:
        """Running requests to preempt, in this order, until `request` gets the blocks it needs.

        The core takes as many as it needs, passes over those that may not be preempted, and goes
        on with those admitted after `request`, last one first. That is also the default.
        """
        return ()

    def explain(self, request_id: str, view: View) -> dict[str, Any]:
        """What the policy thinks of a request, in JSON's types: its score, level, counter."""
        return {}

    def described(self) -> dict[str, Any]:
        """`{"kind": …}` and the parameters, in JSON's types: `POLICIES.build` makes it again."""
        return {"kind": self.kind, **self.model_dump(mode="json", by_alias=True)}

    def fresh(self) -> Self:
        """The same parameters and nothing remembered."""
        return type(self).model_validate(self.model_dump(mode="json", by_alias=True))


POLICIES: Registry[Policy] = Registry("slobench.policies", "batching mode")
