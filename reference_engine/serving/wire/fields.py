"""Values out of a JSON object, each checked and refused under its own name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from reference_engine.serving.wire.wire_errors import WireError


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises WireError for anything else."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise WireError(f"the body must be a JSON object, got {type(data).__name__}")
    return data


def valid_unicode(text: str) -> str:
    """With `?` for lone surrogates, which are valid JSON and no valid Unicode."""
    return text.encode("utf-8", errors="replace").decode()


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def integer(data: Mapping[str, Any], field: str, least: int) -> int | None:
    value = data.get(field)
    if value is None:
        return None
    if not is_int(value) or value < least or value >= 1 << 63:
        expected = f"an integer of at least {least}" if least > -2 else "an integer of 64 bits"
        raise WireError(f"{field} must be {expected}, got {value!r}", param=field)
    return int(value)


def number(
    data: Mapping[str, Any],
    field: str,
    low: float,
    high: float,
    default: float,
    above: bool = False,
) -> float:
    """A number in [low, high], or in (low, high] with `above`."""
    value = data.get(field)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (above and value == low):
        interval = f"{'(' if above else '['}{low:.15g}, {high:.15g}]"
        raise WireError(f"{field} must be a number in {interval}, got {value!r}", param=field)
    return float(value)


def seconds(data: Mapping[str, Any], field_ms: str) -> float | None:
    """A duration given in milliseconds, up to a day."""
    if data.get(field_ms) is None:
        return None
    return number(data, field_ms, 0.0, 86_400_000.0, 0.0, above=True) / 1e3


def flag(data: Mapping[str, Any], field: str, path: str = "") -> bool:
    value = data.get(field)
    if value is not None and not isinstance(value, bool):
        raise WireError(f"{path}{field} must be true or false, got {value!r}", param=path + field)
    return bool(value)


def text(data: Mapping[str, Any], field: str) -> str | None:
    value = data.get(field)
    if value is not None and not isinstance(value, str):
        raise WireError(f"{field} must be a string, got {value!r}", param=field)
    return value
