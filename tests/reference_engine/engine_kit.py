"""What the engine's tests share: an engine in one line, and the oracle of its toy tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.system.clock import VirtualClock
from reference_engine.core.core import EngineState, step
from reference_engine.executors.base import EXECUTORS, Executor, Site
from reference_engine.model.zoo import resolve
from reference_engine.policies.base import POLICIES, Policy
from reference_engine.state.batch import TokenEvent
from reference_engine.state.cost_model import CostModel
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import How, Limits, Plan
from reference_engine.state.predictor import Predictor
from reference_engine.state.sequence import Request, Sampling
from reference_engine.state.steps import StepLog
from reference_engine.state.swap import HostPool


@dataclass
class Rig:
    """An engine on a virtual clock."""

    state: EngineState
    executor: Executor
    clock: VirtualClock

    @property
    def policy(self) -> Policy:
        return self.state.policy

    @property
    def plan(self) -> Plan:
        """What the policy would do now."""
        return self.policy.plan(self.state.view())

    @property
    def shares(self) -> dict[str, int]:
        """Tokens that the policy would give to each request now, decodes first."""
        plan = self.plan
        named = {item.request_id: item.n_tokens for item in plan.items}
        left_out = {*named, *plan.hold, *(entry.request_id for entry in plan.preempt)}
        decoding = self.state.view().decoding if plan.decode_all else ()
        return {req.id: 1 for req in decoding if req.id not in left_out} | named

    def admit(self, *requests: Request) -> None:
        for request in requests:
            self.state.admit(request)

    def step(self) -> list[TokenEvent]:
        events = list(step(self.state, self.executor))
        self.state.check()
        return events

    def drain(self, max_steps: int = 20_000) -> list[TokenEvent]:
        """Steps until nothing is left; fails rather than looping for ever."""
        events: list[TokenEvent] = []
        for _ in range(max_steps):
            if not self.state.has_work:
                assert self.state.kv.n_free == self.state.kv.n_blocks
                assert self.state.host.n_free == self.state.host.n_blocks
                return events
            events += self.step()
        raise AssertionError(f"still work after {max_steps} steps")


def rig(
    n_blocks: int = 256,
    max_model_len: int = 1024,
    max_num_seqs: int = 64,
    max_step_tokens: int = 1 << 20,
    executor: str = "toy",
    prefix_cache: bool = True,
    executor_args: dict[str, object] | None = None,
    policy: str | Policy = "chunked",
    cost: CostModel | None = None,
    predictor: Predictor | None = None,
    log: StepLog | None = None,
    n_host_blocks: int = 0,
    host_prefixes: bool = False,
    how: How = How.auto,
    async_depth: int = 0,
    is_strict: bool = True,
    **knobs: object,
) -> Rig:
    """An engine of a mode, chunked by default; `knobs` are the policy's."""
    clock = VirtualClock()
    limits = Limits(max_num_seqs, max_step_tokens, max_model_len, 320)
    if isinstance(policy, str):
        policy = POLICIES.build({"kind": policy, **knobs})
    site = Site(
        resolve("nano"), n_blocks, 16, max_model_len, clock.advance, n_host_blocks, max_num_seqs
    )
    runner = EXECUTORS.build({"kind": executor, **(executor_args or {})}).build(site)
    kv = KvPool(n_blocks, prefix_cache=prefix_cache)
    state = EngineState(
        limits, kv, clock, policy, cost=cost, predictor=predictor, log=log,
        host=HostPool(runner.caps.n_host_blocks, runner.caps.copy_s, keeps_prefixes=host_prefixes),
        preempt=how,
        async_depth=async_depth, is_strict=is_strict,
    )  # fmt: skip
    return Rig(state, runner, clock)


def request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    arrived_s: float = 0.0,
    min_tokens: int = 0,
    stop_ids: Iterable[int] = (),
    sampling: Sampling | None = None,
    tenant: str = "default",
    **fields: Any,
) -> Request:
    return Request(
        id=name,
        tokens=list(prompt),
        max_tokens=max_tokens,
        arrived_s=arrived_s,
        min_tokens=min_tokens,
        stop_ids=frozenset(stop_ids),
        sampling=sampling or Sampling(),
        tenant=tenant,
        **fields,
    )


def toy_output(prompt: Sequence[int], n: int, eos_every: int = 0, stop: int = 0) -> list[int]:
    """What the toy model must answer, straight from its definition and without any paging: a
    64-bit hash of all tokens so far (splitmix64's finaliser), modulo 256, or the stop token where
    the hash says so."""
    state, out, mask = 0, [], 2**64 - 1
    tokens = list(prompt)
    for token in tokens:
        state = _mix(state, token, mask)
    for _ in range(n):
        is_stop = eos_every and (state >> 8) % eos_every == 0
        out.append(stop if is_stop else state % 256)
        state = _mix(state, out[-1], mask)
    return out


def _mix(state: int, token: int, mask: int) -> int:
    z = (state * 11400714819323198485 + token + 1) % 2**64
    z = ((z ^ (z >> 30)) * 13787848793156543929) & mask
    z = ((z ^ (z >> 27)) * 10723151780598845931) & mask
    return z ^ (z >> 31)
