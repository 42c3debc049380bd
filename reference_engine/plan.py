"""What a policy sees and what it may answer: `View` in, `Plan` out, and the check in between.

A policy proposes, the core disposes. A plan is only "these requests get so many tokens in this
step"; decoding is one token, a chunk of a prompt is several, and nothing else is special.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from loadgen.errors import SlobenchError
from reference_engine.kv import KvPool
from reference_engine.sequence import Request


class Why(StrEnum):
    """Why a waiting request was not scheduled; the value completes "waited 0.2 s …"."""

    step_in_flight = "for the running step to end"
    no_token_budget = "for token budget"
    no_seq_slot = "for a sequence slot"
    no_kv_blocks = "for KV blocks"
    behind = "behind"
    preempted_by = "after preemption by"


@dataclass(frozen=True, slots=True)
class Cause:
    """A reason and, where another request is to blame, its id."""

    why: Why
    blocker: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can take in one step and in one request, whatever the policy."""

    max_num_seqs: int
    max_step_tokens: int
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class View:
    """The engine as a policy sees it. Read-only by contract: nothing here is a policy's to write.

    `waiting` is in queue order (preempted requests at the head), `running` in order of admission.
    """

    now_s: float
    waiting: Collection[Request]
    running: Collection[Request]
    kv: KvPool
    limits: Limits

    def to_compute(self, request: Request) -> int:
        """Tokens the request can use in this step: for a waiting one, those after its cached
        prefix."""
        if request.blocks:
            return len(request.tokens) - request.n_computed
        return request.n_tokens - self.kv.cached_tokens(request)


class Item(NamedTuple):
    """`n_tokens` of a request in this step."""

    request_id: str
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Running requests that are not named keep their blocks and wait.

    `causes` names why single waiting requests are left out, `rest` why all others are.
    `wait_until_s` is deliberate idling: the core asks again then, or when something arrives.
    """

    items: tuple[Item, ...] = ()
    preempt: tuple[str, ...] = ()
    causes: tuple[tuple[str, Cause], ...] = ()
    rest: Cause = Cause(Why.no_token_budget)
    wait_until_s: float | None = None


class PlanError(SlobenchError):
    """A policy proposed what the engine cannot do; a bug in the policy, never in a request."""


class UnknownRequest(PlanError):
    """A plan names a request that is neither waiting nor running."""


class DuplicateItem(PlanError):
    """A plan names a request twice, or preempts and schedules it."""


class BadTokenCount(PlanError):
    """An item asks for no token, or for more than the request has left."""


class OverLimit(PlanError):
    """A plan exceeds the engine's token or sequence limit."""


class NoProgress(PlanError):
    """Requests wait, nothing runs, and the plan neither schedules one nor names an instant."""


def check_plan(plan: Plan, view: View) -> Plan:
    """The plan, if the engine can carry it out. KV room is not checked here: the core makes it by
    preempting, or leaves an admission out.

    Raises a `PlanError` that names the request and the numbers.
    """
    running = {request.id: request for request in view.running}
    waiting = _named(view.waiting, {item.request_id for item in plan.items} - running.keys())
    for request_id in plan.preempt:
        if request_id not in running:
            raise UnknownRequest(f"plan preempts '{request_id}', which is not running")
    seen = set(plan.preempt)
    if len(seen) < len(plan.preempt):
        raise DuplicateItem(f"plan preempts a request twice: {', '.join(plan.preempt)}")
    n_tokens = 0
    for item in plan.items:
        request_id, n_item = item
        request = running.get(request_id) or waiting.get(request_id)
        most = 0 if request is None else view.to_compute(request)
        if request is None or request_id in seen or not 1 <= n_item <= most:
            raise _item_error(item, request is not None, request_id in seen, most)
        seen.add(request_id)
        n_tokens += n_item
    if n_tokens > view.limits.max_step_tokens:
        raise OverLimit(f"plan has {n_tokens} tokens, limit {view.limits.max_step_tokens}")
    n_seqs = len(running) - len(plan.preempt) + len(waiting)
    if waiting and n_seqs > view.limits.max_num_seqs:
        raise OverLimit(f"plan makes {n_seqs} sequences run, limit {view.limits.max_num_seqs}")
    if not plan.items and plan.wait_until_s is None and (view.running or view.waiting):
        raise NoProgress(
            f"{len(view.waiting)} wait, {len(view.running)} run, and the plan is empty without "
            "wait_until_s"
        )
    return plan


def _item_error(item: Item, is_known: bool, is_seen: bool, most: int) -> PlanError:
    name = item.request_id
    if not is_known:
        return UnknownRequest(f"plan schedules '{name}', which neither waits nor runs")
    if is_seen:
        return DuplicateItem(f"plan names '{name}' twice")
    return BadTokenCount(f"plan gives '{name}' {item.n_tokens} tokens, it can use 1-{most}")


def _named(waiting: Collection[Request], wanted: set[str]) -> dict[str, Request]:
    """The wanted ones of the queue; stops at the last of them, since they are nearly always at
    its head."""
    found: dict[str, Request] = {}
    if wanted:
        for request in waiting:
            if request.id in wanted:
                found[request.id] = request
                if len(found) == len(wanted):
                    break
    return found
