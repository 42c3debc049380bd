"""Tables of batch sizes: the size of the next batch by the number of waiting requests, per range of
load. `slobench solve` writes them, the mode `dynamic` reads them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from loadgen.registry import Block
from reference_engine.smdp.decision_table import Choice, is_within, load_file
from reference_engine.state.cost_model import CostModel


class BatchSheet(Block):
    """The batch sizes for a range of arrivals per second. `batch_sizes[n]` is the size with n
    waiting requests, 0 to wait for the next; the last size stands for all longer queues.

    `action_gap[n]` is by how much the action is better than the second best, in the objective's
    unit times seconds; None where there is no other.
    """

    load_per_s: tuple[float, float]
    batch_sizes: tuple[int, ...] = Field(min_length=2)
    action_gap: tuple[float | None, ...] = ()

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if not 0 <= self.load_per_s[0] < self.load_per_s[1]:
            raise ValueError(f"load_per_s must be a range, not {list(self.load_per_s)}")
        for n_waiting, size in enumerate(self.batch_sizes):
            if not 0 <= size <= n_waiting:
                raise ValueError(f"batch_sizes: a batch of {size} cannot be formed of {n_waiting}")
        if not self.batch_sizes[-1]:
            raise ValueError("batch_sizes: the last size must not be 0, or long queues would wait")
        if len(self.action_gap) not in (0, len(self.batch_sizes)):
            raise ValueError("action_gap has an entry for each of batch_sizes, or none")
        return self

    def covers(self, rate_per_s: float, slack: float = 0.0) -> bool:
        """Whether the table is for this load. `slack` widens its range by a share on both sides."""
        return is_within(self.load_per_s, rate_per_s, slack)

    def size(self, n_waiting: int) -> int:
        """The size of the next batch, 0 to wait."""
        return self.batch_sizes[min(n_waiting, len(self.batch_sizes) - 1)]


class BatchTableFile(Block):
    """A file of batch sizes. `cost_model` is the digest of the cost model that they were solved
    with, and `pad_to` the batch sizes to which the service times were padded."""

    schema_: Literal[1] = Field(alias="schema")
    states: Literal["waiting_requests"]
    actions: Literal["batch_size"]
    name: str
    about: str = ""
    cost_model: str | None = None
    pad_to: tuple[int, ...] = ()
    tables: tuple[BatchSheet, ...] = Field(min_length=1)


class BatchLookup:
    """Look-up of batch sizes in a file. `choice.fallbacks` counts the decisions that no table made,
    by reason: `out_of_load`, `other_cost_model`."""

    def __init__(self, path: str, window_s: float) -> None:
        """Raises UsageError that names the file and the key."""
        self.file = load_file(path, BatchTableFile)
        self.choice = Choice(self.file.tables, self.file.cost_model, window_s)

    def decide(self, n_waiting: int, cost: CostModel, now_s: float) -> int | None:
        """The size of the next batch, 0 to wait; None where no table is valid."""
        sheet, _ = self.choice.at(cost, now_s)
        return None if sheet is None else sheet.size(n_waiting)
