"""Numbers formatted for people: three significant digits and their unit."""

from __future__ import annotations

import math
from typing import Any

from loadgen.measure.catalog import Unit
from loadgen.units import format_duration

_THIN = "\u202f"  # narrow and no-break


def format_value(value: float | None, unit: Unit) -> str:
    """A value with its unit: `431 ms`, `99.2 %`, `12.3/s`; `–` for none, `∞` for infinity."""
    if value is None or math.isnan(value):
        return "–"
    if unit == "s":
        return f"-{format_duration(-value)}" if value < 0 else format_duration(value)
    if math.isinf(value):
        return "∞"
    return format_share(value) if unit == "share" else f"{format_number(value)}/s"


def csv_cell(value: Any) -> Any:
    """A value for a CSV file: a text that a spreadsheet would run as a formula gets an apostrophe
    in front; numbers stay numbers. A carriage return, which `csv` does not quote, becomes a space.
    Source: OWASP, CSV Injection."""
    if not isinstance(value, str):
        return value
    shown = value.replace("\r", " ")
    if value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{shown}"
    return shown


def format_share(share: float) -> str:
    """Per cent with three significant digits; near 100 % two digits of the distance: `3.33 %`,
    `99.95 %`."""
    percent = 100 * share
    if percent < 50:
        return f"{float(f'{percent:.3g}'):.10g} %"
    rest = 100 - percent
    digits = 1 if rest <= 0 else max(1, min(2, 1 - math.floor(math.log10(rest))))
    if 0 < rest < 0.01:
        digits = min(9, -math.floor(math.log10(rest)))
    return f"{percent:.{digits}f}".rstrip("0").rstrip(".") + " %"


def format_number(value: float) -> str:
    """Three significant digits, thousands separated by narrow spaces, never in powers of ten."""
    rounded = float(f"{value:.3g}")
    if abs(rounded) >= 100:
        return f"{round(rounded):,}".replace(",", _THIN)
    return f"{rounded:g}"


def format_count(count: int) -> str:
    """A whole number, thousands separated by narrow spaces."""
    return f"{count:,}".replace(",", _THIN)
