"""What a policy sees and what it may answer: `View` in, `Plan` out, and the check in between.

A policy proposes, the core disposes. A plan is only "these requests get so many tokens in this
step"; decoding is one token, a chunk of a prompt is several, and nothing else is special.
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
    """Why a waiting request was not scheduled; the value completes "waited: 0.2 s …"."""

    step_in_flight = "step in flight"
    no_token_budget = "token budget"
    no_seq_slot = "sequence slots"
    no_kv_blocks = "KV blocks"
    behind = "behind"
    lower_priority = "lower priority than"
    tenant_budget = "tenant's budget"
    bucket_not_ready = "bucket not full"
    window_open = "batching window open"
    static_group_running = "running batch, whose slowest is"
    smdp_wait = "policy table says wait"
    preempted_by = "preempted by"
    admission_limit = "admission limit"
    paused_by_operator = "paused by the operator"


@dataclass(frozen=True, slots=True)
class Cause:
    """A reason and, where another request is to blame, its id.

    Causes are equal when these two are, so that waiting is charged to few of them. The rest is
    detail of the moment: until when (instant, s), and how much there is of how much is wanted.
    """

    why: Why
    blocker: str = ""
    until_s: float | None = field(default=None, compare=False)
    have: float | None = field(default=None, compare=False)
    want: float | None = field(default=None, compare=False)

    def __hash__(self) -> int:
        # As the generated one, without two calls into the enumeration's own: causes are looked up
        # for everybody who waits.
        return hash((self.why._value_, self.blocker))


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can take in one step and in one request, whatever the policy."""

    max_num_seqs: int
    max_step_tokens: int
    max_model_len: int
    vocab_size: int


class View:
    """The engine as a policy sees it: always the present state, and read-only by contract. The
    one thing a policy may write is which queue segment a request belongs to (`assign`)."""

    __slots__ = (
        "_queues",
        "assign",
        "cost",
        "is_source_closed",
        "kv",
        "limits",
        "now_s",
        "predictor",
    )

    def __init__(
        self,
        now_s: float,
        queues: Queues,
        kv: KvPool,
        limits: Limits,
        cost: CostModel | None = None,
        predictor: Predictor | None = None,
        assign: Callable[[str, str], None] | None = None,
    ) -> None:
        self.now_s = now_s
        self.kv, self.limits, self._queues = kv, limits, queues
        self.cost: CostModel = cost or StepCost()
        self.predictor: Predictor = predictor or MaxTokens()
        # True when nothing will arrive any more; a live server never knows.
        self.is_source_closed = False
        # assign(request_id, segment): from now on the request waits for the segment's cause
        # (`Plan.segments`), until it is assigned another; "" is the segment of `Plan.rest`.
        self.assign: Callable[[str, str], None] = assign or _nowhere

    @property
    def waiting(self) -> Collection[Request]:
        """The queue in its order, preempted requests at the head; without those of paused
        tenants."""
        return self._queues.waiting.values()

    @property
    def running(self) -> Collection[Request]:
        """All that hold blocks and a sequence slot, in order of admission."""
        return self._queues.running.values()

    @property
    def decoding(self) -> Collection[Request]:
        """The running ones with one token left to compute, in the order in which they got
        there."""
        return self._queues.decoding.values()

    @property
    def prefilling(self) -> Collection[Request]:
        """The running ones with more than one token left to compute, in order of admission."""
        return self._queues.prefilling.values()

    @property
    def decode_context_tokens(self) -> int:
        """Tokens in KV that one step of all decoding requests reads."""
        return self._queues.context_tokens

    @property
    def decode_blocks(self) -> int:
        """Free blocks that one step of all decoding requests takes."""
        return len(self._queues.out_of_room)

    @property
    def is_ending(self) -> bool:
        """Whether running requests end with the step in flight (only when planning ahead)."""
        return bool(self._queues.ending)

    def find(self, request_id: str) -> Request | None:
        """The request, wherever it is; None when it is over."""
        return self._queues.find(request_id)

    def is_waiting(self, request_id: str) -> bool:
        """Whether it is in `waiting`."""
        return request_id in self._queues.waiting

    def is_running(self, request_id: str) -> bool:
        return request_id in self._queues.running

    def is_decoding(self, request_id: str) -> bool:
        return request_id in self._queues.decoding

    def to_compute(self, request: Request) -> int:
        """Tokens the request can use in this step: for a waiting one, those after its cached
        prefix or after what is swapped out; 0 for a running one whose end is already due."""
        if request.blocks:
            is_landing = request.id in self._queues.ending
            return 0 if is_landing else len(request.tokens) - request.n_computed
        return len(request.tokens) - self.kv.cached_tokens(request)


class Item(NamedTuple):
    """`n_tokens` of a request in this step. With an admission, `reserve_tokens` asks for KV room
    for so many tokens in total, prompt and output; 0 asks for this step's only."""

    request_id: str
    n_tokens: int
    reserve_tokens: int = 0


class How(StrEnum):
    """What becomes of a preempted request's KV; `auto` takes the cheaper."""

    recompute = "recompute"
    swap = "swap"
    auto = "auto"


