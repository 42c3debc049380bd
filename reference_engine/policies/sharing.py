"""A step shared out in order of rank, among prompts being read and requests still waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reference_engine.policies.sorted_queue import Key
from reference_engine.policies.step_budget import Causes, Reserve, StepBudget
from reference_engine.state.plan import Cause, Preemption, View, Why
from reference_engine.state.sequence import Request

Ranked = tuple[Key, Request]


@dataclass(frozen=True, slots=True)
class Blocked:
    """The first waiting request that could not be taken in, and why."""

    rank: Key
    request: Request
    cause: Cause

    @property
    def is_full(self) -> bool:
        """Whether it is others' slots or KV blocks that it lacks, rather than tokens."""
        return self.cause.why in (Why.no_seq_slot, Why.no_kv_blocks)


def share_out(
    room: StepBudget,
    reading: Sequence[Ranked],
    waiting: Iterable[Ranked],
    reserve: Reserve = Reserve.watermark,
) -> Blocked | None:
    """Give the step's tokens to both, both sorted by rank, lowest first. Nobody overtakes: once one
    cannot be taken in, no other is, and what is left goes to prompts being read."""
    n_read, blocked = 0, None
    for rank, request in waiting:
        while n_read < len(reading) and reading[n_read][0] < rank:
            room.proceed(reading[n_read][1])
            n_read += 1
        cause = room.admit(request, reserve=reserve)
        if cause is not None:
            blocked = Blocked(rank, request, cause)
            break
    for _, request in reading[n_read:]:
        room.proceed(request)
    room.proceed_anyhow()
    return blocked


def causes_of(blocked: Blocked | None) -> tuple[Causes, Cause]:
    """`Plan.causes` and `Plan.rest`. Where the first lacks KV blocks, the others wait for it."""
    if blocked is None:
        return (), Cause(Why.no_token_budget)
    if blocked.cause.why is not Why.no_kv_blocks:
        return (), blocked.cause
    return (
        ((blocked.request.id, blocked.cause),),
        Cause(Why.lower_priority, blocked.request.id),
    )


def displace(
    view: View, room: StepBudget, blocked: Blocked, candidates: Iterable[Request]
) -> tuple[Preemption, ...]:
    """The first of `candidates`, as many as the blocked request needs gone; nobody where all of
    them would not be enough, or where nobody would be left to compute.

    A step that preempts admits nobody, so a step that admits displaces nobody.
    """
    if room.admitted:
        return ()
    n_needed, chosen = _missing_blocks(room, blocked.cause), []
    for victim in candidates:
        chosen.append(Preemption(victim.id, by=blocked.request.id))
        n_needed -= len(victim.blocks)
        if n_needed <= 0:
            break
    n_left = len(view.decoding) - len(chosen) + len(room.items)
    return tuple(chosen) if n_needed <= 0 < n_left else ()


def _missing_blocks(room: StepBudget, cause: Cause) -> float:
    if cause.why is Why.no_seq_slot:
        return 1.0  # any victim will do
    return (cause.want or 0.0) + room.spare - (cause.have or 0.0)
