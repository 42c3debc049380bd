"""A batching window in front of batches that run to completion."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, ClassVar

from pydantic import Field, PrivateAttr

from loadgen.units import Seconds
from reference_engine.policies.base import Policy
from reference_engine.policies.gang import FinishedRows, Gang, Pad, wait_for_more
from reference_engine.state.plan import Plan, View
from reference_engine.state.sequence import Request
from reference_engine.state.steps import StepRecord


class Dynamic(Policy):
    """A batch begins at the first of: `max_batch_size` requests wait, as many wait as one of
    `preferred_sizes`, the oldest has waited `max_delay`. It runs until its last request ends. With
    `max_delay: 0s` it is greedy: whatever waits when the engine is free, the model of Inoue
    (arXiv 1912.06322) and of the SMDP papers.

    At low load an answer takes `max_delay` longer than it need; at high load this is `static`.

    Source: Triton Inference Server's dynamic batcher (`preferred_batch_size`,
    `max_queue_delay_microseconds`).
    """

    kind: ClassVar[str] = "dynamic"
    is_in_order: ClassVar[bool] = True

    max_batch_size: int = Field(default=16, ge=1)
    max_delay: Annotated[Seconds, Field(ge=0)] = 0.1
    preferred_sizes: tuple[Annotated[int, Field(ge=1)], ...] = ()
    finished_rows: FinishedRows = FinishedRows.masked
    pad: Pad = Pad.batch_max
    _gang: Gang = PrivateAttr()

    def model_post_init(self, context: object) -> None:
        self._gang = Gang(self.finished_rows, self.pad)

    def plan(self, view: View) -> Plan:
        if not self._gang.is_over(view):
            return self._gang.plan(view)
        most = min(self.max_batch_size, view.limits.max_num_seqs, view.limits.max_step_tokens)
        size = self._closed_size(len(view.waiting), most)
        if size is None:
            waits = None if view.is_source_closed else wait_for_more(view, most, self.max_delay)
            if waits is not None:
                return waits
            size = most
        self._gang.form(list(islice(view.waiting, size)), view)
        return self._gang.plan(view)

    def on_step_end(self, record: StepRecord, view: View) -> None:
        self._gang.stepped(record)

    def on_finish(self, request: Request, view: View) -> None:
        self._gang.finished(request, view)

    def _closed_size(self, n_waiting: int, most: int) -> int | None:
        """The size at which the window closes at once; None while it stays open."""
        if n_waiting >= most:
            return most
        return max((n for n in self.preferred_sizes if n <= n_waiting), default=None)