class Preemption(NamedTuple):
    """A running request goes back to the queue; `by` is the request that it makes room for."""

    request_id: str
    how: How = How.auto
    by: str = "policy"


class Plan(NamedTuple):
    """One step. With `decode_all` every decoding request that is not in `items`, `preempt` or
    `hold` gets its one token; other running requests that are not named keep their blocks and
    skip the step.

    `causes` names why single waiting requests are left out, `segments` why all others of a queue
    segment are, `rest` why all others. `wait_until_s` is deliberate idling: the core asks again
    then, or when something arrives. `group` and `action` are for the step log; `padding` is work
    the step computes for nobody.
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
    """A policy proposed what the engine cannot do; a bug in the policy, never in a request."""


class UnknownRequest(PlanError):
    """A plan names a request that is neither waiting nor running."""


class DuplicateItem(PlanError):
    """A plan names a request twice, or preempts or holds it and schedules it."""


class BadTokenCount(PlanError):
    """An item asks for no token, or for more than the request has left."""


class OverLimit(PlanError):
    """A plan exceeds the engine's token or sequence limit."""


class NoProgress(PlanError):
    """Requests wait or run, and the plan neither schedules one nor names a later instant."""


def check_plan(plan: Plan, view: View) -> Plan:
    """The plan, if the engine can carry it out. KV room is not checked here: the core makes it by
    preempting, or leaves an admission out.

    Raises a `PlanError` that names the request and the numbers.
    """
    seen = _check_unscheduled(plan, view)
    n_decode = 0
    if plan.decode_all:
        n_decode = len(view.decoding) - sum(map(view.is_decoding, seen))
    n_tokens, n_admitted = 0, 0
    for item in plan.items:
        request_id, n_item, reserve_tokens = item
        request = view.find(request_id)
        most = 0 if request is None else view.to_compute(request)
        if request is None or request_id in seen or not 1 <= n_item <= most or reserve_tokens < 0:
            raise _item_error(item, request is not None, request_id in seen, most)
        seen.add(request_id)
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
    if not n_tokens and (view.running or view.waiting) and not view.is_ending:
        _check_wait(plan, view)
    return plan


def _check_unscheduled(plan: Plan, view: View) -> set[str]:
    """The ids a plan preempts or holds."""
    seen = {preemption.request_id for preemption in plan.preempt}
    if len(seen) < len(plan.preempt):
        ids = ", ".join(preemption.request_id for preemption in plan.preempt)
        raise DuplicateItem(f"plan preempts a request twice: {ids}")
    for verb, ids_of in (("preempts", tuple(seen)), ("holds", plan.hold)):
        for request_id in ids_of:
            if not view.is_running(request_id):
                raise UnknownRequest(f"plan {verb} '{request_id}', which is not running")
    for request_id in plan.hold:
        if request_id in seen:
            raise DuplicateItem(f"plan holds '{request_id}' and names it again")
        seen.add(request_id)
    return seen


def _check_wait(plan: Plan, view: View) -> None:
    sizes = f"{len(view.waiting)} wait, {len(view.running)} run, and the plan is empty"
    if plan.wait_until_s is None:
        raise NoProgress(f"{sizes} without wait_until_s")
    if plan.wait_until_s <= view.now_s:
        raise NoProgress(
            f"{sizes} until {plan.wait_until_s:g} s, which is not after now ({view.now_s:g} s)"
        )


def _item_error(item: Item, is_known: bool, is_seen: bool, most: int) -> PlanError:
    name = item.request_id
    if not is_known:
        return UnknownRequest(f"plan schedules '{name}', which neither waits nor runs")
    if is_seen:
        return DuplicateItem(f"plan names '{name}' twice")
    if item.reserve_tokens < 0:
        return BadTokenCount(f"plan reserves {item.reserve_tokens} tokens for '{name}'")
    return BadTokenCount(f"plan gives '{name}' {item.n_tokens} tokens, it can use 1-{most}")


def _nowhere(request_id: str, segment: str) -> None:
    """A view on its own keeps no segments."""


class AdmissionError(SlobenchError):
    """A refused request; `code` is the OpenAI error code. Without `retry_after_s` it could not run
    even alone (a 400); with it, it may be tried again after so many seconds (a 429)."""

    def __init__(self, message: str, code: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code, self.retry_after_s = code, retry_after_s


def check_admission(n_prompt: int, max_tokens: int, limits: Limits, kv: KvPool) -> None:
    """Raises AdmissionError for a request that would not fit an empty engine. Reads only what
    never changes, so any thread may ask."""
    if n_prompt + max_tokens > limits.max_model_len:
        raise AdmissionError(
            f"{n_prompt} prompt tokens and {max_tokens} to generate make {n_prompt + max_tokens}; "
            f"the context here is {limits.max_model_len} tokens: shorten the prompt or max_tokens",
            "context_length_exceeded",
        )
    n_blocks = kv.blocks_for(n_prompt + max_tokens - 1)
    if n_blocks > kv.n_blocks:
        raise AdmissionError(
            f"{n_prompt} prompt tokens and {max_tokens} to generate need {n_blocks} KV blocks of "
            f"{kv.block_tokens} tokens; there are {kv.n_blocks}: start with more kv_blocks",
            "kv_capacity_exceeded",
        )
