"""Checked values from a JSON object. Each error names the field and its value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from loadgen.manifest.json_section import JsonObject
from reference_engine.serving.wire.wire_errors import WireError


def parse_object(body: bytes) -> JsonObject:
    """The JSON object of a body. Raises WireError for anything else."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise WireError(f"the body must be a JSON object, got {type(data).__name__}")
    return data


def wrong_value(field: str, expected: str, value: object) -> WireError:
    """The error for a value that is not as expected; long values are cut off in the message."""
    return WireError(f"{field} must be {expected}, got {value!r:.100}", param=field)


def valid_unicode(text: str) -> str:
    """`text` with `?` for each lone surrogate, which JSON allows and UTF-8 does not."""
    return text.encode("utf-8", errors="replace").decode()


def is_int(value: object) -> bool:
    """Whether `value` is an integer and not a bool, which Python counts as an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def integer(data: Mapping[str, Any], field: str, least: int) -> int | None:
    """An integer from `least` to 2^63 - 1; None if the field is absent or null."""
    value = data.get(field)
    if value is None:
        return None
    if not is_int(value) or value < least:
        raise wrong_value(field, f"an integer of at least {least}", value)
    if value >= 1 << 63:
        raise wrong_value(field, "an integer below 2^63", value)
    return int(value)


def bounded(data: Mapping[str, Any], field: str, least: int, most: int, default: int) -> int:
    """An integer in [least, most]; `default` if the field is absent or null."""
    value = data.get(field)
    if value is None:
        return default
    if not is_int(value) or not least <= value <= most:
        raise wrong_value(field, f"an integer in [{least}, {most}]", value)
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
        raise wrong_value(field, f"a number in {interval}", value)
    return float(value)


def seconds(data: Mapping[str, Any], field_ms: str) -> float | None:
    """A duration in seconds from a field in milliseconds, at most a day."""
    if data.get(field_ms) is None:
        return None
    return number(data, field_ms, 0.0, 86_400_000.0, 0.0, above=True) / 1e3


def flag(data: Mapping[str, Any], field: str, path: str = "") -> bool:
    """A boolean, false if absent or null; `path` comes before the field's name in errors."""
    value = data.get(field)
    if value is not None and not isinstance(value, bool):
        raise wrong_value(path + field, "true or false", value)
    return bool(value)


def text(data: Mapping[str, Any], field: str) -> str | None:
    value = data.get(field)
    if value is not None and not isinstance(value, str):
        raise wrong_value(field, "a string", value)
    return value
