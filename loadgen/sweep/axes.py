"""What a sweep varies: keys with their values, and the points they span."""

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

_WORDS = {"rate": "arrivals.rate", "concurrency": "limits.max_concurrency"}
_RANGE = re.compile(r"(?P<first>[\d.]+):(?P<last>[\d.]+):(?P<step>[\d.]+)(?P<unit>[^\d:].*)?")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_MOST = 10_000


@dataclass(frozen=True)
class Axis:
    """One key and the values it takes, as YAML has them."""

    key: str
    values: tuple[Any, ...]

    def numbers(self) -> list[float] | None:
        """The values as numbers, without their units; None where one of them is none."""
        found = [number(value) for value in self.values]
        known = [value for value in found if value is not None]
        return known if len(known) == len(found) else None


def read_axis(text: str) -> Axis:
    """`arrivals.rate=2/s,4/s,8/s`, `rate=2:10:2/s` (from, to, step; both ends included) or
    `engine.mode=[chunked, static]`: YAML on the right, commas between. Raises UsageError."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise UsageError(f"--over {text}: expected key=value,value, e.g. arrivals.rate=2/s,4/s,8/s")
    document = parse_document(f"values: [{values}]", f"--over {text}", UsageError)
    document.raise_mistakes()
    found = document.values["values"]
    if len(found) == 1 and isinstance(found[0], list):
        found = found[0]
    return axis(key.strip(), found, f"--over {text}")


def axis(key: str, values: object, where: str = "over") -> Axis:
    """A key with values that may be ranges. Raises UsageError, naming `where` it stands."""
    if not isinstance(values, list | tuple) or not values:
        raise UsageError(f"{where}: {key}: expected a list of values, got {values!r}")
    spread = [one for value in values for one in _spread(value, where)]
    labels = [label(value) for value in spread]
    twice = [text for k, text in enumerate(labels) if text in labels[:k]]
    if twice:
        raise UsageError(f"{where}: {key}: the value {twice[0]} is named twice")
    return Axis(_WORDS.get(key, key), tuple(spread))


def points(axes: Sequence[Axis], how: How) -> list[Point]:
    """Every combination (`grid`), the last axis fastest, or the k-th values together (`zip`).
    Raises UsageError for a key that stands twice, lists of different length and too many points."""
    keys = [one.key for one in axes]
    if not axes:
        raise UsageError("--over: what varies? E.g. --over arrivals.rate=2/s,4/s,8/s")
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(f"--over {key}: this key stands twice; name all its values at once")
    lists = [one.values for one in axes]
    if how == "zip":
        lengths = {one.key: len(one.values) for one in axes}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{key} has {n}" for key, n in lengths.items())
            raise UsageError(f"--zip: every key needs as many values as the others; {told}")
        return [dict(zip(keys, values, strict=True)) for values in zip(*lists, strict=True)]
    n_points = 1
    for values in lists:
        n_points *= len(values)
    if n_points > _MOST:
        raise UsageError(f"--over: {n_points} cells; {_MOST} are the most")
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*lists)]


def label(value: object) -> str:
    """A value as tables and figures show it: text as it is, the rest as YAML's JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def number(value: object) -> float | None:
    """The number a value begins with: 4 of `4/s`, 512 of 512; None where it does not."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    match = _NUMBER.match(str(value))
    return float(match[0]) if match else None


def _spread(value: object, where: str) -> list[object]:
    """The values of a range; any other value is itself."""
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
        raise UsageError(f"{where}: the range {value} has {n} values; {_MOST} are the most")
    numbers = [round(first + k * step, 9) for k in range(n)]
    unit = match["unit"]
    if unit:
        return [f"{one:.12g}{unit}" for one in numbers]
    return [int(one) if one.is_integer() else one for one in numbers]
