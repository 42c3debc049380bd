"""The contract of batching policies: a `View` of the engine in, a `Plan` out, and its check.

A policy proposes, the core disposes. A plan only sets how many tokens each request gets in the
next step: 1 for a decode, several for a piece of a prompt. Nothing else is special.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from loadgen.errors import SlobenchError
from reference_engine.state.cost_model import NO_PADDING, CostModel, Padding, StepCost
from reference_engine.state.kv import KvPool
from reference_engine.state.predictor import MaxTokens, Predictor
from reference_engine.state.queues import Queues
from reference_engine.state.sequence import Request


class Why(StrEnum):
    """Reasons for which a waiting request was not scheduled. The name is the key in logs and
    metrics, the value the label that users read; `explain` adds the preposition."""

    step_in_flight = "step in flight"
    no_token_budget = "token budget"
    no_seq_slot = "sequence slots"
    no_kv_blocks = "KV blocks"
    behind = "behind"
    lower_priority = "lower priority than"
    tenant_budget = "tenant's budget"
    bucket_not_ready = "bucket not full"
    window_open = "batching window open"
    static_group_running = "running batch"
    smdp_wait = "wait chosen by the policy table"
    preempted_by = "preempted by"
    admission_limit = "admission limit"
    paused_by_operator = "paused by the operator"
    kv_transfer = "transfer of its KV"
    replica_failed = "failure of its replica"


@dataclass(frozen=True, slots=True)
class Cause:
    """A reason for waiting and, where another request is the cause, its id (`blocker`).

    Two causes are equal when these two fields are, so that waiting is charged to few causes. The
    other fields are details of the moment: the instant (s) until which the request waits, and how
    much is available of the amount wanted.
    """

    why: Why
    blocker: str = ""
    until_s: float | None = field(default=None, compare=False)
    have: float | None = field(default=None, compare=False)
    want: float | None = field(default=None, compare=False)

    def __hash__(self) -> int:
        # As generated, without two calls into the enumeration: causes are looked up for every
        # waiting request.
        return hash((self.why._value_, self.blocker))


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step and the largest request that the engine accepts, whatever the policy."""

    max_num_seqs: int
    max_step_tokens: int
    max_model_len: int
    vocab_size: int


def _no_segments(request_id: str, segment: str) -> None:
    """`assign` of a view without an engine."""


_NO_COST, _NO_HISTORY = StepCost(), MaxTokens()


@dataclass(slots=True, eq=False)
class View:
    """The engine as a policy sees it: always the present state, and read-only by contract. Only
    `assign` changes anything: `assign(request_id, segment)` makes the request wait for the cause
    of that segment (`Plan.segments`) until it is assigned another; "" is the segment of
    `Plan.rest`.

    `is_source_closed` is true when no request will arrive any more; only a simulator sets it.
    """

    now_s: float
    _queues: Queues
    kv: KvPool
    limits: Limits
    cost: CostModel = _NO_COST
    predictor: Predictor = _NO_HISTORY
    assign: Callable[[str, str], None] = _no_segments
    is_source_closed: bool = False

    @property
    def waiting(self) -> Collection[Request]:
        """The queue in its order, preempted requests at its head, without requests of paused
        tenants."""
        return self._queues.waiting.values()

    @property
    def running(self) -> Collection[Request]:
        """The requests that hold blocks and a sequence slot, in order of admission. In a pipeline,
        those that are in flight are left out; `limits` is then what they leave."""
        return self._queues.running.values()

    @property
    def decoding(self) -> Collection[Request]:
        """The running requests with a single token left to compute, in the order in which they
        reached that point."""
        return self._queues.decoding.values()

    @property
    def prefilling(self) -> Collection[Request]:
        """The running requests with several tokens left to compute, in order of admission."""
        return self._queues.prefilling.values()

    @property
    def decode_context_tokens(self) -> int:
        """Tokens in KV that a step of all decoding requests reads."""
        return self._queues.context_tokens

    @property
    def decode_blocks(self) -> int:
        """Free blocks that a step of all decoding requests takes."""
        return len(self._queues.out_of_room)

    def needs_block(self, request_id: str) -> bool:
        """Whether the next token of a decoding request takes a free block."""
        return request_id in self._queues.out_of_room

    @property
    def is_ending(self) -> bool:
        """Whether running requests end with the step in flight (only when planning ahead)."""
        return bool(self._queues.ending)

    @property
    def has_in_flight(self) -> bool:
        """Whether other batches are in the pipeline."""
        return bool(self._queues.in_flight)

    def find(self, request_id: str) -> Request | None:
        """The request, running or waiting; None when it is over."""
        return self._queues.find(request_id)

    def is_waiting(self, request_id: str) -> bool:
        """Whether the request is in `waiting`."""
        return request_id in self._queues.waiting

    def is_running(self, request_id: str) -> bool:
        """Whether the request holds blocks and a sequence slot."""
        return request_id in self._queues.running or request_id in self._queues.in_flight

    def is_in_flight(self, request_id: str) -> bool:
        """Whether a batch in the pipeline computes a token of the request: no plan can name it."""
        return request_id in self._queues.in_flight

    def is_decoding(self, request_id: str) -> bool:
        return request_id in self._queues.decoding

    def to_compute(self, request: Request) -> int:
        """Tokens that the request can use in this step. For a waiting request these are the tokens
        after its cached prefix or its swapped-out tokens; 0 for a running request whose last token
        is already being computed, and for a request in flight."""
        if request.blocks:
            is_ending = request.id in self._queues.ending or self.is_in_flight(request.id)
            return 0 if is_ending else len(request.tokens) - request.n_computed
        return len(request.tokens) - self.kv.cached_tokens(request)


