"""Conversion of quantities as people write them (`500ms`, `12/s`, `2%`) to SI floats and back.

Inside slobench a duration is in seconds and a rate per second. A bare number is rejected, because
its unit would be a guess. Python code (not YAML or flags) passes floats to dataclasses directly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

_SECONDS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_DURATION = re.compile(rf"({_NUMBER})\s*([a-zµ]+)\s*")
_RATE = re.compile(rf"({_NUMBER})\s*(?:req|requests|tok|tokens)?\s*/\s*([a-zµ]+)")


def parse_duration_s(text: object) -> float:
    """Seconds from `'500ms'`, `'1.5s'`, `'5m'`, `'1h30m'`. Raises ValueError on a bare number, a
    minus sign or an unknown unit."""
    if not isinstance(text, str):
        raise ValueError(f"a duration needs its unit: write '{text}s' or '{text}ms', not {text!r}")
    body = text.strip()
    total, position = 0.0, 0
    while position < len(body):
        match = _DURATION.match(body, position)
        if match is None or match[2] not in _SECONDS:
            known = ", ".join(_SECONDS)
            if is_bare_number(body):
                raise ValueError(f"{text!r} is not a duration; write '{body}s' or '{body}ms'")
            raise ValueError(f"{text!r} is not a duration; write e.g. '500ms' (units: {known})")
        total += float(match[1]) * _SECONDS[match[2]]
        position = match.end()
        if "-" in match[1][:1]:
            raise ValueError(f"{text!r}: a duration cannot be negative")
    if not body or not math.isfinite(total):
        raise ValueError(f"{text!r} is not a duration; write e.g. '500ms', '1.5s', '5m'")
    return total


def parse_rate_per_s(text: object) -> float:
    """Events per second from `'12/s'`, `'30/min'`, `'0.5 req/s'`. Raises ValueError on a bare,
    zero or negative number."""
    rate = _rate_per_s(text)
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"{text!r}: a rate must be positive")
    return rate


def parse_level_per_s(text: object) -> float:
    """Events per second as `parse_rate_per_s` reads them; `'0/s'` (silence) is allowed too."""
    rate = _rate_per_s(text)
    if not (rate >= 0 and math.isfinite(rate)):
        raise ValueError(f"{text!r}: a rate must be positive, or '0/s' for silence")
    return rate


def parse_share(text: object) -> float:
    """A share in [0, 1] from `'2%'` or `0.02`. Raises ValueError outside that range."""
    body = str(text).strip()
    try:
        value = float(body[:-1]) / 100 if body.endswith("%") else float(body)
    except ValueError:
        raise ValueError(f"{text!r} is not a share; write e.g. '2%' or 0.02") from None
    if not 0 <= value <= 1:
        raise ValueError(f"{text!r} is not a share between 0 and 1; per cent needs its sign")
    return value


def is_bare_number(text: str) -> bool:
    """Whether a text is a number without a unit."""
    return re.fullmatch(_NUMBER, text.strip()) is not None


def format_duration(seconds: float) -> str:
    """A duration for people, with three significant digits and a unit that fits its size:
    `0.0123` → `'12.3 ms'`. Infinity is `'∞'`, NaN `'–'`."""
    return " ".join(filter(None, duration_parts(seconds)))


def duration_parts(seconds: float) -> tuple[str, str]:
    """Number and unit of `format_duration`; the unit of infinity and NaN is ""."""
    if not math.isfinite(seconds):
        return ("∞" if seconds > 0 else "–"), ""
    seconds = float(f"{seconds:.3g}")  # before choosing the unit: 0.9996 s is 1 s, not 1e+03 ms
    for limit, scale, unit in (
        (1e-3, 1e6, "µs"),
        (1.0, 1e3, "ms"),
        (120.0, 1.0, "s"),
        (7200.0, 1 / 60, "min"),
    ):
        if abs(seconds) < limit:
            return f"{seconds * scale:.3g}", unit
    return f"{seconds / 3600:.3g}", "h"


def write_duration(seconds: float) -> str:
    """The shortest duration string that `parse_duration_s` reads back as exactly this value:
    `0.5` → `'500ms'`, `300.0` → `'5m'`."""
    return _shortest(seconds, ("ms", "s", "us", "m", "h", "d"), "", parse_duration_s)


def write_rate(rate_per_s: float) -> str:
    """The shortest rate string that `parse_rate_per_s` reads back as exactly this value:
    `12.0` → `'12/s'`."""
    return _shortest(rate_per_s, ("s", "min", "h", "d"), "/", parse_rate_per_s)


def write_level(rate_per_s: float) -> str:
    """`write_rate`, and `'0/s'` for silence."""
    return write_rate(rate_per_s) if rate_per_s else "0/s"


def write_share(share: float) -> str:
    """A percentage that `parse_share` reads back as exactly this value, else the plain number:
    `0.02` → `'2%'`."""
    percent = f"{share * 100:.12g}%"
    return percent if parse_share(percent) == share else repr(share)


def _rate_per_s(text: object) -> float:
    if not isinstance(text, str):
        raise ValueError(f"a rate needs its unit: write '{text}/s', not {text!r}")
    match = _RATE.fullmatch(text.strip())
    if match is None or match[2] not in _SECONDS:
        nearest = f"'{text.strip()}/s'" if is_bare_number(text) else "e.g. '12/s' or '30/min'"
        raise ValueError(f"{text!r} is not a rate; write {nearest}")
    return float(match[1]) / _SECONDS[match[2]]


def _shortest(
    value: float, units: tuple[str, ...], separator: str, parse: Callable[[object], float]
) -> str:
    exact = f"{value!r}{separator}s"  # the repr of a float always parses to the same value
    texts = []
    for unit in units:
        scale = _SECONDS[unit] if separator else 1 / _SECONDS[unit]
        texts.append(f"{value * scale:.12g}{separator}{unit}")
    readable = [text for text in texts if parse(text) == value]
    # 500ms is preferred to 0.5s: a leading "0." counts as one more character
    return min(readable, key=lambda text: len(text) + text.startswith("0."), default=exact)
