"""The contract of executors: a batch of rows in, a token per finished row out."""

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
    """Capabilities of an executor. `n_host_blocks` is the host memory for swapped KV, in blocks (0:
    it cannot swap). `copy_s` is the time to copy a block in one direction; all copies of a step in
    one direction take `copy_latency_s` in addition. `n_blocks` is the number of KV blocks that fit,
    of an executor that sizes itself; else 0. `gpu` is the NVML UUID (`GPU-…`) of the GPU it
    computes on, "" on a CPU. `has_logits` is true if tokens are sampled from logits; without, the
    only token of `top_logprobs` is the sampled token, and penalties and `min_p` have no effect.
    """

    n_host_blocks: int = 0
    copy_s: float = 0.0
    n_blocks: int = 0
    gpu: str = ""
    has_logits: bool = False
    copy_latency_s: float = 0.0

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
    """An executor that can start a step and return its tokens later, by the function that `launch`
    returns: with `async_depth` 1 the next step is planned in between. Steps are computed one after
    another; `execute` is `launch(batch)()`."""

    def launch(self, batch: StepBatch) -> Callable[[], StepResult]: ...


@runtime_checkable
class LaunchingAhead(Protocol):
    """A `Launching` executor whose next step can be launched before the tokens of the present step
    are read, so that the device does not idle in between. The newest tokens of requests are then
    `UNKNOWN`, and the executor takes them from its own memory."""

    def launch(self, batch: StepBatch) -> Callable[[], StepResult]: ...

    def can_launch_ahead(self, batch: StepBatch) -> bool:
        """Whether `batch` can be launched now, before the tokens of the step before are read."""
        ...


@dataclass(frozen=True, slots=True)
class Site:
    """Model, sizes and clock that an executor is built for. `pause` spends seconds on the clock in
    use: `time.sleep`, or `VirtualClock.advance`. `n_blocks` is the number of KV blocks; 0 requests
    as many as fit from an executor that `sizes_itself`. `n_host_blocks` is the number of blocks
    that may be swapped to host memory. `max_num_seqs` and `max_step_tokens` are the limits of a
    step without padding."""

    model: ModelSource
    n_blocks: int
    block_tokens: int
    max_model_len: int
    pause: Callable[[float], None]
    n_host_blocks: int = 0
    max_num_seqs: int = 256
    max_step_tokens: int = 1 << 15


class ExecutorKind(Plugin, ABC):
    """A kind of executor; its fields are its parameters. `build` may take seconds, and may import
    packages that the kind itself does not need. A kind that `sizes_itself` chooses the number of KV
    blocks where the options do not."""

    sizes_itself: ClassVar[bool] = False

    @abstractmethod
    def build(self, site: Site) -> Executor: ...


EXECUTORS: Registry[ExecutorKind] = Registry("slobench.executors", "executor")