class Item(NamedTuple):
    """`n_tokens` of a request in this step. When it admits the request, `reserve_tokens` takes KV
    room for that many tokens in total, prompt and output; 0 takes room for this step only."""

    request_id: str
    n_tokens: int
    reserve_tokens: int = 0


class How(StrEnum):
    """The fate of a preempted request's KV; `auto` chooses the cheaper."""

    recompute = "recompute"
    swap = "swap"
    auto = "auto"


class Preemption(NamedTuple):
    """A running request goes back to the queue; `by` is the request that it makes room for."""

    request_id: str
    how: How = How.auto
    by: str = "policy"


class Plan(NamedTuple):
    """A step. With `decode_all` every decoding request that is not in `items`, `preempt` or
    `hold` gets its token. Other running requests that are not named keep their blocks and
    skip the step.

    `causes` gives the cause of single waiting requests that are left out, `segments` the cause of
    all others of a queue segment, `rest` that of all others. `wait_until_s` is deliberate idling:
    the core plans again then, or when a request arrives. `group` and `action` are for the step
    log; `padding` is work of the step without a request.
    """

    items: tuple[Item, ...] = ()
    decode_all: bool = False
    hold: tuple[str, ...] = ()
    preempt: tuple[Preemption, ...] = ()
    causes: tuple[tuple[str, Cause], ...] = ()
    segments: tuple[tuple[str, Cause], ...] = ()
    rest: Cause = Cause(Why.no_token_budget)
    wait_until_s: float | None = None
    group: int | None = None
    padding: Padding = NO_PADDING
    action: str = ""


class PlanError(SlobenchError):
    """A policy proposed a plan that the engine cannot carry out: a bug in the policy, never in a
    request."""


class UnknownRequest(PlanError):
    """A plan names a request that is neither waiting nor running."""


class DuplicateItem(PlanError):
    """A plan names a request twice, or preempts or holds it and schedules it."""


class BadTokenCount(PlanError):
    """An item has no token, or more than the request has left."""


class OverLimit(PlanError):
    """A plan exceeds the engine's token or sequence limit."""


class NoProgress(PlanError):
    """Requests wait or run, and the plan neither schedules any nor names a later instant."""


