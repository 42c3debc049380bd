"""Records of steps and events: the trace, the data for fitting step costs, and the input of a
replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from reference_engine.state.sequence import Request

Level = Literal["sizes", "full"]

_N_RECENT = 4096  # steps, and as many events, that stay in memory
# The parameters of a request, which is all that a policy may read of it.
ARRIVAL_FIELDS = (
    *("n_prompt", "max_tokens", "min_tokens", "priority", "arrived_s"),
    *("ttft_slo_s", "tpot_slo_s", "deadline_s"),
)


class StepRecord(NamedTuple):
    """A step. Instants (s) on the engine's clock: `t_s` as of which it was planned (for a step
    planned ahead, the beginning of the step before), `began_s` when computing began, `end_s` when
    its tokens were committed. Durations (s): `plan_s` of planning and bookkeeping, `duration_s` of
    computing.

    `n_prefill_tokens` counts every token that is not a decode's, recomputed ones included, and
    `prefill_attention` is Σ n·(c + n/2) over pieces of n tokens after c (tokens²).
    `context_tokens` is Σ tokens in KV of the decoding rows. `n_running`, `n_waiting` and
    `kv_used_blocks` are as of the end of planning. `padding_tokens` are computed without a request,
    and `padding_context_tokens` of KV are read for them. `causes` counts the waiting requests by
    reason. `items` is (id, tokens) of each row, at level "full" only.
    """

    step: int
    t_s: float
    began_s: float
    end_s: float
    duration_s: float
    plan_s: float
    n_prefill_tokens: int
    prefill_attention: float
    n_decode: int
    context_tokens: int
    n_running: int
    n_waiting: int
    kv_used_blocks: int
    padding_tokens: int
    n_preempted: int
    policy: str
    action: str
    group: int | None
    items: tuple[tuple[str, int], ...]
    causes: tuple[tuple[str, int], ...]
    padding_context_tokens: int = 0


class StepEvent(NamedTuple):
    """An event before step number `step`. Kinds: `start` (with the engine's `Setup`), `arrival`,
    `finish`, `cancel`, `reject`, `jump` (admitted before earlier arrivals), `rejected_plan`, and
    the interventions. `actor` is the operator, `detail` holds the numbers. The detail `ended_by` of
    an end is `step` (by a token) or `call` (by a stop string or a client that left)."""

    t_s: float
    step: int
    kind: str
    detail: Mapping[str, object]
    request_id: str = ""
    tenant: str = ""
    actor: str = ""


def event_detail(kind: str, request: Request, level: Level) -> dict[str, object]:
    """The detail of a request's event: its parameters at arrival and refusal, its outcome later.
    Level "full" adds the token ids at the arrival, the answer and the stop tokens, so that ends and
    prefix hits can be replayed."""
    detail: dict[str, object]
    if kind not in ("arrival", "reject"):
        detail = {"state": request.state.name}
        for name in ("n_output", "n_cached", "n_preemptions"):
            detail[name] = getattr(request, name)
        return detail | {"output": request.output} if level == "full" else detail
    detail = {name: getattr(request, name) for name in ARRIVAL_FIELDS}
    if level == "full":
        detail["tokens"] = list(request.tokens)
        detail["stop_ids"] = sorted(request.stop_ids)
        detail["oracle_output_tokens"] = request.oracle_output_tokens
    return detail


def _no_listener(entry: object) -> None:
    pass


@dataclass(slots=True)
class StepLog:
    """The most recent steps and events. Each is also passed to a listener as it happens."""

    level: Level = "sizes"
    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=_N_RECENT))
    events: deque[StepEvent] = field(default_factory=lambda: deque(maxlen=_N_RECENT))
    on_step: Callable[[StepRecord], None] = _no_listener
    on_event: Callable[[StepEvent], None] = _no_listener

    def add_step(self, record: StepRecord) -> None:
        self.steps.append(record)
        self.on_step(record)

    def add_event(self, event: StepEvent) -> None:
        self.events.append(event)
        self.on_event(event)

    def last(self, n: int) -> Iterator[StepRecord]:
        """The last `n` steps, oldest first."""
        first = max(0, len(self.steps) - n)
        return (self.steps[i] for i in range(first, len(self.steps)))
