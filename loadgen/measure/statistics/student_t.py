"""Quantiles of Student's t distribution, without scipy, whose import takes longer than a report."""

from __future__ import annotations

import math
from statistics import NormalDist

_EXPANDED_FROM = 1000.0  # degrees of freedom, from which the expansion is exact to 1e-13
_MOST_STEPS = 200


def student_t(level: float, degrees: float) -> float:
    """The quantile at `level`, between 0 and 1, with `degrees` of freedom, which need not be whole;
    NaN where they are not positive. The relative error is below 1e-11.

    Newton's method on the distribution function, from the expansion in 1/degrees, which is the
    result itself for 1000 degrees and more. From the left of the quantile the iterates rise to it,
    because the tail is convex.

    Source: Abramowitz & Stegun 26.7.1 (the tail) and 26.7.5 (the expansion).
    """
    if not degrees > 0:
        return math.nan
    if level < 0.5:
        return -student_t(1 - level, degrees)
    z = NormalDist().inv_cdf(level)
    t = _expanded(z, max(degrees, 2.0))
    if degrees >= _EXPANDED_FROM:
        return t
    log_peak = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    log_peak -= math.log(degrees * math.pi) / 2
    for _ in range(_MOST_STEPS):
        density = math.exp(log_peak - (degrees + 1) / 2 * math.log1p(t * t / degrees))
        before, t = t, max(z, t + (_upper_tail(t, degrees) - (1 - level)) / density)
        if abs(t - before) <= 1e-13 * t:
            return t
    raise ArithmeticError(f"Student's t at {level} with {degrees} degrees of freedom: no limit")


def _expanded(z: float, degrees: float) -> float:
    """Up to the fourth power of 1/degrees, from the normal quantile z of the same level."""
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees ** (power + 1) for power, term in enumerate(terms))


def _upper_tail(t: float, degrees: float) -> float:
    """The probability above t ≥ 0."""
    a, x, y = degrees / 2, degrees / (degrees + t * t), t * t / (degrees + t * t)
    if x < (a + 1) / (a + 2.5):  # where the fraction converges fast
        return _beta(a, 0.5, x, y) / 2
    return (1 - _beta(0.5, a, y, x)) / 2


def _beta(a: float, b: float, x: float, y: float) -> float:
    """The regularised incomplete beta function I_x(a, b) by its continued fraction, which converges
    for x < (a + 1) / (a + b + 2); y = 1 − x.

    Source: Press et al., Numerical Recipes (3rd ed. 2007), §6.4.
    """
    if x == 0:
        return 0.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log(y)) / a
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _MOST_STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        factor = 1.0
        for term in (even, odd):
            c, d = 1 + term / c, 1 / (1 + term * d)
            factor *= c * d
        value *= factor
        if abs(factor - 1) < 1e-15:
            break
    return front * value
