"""Records of steps and events: the trace, the data for fitting step costs, and the input of a
replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
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
    `finish`, `cancel`, `reject`, `jump` (admitted before earlier arrivals), `rejected_plan`,
    `hand_over` and `take_over` (to and from another engine), and the interventions. `actor` is the
    operator, `detail` holds the numbers. The detail `ended_by` of an end is `step` (by a token) or
    `call` (by a stop string or a client that left)."""

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


Make = Callable[[], list[StepRecord]]


class StepLog:
    """The most recent steps and events. Each is also passed to a listener as it happens; without a
    listener, records of many steps are made only when they are read."""

    def __init__(
        self,
        level: Level = "sizes",
        on_step: Callable[[StepRecord], None] = _no_listener,
        on_event: Callable[[StepEvent], None] = _no_listener,
    ) -> None:
        self.level, self.on_step, self.on_event = level, on_step, on_event
        self.events: deque[StepEvent] = deque(maxlen=_N_RECENT)
        self._steps: deque[StepRecord] = deque(maxlen=_N_RECENT)
        self._unmade: deque[tuple[int, Make]] = deque()
        self._n_unmade = 0

    @property
    def steps(self) -> deque[StepRecord]:
        while self._unmade:
            self._steps += self._unmade.popleft()[1]()
        self._n_unmade = 0
        return self._steps

    def add_step(self, record: StepRecord) -> None:
        if self._unmade:
            self._unmade.append((1, lambda: [record]))
            self._n_unmade += 1
            self._forget()
        else:
            self._steps.append(record)
        self.on_step(record)

    def add_steps(self, n: int, make: Make) -> None:
        """Add `n` records, which `make` returns."""
        if self.on_step is not _no_listener:
            for record in make():
                self.add_step(record)
            return
        self._unmade.append((n, make))
        self._n_unmade += n
        self._forget()

    def add_event(self, event: StepEvent) -> None:
        self.events.append(event)
        self.on_event(event)

    def last(self, n: int) -> Iterator[StepRecord]:
        """The last `n` steps, oldest first."""
        steps = self.steps
        first = max(0, len(steps) - n)
        return (steps[i] for i in range(first, len(steps)))

    def _forget(self) -> None:
        while self._n_unmade - self._unmade[0][0] >= _N_RECENT:
            self._n_unmade -= self._unmade.popleft()[0]
