"""From a recorded trace to a scenario that looks like it, with how well it does."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.errors import TraceFileError
from loadgen.measure.statistics.arrival_stats import describe_arrivals
from loadgen.units import write_duration, write_rate
from loadgen.workload.fit_arrivals import ArrivalFit, fit_arrivals
from loadgen.workload.fit_lengths import LengthFit, copula_correlation, fit_lengths
from loadgen.workload.scenario import Scenario
from loadgen.workload.traces.file import load_trace
from loadgen.workload.traces.trace import Trace, TraceFormat

N_REQUESTS = 3000  # that the proposed scenario measures, within a minute and an hour
LEAST = 20  # requests below which a fit says nothing


@dataclass(frozen=True, slots=True)
class ScenarioFit:
    """A proposed scenario and the figures that it has to be believed for.

    `arrivals` holds, for the trace and for a run of the fitted process over the same time: rate,
    gap cv, lag-1 correlation of gaps, and dispersion of counts in windows of 5 and of 100 requests.
    """

    scenario: Scenario
    source: str
    n: int
    duration_s: float
    arrivals: dict[str, dict[str, Any]]
    arrival_fit: ArrivalFit
    lengths: dict[str, LengthFit]
    correlation: float
    notes: tuple[str, ...]

    def to_facts(self) -> dict[str, Any]:
        """The figures as JSON."""
        return {
            "source": self.source,
            "n": self.n,
            "duration_s": self.duration_s,
            "arrivals": self.arrivals,
            "dispersion_distance": dict(self.arrival_fit.distance),
            "chosen": self.arrival_fit.spec["kind"],
            "ks_distance": {name: dict(fit.distance) for name, fit in self.lengths.items()},
            "correlation": self.correlation,
            "notes": [*self.notes],
        }

    def to_yaml(self) -> str:
        """The scenario as a file whose first line says where its numbers come from."""
        return (
            f"# Fitted to {Path(self.source).name}: {self.n} requests in {self.duration_s:.4g} s;"
            f" add the promises (slo) that this traffic was made.\n{self.scenario.to_yaml()}"
        )


def fit(trace: Trace) -> ScenarioFit:
    """A stationary scenario for a trace: arrivals by their dispersion curve, lengths by KS
    distance, their correlation by a copula. Promises are left to whoever makes them.

    Raises TraceFileError for fewer than 20 requests.
    """
    n = len(trace)
    if n < LEAST:
        raise TraceFileError(f"{trace.source}: {n} requests are too few to fit; needs {LEAST}")
    has_times = trace.has_times and float(trace.times_s[-1]) > 0
    duration_s = float(trace.times_s[-1]) * n / (n - 1) if has_times else 0.0
    notes = list(trace.notes)
    arrival_fit = ArrivalFit({"kind": "poisson", "rate": "1/s"}, {})
    if has_times:
        arrival_fit = fit_arrivals(trace.times_s)
        notes += [*arrival_fit.notes, *_drift(trace)]
    else:
        notes.append("the file has no times: Poisson arrivals of 1/s, to be set")
    lengths = {
        "input_tokens": fit_lengths(trace.input_tokens),
        "output_tokens": fit_lengths(trace.output_tokens),
    }
    correlation = round(copula_correlation(trace.input_tokens, trace.output_tokens), 2)
    if trace.prefix_tokens.any():
        share = trace.prefix_tokens.sum() / trace.input_tokens.sum()
        notes.append(
            f"shared prefixes ({share:.0%} of the input tokens) and sessions are not in the fit;"
            " replay the file (arrivals: {kind: trace, path: …}) to have them"
        )
    rate_per_s = n / duration_s if duration_s else 1.0
    measure_s = min(max(60.0, float(f"{N_REQUESTS / rate_per_s:.2g}")), 3600.0)
    requests: dict[str, Any] = {name: found.spec for name, found in lengths.items()}
    if abs(correlation) >= 0.05:
        requests["correlation"] = correlation
    scenario = Scenario.model_validate(
        {
            "name": _name(trace.source),
            "arrivals": arrival_fit.spec,
            "requests": requests,
            "phases": {"measure": write_duration(measure_s)},
        }
    )
    return ScenarioFit(
        scenario=scenario,
        source=trace.source,
        n=n,
        duration_s=duration_s,
        arrivals=_compared(trace, scenario, duration_s) if has_times else {},
        arrival_fit=arrival_fit,
        lengths=lengths,
        correlation=correlation,
        notes=tuple(notes),
    )


def fit_text(path: str | Path, format: str | TraceFormat = "auto") -> tuple[str, dict[str, Any]]:
    """(the proposed scenario as YAML, the figures of the fit as JSON) for a trace file."""
    found = fit(load_trace(path, format))
    return found.to_yaml(), found.to_facts()


def _compared(trace: Trace, scenario: Scenario, duration_s: float) -> dict[str, dict[str, Any]]:
    """The same figures of the trace and of one run of the fitted process over the same time."""
    assert scenario.arrivals is not None, "a fitted scenario has arrivals"
    drawn = scenario.arrivals.times(np.random.Generator(np.random.PCG64(0)), duration_s)
    return {
        name: {
            "rate_per_s": len(times) / duration_s,
            **describe_arrivals(times, duration_s),
            "dispersion_100": _dispersion(times, duration_s, 100),
        }
        for name, times in (("trace", trace.times_s), ("fit", drawn))
        if len(times) > 2
    }


def _dispersion(times_s: np.ndarray, duration_s: float, per_window: int) -> float | None:
    """Variance / mean of counts in equal windows of about `per_window` requests; None for fewer
    than ten windows."""
    n_windows = len(times_s) // per_window
    if n_windows < 10:
        return None
    counts, _ = np.histogram(times_s, n_windows, (0.0, duration_s))
    return float(np.var(counts) / np.mean(counts))


def _drift(trace: Trace) -> list[str]:
    """A warning where tenths of the trace differ in rate far more than such counts would by chance
    (a stationary process does not fit)."""
    counts, _ = np.histogram(trace.times_s, 10)
    low, high = int(counts.min()), int(counts.max())
    if len(trace) < 1000 or high < 2 * max(low, 1):
        return []
    busiest = int(np.argmax(counts))
    tenth_s = float(trace.times_s[-1]) / 10
    calm, busy = (write_rate(float(f"{count / tenth_s:.3g}")) for count in (low, high))
    return [
        f"the rate changes: {calm} in the calmest tenth, {busy} in the busiest (number"
        f" {busiest + 1} of 10); one stationary process cannot say when: fit a part, or replay the"
        " file"
    ]


def _name(source: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(source).name.split(".")[0])[:59]
    return f"{stem}_fit" if stem[:1].isalpha() else f"trace_{stem[:54]}_fit"
