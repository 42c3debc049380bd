"""Dynamic batching: a batching window before batches that run to completion."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, PrivateAttr

from loadgen.fields import Seconds
from loadgen.manifest.json_section import JsonObject
from reference_engine.policies.fixed_batch import FinishedRows, FixedBatch, FixedBatchPolicy, Pad
from reference_engine.smdp.batch_table import BatchLookup
from reference_engine.state.plan import Plan, View
from reference_engine.state.sequence import Request


def _read_sizes(value: object) -> object:
    return value.split() if isinstance(value, str) else value


Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_read_sizes)]
"""Batch sizes; on a command line with blanks between them."""


class Dynamic(FixedBatchPolicy):
    """A batch begins as soon as `max_batch_size` requests wait, as many wait as one of
    `preferred_sizes`, or the oldest has waited `max_delay` (seconds). It runs until its last
    request ends. With `max_delay: 0s` each batch takes all requests that wait when the engine
    becomes free: the model of Inoue (arXiv 1912.06322) and of the SMDP papers.

    At low load an answer takes up to `max_delay` longer than necessary; at high load the mode
    equals `static`. `finished_rows`, `pad` and `answers` are as in `static`. With `pad_to` a
    batch is filled up to the next of these sizes, as on a server with shapes compiled in advance.

    `table` is a file by `slobench solve`: the size of the next batch by the number of waiting
    requests, for ranges of the arrival rate over about `load_window` (seconds). It replaces
    `preferred_sizes`; where it waits, it waits `max_delay` at most. For another load or cost model
    a batch takes all requests that wait.

    Source: Triton Inference Server's dynamic batcher (`preferred_batch_size`,
    `max_queue_delay_microseconds`).
    """

    kind: ClassVar[str] = "dynamic"

    max_batch_size: int = Field(default=16, ge=1)
    max_delay: Annotated[Seconds, Field(ge=0)] = 0.1
    preferred_sizes: Sizes = ()
    finished_rows: FinishedRows = FinishedRows.masked
    pad: Pad = Pad.batch_max

    pad_to: Sizes = ()
    table: str = ""
    load_window: Annotated[Seconds, Field(gt=0)] = 30.0

    _lookup: BatchLookup | None = PrivateAttr(default=None)

    def model_post_init(self, context: object) -> None:
        self._batch = FixedBatch(self.finished_rows, self.pad, self.pad_to)
        if self.table:
            self._lookup = BatchLookup(self.table, self.load_window)

    def on_arrival(self, request: Request, view: View) -> None:
        if self._lookup is not None:
            self._lookup.choice.arrival_rate.arrive(view.now_s)

    def on_requeue(self, request: Request, view: View) -> None:
        """A request that returns to the queue is no arrival."""

    def plan(self, view: View) -> Plan:
        most = self.max_batch_size
        if self._lookup is None or view.running:
            return self._batch.plan(view, most, self.max_delay, self.preferred_sizes)
        size = self._lookup.decide(len(view.waiting), view.cost, view.now_s)
        if size is None:
            return self._batch.plan(view, most, 0.0)
        return self._batch.plan(view, min(size or most, most), self.max_delay)

    def explain(self, request_id: str, view: View) -> JsonObject:
        if self._lookup is None:
            return super().explain(request_id, view)
        choice = self._lookup.choice
        sheet, n_waiting = choice.current, len(view.waiting)
        return {
            "table": self._lookup.file.name,
            "n_waiting": n_waiting,
            "batch_size": None if sheet is None else sheet.size(n_waiting),
            "arrivals_per_s": choice.arrival_rate.per_s(view.now_s),
            "fallbacks": dict(choice.fallbacks),
        }
