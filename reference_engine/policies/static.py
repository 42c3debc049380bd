"""Static batching: a full batch, run until its longest answer ends."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from loadgen.fields import Seconds
from reference_engine.policies.fixed_batch import (
    Answers,
    FinishedRows,
    FixedBatch,
    FixedBatchPolicy,
    Pad,
)
from reference_engine.state.plan import Plan, View


class Static(FixedBatchPolicy):
    """`batch_size` requests are prefilled together, padded to the longest prompt, and decoded
    together until the last of them ends. Only then is the next batch formed. On average the share
    mean(output)/max(output) of the rows produces tokens that are used.

    With `answers: at_end` all answers of a batch are delivered when its longest ends, so TTFT is
    the latency of the batch. With `answers: streamed` each token is delivered when it is generated;
    TPOT is then the lowest possible, and TTFT includes the wait for a whole batch.

    A smaller batch begins when its oldest request has waited `fill_timeout` (seconds), or when no
    more requests will arrive. Only a simulator can know the latter: a server needs the timeout, or
    its last requests would wait for ever. `finished_rows` and `pad` choose whether ended rows and
    padding are computed.

    Source: Hugging Face `generate`, FasterTransformer; Orca (OSDI'22) §2 "request-level".
    """

    kind: ClassVar[str] = "static"

    batch_size: int = Field(default=32, ge=1)
    fill_timeout: Annotated[Seconds, Field(ge=0)] = 0.1
    finished_rows: FinishedRows = FinishedRows.masked
    pad: Pad = Pad.batch_max
    answers: Answers = Answers.at_end

    def model_post_init(self, context: object) -> None:
        self._batch = FixedBatch(self.finished_rows, self.pad)

    def plan(self, view: View) -> Plan:
        return self._batch.plan(view, self.batch_size, self.fill_timeout)
