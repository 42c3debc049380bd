"""Timed steps as columns, and the time of a request outside them, from the engine's own log."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf, isfinite
from statistics import median
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from loadgen.archive.request_names import RequestNames
from loadgen.records import Run
from reference_engine.state.steps import StepRecord
from reference_engine.step_log.log_replay import EngineLog

Column = NDArray[np.float64]  # [n]


@dataclass(frozen=True)
class StepSamples:
    """n timed steps in the order of their measurement, each column of shape [n].

    `seconds` is the time from the end of the step before, or from the request that ended an idle
    time, to the end of the step: a server pays for the work between two steps, too. `n_prefill`
    counts the sequences with a piece of their prompt, the other counts are those of `StepShape`.
    `requests` is 1 where the time contains that of a request outside the steps (HTTP, tokenizing).
    """

    seconds: Column
    n_prefill: Column
    prefill_tokens: Column
    prefill_attention: Column
    n_decode: Column
    context_tokens: Column
    requests: Column

    def __len__(self) -> int:
        return len(self.seconds)

    def at(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Self:
        """The steps in `rows`, a mask or row numbers."""
        return type(self)(*(getattr(self, field.name)[rows] for field in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[StepSamples]) -> StepSamples:
        """The steps of all parts, in their order."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def samples_of_steps(steps: Sequence[StepRecord]) -> StepSamples:
    """The steps of an engine's log that computed tokens without padding.

    A step with a decode follows its predecessor at once, because a decoding request never leaves
    the engine between two steps; its time starts at the predecessor's end. A step without a decode
    may follow an idle time; its time starts when it was planned.
    """
    rows = []
    previous_end_s = -np.inf
    for step in steps:
        start_s = previous_end_s if step.n_decode else max(previous_end_s, step.t_s)
        if not np.isfinite(start_s):
            start_s = step.t_s
        previous_end_s = step.end_s
        if step.padding_tokens or not (step.n_prefill_tokens or step.n_decode):
            continue
        n_seqs = len(step.items) or step.n_running
        n_prefill = max(1, n_seqs - step.n_decode) if step.n_prefill_tokens else 0
        rows.append(
            (
                step.end_s - start_s,
                n_prefill,
                step.n_prefill_tokens,
                step.prefill_attention,
                step.n_decode,
                step.context_tokens,
                0.0,
            )
        )
    table = np.array(rows, dtype=np.float64).reshape(len(rows), 7)
    return StepSamples(*table[table[:, 0] > 0].T)


def request_outside_s(run: Run, log: EngineLog) -> float | None:
    """The median time (s) that a request of a run spends outside the steps in `log`, the server's
    own: HTTP, tokenizing, and the ways from and to the engine. Measured on requests whose prompt
    was computed alone on an idle engine; None if there is none."""
    names = RequestNames.of(run)
    finishes: dict[str, Any] = {e.request_id: e.detail for e in log.events if e.kind == "finish"}
    steps = [step for step in log.steps if step.n_prefill_tokens or step.n_decode]
    began_s, ended_s = [step.t_s for step in steps], [-inf, *(step.end_s for step in steps)]
    rows = run.request_rows
    ttft_s = rows["first_token_s"] - rows["sent_s"]
    row_of = {int(request_id): row for row, request_id in enumerate(rows["request_id"])}
    outside_s = []
    for event in log.events:
        if event.kind != "arrival" or event.request_id not in finishes:
            continue
        arrival: Any = event.detail
        request_id = names.request_id(event.request_id)
        row = None if request_id is None else row_of.get(request_id)
        first = bisect_left(began_s, event.t_s)
        if row is None or ended_s[first] > arrival["arrived_s"]:
            continue
        n_tokens = arrival["n_prompt"] - finishes[event.request_id]["n_cached"]
        end_s = _end_of_prompt_s(steps, first, n_tokens)
        if end_s is not None and isfinite(ttft_s[row]):
            outside_s.append(ttft_s[row] - (end_s - began_s[first]))
    return max(0.0, median(outside_s)) if outside_s else None


def _end_of_prompt_s(steps: Sequence[StepRecord], first: int, n_tokens: int) -> float | None:
    """The end (s) of `n_tokens` of a prompt that begin with step `first`; None if anything else is
    computed until then."""
    left = n_tokens
    for at in range(first, len(steps)):
        step = steps[at]
        left -= step.n_prefill_tokens
        if step.n_running != 1 or left < 0:
            return None
        if not left:
            return step.end_s
        if step.n_decode:
            return None
    return None
