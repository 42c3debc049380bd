"""Where the load-generating processes of a run are: here, or on other machines."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from loadgen.drive.shards import OnBeat, Outcome, Shards
from loadgen.run.shard_tasks import Job, shard_tasks
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import Plan


class Fleet(Protocol):
    """`hand_over` lets the processes get ready for a job; `run` starts it, and returns when every
    one has written its part or is given up; `stop` may be called from its callbacks, which are
    those of `Shards.run`."""

    @property
    def pids(self) -> Collection[int] | None:
        """The processes, where they are of this machine and children of this process."""

    def hand_over(self, job: Job) -> None: ...

    def run(
        self,
        on_beat: OnBeat,
        on_start: Callable[[int], None],
        on_idle: Callable[[], None],
        limit_s: float,
        on_death: Callable[[int], None],
    ) -> Outcome: ...

    def stop(self, reason: str, drain_s: float) -> None: ...


OpenFleet = Callable[[Scenario, Plan, Path], AbstractContextManager[Fleet]]
"""Makes a fleet for a plan; the path is where its logs go."""


class LocalFleet:
    """Processes of this machine, started on entering."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def __enter__(self) -> LocalFleet:
        self._shards.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._shards.__exit__(*exc)

    @property
    def pids(self) -> Collection[int]:
        return self._shards.pids

    def await_started(self) -> None:
        """As `Shards.await_started`."""
        self._shards.await_started()

    def hand_over(self, job: Job) -> None:
        self._shards.hand_over(shard_tasks(job, self._shards.n))

    def run(
        self,
        on_beat: OnBeat,
        on_start: Callable[[int], None],
        on_idle: Callable[[], None],
        limit_s: float,
        on_death: Callable[[int], None],
    ) -> Outcome:
        return self._shards.run(on_beat, on_start, on_idle, limit_s, on_death)

    def stop(self, reason: str, drain_s: float) -> None:
        self._shards.stop(reason, drain_s)