class AdmissionError(SlobenchError):
    """A refused request; `code` is the OpenAI error code. Without `retry_after_s` the request
    could not run even alone (a 400); with it, it may be sent again after that time (a 429)."""

    def __init__(self, message: str, code: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code, self.retry_after_s = code, retry_after_s


def check_admission(n_prompt: int, max_tokens: int, limits: Limits, kv: KvPool) -> None:
    """Raises AdmissionError for a request that would not fit an empty engine. Reads only values
    that never change, so any thread may call it."""
    n_tokens = n_prompt + max_tokens
    if n_tokens > limits.max_model_len:
        raise AdmissionError(
            f"{n_prompt} prompt tokens and {max_tokens} to generate make {n_tokens}; "
            f"the context here is {limits.max_model_len} tokens: shorten the prompt or max_tokens",
            "context_length_exceeded",
        )
    n_blocks = kv.blocks_for(n_tokens - 1)
    if n_blocks > kv.n_blocks:
        raise AdmissionError(
            f"{n_prompt} prompt tokens and {max_tokens} to generate need {n_blocks} KV blocks of "
            f"{kv.block_tokens} tokens; there are {kv.n_blocks}: start with more kv_blocks",
            "kv_capacity_exceeded",
        )


def check_plan(plan: Plan, view: View) -> Plan:
    """The plan, if the engine can carry it out. KV room is not checked here: the core makes it by
    preempting, or leaves an admission out.

    Raises a `PlanError` that names the request and the numbers.
    """
    named = _check_unscheduled(plan, view)
    n_decode = 0
    if plan.decode_all:
        n_decode = len(view.decoding) - sum(map(view.is_decoding, named))
    n_tokens, n_admitted = 0, 0
    for item in plan.items:
        request_id, n_item, reserve_tokens = item
        request = view.find(request_id)
        most = 0 if request is None else view.to_compute(request)
        if request is None or request_id in named or not 1 <= n_item <= most or reserve_tokens < 0:
            raise _item_error(item, request is not None, request_id in named, most)
        named.add(request_id)
        n_tokens += n_item
        if view.is_waiting(request_id):
            n_admitted += 1
        elif not view.is_running(request_id):
            raise UnknownRequest(f"plan schedules '{request_id}', whose tenant is paused")
        elif plan.decode_all and view.is_decoding(request_id):
            n_decode -= 1
    n_tokens += n_decode
    if n_tokens > view.limits.max_step_tokens:
        raise OverLimit(f"plan has {n_tokens} tokens, limit {view.limits.max_step_tokens}")
    n_seqs = len(view.running) - len(plan.preempt) + n_admitted
    if n_admitted and n_seqs > view.limits.max_num_seqs:
        raise OverLimit(f"plan makes {n_seqs} sequences run, limit {view.limits.max_num_seqs}")
    is_idle = not n_tokens and not view.is_ending and not view.has_in_flight
    if is_idle and (view.running or view.waiting):
        _check_wait(plan, view)
    return plan


def _check_unscheduled(plan: Plan, view: View) -> set[str]:
    """The ids that a plan preempts or holds."""
    named = {preemption.request_id for preemption in plan.preempt}
    if len(named) < len(plan.preempt):
        ids = ", ".join(preemption.request_id for preemption in plan.preempt)
        raise DuplicateItem(f"plan preempts a request twice: {ids}")
    for verb, ids_of in (("preempts", tuple(named)), ("holds", plan.hold)):
        for request_id in ids_of:
            if not view.is_running(request_id) or view.is_in_flight(request_id):
                raise UnknownRequest(f"plan {verb} '{request_id}', which is not running")
    for request_id in plan.hold:
        if request_id in named:
            raise DuplicateItem(f"plan holds '{request_id}' and names it again")
        named.add(request_id)
    return named


def _check_wait(plan: Plan, view: View) -> None:
    sizes = f"{len(view.waiting)} wait, {len(view.running)} run, and the plan is empty"
    if plan.wait_until_s is None:
        raise NoProgress(f"{sizes} without wait_until_s")
    if plan.wait_until_s <= view.now_s:
        raise NoProgress(
            f"{sizes} until {plan.wait_until_s:g} s, which is not after now ({view.now_s:g} s)"
        )


def _item_error(item: Item, exists: bool, is_named: bool, most: int) -> PlanError:
    name = item.request_id
    if not exists:
        return UnknownRequest(f"plan schedules '{name}', which neither waits nor runs")
    if is_named:
        return DuplicateItem(f"plan names '{name}' twice")
    if item.reserve_tokens < 0:
        return BadTokenCount(f"plan reserves {item.reserve_tokens} tokens for '{name}'")
    return BadTokenCount(f"plan gives '{name}' {item.n_tokens} tokens, it can use 1-{most}")
