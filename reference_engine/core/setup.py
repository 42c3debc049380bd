"""What an engine is, besides what it is asked: enough to build its like and get like decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from loadgen.clock import Clock
from loadgen.errors import UsageError
from reference_engine.core.core import EngineState
from reference_engine.policies.base import POLICIES, Policy
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.state.cost_model import StepCost
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import How, Limits
from reference_engine.state.predictor import MaxTokens, Predictor
from reference_engine.state.steps import StepEvent, StepLog
from reference_engine.state.swap import HostPool


class NotReplayable(UsageError):
    """A log that does not hold all that a replay needs."""


MakePolicy = Callable[[Mapping[str, Any]], Policy]  # from {"kind": …, **knobs}


@dataclass(frozen=True, slots=True)
class Setup:
    """`cost` and `half_life` (of the length predictor) are None where the engine had one of
    another kind, which cannot be written down; `half_life` 0 is no predictor at all."""

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
        )

    @classmethod
    def read(cls, detail: Mapping[str, Any]) -> Setup:
        """Of a `start` event."""
        cost = detail["cost"]
        if cost is not None:
            cost = StepCost(**{**cost, "graph_rows": tuple(cost["graph_rows"])})
        return cls(
            **{
                **detail,
                "limits": Limits(**detail["limits"]),
                "preempt": How(detail["preempt"]),
                "cost": cost,
            }
        )

    def event(self, now_s: float) -> StepEvent:
        """The event that a log begins with."""
        return StepEvent(now_s, 0, "start", asdict(self))

    def build(self, clock: Clock, log: StepLog, make_policy: MakePolicy) -> EngineState:
        """An engine like it, with nothing in it. Raises NotReplayable where that cannot be."""
        if self.cost is None or self.half_life is None:
            what = "cost model" if self.cost is None else "length predictor"
            raise NotReplayable(f"the engine had a {what} of its own kind, which no log describes")
        predictor = MaxTokens() if not self.half_life else QuantilePredictor(self.half_life)
        return EngineState(
            self.limits,
            KvPool(self.n_blocks, self.block_tokens, self.prefix_cache),
            clock,
            make_policy(self.policy),
            cost=self.cost,
            predictor=predictor,
            log=log,
            host=HostPool(self.n_host_blocks, self.copy_s),
            preempt=self.preempt,
            async_depth=self.async_depth,
            is_strict=self.is_strict,
        )


def build_policy(description: Mapping[str, Any]) -> Policy:
    """The batching mode of a description. Raises UnknownKind for one that is not loaded."""
    return POLICIES.build(description)


def _half_life(predictor: Predictor) -> float | None:
    if isinstance(predictor, QuantilePredictor):
        return predictor.half_life
    return 0.0 if isinstance(predictor, MaxTokens) else None
