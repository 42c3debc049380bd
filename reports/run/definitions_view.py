"""The same run under each tool's definition, one row per metric and tool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loadgen.measure.definitions import Rescored
from loadgen.measure.wording import format_count, format_value

if TYPE_CHECKING:
    from rich.console import Group


def table(rows: Sequence[Rescored]) -> Group:
    """Numbers side by side, and below them the formula each is made by."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    heads = ("metric", "by", "n", "mean", *rows[0].percentiles)
    for k, head in enumerate(heads):
        grid.add_column(head, justify="left" if k < 2 else "right")
    for row in rows:
        numbers = [format_value(value, "s") for value in (row.mean, *row.percentiles.values())]
        grid.add_row(row.metric.upper(), row.definition, format_count(row.n), *numbers)
    said = [Text(f"  {r.metric.upper()} by {r.definition}: {r.formula}") for r in rows]
    return Group(grid, *said)
