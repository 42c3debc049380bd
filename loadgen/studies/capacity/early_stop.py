"""Early stop of a capacity probe, as soon as it is clear whether the load meets the SLO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadgen.live.watched import meets_slos
from loadgen.measure.slo import Slo
from loadgen.records import Status
from loadgen.studies.capacity.dispersion import clear
from loadgen.studies.capacity.probe import Grade, in_blocks
from loadgen.workload.scenario import Scenario

_LOOKS = 40  # over the window


class EarlyStop:
    """Decides when to stop a probe, from finished requests (`loadgen.drive.live_sample.FIELDS`).

    Their values are estimates from undecoded bytes and only decide when to stop; the probe's result
    is counted from the decoded rows. Requests in flight count as met before the load may be called
    saturated, and as missed before it may be called fine. A load at which some requests meet the
    SLO and most misses are HTTP errors is not called saturated: a rate limit shows its rate only
    over time. `grade` is the decision.
    """

    def __init__(self, scenario: Scenario, target: float, effect: float) -> None:
        self._slos = [
            [slo for slo in slos if slo.scope == "request"]
            for slos in scenario.slos_by_class().values()
        ]
        self._target, self._effect = target, effect
        self._start_s = scenario.phases.warmup
        self._step_s = scenario.phases.measure / _LOOKS
        self._end_s = scenario.horizon_s
        self._next_s = self._start_s + self._step_s
        self._at_s: list[float] = []
        self._met: list[bool] = []
        self._n_refused = 0
        self.grade: Grade = "measured"

    def note(self, now_s: float, ended: Sequence[Mapping[str, Any]]) -> None:
        """Record requests that have ended by now."""
        for request in ended:
            if now_s >= self._start_s and request["status"] != Status.not_released:
                self._at_s.append(now_s)
                self._met.append(_has_met(request, self._slos[request["class_id"]]))
                self._n_refused += request["status"] == Status.http_error

    def reason(self, now_s: float, in_flight: int) -> str | None:
        """The reason to stop now, or None."""
        if self.grade != "measured" or not self._next_s <= now_s < self._end_s:
            return None
        self._next_s = now_s + self._step_s
        at_s, met = np.array(self._at_s), np.array(self._met, bool)
        for grade, counts_as in (("fine", False), ("saturated", True)):
            due, n_met = in_blocks(
                np.r_[at_s, np.full(in_flight, now_s)],
                np.r_[met, np.full(in_flight, counts_as)],
                self._start_s,
                now_s,
            )
            n_missed = sum(due) - sum(n_met)
            is_refused = counts_as and any(self._met) and 2 * self._n_refused >= n_missed > 0
            if clear(due, n_met, self._target, self._effect) == grade and not is_refused:
                self.grade = "fine" if grade == "fine" else "saturated"
                share = 100 * sum(n_met) / sum(due)
                word = "clearly fine" if grade == "fine" else "clearly overloaded"
                bound = "at least" if grade == "fine" else "at most"
                return f"{word}: {bound} {share:.0f} % of {sum(due)} requests met their SLOs"
        return None


def _has_met(request: Mapping[str, Any], slos: Sequence[Slo]) -> bool:
    is_answered = request["status"] == Status.ok and request["e2e_s"] is not None
    return is_answered and meets_slos(request, slos)
