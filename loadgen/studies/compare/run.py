"""Two targets measured in turns with the same requests, to be compared.

compare.json  compare.html    the result and its page
A/r<k>/  B/r<k>/              the run directories (loadgen.studies.cells.order)
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from loadgen.errors import TargetError
from loadgen.studies.cells.cell import CELL_FILE, Cell
from loadgen.studies.cells.order import run_cells
from loadgen.studies.cells.runner import CellFailure
from loadgen.studies.compare.numbers import Comparison
from loadgen.studies.study import Place, Study
from loadgen.units import format_duration

COMPARE = Study("compare", "comparison", Comparison, before=(CELL_FILE,))


def measure_sides(
    cells: Sequence[Cell], place: Place[Comparison], repeats: int, console: Console
) -> list[str]:
    """Measures two cells in turns, apart from the runs that the directory has; the directories of
    their runs. Raises KeyboardInterrupt when interrupted, and TargetError for a side without any
    run."""
    seconds = 2 * repeats * cells[0].scenario.horizon_s
    runs = "1 run" if repeats == 1 else f"{repeats} runs"
    console.print(
        f"measuring A and B in turns, {runs} each: {format_duration(seconds)} of traffic, and the "
        f"drains; Ctrl-C keeps the finished runs in {place.directory}",
        soft_wrap=True,
    )
    failed: dict[str, str] = {}
    measured = {cell.name: 0 for cell in cells}
    try:
        for result in run_cells(cells, place.directory, repeats=repeats, console=console):
            if isinstance(result, CellFailure):
                failed[result.cell.name] = result.reason
            else:
                measured[result.cell.name] += 1
    except KeyboardInterrupt:
        n_done, n_runs = sum(measured.values()), repeats * len(cells)
        place.print_interrupted(console, f"{n_done} of {n_runs} runs are finished")
        raise
    for cell in cells:
        if not measured[cell.name]:
            raise TargetError(f"{cell.name} ({cell.target}): no run: {failed[cell.name]}")
    return [str(place.directory / cell.name) for cell in cells]
