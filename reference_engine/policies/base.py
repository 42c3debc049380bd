"""What a batching policy is: one method, three optional hooks, parameters as fields."""

from __future__ import annotations

from abc import ABC, abstractmethod

from loadgen.registry import Plugin, Registry
from reference_engine.plan import Plan, View
from reference_engine.sequence import Request


class Policy(Plugin, ABC):
    """A batching mode. Deterministic: no clock, no randomness, no torch; the same view gives the
    same plan, so a live run can be replayed in the simulator."""

    @abstractmethod
    def plan(self, view: View) -> Plan:
        """The next step. Called whenever a request waits or runs; must make progress (see
        `plan.NoProgress`)."""

    # The hooks are optional, hence neither abstract nor doing anything.
    def on_arrival(self, request: Request, view: View) -> None:
        """A request joined the queue."""

    def on_step_end(self, view: View) -> None:
        """A step was carried out and its tokens are committed."""

    def on_finish(self, request: Request, view: View) -> None:
        """A request is over, whichever way."""


POLICIES: Registry[Policy] = Registry("slobench.policies", "batching mode")
