"""What is kept of each step and of each event between steps; trace, calibration data and the
simulator's regression input at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from reference_engine.state.sequence import Request

Level = Literal["sizes", "full"]

_KEPT = 4096


class StepRecord(NamedTuple):
    """One step. Instants (s) on the engine's clock: `t_s` as of which it was planned, `began_s`
    when its computation began, `end_s` when its tokens were booked. Durations (s): `plan_s` of
    planning and bookkeeping, `duration_s` of computing.

    `n_prefill_tokens` counts every token that is not a decode's (recomputed ones too) and
    `prefill_attention` is Σ n·(c + n/2) over pieces of n tokens after c (tokens²);
    `context_tokens` is Σ tokens in KV of the decoding rows, `n_running`, `n_waiting` and
    `kv_used_blocks` are as of the end of the plan. `causes` counts the requests left waiting by
    reason, `items` is (id, tokens) of each row and filled at level "full" only.
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


class StepEvent(NamedTuple):
    """Something that happened before step number `step`: `start` (what the engine is: its
    `setup`), `arrival`, `finish`, `cancel`, `reject`, `jump` (let in before others that came
    earlier), `rejected_plan` or an intervention. `actor` is who did it, `detail` its numbers; an
    end is `ended_by` a `step`'s token or a `call` (a stop string, a client that left)."""

    t_s: float
    step: int
    kind: str
    detail: Mapping[str, object]
    request_id: str = ""
    tenant: str = ""
    actor: str = ""


def event_detail(kind: str, request: Request, level: Level) -> dict[str, object]:
    """What an event says of its request: at its arrival and refusal what it asks, which is all a
    policy may read; later what became of it. At level "full" with the ids of the prompt, of the
    answer and of stop tokens, so that ends and prefix hits can be replayed."""
    if kind not in ("arrival", "reject"):
        became: dict[str, object] = {
            "state": request.state.name,
            "n_output": request.n_output,
            "n_cached": request.n_cached,
            "n_preemptions": request.n_preemptions,
        }
        return became | {"output": request.output} if level == "full" else became
    asked: dict[str, object] = {
        "n_prompt": request.n_prompt,
        "max_tokens": request.max_tokens,
        "min_tokens": request.min_tokens,
        "priority": request.priority,
        "arrived_s": request.arrived_s,
        "ttft_slo_s": request.ttft_slo_s,
        "tpot_slo_s": request.tpot_slo_s,
        "deadline_s": request.deadline_s,
    }
    if level != "full":
        return asked
    return asked | {
        "tokens": request.tokens[: request.n_prompt],
        "stop_ids": sorted(request.stop_ids),
        "oracle_output_tokens": request.oracle_output_tokens,
    }


def _ignore(entry: object) -> None:
    """Nobody listens."""


@dataclass(slots=True)
class StepLog:
    """The most recent steps and events, each also handed to a listener as it happens."""

    level: Level = "sizes"
    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=_KEPT))
    events: deque[StepEvent] = field(default_factory=lambda: deque(maxlen=_KEPT))
    on_step: Callable[[StepRecord], None] = _ignore
    on_event: Callable[[StepEvent], None] = _ignore

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
