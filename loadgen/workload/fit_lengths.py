"""Which length distribution recorded token counts look like: lognormal, gamma, power law, or none
of them.

The one with the smallest Kolmogorov–Smirnov distance D = max |F_n(x) − F(x)| wins; where none comes
closer than 5 %, the counts themselves are proposed, thinned out to some fifty values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, pi, sin
from typing import Any

import numpy as np
from pydantic import ValidationError

from loadgen.workload.lengths import LENGTHS, Lengths, TokenCounts

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
