"""Fit of a scenario to a recorded trace, with figures of its quality.

Length distributions are chosen by the Kolmogorov–Smirnov distance D = max |F_n(x) − F(x)|:
lognormal, gamma or power law, whichever is closest. If none comes closer than 5 %, the token counts
themselves are proposed, thinned out to about fifty values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import exp, pi, sin
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from loadgen.errors import TraceFileError
from loadgen.manifest.json_section import JsonObject
from loadgen.measure.statistics.ranks import rank_correlation
from loadgen.measure.statistics.time_series import describe_arrivals
from loadgen.units import write_duration, write_rate
from loadgen.workload.empirical import thinned
from loadgen.workload.fit_arrivals import ArrivalFit, dispersion, fit_arrivals, rounded
from loadgen.workload.lengths import LENGTHS, Lengths, TokenCounts
from loadgen.workload.scenario import Scenario
from loadgen.workload.traces.file import load_trace
from loadgen.workload.traces.trace import Trace, TraceFormat

N_REQUESTS = 3000  # in the proposed measured window, which is between a minute and an hour
LEAST = 20  # requests; a fit to fewer would mean nothing
CLOSE_ENOUGH = 0.05  # KS distance
_MAX_RANGE = 2_000_000  # of a power law, because its lengths are summed in a single array


@dataclass(frozen=True, slots=True)
class ScenarioFit:
    """A proposed scenario and the figures of its quality, as JSON.

    `facts["arrivals"]` holds, for the trace and for a run of the fitted process over the same time:
    rate, gap cv, lag-1 correlation of gaps, and dispersion of counts in windows of 5 and of 100
    requests.
    """

    scenario: Scenario
    facts: JsonObject

    def to_yaml(self) -> str:
        """The scenario as a file; the first line names the source of its numbers."""
        source, n, duration_s = (self.facts[key] for key in ("source", "n", "duration_s"))
        return (
            f"# Fitted to {Path(source).name}: {n} requests in {duration_s:.4g} s;"
            f" add the SLOs (slo) of this traffic.\n{self.scenario.to_yaml()}"
        )


def fit(trace: Trace) -> ScenarioFit:
    """A stationary scenario for a trace: arrivals by their dispersion curve, lengths by KS
    distance, their correlation by a copula. SLOs are left to the user.

    Raises TraceFileError for fewer than 20 requests.
    """
    n = len(trace)
    if n < LEAST:
        raise TraceFileError(f"{trace.source}: {n} requests are too few; a fit needs {LEAST}")
    has_times = trace.has_times and float(trace.times_s[-1]) > 0
    duration_s = float(trace.times_s[-1]) * n / (n - 1) if has_times else 0.0
    notes = list(trace.notes)
    arrival_fit = ArrivalFit({"kind": "poisson", "rate": "1/s"}, {})
    if has_times:
        arrival_fit = fit_arrivals(trace.times_s)
        notes += [*arrival_fit.notes, *_drift(trace)]
        if not arrival_fit.has_fit:
            notes.append(_replay_note(trace.source, arrival_fit))
    else:
        notes.append("the file has no times: Poisson arrivals of 1/s are a placeholder")
    lengths = {
        "input_tokens": fit_lengths(trace.input_tokens),
        "output_tokens": fit_lengths(trace.output_tokens),
    }
    correlation = round(copula_correlation(trace.input_tokens, trace.output_tokens), 2)
    if trace.prefix_tokens.any():
        share = trace.prefix_tokens.sum() / trace.input_tokens.sum()
        notes.append(
            f"shared prefixes ({share:.0%} of the input tokens) and sessions are not in the fit;"
            " replay the file (arrivals: {kind: trace, path: …}) to keep them"
        )
    rate_per_s = n / duration_s if duration_s else 1.0
    measure_s = min(max(60.0, float(f"{N_REQUESTS / rate_per_s:.2g}")), 3600.0)
    requests: JsonObject = {name: law.spec for name, law in lengths.items()}
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
    facts = {
        "source": trace.source,
        "n": n,
        "duration_s": duration_s,
        "arrivals": _compared(trace, scenario, duration_s) if has_times else {},
        "dispersion_distance": dict(arrival_fit.distance),
        "chosen": arrival_fit.spec["kind"],
        "has_fit": arrival_fit.has_fit,
        "ks_distance": {name: dict(law.distance) for name, law in lengths.items()},
        "correlation": correlation,
        "notes": notes,
    }
    return ScenarioFit(scenario, facts)


def fit_file(path: str | Path, format: str | TraceFormat = "auto") -> tuple[str, JsonObject]:
    """(the proposed scenario as YAML, the figures of the fit as JSON) for a trace file."""
    fitted = fit(load_trace(path, format))
    return fitted.to_yaml(), fitted.facts


def _compared(trace: Trace, scenario: Scenario, duration_s: float) -> dict[str, JsonObject]:
    """The figures of the trace and of a run of the fitted process over the same time."""
    assert scenario.arrivals is not None, "a fitted scenario has arrivals"
    drawn = scenario.arrivals.times(np.random.Generator(np.random.PCG64(0)), duration_s)
    return {
        name: {
            "rate_per_s": len(times) / duration_s,
            **describe_arrivals(times, duration_s),
            # of counts in windows of about 100 requests, None for fewer than ten windows
            "dispersion_100": dispersion(times, len(times) // 100, duration_s)
            if len(times) >= 1000
            else None,
        }
        for name, times in (("trace", trace.times_s), ("fit", drawn))
        if len(times) > 2
    }


def _replay_note(source: str, arrivals: ArrivalFit) -> str:
    """The scenario and the command that replay the trace; Python reads JSON as YAML."""
    closest = min(arrivals.distance, key=lambda name: arrivals.distance[name])
    replay = f"arrivals: {{kind: trace, path: {json.dumps(source, ensure_ascii=False)}}}"
    return (
        f"none fits: replay it; the closest process ({closest}) is"
        f" {arrivals.distance[closest]:.0%} away from the trace. In place of the proposed arrivals:"
        f" {replay}, without requests; then: slobench run SCENARIO.yaml --target URL"
    )


def _drift(trace: Trace) -> list[str]:
    """A warning if the rates of tenths of the trace differ far more than by chance, so that no
    stationary process fits."""
    counts, _ = np.histogram(trace.times_s, 10)
    low, high = int(counts.min()), int(counts.max())
    if len(trace) < 1000 or high < 2 * max(low, 1):
        return []
    busiest = int(np.argmax(counts))
    tenth_s = float(trace.times_s[-1]) / 10
    calm, busy = (write_rate(float(f"{count / tenth_s:.3g}")) for count in (low, high))
    return [
        f"the rate changes: {calm} in the calmest tenth, {busy} in the busiest (number"
        f" {busiest + 1} of 10); a stationary process does not follow that: fit a part, or replay"
        " the file"
    ]


def _name(source: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(source).name.split(".")[0])[:59]
    return f"{stem}_fit" if stem[:1].isalpha() else f"trace_{stem[:54]}_fit"


@dataclass(frozen=True, slots=True)
class LengthFit:
    """The chosen distribution in scenario form, and the KS distance of each candidate."""

    spec: Mapping[str, Any] | int
    distance: Mapping[str, float]


def fit_lengths(tokens: TokenCounts) -> LengthFit:
    """The distribution of n ≥ 1 token counts, each ≥ 1."""
    low, high = int(tokens.min()), int(tokens.max())
    if low == high:
        return LengthFit(low, {"fixed": 0.0})
    logs = np.log(tokens)
    mean = float(tokens.mean())
    candidates = {
        "lognormal": {"median": exp(float(logs.mean())), "sigma": float(logs.std())},
        "gamma": {"mean": mean, "cv": float(tokens.std()) / mean},
    }
    if high - low <= _MAX_RANGE:
        candidates["power_law"] = {"alpha": power_law_exponent(tokens)}
    distance, specs = {}, {}
    for kind, parameters in candidates.items():
        values = {name: rounded(value) for name, value in parameters.items()}
        specs[kind] = {"kind": kind, **values, "min": low, "max": high}
        # pydantic rejects a law that cannot have these moments between these bounds
        with suppress(ValidationError):
            distance[kind] = ks_distance(tokens, LENGTHS.build(specs[kind]))
    best = min(distance, key=lambda kind: distance[kind], default="")
    if best and distance[best] <= CLOSE_ENOUGH:
        return LengthFit(specs[best], distance)
    own = thinned(tokens)
    return LengthFit(own, {**distance, "empirical": ks_distance(tokens, LENGTHS.build(own))})


def power_law_exponent(tokens: TokenCounts) -> float:
    """The maximum-likelihood alpha of P(x) = x^−alpha / Σ y^−alpha on min … max of the sample:
    the maximum of −alpha · mean(ln x) − ln Σ y^−alpha, between 0.01 and 20.

    Source: A. Clauset, C. R. Shalizi, M. E. J. Newman, SIAM Review 51 (2009), appendix B, truncated
    at the upper end.
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
    """max |F_n − F| over the whole numbers. Both functions are steps, so the sample's values and
    the integers just below them suffice."""
    values, counts = np.unique(tokens.astype(np.int64), return_counts=True)
    above = np.cumsum(counts) / tokens.size
    below = above - counts / tokens.size
    low, high = law.support
    at = np.where(values < low, 0.0, law.cdf(np.clip(values, low, high)))
    before = np.where(values - 1 < low, 0.0, law.cdf(np.clip(values - 1, low, high)))
    return float(max(np.abs(at - above).max(), np.abs(before - below).max()))


def copula_correlation(inputs: TokenCounts, outputs: TokenCounts) -> float:
    """The Gaussian copula's ρ = 2·sin(π·ρ_s/6), ρ_s Spearman's rank correlation; 0 if either is
    constant.

    Source: R. B. Nelsen, An Introduction to Copulas (2nd ed. 2006), section 5.1.
    """
    if inputs.min() == inputs.max() or outputs.min() == outputs.max():
        return 0.0
    return 2 * sin(pi * rank_correlation(inputs.astype(float), outputs.astype(float)) / 6)
