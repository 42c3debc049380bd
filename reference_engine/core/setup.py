"""The setup of an engine: enough to build another engine that makes the same decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from loadgen.errors import UsageError
from loadgen.system.clock import Clock
from reference_engine.core.core import EngineState
from reference_engine.policies.base import Policy
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.state.cost_model import MeasuredSteps, StepCost
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import How, Limits
from reference_engine.state.predictor import MaxTokens, Predictor
from reference_engine.state.steps import StepEvent, StepLog
from reference_engine.state.swap import HostPool


class NotReplayable(UsageError):
    """A log without the data that a replay needs."""


MakePolicy = Callable[[Mapping[str, Any]], Policy]  # from {"kind": …, **parameters}


@dataclass(frozen=True, slots=True)
class Setup:
    """The parameters of an engine, as logged in its `start` event. `cost` and `half_life` (of the
    length predictor) are None for a cost model or predictor of another kind, which cannot be
    logged; `half_life` 0 is the predictor `MaxTokens`."""

    policy: Mapping[str, Any]
    limits: Limits
    n_blocks: int
    block_tokens: int
    prefix_cache: bool
    n_host_blocks: int
    copy_s: float
    preempt: How
    async_depth: int
    is_strict: bool
    cost: StepCost | None
    half_life: float | None
    host_latency_s: float = 0.0
    keeps_prefixes: bool = False

    @classmethod
    def of(cls, state: EngineState) -> Setup:
        view, kv, host = state.view(), state.kv, state.host
        return cls(
            policy=state.policy.described(),
            limits=state.limits,
            n_blocks=kv.n_blocks,
            block_tokens=kv.block_tokens,
            prefix_cache=kv.prefix_cache,
            n_host_blocks=host.n_blocks,
            copy_s=host.copy_s,
            preempt=state.preempt,
            async_depth=state.async_depth,
            is_strict=state.is_strict,
            cost=view.cost if isinstance(view.cost, StepCost) else None,
            half_life=_half_life(view.predictor),
            host_latency_s=host.latency_s,
            keeps_prefixes=host.keeps_prefixes,
        )

    @classmethod
    def read(cls, detail: Mapping[str, Any]) -> Setup:
        """The setup in the detail of a `start` event."""
        limits, preempt = Limits(**detail["limits"]), How(detail["preempt"])
        setup, cost = {**detail, "limits": limits, "preempt": preempt}, detail["cost"]
        if cost is not None:
            pieces = tuple((int(k), piece_s) for k, piece_s in cost.get("seq_pieces", ()))
            measured = tuple(
                MeasuredSteps(
                    steps["kind"], **{key: tuple(v) for key, v in steps.items() if key != "kind"}
                )
                for steps in cost.get("measured", ())
            )
            tuples = {"graph_rows": tuple(cost["graph_rows"]), "seq_pieces": pieces}
            tuples["measured"] = measured
            setup["cost"] = StepCost(**{**cost, **tuples})
        return cls(**setup)

    def event(self, now_s: float) -> StepEvent:
        """The `start` event, with which a log begins."""
        return StepEvent(now_s, 0, "start", asdict(self))

    def build(self, clock: Clock, log: StepLog, make_policy: MakePolicy) -> EngineState:
        """Build an empty engine with this setup. Raises NotReplayable where `cost` or `half_life`
        is None."""
        if self.cost is None or self.half_life is None:
            part = "cost model" if self.cost is None else "length predictor"
            raise NotReplayable(f"the engine had a {part} of its own kind, which no log describes")
        predictor = MaxTokens() if not self.half_life else QuantilePredictor(self.half_life)
        return EngineState(
            self.limits,
            KvPool(self.n_blocks, self.block_tokens, self.prefix_cache),
            clock,
            make_policy(self.policy),
            cost=self.cost,
            predictor=predictor,
            log=log,
            host=HostPool(
                self.n_host_blocks, self.copy_s, self.host_latency_s, self.keeps_prefixes
            ),
            preempt=self.preempt,
            async_depth=self.async_depth,
            is_strict=self.is_strict,
        )


def _half_life(predictor: Predictor) -> float | None:
    if isinstance(predictor, QuantilePredictor):
        return predictor.half_life
    return 0.0 if isinstance(predictor, MaxTokens) else None
