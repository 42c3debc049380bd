"""Timed steps as columns, from the engine's own log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from reference_engine.state.steps import StepRecord

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
