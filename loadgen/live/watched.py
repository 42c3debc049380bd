"""Live metrics of a run under way, summed over its shards from their progress messages."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadgen.drive.live_sample import FIELDS, SecondsHistogram, coarse_counts
from loadgen.live.live_series import SERIES, Labels, Reading
from loadgen.measure.catalog import PASSES_UNDEFINED
from loadgen.measure.slo import Slo, slos_of_request
from loadgen.records import OWN_SLO, Schedule, Status

_SUMMED = ("released", "sent", "in_flight", "waiting")


@dataclass(frozen=True)
class RunLabels:
    """The names that identify a run in its live metrics, and the per-request SLOs of each class.
    `horizon_s` is the length of warm-up and measured window together. A closed loop offers no
    rate."""

    run: str
    scenario: str
    target: str
    model: str
    api: str
    classes: tuple[str, ...]
    slos: Mapping[str, Sequence[Slo]]
    horizon_s: float
    is_closed_loop: bool = False


class WatchedRun:
    """The live metrics of a run.

    The thread that reads the shards' messages calls `take`; any thread may call `read`. The values
    come from undecoded bytes, so they are estimates; the report's come from the decoded rows.
    """

    def __init__(self, labels: RunLabels, schedule: Schedule) -> None:
        self.labels = labels
        self._lock = threading.Lock()
        scheduled_s = schedule["scheduled_s"]
        self._scheduled_s = np.sort(scheduled_s[~np.isnan(scheduled_s)])
        self._n_requests = len(schedule)
        self._beats: dict[int, Mapping[str, Any]] = {}
        classes = [(name,) for name in labels.classes]
        self._counts: dict[str, dict[Labels, float]] = {
            name: dict.fromkeys(classes, 0.0)
            for name in ("slobench_slo_met_total", "slobench_events_total")
        }
        self._counts["slobench_requests_total"] = {
            (name, status.name): 0.0 for name in labels.classes for status in Status
        }
        self._histograms: dict[str, dict[Labels, SecondsHistogram]] = {
            series.name: {label: SecondsHistogram(series.bounds) for label in classes}
            for series in SERIES.values()
            if series.kind == "histogram" and series.labels == ("class",)
        }
        self._histograms["slobench_duration_seconds"] = {}

    def take(self, shard: int, beat: Mapping[str, Any]) -> None:
        """Adds a progress message of a shard: totals since its start, and the requests that ended
        since its previous message."""
        with self._lock:
            self._beats[shard] = {key: beat[key] for key in ("now_s", *_SUMMED)}
            for values in beat.get("ended", ()):
                self._add(dict(zip(FIELDS, values, strict=True)))
            for class_id, counts, sum_s in beat.get("gaps", ()):
                label = (self.labels.classes[class_id],)
                itl = self._histograms["slobench_itl_seconds"][label]
                itl.add_counts(coarse_counts(counts), sum_s)

    def read(self) -> list[Reading]:
        """The current values of every series."""
        values: dict[str, Mapping[Labels, float | SecondsHistogram]]
        with self._lock:
            values = {
                name: {} if math.isnan(value) else {(): value}
                for name, value in self._totals().items()
            }
            values |= {name: dict(counts) for name, counts in self._counts.items()}
            for name, histograms in self._histograms.items():
                values[name] = {labels: h.copy() for labels, h in histograms.items()}
        return [Reading(series, values[name]) for name, series in SERIES.items()]

    def _add(self, ended: Mapping[str, Any]) -> None:
        """Adds a finished request; `ended` has the fields of `EndedSample`."""
        name, status = self.labels.classes[ended["class_id"]], Status(ended["status"])
        label = (name,)
        self._counts["slobench_requests_total"][name, status.name] += 1
        self._counts["slobench_events_total"][label] += ended["n_events"]
        seconds = {"lateness": ended["lateness_s"]}
        if status is Status.ok:
            seconds |= {metric: ended[f"{metric}_s"] for metric in ("ttft", "ttfat", "tpot", "e2e")}
            if ended["ttft_s"] is not None:
                seconds["ttft_from_send"] = ended["ttft_s"] - ended["lateness_s"]
            if ended["e2e_s"] is not None:
                is_met = meets_slos(ended, self.labels.slos.get(name, ()))
                self._counts["slobench_slo_met_total"][label] += is_met
        for metric, value_s in seconds.items():
            if value_s is not None:
                self._histograms[f"slobench_{metric}_seconds"][label].add(value_s)
        if ended["duration_s"] is not None:
            durations = self._histograms["slobench_duration_seconds"]
            new = SecondsHistogram(SERIES["slobench_duration_seconds"].bounds)
            durations.setdefault((name, status.name), new).add(ended["duration_s"])

    def _totals(self) -> dict[str, float]:
        sums = {key: float(sum(beat[key] for beat in self._beats.values())) for key in _SUMMED}
        now_s = max((beat["now_s"] for beat in self._beats.values()), default=0.0)
        elapsed_s = min(max(now_s, 0.0), self.labels.horizon_s)
        n_met = sum(self._counts["slobench_slo_met_total"].values())
        return {
            "slobench_scheduled_total": float(np.searchsorted(self._scheduled_s, now_s, "right")),
            "slobench_released_total": sums["released"],
            "slobench_sent_total": sums["sent"],
            "slobench_in_flight": sums["in_flight"],
            "slobench_waiting": sums["waiting"],
            "slobench_asked_rate_per_second": math.nan
            if self.labels.is_closed_loop
            else self._n_requests / self.labels.horizon_s,
            "slobench_achieved_rate_per_second": sums["sent"] / elapsed_s if elapsed_s else 0.0,
            "slobench_goodput_per_second": n_met / elapsed_s if elapsed_s else 0.0,
            "slobench_elapsed_seconds": max(now_s, 0.0),
        }


def meets_slos(ended: Mapping[str, Any], slos: Sequence[Slo]) -> bool:
    """Whether a successful request met all per-request SLOs, and the limits that it brings itself
    (trace rows), by its undecoded bytes. `ended` has the fields of `EndedSample`."""
    if own_slo_s := ended["own_slo_s"]:
        slos = slos_of_request(slos, dict(zip(OWN_SLO, own_slo_s, strict=True)))
    return all(_is_met(slo, ended) for slo in slos)


def _is_met(slo: Slo, ended: Mapping[str, Any]) -> bool:
    value = _value(slo.metric, ended)
    return slo.metric in PASSES_UNDEFINED if math.isnan(value) else slo.holds(value)


def _value(metric: str, ended: Mapping[str, Any]) -> float:
    """A per-request metric of the catalogue, NaN where undefined."""
    base = {"max_itl_s": "max_stall_s"}.get(metric, metric)
    base = base.replace("_from_send_s", "_s")
    if metric == "e2e_per_token_s":
        return float(ended["e2e_s"]) / max(1, int(ended["n_events"]))
    if ended[base] is None:
        return math.nan
    before_s = ended["lateness_s"] if metric.endswith("_from_send_s") else 0.0
    return float(ended[base]) - float(before_s)
