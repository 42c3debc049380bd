"""The capacity search that a run was a probe of, as the page of that run tells it."""

from __future__ import annotations

from dataclasses import dataclass

from loadgen.measure.capacity.capacity_result import Capacity
from reports.run.tables import TableCell


@dataclass(frozen=True, slots=True)
class Searched:
    """`answer` is what the search knew when the page was written; `page` leads to its own."""

    probe: str
    page: str
    answer: Capacity

    def sentence(self) -> str:
        """Whose probe the run is, and what the search has found."""
        n = len(self.answer.probes)
        if not n:
            return f"Probe {self.probe} of a capacity search, its first."
        known = f"{n} {'probe' if n == 1 else 'probes'}"
        found, _, _ = self.answer.sentence().partition(";")  # how it ended is not known yet
        return (
            f"Probe {self.probe} of a capacity search. When this page was written, {known} said:"
            f" {found}."
        )

    def tile(self) -> tuple[str, TableCell]:
        """The capacity among the headline numbers."""
        share = f"{100 * self.answer.attainment:g} % keep their promises"
        if self.answer.value is None:
            return "Capacity", TableCell("–", small=f"not yet known; {share}")
        value, _, interval = self.answer.sentence().partition(" [")
        return "Capacity", TableCell(value, small=f"[{interval}; {share}")
