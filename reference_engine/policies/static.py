"""Request-level batching: a full batch, run until its longest answer ends."""

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


class Static(Policy):
    """`batch_size` requests are read together, padded to the longest prompt, and decoded together
    until the last of them ends; only then the next batch is formed. TPOT is as good as it gets,
    TTFT holds a whole batch of waiting, and throughput is that of mean(output)/max(output) rows.

    A batch that is not full begins when its oldest request has waited `fill_timeout`, or when
    nothing more will arrive, which only a simulator knows: without a timeout a server's last
    requests would wait for ever.

    Source: Hugging Face `generate`, FasterTransformer; Orca (OSDI'22) §2 "request-level".
    """

    kind: ClassVar[str] = "static"
    is_in_order: ClassVar[bool] = True

    batch_size: int = Field(default=32, ge=1)
    fill_timeout: Annotated[Seconds, Field(ge=0)] = 0.1
    finished_rows: FinishedRows = FinishedRows.masked
    pad: Pad = Pad.batch_max
    _gang: Gang = PrivateAttr()

    def model_post_init(self, context: object) -> None:
        self._gang = Gang(self.finished_rows, self.pad)

    def plan(self, view: View) -> Plan:
        if not self._gang.is_over(view):
            return self._gang.plan(view)
        size = min(self.batch_size, view.limits.max_num_seqs, view.limits.max_step_tokens)
        is_full = len(view.waiting) >= size
        if not is_full and not view.is_source_closed:
            waits = wait_for_more(view, size, self.fill_timeout)
            if waits is not None:
                return waits
        self._gang.form(list(islice(view.waiting, size)), view)
        return self._gang.plan(view)

    def on_step_end(self, record: StepRecord, view: View) -> None:
        self._gang.stepped(record)

    def on_finish(self, request: Request, view: View) -> None:
        self._gang.finished(request, view)
