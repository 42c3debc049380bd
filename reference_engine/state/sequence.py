"""A request inside the engine: its parameters, its progress, and the KV blocks it holds.

    waiting ─plan─▶ running ─▶ finished_stop | finished_length
       ▲               │
       ├── preempted ◀─┤   KV given up, computed again
       ├── swapped ◀───┘   KV kept in host memory
       └── received        KV computed by another engine (simulated clusters)
    any of them ─cancel─▶ finished_abort
    rejected: never entered, because it would not fit an empty engine or the policy refused it

There are no prefill and decode phases: a request has `n_tokens` tokens so far, `n_computed` of
them in KV, and each step computes some of the difference. Computing the last token samples the
next. Chunking, prefix hits and recomputation after a preemption all follow from that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from reference_engine.state.prefix_tree import Node, Run
from reference_engine.state.run_keys import RunKeys


class State(Enum):
    """Where a request is; the value of a finished state is its OpenAI `finish_reason`."""

    waiting = "waiting"
    running = "running"
    preempted = "preempted"
    swapped = "swapped"
    received = "received"
    finished_stop = "stop"
    finished_length = "length"
    finished_abort = "abort"
    rejected = "rejected"

    @property
    def is_over(self) -> bool:
        return self in _OVER


_OVER = frozenset(
    {State.finished_stop, State.finished_length, State.finished_abort, State.rejected}
)


MOST_TOP_LOGPROBS = 20
"""The most `top_logprobs` of a request."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 cut
    nothing. Equal seeds give equal tokens, whatever else is in the batch. `logprobs` returns the
    log-probability of each sampled token, and those of the `top_logprobs` most likely tokens.

    Penalties change logits before temperature, as in vLLM: `repetition_penalty` r (1: none) divides
    positive and multiplies negative logits of tokens in prompt or output; `frequency_penalty` times
    the number of occurrences in the output is subtracted, and `presence_penalty` once.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    logprobs: bool = False
    min_p: float = 0.0
    top_logprobs: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def is_truncated(self) -> bool:
        """Whether top-k, top-p or min-p excludes tokens from the draw."""
        cuts = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return self.temperature > 0 and cuts

    @property
    def is_penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


class StartForecast(NamedTuple):
    """The forecast of a request's start, made when it arrives: `tokens_ahead` prompt tokens will be
    computed first, at `tokens_per_s`, so it starts at the instant `start_s` (engine's clock). None
    where there is no rate yet."""

    tokens_ahead: int
    tokens_per_s: float | None
    start_s: float | None


NO_HITS: tuple[int, Sequence[Node], int] = (-1, (), 0)


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress. Policies read it; only the core writes to it.

    Times are seconds on the engine's clock, `None` until they happen; `ttft_slo_s` and
    `tpot_slo_s` are durations, `deadline_s` an instant. `tokens` is the prompt followed by the
    output; `chain` the hashes of its full blocks (see `kv`).

    `n_prompt` of the tokens are the prompt, all of them unless stated: a request that continues
    elsewhere arrives with the prompt and the output so far.

    `oracle_output_tokens` is for simulation: the request stops after that many tokens. No policy
    or predictor may read it. A simulator appends the instants (s) of the tokens to `token_times_s`,
    where it is a list.
    """

    id: str
    tokens: list[int]
    max_tokens: int
    arrived_s: float
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = Sampling()
    tenant: str = "default"
    priority: int = 0  # lower goes first, as in vLLM
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    deadline_s: float | None = None
    oracle_output_tokens: int | None = None
    n_prompt: int = 0
    token_times_s: list[float] | None = None
    # --- owned by the core
    state: State = State.waiting
    n_computed: int = 0
    n_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    n_preemptions: int = 0
    blocks: list[int] = field(default_factory=list)
    n_room: int = 0  # tokens that `blocks` can hold
    chain: list[bytes] | RunKeys = field(default_factory=list)
    n_published: int = 0  # leading blocks already handed to the prefix cache
    host_blocks: list[int] = field(default_factory=list)
    n_swapped: int = 0  # tokens with KV in `host_blocks`, or received
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    arrival: int = 0  # number in the order of arrival
    forecast: StartForecast | None = None  # made at arrival
    n_displaced: int = 0  # earlier arrivals that it was admitted before, counted per jump
    displaced_s: float = 0.0  # the wait that this added to them, summed
    pushed_back_s: float = 0.0  # the wait that others' jumps added to it
    # `n_computed` at which a decoding request needs more than an appended token: its blocks are
    # full, or its answer has its full length (`_n_last`).
    _n_milestone: int = 0
    _n_last: int = field(init=False)
    # See `kv`: the blocks that are in the prefix tree, and the cached prefix when last looked up.
    _runs: list[Run] = field(default_factory=list)
    _hits: tuple[int, Sequence[Node], int] = NO_HITS
    _start: int = 0  # the number of its admission, see `queues`
    # The place in a `lockstep` (0: none), and the steps at which it was settled and is due.
    _order: int = 0
    _since: int = 0
    _due: int = -1

    def __post_init__(self) -> None:
        self.n_prompt = self.n_prompt or len(self.tokens)
        n_output = self.max_tokens
        if self.oracle_output_tokens is not None:
            n_output = min(n_output, max(1, self.oracle_output_tokens))
        self._n_last = self.n_prompt + n_output - 1

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_remaining(self) -> int:
        """Tokens not in KV yet; 1 while decoding."""
        return len(self.tokens) - self.n_computed

    @property
    def output(self) -> list[int]:
        return self.tokens[self.n_prompt :]

    @property
    def n_most(self) -> int:
        """The most tokens that can ever be in KV: the last token is never computed."""
        return self.n_prompt + self.max_tokens - 1

    def finish_after(self, token: int) -> State | None:
        """The final state after `token`, which is appended already; None to go on."""
        n_output = len(self.tokens) - self.n_prompt
        if token in self.stop_ids and n_output > self.min_tokens:
            return State.finished_stop
        if n_output >= self.max_tokens:
            return State.finished_length
        return State.finished_stop if len(self.tokens) > self._n_last else None

    def banned_ids(self) -> Iterable[int]:
        """Token ids that the next sample must avoid: stop ids until there are `min_tokens`."""
        return self.stop_ids if self.n_output < self.min_tokens else ()
