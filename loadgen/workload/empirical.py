"""Observed lengths: values with weights, inline or in a file."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from loadgen.errors import nearest
from loadgen.registry import FILLED, FROM_LIST
from loadgen.workload.lengths import MAX_TOKENS, Lengths, Shares, TokenCounts, Tokens

Weight = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, eq=False)  # what it was read from is compared, not the arrays
class _Law:
    """The possible lengths, sorted, and P(length ≤ each)."""

    values: TokenCounts
    shares: Shares


class Empirical(Lengths):
    """One of the observed `values`, with probability proportional to its weight (equal if none are
    given); P(x) = Σ_{values = x} weight / Σ weight.

    `path` names a CSV file (a column of tokens and, optionally, one of weights; a header line may
    say `tokens,weight`) or a JSON file (a list of numbers, or {"values": […], "weights": […]}).
    """

    kind = "empirical"
    path: str | None = None
    values: Annotated[tuple[Tokens, ...], FROM_LIST, FILLED] | None = None
    weights: Annotated[tuple[Weight, ...], FROM_LIST] | None = None

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
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
        _ = self._law  # reads the file now, so that its mistakes are told with the scenario's
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
            columns = read_columns(self.path, ("tokens", "weight"), n_required=1)
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
WEIGHT = "weight"


def read_columns(path: str, names: Sequence[str], n_required: int) -> Columns:
    """The columns `names` of a file, of which the first `n_required` must be there.

    Token columns hold whole numbers 1 … 10 000 000, `weight` numbers ≥ 0 that are not all 0. Raises
    ValueError where the file cannot be read, is empty, or says something else.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: is not UTF-8 text ({error.reason})") from None
    is_json = path.lower().endswith(".json") or text.lstrip()[:1] in ("[", "{")
    rows = _json_rows(path, text, names) if is_json else _csv_rows(path, text, names, n_required)
    columns: dict[str, list[float]] = {}
    for where, row in rows:
        if columns and set(row) != set(columns):
            raise ValueError(
                f"{where}: has {', '.join(row)}, but the first row has {', '.join(columns)}"
            )
        for name, value in row.items():
            columns.setdefault(name, []).append(_checked(where, name, value))
    if not columns:
        raise ValueError(f"{path}: has no rows; expected {', '.join(names[:n_required])} in each")
    found = {name: np.array(values) for name, values in columns.items()}
    if WEIGHT in found and not found[WEIGHT].any():
        raise ValueError(f"{path}: every weight is 0; at least one row must be possible")
    return found


Rows = list[tuple[str, dict[str, Any]]]


def _csv_rows(path: str, text: str, names: Sequence[str], n_required: int) -> Rows:
    lines = [
        (f"{path}:{number}", [cell.strip() for cell in cells])
        for number, cells in enumerate(csv.reader(text.splitlines()), start=1)
        if any(cell.strip() for cell in cells)
    ]
    order = list(names)
    if lines and not _is_number(lines[0][1][0]):
        where, header = lines.pop(0)
        order = [cell.lower() for cell in header]
        for name in names[:n_required]:
            if name not in order:
                raise ValueError(f"{where}: has no column '{name}'; {nearest(name, order)}")
    rows: Rows = []
    for where, cells in lines:
        if not n_required <= len(cells) <= len(order):
            expected = ",".join(order)
            raise ValueError(f"{where}: has {len(cells)} cells; expected {expected}")
        named = zip(order, cells, strict=False)
        rows.append((where, {name: cell for name, cell in named if name in names}))
    return rows


def _json_rows(path: str, text: str, names: Sequence[str]) -> Rows:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: is not JSON ({error.msg})") from None
    if isinstance(content, dict):
        content = _transposed(path, content)
    if not isinstance(content, list):
        raise ValueError(f"{path}: expected a list, got {str(content)[:40]}")
    return [
        (f"{path}: entry {index}", _named(f"{path}: entry {index}", entry, names))
        for index, entry in enumerate(content)
    ]


def _transposed(path: str, content: dict[str, Any]) -> list[Any]:
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
        raise ValueError(f"{path}: values and weights must be lists of one length")
    return [
        [*(value if isinstance(value, list) else [value]), weight]
        for value, weight in zip(values, weights, strict=True)
    ]


def _named(where: str, entry: object, names: Sequence[str]) -> dict[str, Any]:
    if isinstance(entry, dict):
        missing = [name for name in names if name != WEIGHT and name not in entry]
        if missing:
            raise ValueError(f"{where}: has no '{missing[0]}'; {nearest(missing[0], entry)}")
        return {name: entry[name] for name in names if name in entry}
    cells = entry if isinstance(entry, list) else [entry]
    n_least = len(names) - 1  # every column but the weight
    if not n_least <= len(cells) <= len(names):
        raise ValueError(f"{where}: has {len(cells)} numbers; expected {', '.join(names)}")
    return dict(zip(names, cells, strict=False))


def _checked(where: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str) or not _is_number(value):
        raise ValueError(f"{where}: {name} {value!r} is not a number")
    number = float(value)
    if name == WEIGHT:
        if not (number >= 0 and isfinite(number)):
            raise ValueError(f"{where}: weight {value} must be 0 or more")
    elif not (1 <= number <= MAX_TOKENS and number == int(number)):
        raise ValueError(f"{where}: {name} {value} must be a whole number from 1 to {MAX_TOKENS}")
    return number


def _is_number(cell: object) -> bool:
    try:
        float(str(cell))
    except ValueError:
        return False
    return True
