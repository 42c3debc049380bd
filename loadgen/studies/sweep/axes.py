"""Axes of a sweep: keys with their values, and the points that they span."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from loadgen.errors import UsageError
from loadgen.yaml_document import parse_document

How = Literal["grid", "zip"]
Point = Mapping[str, Any]

_WORDS = {"rate": "arrivals.rate"}
_RANGE = re.compile(r"(?P<first>[\d.]+):(?P<last>[\d.]+):(?P<step>[\d.]+)(?P<unit>[^\d:].*)?")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_MOST = 10_000


@dataclass(frozen=True)
class Axis:
    """A key and its values, as YAML reads them."""

    key: str
    values: tuple[Any, ...]

    def numbers(self) -> list[float] | None:
        """The values as numbers, without their units; None unless all of them are numbers."""
        numbers = [n for value in self.values if (n := number(value)) is not None]
        return numbers if len(numbers) == len(self.values) else None


def read_axis(text: str) -> Axis:
    """`arrivals.rate=2/s,4/s,8/s`, `rate=2:10:2/s` (from, to, step; both included) or
    `engine.mode=[chunked, static]`; the right side is YAML, separated by commas. Raises
    UsageError."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise UsageError(f"--over {text}: expected key=value,value, e.g. arrivals.rate=2/s,4/s,8/s")
    document = parse_document(f"values: [{values}]", f"--over {text}", UsageError)
    document.raise_mistakes()
    listed = document.values["values"]
    if len(listed) == 1 and isinstance(listed[0], list):
        listed = listed[0]
    return axis(key.strip(), [_with_unit(key.strip(), value) for value in listed], f"--over {text}")


def _with_unit(key: str, value: object) -> object:
    """A bare number or range of `rate` per second; a file needs the unit."""
    text = str(value)
    is_bare = bool(_NUMBER.fullmatch(text)) or bool((m := _RANGE.fullmatch(text)) and not m["unit"])
    return f"{text}/s" if key in ("rate", "arrivals.rate") and is_bare else value


def axis(key: str, values: object, where: str = "over") -> Axis:
    """The axis of a key, with ranges expanded. Raises UsageError that begins with `where`."""
    if not isinstance(values, list | tuple) or not values:
        raise UsageError(f"{where}: {key}: expected a list of values, got {values!r}")
    spread = [element for value in values for element in _spread(value, where)]
    labels = [label(value) for value in spread]
    twice = [text for k, text in enumerate(labels) if text in labels[:k]]
    if twice:
        raise UsageError(f"{where}: {key}: the value {twice[0]} appears twice")
    return Axis(_WORDS.get(key, key), tuple(spread))


def points(axes: Sequence[Axis], how: How) -> list[Point]:
    """Every combination (`grid`), the last axis fastest, or the k-th values together (`zip`).
    Raises UsageError for a repeated key, lists of different length and too many points."""
    keys = [axis.key for axis in axes]
    if not axes:
        raise UsageError("--over: name a key to vary, e.g. --over arrivals.rate=2/s,4/s,8/s")
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(f"--over {key}: this key appears twice; list all its values at once")
    lists = [axis.values for axis in axes]
    if how == "zip":
        lengths = {axis.key: len(axis.values) for axis in axes}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{key} has {n}" for key, n in lengths.items())
            raise UsageError(f"--zip: all keys need the same number of values; {counts}")
        return [dict(zip(keys, values, strict=True)) for values in zip(*lists, strict=True)]
    n_points = 1
    for values in lists:
        n_points *= len(values)
    if n_points > _MOST:
        raise UsageError(f"--over: {n_points} cells; the limit is {_MOST}")
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*lists)]


def label(value: object) -> str:
    """A value as text for tables and figures: text unchanged, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def number(value: object) -> float | None:
    """The number at the start of a value: 4 of `4/s`, 512 of 512; None without a number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    match = _NUMBER.match(str(value))
    return float(match[0]) if match else None


def _spread(value: object, where: str) -> list[object]:
    """The values of a range; any other value alone."""
    match = _RANGE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return [value]
    try:
        first, last, step = (float(match[name]) for name in ("first", "last", "step"))
    except ValueError:
        return [value]
    n = int((last - first) / step + 1e-9) + 1 if step > 0 else 0
    if n < 1:
        raise UsageError(f"{where}: the range {value}: from, to and step give no values")
    if n > _MOST:
        raise UsageError(f"{where}: the range {value} has {n} values; the limit is {_MOST}")
    numbers = [round(first + k * step, 9) for k in range(n)]
    unit = match["unit"]
    if unit:
        return [f"{n:.12g}{unit}" for n in numbers]
    return [int(n) if n.is_integer() else n for n in numbers]
