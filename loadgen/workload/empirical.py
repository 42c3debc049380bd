"""Observed lengths: values with weights, in the scenario or in a small CSV or JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from loadgen.errors import nearest
from loadgen.manifest.json_section import JsonObject
from loadgen.registry import FILLED, FROM_LIST
from loadgen.workload.csv_rows import csv_rows
from loadgen.workload.lengths import MAX_TOKENS, Lengths, Shares, TokenCounts, Tokens
from loadgen.workload.texts import read_text

Weight = Annotated[float, Field(ge=0)]
_EDGES = np.concatenate([np.arange(50) / 50, [0.99, 0.995, 0.999, 1.0]])


@dataclass(frozen=True, eq=False)  # comparisons use the kind's fields, not these arrays
class _Law:
    """The possible lengths, sorted, and P(length ≤ each)."""

    values: TokenCounts
    shares: Shares


class Empirical(Lengths):
    """One of the observed `values`, with probability proportional to its weight (equal without
    weights); P(x) = Σ_{values = x} weight / Σ weight.

    `path` names a CSV file (a column of tokens and, optionally, a column of weights; the header
    line `tokens,weight` is optional) or a JSON file (a list of numbers, or
    {"values": […], "weights": […]}).
    """

    kind = "empirical"
    path: str | None = None
    values: Annotated[tuple[Tokens, ...], FROM_LIST, FILLED] | None = None
    weights: Annotated[tuple[Weight, ...], FROM_LIST] | None = None

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.path is None) == (self.values is None):
            raise ValueError("give either path (a file) or values (a list), not both or neither")
        if self.weights is not None and self.values is None:
            raise ValueError("weights go with values; in a file they are its second column")
        if self.weights is not None and self.values is not None:
            if len(self.weights) != len(self.values):
                raise ValueError(
                    f"{len(self.weights)} weights for {len(self.values)} values; give each its own"
                )
            if not sum(self.weights):
                raise ValueError("every weight is 0; at least one value must be possible")
        _ = self._law  # reads the file now, so that its errors are reported with the scenario's
        return self

    @property
    def support(self) -> tuple[int, int]:
        values = self._law.values
        return int(values[0]), int(values[-1])

    def cdf(self, tokens: NDArray[np.integer]) -> Shares:
        n_below = np.searchsorted(self._law.values, tokens, side="right")
        return np.concatenate([[0.0], self._law.shares])[n_below]

    def ppf(self, shares: Shares) -> TokenCounts:
        index = np.searchsorted(self._law.shares, shares, side="right")
        return self._law.values[np.minimum(index, len(self._law.values) - 1)]

    @cached_property
    def _law(self) -> _Law:
        if self.path is not None:
            columns = read_columns(self.path, "tokens")
            tokens = columns["tokens"]
            weights = columns.get("weight", np.ones(len(tokens)))
        else:
            tokens = np.array(self.values, np.float64)
            weights = np.ones(len(tokens)) if self.weights is None else np.array(self.weights)
        values, index = np.unique(tokens.astype(np.uint32), return_inverse=True)
        totals = np.bincount(index, weights)
        is_possible = totals > 0
        cumulative = np.cumsum(totals[is_possible])
        return _Law(values[is_possible], cumulative / cumulative[-1])


Columns = dict[str, NDArray[np.float64]]
Row = Mapping[str, object]  # value by column
Rows = list[tuple[str, Row]]  # (place in the file, row)
WEIGHT = "weight"


def read_columns(path: str, *names: str) -> Columns:
    """The columns `names` of a CSV or JSON file, and the optional column `weight` after them.

    Token columns hold whole numbers 1 … 10 000 000, `weight` numbers ≥ 0 that are not all 0. Raises
    ValueError with the file and the line or entry of the first mistake.
    """
    text = read_text(path, path, ValueError)
    is_json = path.lower().endswith(".json") or text.lstrip()[:1] in ("[", "{")
    rows = _json_rows(path, text, names) if is_json else _csv_rows(path, text, names)
    columns: dict[str, list[float]] = {}
    for where, row in rows:
        if columns and set(row) != set(columns):
            raise ValueError(
                f"{where}: has {', '.join(row)}, but the first row has {', '.join(columns)}"
            )
        for name, value in row.items():
            columns.setdefault(name, []).append(_number(where, name, value))
    if not columns:
        raise ValueError(f"{path}: has no rows; expected {', '.join(names)} in each")
    if not any(columns.get(WEIGHT, [1.0])):
        raise ValueError(f"{path}: every weight is 0; at least one row must be possible")
    return {name: np.array(values) for name, values in columns.items()}


def _csv_rows(path: str, text: str, names: Sequence[str]) -> Rows:
    lines = [
        (f"{path}:{number}", [cell.strip() for cell in cells])
        for number, cells in enumerate(csv_rows(text.splitlines()), start=1)
        if any(cell.strip() for cell in cells)
    ]
    order = [*names, WEIGHT]
    if lines and not _is_number(lines[0][1][0]):
        where, header = lines.pop(0)
        order = [cell.lower() for cell in header]
        for name in names:
            if name not in order:
                raise ValueError(f"{where}: has no column '{name}'; {nearest(name, order)}")
    for where, cells in lines:
        if not len(names) <= len(cells) <= len(order):
            raise ValueError(f"{where}: has {len(cells)} cells; expected {','.join(order)}")
    is_read = {*names, WEIGHT}
    return [
        (where, {name: c for name, c in zip(order, cells, strict=False) if name in is_read})
        for where, cells in lines
    ]


def _json_rows(path: str, text: str, names: Sequence[str]) -> Rows:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: is not JSON ({error.msg})") from None
    if isinstance(content, dict):
        content = _transposed(path, content)
    if not isinstance(content, list):
        raise ValueError(f"{path}: expected a list, got {str(content)[:40]}")
    places = [f"{path}: entry {index}" for index in range(len(content))]
    return [(place, _row(place, e, names)) for place, e in zip(places, content, strict=True)]


def _transposed(path: str, content: JsonObject) -> list[Any]:
    """Rows of {"values": […], "weights": […]}."""
    unknown = [key for key in content if key not in ("values", "weights")]
    values, weights = content.get("values"), content.get("weights")
    if unknown or not isinstance(values, list):
        raise ValueError(
            f'{path}: expected a list or {{"values": […], "weights": […]}}, '
            f"got the keys {', '.join(map(str, content)) or 'none'}"
        )
    if weights is None:
        return values
    if not isinstance(weights, list) or len(weights) != len(values):
        raise ValueError(f"{path}: values and weights must be lists of the same length")
    return [
        [*(value if isinstance(value, list) else [value]), weight]
        for value, weight in zip(values, weights, strict=True)
    ]


def _row(where: str, entry: object, names: Sequence[str]) -> Row:
    if isinstance(entry, dict):
        missing = [name for name in names if name not in entry]
        if missing:
            raise ValueError(f"{where}: has no '{missing[0]}'; {nearest(missing[0], entry)}")
        return {name: entry[name] for name in (*names, WEIGHT) if name in entry}
    cells = entry if isinstance(entry, list) else [entry]
    if not len(names) <= len(cells) <= len(names) + 1:
        expected = ", ".join((*names, WEIGHT))
        raise ValueError(f"{where}: has {len(cells)} numbers; expected {expected}")
    return dict(zip((*names, WEIGHT), cells, strict=False))


def _number(where: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not _is_number(value):
        raise ValueError(f"{where}: {name} {value!r} is not a number")
    number = float(str(value))  # inf for an integer beyond the floats
    if name == WEIGHT:
        if not 0 <= number < inf:
            raise ValueError(f"{where}: weight {value} must be 0 or more")
    elif not (1 <= number <= MAX_TOKENS and number == int(number)):
        raise ValueError(f"{where}: {name} {value} must be a whole number from 1 to {MAX_TOKENS}")
    return number


def _is_number(cell: Any) -> bool:
    try:
        float(str(cell))
    except ValueError:
        return False
    return True


def thinned(tokens: TokenCounts) -> JsonObject:
    """The sample as an empirical law: all values if there are few, else a value per 2 % of the
    sample, and several for the last 2 %."""
    values, counts = np.unique(tokens, return_counts=True)
    if values.size <= _EDGES.size:
        return {"kind": "empirical", "values": values.tolist(), "weights": counts.tolist()}
    middles = (_EDGES[1:] + _EDGES[:-1]) / 2
    chosen = np.quantile(tokens, middles, method="inverted_cdf").astype(np.int64)
    values, place = np.unique(chosen, return_inverse=True)
    weights = [float(f"{1000 * weight:.4g}") for weight in np.bincount(place, np.diff(_EDGES))]
    return {"kind": "empirical", "values": values.tolist(), "weights": weights}
