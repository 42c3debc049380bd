"""What runs a batch: rows of requests in, one token per row that reached its end out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from loadgen.registry import Plugin, Registry
from reference_engine.model.config import ModelSource
from reference_engine.sequence import Request


class Row(NamedTuple):
    """Compute tokens `start … start + n_tokens` of a request, whose blocks have room for them;
    `samples` when that reaches its last known token, so that the next one is wanted."""

    request: Request
    start: int
    n_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's rows. An executor reads the requests and never writes to them."""

    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The sampled tokens, one per row with `samples`, in the order of the rows."""

    tokens: tuple[int, ...]


class Executor(Protocol):
    """Runs batches against its own KV memory, addressed by the block numbers of `kv.KvPool`."""

    def execute(self, batch: StepBatch) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class Site:
    """What wiring tells an executor about the place it will work in. `pause` spends seconds on
    the clock in use: `time.sleep`, or `VirtualClock.advance`."""

    model: ModelSource
    n_blocks: int
    block_tokens: int
    max_model_len: int
    pause: Callable[[float], None]


class ExecutorKind(Plugin, ABC):
    """A way to run batches; its fields are its parameters. Building may take seconds and may need
    packages that knowing the kind does not."""

    @abstractmethod
    def build(self, site: Site) -> Executor: ...


EXECUTORS: Registry[ExecutorKind] = Registry("slobench.executors", "executor")
