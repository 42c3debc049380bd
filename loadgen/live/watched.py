"""The run so far, for whoever reads it from outside: fed by the shards' beats, read by threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadgen.drive.live_sample import FIELDS, coarse
from loadgen.live.live_series import SERIES, Labels, Reading, SecondsHistogram
from loadgen.measure.catalog import PASSES_UNDEFINED
from loadgen.measure.slo import Slo, slos_of_request
from loadgen.records import OWN_SLO, Schedule, Status

Values = dict[str, Mapping[Labels, float | SecondsHistogram]]
_SUMMED = ("released", "sent", "in_flight", "waiting")


@dataclass(frozen=True)
class RunLabels:
    """Which run this is, as labels say it, and what each class was promised."""

    run: str
    scenario: str
    target: str
    model: str
    api: str
    classes: tuple[str, ...]
    promises: Mapping[str, Sequence[Slo]]
    horizon_s: float


class WatchedRun:
    """`take` is called by the thread that hears the shards, `read` by any."""

    def __init__(self, about: RunLabels, schedule: Schedule) -> None:
        self.about = about
        self._lock = threading.Lock()
        planned_s = schedule["scheduled_s"]
        self._planned_s = np.sort(planned_s[~np.isnan(planned_s)])
        self._n = len(schedule)
        self._beats: dict[int, Mapping[str, Any]] = {}
        self._counts: dict[str, dict[Labels, float]] = {
            name: dict.fromkeys([(word,) for word in about.classes], 0.0)
            for name in ("slobench_promises_kept_total", "slobench_events_total")
        }
        self._counts["slobench_requests_total"] = {
            (word, status.name): 0.0 for word in about.classes for status in Status
        }
        self._tallies: dict[str, dict[Labels, SecondsHistogram]] = {
            name: {(word,): SecondsHistogram(one.bounds) for word in about.classes}
            for name, one in SERIES.items()
            if one.kind == "histogram" and one.labels == ("class",)
        }
        self._tallies["slobench_duration_seconds"] = {}

    def take(self, shard: int, beat: Mapping[str, Any]) -> None:
        """One shard's beat: totals since its start, and what ended since its last one."""
        with self._lock:
            self._beats[shard] = {key: beat[key] for key in ("now_s", *_SUMMED)}
            for values in beat.get("ended", ()):
                self._end(dict(zip(FIELDS, values, strict=True)))
            for class_id, counts, sum_s in beat.get("gaps", ()):
                label = (self.about.classes[class_id],)
                self._tallies["slobench_itl_seconds"][label].add_counts(coarse(counts), sum_s)

    def read(self) -> list[Reading]:
        """Every series as of now."""
        with self._lock:
            single: Values = {name: {(): value} for name, value in self._totals().items()}
            tallies: Values = {
                name: {labels: tally.copy() for labels, tally in found.items()}
                for name, found in self._tallies.items()
            }
            counts: Values = {name: dict(found) for name, found in self._counts.items()}
        found = {**single, **counts, **tallies}
        return [Reading(one, found[name]) for name, one in SERIES.items()]

    def _end(self, ended: Mapping[str, Any]) -> None:
        word, status = self.about.classes[ended["class_id"]], Status(ended["status"])
        label = (word,)
        self._counts["slobench_requests_total"][word, status.name] += 1
        self._counts["slobench_events_total"][label] += ended["n_events"]
        for name in ("ttft", "tpot", "e2e", "lateness"):
            if ended[f"{name}_s"] is not None and (status is Status.ok or name == "lateness"):
                self._tallies[f"slobench_{name}_seconds"][label].add(ended[f"{name}_s"])
        if ended["duration_s"] is not None:
            durations = self._tallies["slobench_duration_seconds"]
            bounds = SERIES["slobench_duration_seconds"].bounds
            durations.setdefault((word, status.name), SecondsHistogram(bounds)).add(
                ended["duration_s"]
            )
        if status is not Status.ok or ended["ttft_s"] is None:
            return
        from_send_s = ended["ttft_s"] - ended["lateness_s"]
        self._tallies["slobench_ttft_from_send_seconds"][label].add(from_send_s)
        if meets_slos(ended, self.about.promises.get(word, ())):
            self._counts["slobench_promises_kept_total"][label] += 1

    def _totals(self) -> dict[str, float]:
        sums = {key: float(sum(beat[key] for beat in self._beats.values())) for key in _SUMMED}
        now_s = max((beat["now_s"] for beat in self._beats.values()), default=0.0)
        lasted_s = min(max(now_s, 0.0), self.about.horizon_s)
        n_met = sum(self._counts["slobench_promises_kept_total"].values())
        return {
            "slobench_scheduled_total": float(np.searchsorted(self._planned_s, now_s, "right")),
            "slobench_released_total": sums["released"],
            "slobench_sent_total": sums["sent"],
            "slobench_in_flight": sums["in_flight"],
            "slobench_waiting": sums["waiting"],
            "slobench_asked_rate_per_second": self._n / self.about.horizon_s,
            "slobench_achieved_rate_per_second": sums["sent"] / lasted_s if lasted_s else 0.0,
            "slobench_goodput_per_second": n_met / lasted_s if lasted_s else 0.0,
            "slobench_elapsed_seconds": max(now_s, 0.0),
        }


def meets_slos(ended: Mapping[str, Any], promises: Sequence[Slo]) -> bool:
    """Whether an answer that ended well kept all of the per-request promises, as far as undecoded
    bytes tell, and the limits it brought itself. `ended` has the `FIELDS` of a glimpse."""
    asked = promises
    if own_slo_s := ended["own_slo_s"]:
        asked = slos_of_request(promises, dict(zip(OWN_SLO, own_slo_s, strict=True)))
    return all(_keeps(slo, ended) for slo in asked)


def _keeps(slo: Slo, ended: Mapping[str, Any]) -> bool:
    """Whether an answer kept a per-request promise, as far as undecoded bytes tell."""
    value = _value(slo.metric, ended)
    return slo.metric in PASSES_UNDEFINED if math.isnan(value) else slo.holds(value)


def _value(metric: str, ended: Mapping[str, Any]) -> float:
    """A per-request metric of the catalogue; reasoning counts as an answer here."""
    base = {"ttfat_s": "ttft_s", "max_itl_s": "max_stall_s"}.get(metric, metric)
    base = base.replace("_from_send_s", "_s")
    if metric == "e2e_per_token_s":
        return float(ended["e2e_s"]) / max(1, int(ended["n_events"]))
    if ended[base] is None:
        return math.nan
    before_s = ended["lateness_s"] if metric.endswith("_from_send_s") else 0.0
    return float(ended[base]) - float(before_s)
