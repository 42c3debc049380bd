"""What runs a batch: rows of requests in, one token per row that reached its end out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from loadgen.registry import Plugin, Registry
from reference_engine.model.config import ModelSource
from reference_engine.state.cost_model import NO_PADDING, Padding, StepShape
from reference_engine.state.sequence import Request


class Row(NamedTuple):
    """Compute tokens `start … start + n_tokens` of a request, whose blocks have room for them;
    `samples` when that reaches its last known token, so that the next one is wanted."""

    request: Request
    start: int
    n_tokens: int
    samples: bool


class Copy(NamedTuple):
    """One block of KV to host memory (`is_out`) or back."""

    block: int
    host_block: int
    is_out: bool


class StepBatch(NamedTuple):
    """One step, to be worked off in this order: `copies`, then everything else at once. An
    executor reads the requests and never writes to them.

    `rows` are pieces of prompts (or of recomputation); `decodes` compute one token each, the one
    at position `request.n_computed`, and want the next. `context_tokens` is Σ n_computed of
    `decodes`. `padding` is work to be done for nobody.
    """

    rows: tuple[Row, ...] = ()
    decodes: Sequence[Request] = ()
    padding: Padding = NO_PADDING
    copies: tuple[Copy, ...] = ()
    context_tokens: int = 0

    @property
    def has_work(self) -> bool:
        return bool(
            self.rows
            or self.decodes
            or self.copies
            or self.padding.prefill_tokens
            or self.padding.decode_rows
        )

    @property
    def n_tokens(self) -> int:
        """How many tokens the step answers."""
        return sum(row.samples for row in self.rows) + len(self.decodes)

    @property
    def main_prompt(self) -> Request | None:
        """Whose prompt (or recomputation) is more than half of the step's tokens; None where they
        are decoded, or of many prompts. A single row beyond its prompt is a decode, too."""
        row = max(self.rows, key=lambda row: row.n_tokens, default=None)
        if row is None or (row.n_tokens == 1 and row.start >= row.request.n_prompt):
            return None
        n_tokens = sum(row.n_tokens for row in self.rows) + len(self.decodes)
        return row.request if 2 * row.n_tokens > n_tokens else None

    def all_rows(self) -> Iterator[Row]:
        """Rows and decodes alike, in the order in which tokens are answered."""
        yield from self.rows
        for request in self.decodes:
            yield Row(request, request.n_computed, 1, True)

    def shape(self) -> StepShape:
        """What the step's duration depends on."""
        prefill_tokens, prefill_attention = 0, 0.0
        for _, start, n_tokens, _ in self.rows:
            prefill_tokens += n_tokens
            prefill_attention += n_tokens * (start + n_tokens / 2)
        n_decode = len(self.decodes)
        return StepShape(
            n_seqs=len(self.rows) + n_decode,
            prefill_tokens=prefill_tokens,
            prefill_attention=prefill_attention,
            n_decode=n_decode,
            context_tokens=self.context_tokens,
            padding=self.padding,
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """The sampled tokens: one per row with `samples`, in the order of the rows, then one per
    decode. `logprobs` is as long as `tokens`, or None when nobody asked. `duration_s` is how long
    the step took, or None to let the engine's clock tell."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] | None = None
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class Caps:
    """What an executor can do. `n_host_blocks` is the host memory to swap KV to (0: it cannot);
    `copy_s` is how long one block takes one way. `n_blocks` is how many blocks of KV it found room
    for, 0 where it was told; `gpu` the one it computes on, by NVML's UUID (`GPU-…`), "" for none.
    """

    n_host_blocks: int = 0
    copy_s: float = 0.0
    n_blocks: int = 0
    gpu: str = ""

    @property
    def can_swap(self) -> bool:
        return self.n_host_blocks > 0


class Executor(Protocol):
    """Runs batches against its own KV memory, addressed by the block numbers of `kv.KvPool`."""

    @property
    def caps(self) -> Caps: ...

    def execute(self, batch: StepBatch) -> StepResult: ...


@runtime_checkable
class Launching(Protocol):
    """An executor that can begin a step and be asked for its tokens later: with `async_depth` 1
    the next step is planned in between. One step at a time; `execute` is `launch(batch)()`."""

    def launch(self, batch: StepBatch) -> Callable[[], StepResult]: ...


@dataclass(frozen=True, slots=True)
class Site:
    """What wiring tells an executor about the place it will work in. `pause` spends seconds on
    the clock in use: `time.sleep`, or `VirtualClock.advance`. `n_host_blocks` is how many blocks
    of KV may be swapped to host memory. `n_blocks` 0 asks an executor that `sizes_itself` for as
    many as fit; `max_num_seqs` and `max_step_tokens` are the largest step without padding."""

    model: ModelSource
    n_blocks: int
    block_tokens: int
    max_model_len: int
    pause: Callable[[float], None]
    n_host_blocks: int = 0
    max_num_seqs: int = 256
    max_step_tokens: int = 1 << 15


class ExecutorKind(Plugin, ABC):
    """A way to run batches; its fields are its parameters. Building may take seconds and may need
    packages that knowing the kind does not. Whoever `sizes_itself` decides how much KV there is,
    where nobody else did."""

    sizes_itself: ClassVar[bool] = False

    @abstractmethod
    def build(self, site: Site) -> Executor: ...


EXECUTORS: Registry[ExecutorKind] = Registry("slobench.executors", "executor")
