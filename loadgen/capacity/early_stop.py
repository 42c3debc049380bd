"""A run that ends as soon as it is clear whether the promise is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadgen.live.watched import meets_slos
from loadgen.measure.capacity.capacity_probe import Grade, in_blocks
from loadgen.measure.capacity.dispersion import clear
from loadgen.measure.slo import Slo
from loadgen.records import Status
from loadgen.workload.scenario import Scenario

_LOOKS = 40  # over the window


class EarlyStop:
    """Fed with requests as they end (`loadgen.drive.live_sample.FIELDS`), says when to stop.

    What it sees is guessed from undecoded bytes and only decides when to stop; what the run found
    is counted from the decoded rows. Requests in flight count as kept where a miss is to be clear,
    and as missed where success is. `grade` is what was clear.
    """

    def __init__(self, scenario: Scenario, target: float, effect: float) -> None:
        self._promises = [
            [slo for slo in slos if slo.scope == "request"]
            for slos in scenario.slos_by_class().values()
        ]
        self._target, self._effect = target, effect
        self._start_s = scenario.phases.warmup
        self._step_s = scenario.phases.measure / _LOOKS
        self._end_s = scenario.horizon_s
        self._next_s = self._start_s + self._step_s
        self._at_s: list[float] = []
        self._kept: list[bool] = []
        self.grade: Grade = "measured"

    def note(self, now_s: float, ended: Sequence[Mapping[str, Any]]) -> None:
        """Requests that have ended by now."""
        for one in ended:
            if now_s >= self._start_s and one["status"] != Status.not_released:
                self._at_s.append(now_s)
                self._kept.append(_has_kept(one, self._promises[one["class_id"]]))

    def reason(self, now_s: float, in_flight: int) -> str | None:
        """Why to stop now, or None."""
        if self.grade != "measured" or not self._next_s <= now_s < self._end_s:
            return None
        self._next_s = now_s + self._step_s
        at_s, met = np.array(self._at_s), np.array(self._kept, bool)
        for grade, counts_as in (("fine", False), ("saturated", True)):
            due, kept_ = in_blocks(
                np.r_[at_s, np.full(in_flight, now_s)],
                np.r_[met, np.full(in_flight, counts_as)],
                self._start_s,
                now_s,
            )
            if clear(due, kept_, self._target, self._effect) == grade:
                self.grade = "fine" if grade == "fine" else "saturated"
                share = 100 * sum(kept_) / sum(due)
                word = "clearly fine" if grade == "fine" else "clearly too much"
                bound = "at least" if grade == "fine" else "at most"
                return f"{word}: {bound} {share:.0f} % of {sum(due)} requests kept their promises"
        return None


def _has_kept(ended: Mapping[str, Any], promises: Sequence[Slo]) -> bool:
    is_answered = ended["status"] == Status.ok and ended["ttft_s"] is not None
    return is_answered and meets_slos(ended, promises)
