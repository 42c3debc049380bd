"""The rows that a shard adds to its plan during the run, for users of a closed loop who get through
their planned rows (`workload.more_units`), and the file that keeps them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loadgen.drive.store import MORE, append_more
from loadgen.drive.task import ShardTask
from loadgen.records import Edges, Schedule
from loadgen.workload.more_units import Continuation


class MoreRows:
    """The continuation of the users of a task. `last_units` maps the first row of each user's last
    unit to the class of the user: when that row is released, the user needs more."""

    def __init__(self, task: ShardTask) -> None:
        assert task.more is not None, "rows beyond the plan of an open loop"
        self._continuation = Continuation(task.more, task.schedule, task.edges)
        self._path = task.part_path.with_suffix(MORE)
        schedule = task.schedule
        places = np.flatnonzero(schedule["after_failure"])
        users = schedule["session_id"][places]
        last = dict(zip(users.tolist(), places.tolist(), strict=True))
        self.last_units = {row: int(schedule["class_id"][row]) for row in last.values()}
        self.is_of_loop: NDArray[np.bool_] = np.isin(schedule["session_id"], users)
        """Whether each row of the task is of a user."""

    def take(self, row: int, user: int, n_rows: int) -> tuple[Schedule, Edges]:
        """The next rows of the user with `row`, to be added after `n_rows`, and the edges that lead
        to them. They are in the file before any of them can be recorded."""
        class_id = self.last_units.pop(row)
        rows, edges = self._continuation.more(user, class_id)
        append_more(self._path, rows, edges)
        self.last_units[n_rows + int(np.flatnonzero(rows["after_failure"])[-1])] = class_id
        return rows, edges
