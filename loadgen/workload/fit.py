"""Fits a scenario to a recorded trace."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, pi, sin
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from loadgen.errors import TraceFileError
from loadgen.measure.statistics.arrival_stats import describe_arrivals
from loadgen.units import write_duration, write_rate
from loadgen.workload.fit_arrivals import ArrivalFit, fit_arrivals
from loadgen.workload.lengths import LENGTHS, Lengths, TokenCounts
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


def fit_file(path: str | Path, format: str | TraceFormat = "auto") -> tuple[str, dict[str, Any]]:
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


CLOSE_ENOUGH = 0.05
_WIDEST = 2_000_000  # lengths of a power law that are summed over in one piece
_EDGES = np.concatenate([np.arange(50) / 50, [0.99, 0.995, 0.999, 1.0]])


@dataclass(frozen=True, slots=True)
class LengthFit:
    """The chosen distribution as it stands in a scenario, and each candidate's KS distance."""

    spec: Mapping[str, Any] | int
    distance: Mapping[str, float]


def fit_lengths(tokens: TokenCounts) -> LengthFit:
    """The distribution for n ≥ 1 token counts, each ≥ 1."""
    low, high = int(tokens.min()), int(tokens.max())
    if low == high:
        return LengthFit(low, {"fixed": 0.0})
    logs = np.log(tokens)
    mean = float(tokens.mean())
    candidates: list[dict[str, Any]] = [
        {
            "kind": "lognormal",
            "median": _rounded(exp(float(logs.mean()))),
            "sigma": _rounded(float(logs.std())),
            "min": low,
            "max": high,
        },
        {
            "kind": "gamma",
            "mean": _rounded(mean),
            "cv": _rounded(float(tokens.std()) / mean),
            "min": low,
            "max": high,
        },
    ]
    if high - low <= _WIDEST:
        alpha = power_law_exponent(tokens)
        candidates.append({"kind": "power_law", "alpha": _rounded(alpha), "min": low, "max": high})
    distance, specs = {}, {}
    for spec in candidates:
        try:
            distance[spec["kind"]] = ks_distance(tokens, LENGTHS.build(spec))
        except ValidationError:  # a law that cannot have these moments between these ends
            continue
        specs[spec["kind"]] = spec
    best = min(distance, key=lambda kind: distance[kind], default="")
    if best and distance[best] <= CLOSE_ENOUGH:
        return LengthFit(specs[best], distance)
    own = _thinned(tokens)
    return LengthFit(own, {**distance, "empirical": ks_distance(tokens, LENGTHS.build(own))})


def power_law_exponent(tokens: TokenCounts) -> float:
    """The maximum-likelihood alpha of P(x) = x^−alpha / Σ y^−alpha on min … max of the sample:
    the maximum of −alpha · mean(ln x) − ln Σ y^−alpha, between 0.01 and 20.

    Source: A. Clauset, C. R. Shalizi, M. E. J. Newman, SIAM Review 51 (2009), appendix B, with the
    upper end cut.
    """
    from scipy.optimize import minimize_scalar
    from scipy.special import logsumexp

    mean_log = float(np.log(tokens).mean())
    all_logs = np.log(np.arange(int(tokens.min()), int(tokens.max()) + 1))
    found = minimize_scalar(
        lambda alpha: alpha * mean_log + float(logsumexp(-alpha * all_logs)),
        bounds=(0.01, 20.0),
        method="bounded",
    )
    return float(found.x)


def ks_distance(tokens: TokenCounts, law: Lengths) -> float:
    """max |F_n − F| over the whole numbers: both are steps there, so the sample's values and those
    just below them are enough."""
    values, counts = np.unique(tokens.astype(np.int64), return_counts=True)
    above = np.cumsum(counts) / tokens.size
    below = above - counts / tokens.size
    low, high = law.support
    at = np.where(values < low, 0.0, law.cdf(np.clip(values, low, high)))
    before = np.where(values - 1 < low, 0.0, law.cdf(np.clip(values - 1, low, high)))
    return float(max(np.abs(at - above).max(), np.abs(before - below).max()))


def copula_correlation(inputs: TokenCounts, outputs: TokenCounts) -> float:
    """The Gaussian copula's ρ = 2·sin(π·ρ_s/6), ρ_s Spearman's rank correlation; 0 where one of the
    two does not vary.

    Source: R. B. Nelsen, An Introduction to Copulas (2nd ed. 2006), section 5.1.
    """
    from scipy.stats import rankdata

    if inputs.min() == inputs.max() or outputs.min() == outputs.max():
        return 0.0
    of_inputs, of_outputs = rankdata(inputs), rankdata(outputs)
    spearman = float(np.cov(of_inputs, of_outputs)[0, 1] / of_inputs.std(ddof=1))
    return 2 * sin(pi * spearman / float(of_outputs.std(ddof=1)) / 6)


def _thinned(tokens: TokenCounts) -> dict[str, Any]:
    """The sample as an empirical law: all its values if they are few, else one for each 2 % of it
    and more of them in the last."""
    values, counts = np.unique(tokens, return_counts=True)
    if values.size <= _EDGES.size:
        return {"kind": "empirical", "values": values.tolist(), "weights": counts.tolist()}
    middles = (_EDGES[1:] + _EDGES[:-1]) / 2
    chosen = np.quantile(tokens, middles, method="inverted_cdf").astype(np.int64)
    values, place = np.unique(chosen, return_inverse=True)
    weights = np.bincount(place, np.diff(_EDGES))
    rounded = [float(f"{weight * 1000:.4g}") for weight in weights]
    return {"kind": "empirical", "values": values.tolist(), "weights": rounded}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
