"""Where the load-generating processes of a run are: here, or on other machines."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from loadgen.drive.shards import OnBeat, Outcome, Shards
from loadgen.shard_tasks import shard_tasks
from loadgen.target import Target
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import Plan


@dataclass(frozen=True)
class Job:
    """What all processes of a run have to do together; each leaves `shard-<number>.npz` in
    `parts_dir`."""

    scenario: Scenario
    plan: Plan
    target: Target
    transport: Literal["fast", "aiohttp"]
    salt: bytes
    run_name: str
    parts_dir: Path
    is_watched: bool = False


class Fleet(Protocol):
    """`run` returns when every process has written its part or is given up; `stop` may be called
    from its callbacks, which are those of `Shards.run`."""

    @property
    def pids(self) -> Collection[int] | None:
        """The processes, where they are of this machine and children of this process."""

    def run(
        self,
        job: Job,
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

    def run(
        self,
        job: Job,
        on_beat: OnBeat,
        on_start: Callable[[int], None],
        on_idle: Callable[[], None],
        limit_s: float,
        on_death: Callable[[int], None],
    ) -> Outcome:
        tasks = shard_tasks(
            job.scenario,
            job.plan,
            job.target,
            self._shards.n,
            job.transport,
            job.salt,
            job.run_name,
            job.parts_dir,
            job.is_watched,
        )
        return self._shards.run(tasks, on_beat, on_start, on_idle, limit_s, on_death)

    def stop(self, reason: str, drain_s: float) -> None:
        self._shards.stop(reason, drain_s)
