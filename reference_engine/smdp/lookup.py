"""From a situation to an action, and what became of looking it up."""

from __future__ import annotations

from collections import Counter
from math import exp

from reference_engine.smdp.decision_table import DecisionTable, TableFile, digest, pick, table_of
from reference_engine.smdp.states import Action, MacroState
from reference_engine.state.cost_model import CostModel

FALLBACK = Action.prefill_fcfs
"""What is done where no table says anything."""
UNVISITED = "unvisited"
"""Why, where the table for the load never saw the state; a step's action ends with it."""


class ArrivalRate:
    """Arrivals per second; those of `window_s` ago count a third."""

    def __init__(self, window_s: float) -> None:
        self._window_s, self._rate, self._at_s = window_s, 0.0, 0.0

    def arrive(self, now_s: float) -> None:
        self._rate, self._at_s = self.per_s(now_s) + 1 / self._window_s, now_s

    def per_s(self, now_s: float) -> float:
        return self._rate * exp((self._at_s - now_s) / self._window_s)


class Lookup:
    """The tables of a file, with the one for the present load. `tallies` counts the decisions no
    table made, by reason: `unvisited`, `out_of_load`, `other_cost_model`."""

    def __init__(self, file: TableFile, window_s: float) -> None:
        self.file, self.tallies = file, Counter[str]()
        self.pace = ArrivalRate(window_s)
        self._tables = [table_of(sheet) for sheet in file.tables]
        self._fits_cost: bool | None = None  # until it is known which cost model is in use
        self._current: int | None = None

    def decide(self, state: MacroState, cost: CostModel, now_s: float) -> tuple[Action, str]:
        """The action, and why it is the fallback ("" where a table says so)."""
        if self._fits_cost is None:
            self._fits_cost = self.file.cost_model in (None, digest(cost))
        if not self._fits_cost:
            return self._fall_back("other_cost_model")
        self._current = pick(self._tables, self.pace.per_s(now_s), self._current)
        table = self.table
        if table is None:
            return self._fall_back("out_of_load")
        if not table.is_known[state.number]:
            return self._fall_back(UNVISITED)
        return table.actions[state.number], ""

    @property
    def table(self) -> DecisionTable | None:
        """The one the last decision was looked up in; None where none was for its load."""
        return None if self._current is None else self._tables[self._current]

    def _fall_back(self, reason: str) -> tuple[Action, str]:
        self.tallies[reason] += 1
        return FALLBACK, reason
