"""Numbers as people read them: three significant digits and their unit."""

from __future__ import annotations

import math

from loadgen.measure.catalog import Unit
from loadgen.units import format_duration


def say(value: float | None, unit: Unit) -> str:
    """A value with its unit: `431 ms`, `99.2 %`, `12.3/s`; `–` for none, `∞` beyond all."""
    if value is None or math.isnan(value):
        return "–"
    if unit == "s":
        return f"-{format_duration(-value)}" if value < 0 else format_duration(value)
    if math.isinf(value):
        return "∞"
    return say_share(value) if unit == "share" else f"{say_number(value)}/s"


def say_share(share: float) -> str:
    """Per cent, with as many digits as the distance from 0 or 100 % needs: `97.3 %`, `99.95 %`."""
    percent = 100 * share
    rest = min(percent, 100 - percent)
    digits = 1 if rest >= 1 or rest <= 0 else min(6, 1 - math.floor(math.log10(rest)))
    text = f"{percent:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.')} %"


def say_number(value: float) -> str:
    """Three significant digits, thousands separated by thin spaces, never in powers of ten."""
    rounded = float(f"{value:.3g}")
    if abs(rounded) >= 100:
        return f"{round(rounded):,}".replace(",", "\u2009")
    return f"{rounded:g}"


def say_count(count: int) -> str:
    """A whole number, thousands separated by thin spaces."""
    return f"{count:,}".replace(",", "\u2009")
