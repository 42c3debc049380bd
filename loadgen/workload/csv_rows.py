"""Rows of CSV text with cells of any size: Python's reader refuses those above 128 KiB."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _csv import Reader

_MOST_CELL_BYTES = (1 << 31) - 1  # a C long on every platform; files have limits of their own


def csv_rows(lines: Iterable[str], separator: str = ",") -> Reader:
    """`csv.reader`; the limit of its cells is a setting of the process."""
    csv.field_size_limit(_MOST_CELL_BYTES)
    return csv.reader(lines, delimiter=separator)
