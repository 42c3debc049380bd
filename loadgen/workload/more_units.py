"""Further units of the users of a closed loop that get through their planned rows during the run.

A plan holds at most about 100 000 rows of a closed loop, so users of a fast server can get to its
end. `MoreUnits` continues each user from random streams of its own: the same scenario and user give
the same rows, whenever they are needed and whichever process sends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from loadgen.records import EDGES, Edges, Phase, Schedule
from loadgen.workload.arrivals import Traffic
from loadgen.workload.layout import ClassTraffic, Purpose, RandomStreams, laid_out

_UNITS = 64  # drawn at once: the cost of a draw is that of its numpy calls
_MOST_ROWS = 1 << 20


@dataclass(frozen=True)
class ClosedClass:
    """A class whose users send unit after unit, with the columns that a plan gives to its rows.
    `prefix_offset` separates its shared prefixes from those of other classes."""

    part: ClassTraffic
    class_id: int
    tenant_id: int
    prefix_offset: int


@dataclass(frozen=True)
class MoreUnits:
    """The classes of a closed loop by class_id. Row k of a user beyond the plan has the request_id
    `n_planned` + k · `n_users` + user, so that ids of different users differ. `recorded` are the
    input and output tokens of recorded prompts, shape [2, n]; None for other prompts."""

    classes: dict[int, ClosedClass]
    n_planned: int
    n_users: int
    recorded: NDArray[np.int64] | None = None

    def block(self, class_id: int, user: int, number: int) -> tuple[Schedule, Edges]:
        """Block `number` of a user: its rows, with request_id = place in the block, and the edges
        within it. The rows without an edge are those of its first unit; they wait for the unit
        before."""
        closed = self.classes[class_id]
        given = closed.part
        assert given.pause is not None, "a class of an open loop has no further units"
        owner = (*given.streams.owner, f"user {user}", f"block {number}")
        streams = RandomStreams(given.streams.seed, owner)
        part = replace(given, arrivals=Traffic(np.zeros(1)), streams=streams)
        # A source's first unit does not wait for another, so that there is a unit too many.
        pauses_s = given.pause.draw(streams.stream(Purpose.think, "again"), _UNITS + 1)
        layout = laid_out(part, np.array([_UNITS + 1], np.int32), pauses_s, _MOST_ROWS)
        n_dropped = int(np.flatnonzero(layout.rows["after_failure"])[0])
        rows = layout.rows[n_dropped:]
        rows["request_id"] = np.arange(len(rows))
        rows["session_id"], rows["phase"] = user, Phase.measure
        rows["class_id"], rows["tenant_id"] = class_id, closed.tenant_id
        rows["priority"] = given.own.priority
        rows["prefix_id"][rows["prefix_id"] > 0] += np.uint32(closed.prefix_offset)
        rows["scheduled_s"] = np.nan
        is_within = layout.parent >= n_dropped
        edges = np.zeros(int(is_within.sum()), EDGES)
        edges["request_id"] = layout.child[is_within] - n_dropped
        edges["after"] = layout.parent[is_within] - n_dropped
        return rows, edges


@dataclass
class _Progress:
    """How far a user got: blocks and rows drawn, and the request_ids of its last unit's last
    rows."""

    last_ids: Sequence[int]
    n_blocks: int = 0
    n_rows: int = 0


@dataclass
class Continuation:
    """The further rows of the users of a plan, or of a shard's part of it."""

    units: MoreUnits
    schedule: Schedule
    edges: Edges
    _users: dict[int, _Progress] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_last = ~np.isin(self.schedule["request_id"], self.edges["after"])
        self._last_ids: dict[int, list[int]] = {}
        rows = self.schedule[is_last]
        for user, request_id in zip(
            rows["session_id"].tolist(), rows["request_id"].tolist(), strict=True
        ):
            self._last_ids.setdefault(user, []).append(request_id)

    def more(self, user: int, class_id: int) -> tuple[Schedule, Edges]:
        """The next rows of a user, in order, and the edges that lead to them."""
        progress = self._users.setdefault(user, _Progress(self._last_ids.pop(user, [])))
        units, n_users = self.units, self.units.n_users
        rows, edges = units.block(class_id, user, progress.n_blocks)
        ids = units.n_planned + (progress.n_rows + rows["request_id"].astype(np.int64)) * n_users
        ids += user
        is_first = np.isin(rows["request_id"], edges["request_id"], invert=True)
        links = np.zeros(int(is_first.sum()) * len(progress.last_ids), EDGES)
        links["request_id"] = np.repeat(ids[is_first], len(progress.last_ids))
        links["after"] = np.tile(progress.last_ids, int(is_first.sum()))
        is_last = np.isin(rows["request_id"], edges["after"], invert=True)
        edges["request_id"], edges["after"] = ids[edges["request_id"]], ids[edges["after"]]
        rows["request_id"] = ids
        rows["n_parents"][is_first] = len(progress.last_ids)
        if units.recorded is not None:
            set_recorded_lengths(rows, units.recorded)
        progress.last_ids = ids[is_last].tolist()
        progress.n_blocks, progress.n_rows = progress.n_blocks + 1, progress.n_rows + len(rows)
        return rows, np.concatenate([links, edges])


def set_recorded_lengths(schedule: Schedule, recorded: NDArray[np.int64]) -> None:
    """Sets each row's lengths to those of its recorded prompt, without a prefix. `recorded` are
    input and output tokens (0: not stated) in sending order, shape [2, n]."""
    n = recorded.shape[1]
    chosen = schedule["request_id"].astype(np.int64) % n
    schedule["input_tokens"] = recorded[0][chosen]
    schedule["prefix_id"], schedule["prefix_tokens"] = 0, 0
    stated = recorded[1][chosen]
    schedule["output_tokens"] = np.where(stated > 0, stated, schedule["output_tokens"])
