"""Dynamic batching: a batching window before batches that run to completion."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from loadgen.units import Seconds
from reference_engine.policies.fixed_batch import FinishedRows, FixedBatch, FixedBatchPolicy, Pad
from reference_engine.state.plan import Plan, View


class Dynamic(FixedBatchPolicy):
    """A batch begins as soon as `max_batch_size` requests wait, as many wait as one of
    `preferred_sizes`, or the oldest has waited `max_delay` (seconds). It runs until its last
    request ends. With `max_delay: 0s` each batch takes all requests that wait when the engine
    becomes free: the model of Inoue (arXiv 1912.06322) and of the SMDP papers.

    At low load an answer takes up to `max_delay` longer than necessary; at high load the mode
    equals `static`. `finished_rows`, `pad` and `answers` are as in `static`.

    Source: Triton Inference Server's dynamic batcher (`preferred_batch_size`,
    `max_queue_delay_microseconds`).
    """

    kind: ClassVar[str] = "dynamic"

    max_batch_size: int = Field(default=16, ge=1)
    max_delay: Annotated[Seconds, Field(ge=0)] = 0.1
    preferred_sizes: tuple[Annotated[int, Field(ge=1)], ...] = ()
    finished_rows: FinishedRows = FinishedRows.masked
    pad: Pad = Pad.batch_max

    def model_post_init(self, context: object) -> None:
        self._batch = FixedBatch(self.finished_rows, self.pad)

    def plan(self, view: View) -> Plan:
        return self._batch.plan(view, self.max_batch_size, self.max_delay, self.preferred_sizes)
