"""The contract of executors: a batch of rows in, one token per finished row out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from loadgen.registry import Plugin, Registry
from reference_engine.state.batch import StepBatch, StepResult
from reference_engine.state.model_config import ModelSource


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
