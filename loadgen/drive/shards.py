"""The controlling side of the load-generating processes: start them, hand the schedule over once,
agree on an epoch, pass on stops, and notice at once when one of them dies."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loadgen.drive.shard_process import PreforkedShard, ShardProcess
from loadgen.drive.task import ShardTask
from loadgen.errors import RunInvalid
from loadgen.json_section import read_section
from loadgen.manifest import LiveQuantiles, WorkerSection
from loadgen.self_report import SelfReport

_LEAD_NS = 50_000_000  # from "GO" to the first row: every shard has armed its first alarm by then
_READY_S = 60.0
_POLL_S = 0.1

OnBeat = Callable[[int, dict[str, Any]], None]


class Divisible(Protocol):
    """Work that can be divided among any number of load-generating processes."""

    def tasks(self, n_shards: int) -> Sequence[ShardTask]: ...


@dataclass
class _Child:
    number: int
    process: ShardProcess
    buffer: bytes = b""
    told: set[str] = field(default_factory=set)
    report: SelfReport | None = None
    has_ended: bool = False

    @property
    def is_over(self) -> bool:
        """Nothing more is to come from it; the process itself may still be ending."""
        return self.has_ended or self.report is not None


@dataclass(frozen=True)
class CutShort:
    """Why the shards' keeper itself ended a run, and when (monotonic ns)."""

    reason: str
    at_ns: int


@dataclass(frozen=True)
class RemoteWorkers:
    """Workers on other machines, as the manifest records them: `n_bad` counts unreadable messages,
    `live` holds the quantiles of each live metric."""

    n_bad: int
    workers: tuple[WorkerSection, ...]
    live: dict[str, LiveQuantiles]


@dataclass
class Outcome:
    """What came of the shards: the self-reports of those that finished, and by shard why it died;
    `remote` describes workers on other machines, `cut_short` is set where not all was to be
    released any more."""

    epoch_ns: int
    reports: list[SelfReport] = field(default_factory=list)
    dead: dict[int, str] = field(default_factory=dict)
    remote: RemoteWorkers | None = None
    cut_short: CutShort | None = None


class Shards:
    """A set of `n` running shards; a context manager, so that no process outlives it. They import
    what they need while the controlling process does something else, and wait for their tasks.

    `run` returns when every shard has written its part or died. `stop` may be called from its
    callbacks. `plugins` are Python files that each shard runs before it reads its task; `early` is
    a process that may be there already.
    """

    def __init__(
        self,
        n: int,
        log_dir: Path,
        plugins: Sequence[Path] = (),
        early: PreforkedShard | None = None,
    ) -> None:
        self._n, self._log_dir, self._plugins = n, log_dir, tuple(plugins)
        self._early = early
        self._lead_ns = _LEAD_NS
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Shards:
        try:
            for number in range(self._n):
                child = _Child(number, self._process(number))
                self._children.append(child)
                os.set_blocking(child.process.stdout.fileno(), False)
                self._selector.register(child.process.stdout, selectors.EVENT_READ, child)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._selector.close()
        with contextlib.ExitStack() as ends:  # all of them, whichever raises
            for child in reversed(self._children):
                ends.callback(child.process.end)

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children]

    def await_started(self) -> None:
        """Return when every process has imported what it needs and only waits for its task, so that
        none of that takes a core from something else that is measured meanwhile."""
        self._await("started")

    def hand_over(self, job: Divisible) -> None:
        """Gives each shard its task; the shards prepare themselves."""
        tasks = job.tasks(self._n)
        for child, task in zip(self._children, tasks, strict=True):
            self._hand_over(child, task)
        self._lead_ns = lead_ns([task.schedule["scheduled_s"] for task in tasks])

    def run(
        self,
        on_beat: OnBeat,
        on_start: Callable[[int], None],
        on_idle: Callable[[], None],
        limit_s: float,
        on_death: Callable[[int], None] = lambda shard: None,
    ) -> Outcome:
        """Start together what was handed over, and collect. `on_start` gets the epoch
        (monotonic ns); `on_beat` a shard's number and its progress, about four times a second each;
        `on_idle` is called several times a second; `on_death` gets the number of a shard that ended
        before it was done, as soon as its output closes. One that has not ended after `limit_s` is
        killed: nothing hangs."""
        self._await("ready")
        outcome = Outcome(epoch_ns=time.monotonic_ns() + self._lead_ns)
        self._tell(b"GO %d\n" % outcome.epoch_ns)
        on_start(outcome.epoch_ns)
        for child, message in self._messages(time.monotonic() + limit_s, on_idle):
            if message["kind"] == "beat":
                on_beat(child.number, message)
            elif message["kind"] == "done":
                where = f"the report of worker {child.number}"
                child.report = read_section(message["instrument"], SelfReport, where)
            elif message["kind"] == "end" and child.report is None:
                on_death(child.number)
        for child in self._children:
            if not child.is_over:
                child.process.kill()
            if child.report is None:
                outcome.dead[child.number] = child.process.last_words()
                continue
            outcome.reports.append(child.report)
            if child.report.broken:
                outcome.dead[child.number] = child.report.broken
        return outcome

    def stop(self, reason: str, drain_s: float) -> None:
        """Release nothing more; requests in flight have `drain_s` to finish."""
        self._tell(b"STOP %f %s\n" % (drain_s, reason.encode()))

    def _process(self, number: int) -> ShardProcess:
        log = self._log_dir / f"shard-{number}.log"
        early = self._early.take() if self._early is not None else None
        if early is None:
            return ShardProcess.logging_to(log)
        try:
            early.keep_log(log)
        except OSError:
            early.end()
            raise
        return early

    def _hand_over(self, child: _Child, task: ShardTask) -> None:
        data = pickle.dumps((self._plugins, pickle.dumps(task, protocol=5)), protocol=5)
        try:
            view = memoryview(len(data).to_bytes(8, "big") + data)
            while view:
                view = view[os.write(child.process.stdin.fileno(), view) :]
        except BrokenPipeError:
            raise RunInvalid(
                f"load-generating process {child.number} died at its start: "
                f"{child.process.last_words()}"
            ) from None

    def _await(self, word: str) -> None:
        """Read until every shard has said it."""
        deadline_s = time.monotonic() + _READY_S
        for child, message in self._messages(deadline_s):
            child.told.add(message["kind"])
            if all(word in child.told for child in self._children):
                return
            if child.has_ended and word not in child.told:
                break
        late = [child for child in self._children if word not in child.told]
        child = next((child for child in late if child.has_ended), late[0])
        how = "died at its start" if child.has_ended else f"was not {word} within {_READY_S:g} s"
        raise RunInvalid(
            f"load-generating process {child.number} {how}: {child.process.last_words()}"
        )

    def _messages(
        self, deadline_s: float, on_idle: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[_Child, dict[str, Any]]]:
        """Messages as they come, until every shard is done or has died, or the deadline."""
        while any(not child.is_over for child in self._children):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            on_idle()
            for key, _ in self._selector.select(min(left_s, _POLL_S)):
                child: _Child = key.data
                data = child.process.stdout.read(1 << 16)
                if not data:
                    child.has_ended = True
                    self._selector.unregister(child.process.stdout)
                    yield child, {"kind": "end"}
                    continue
                *lines, child.buffer = (child.buffer + data).split(b"\n")
                for line in lines:
                    yield child, json.loads(line)

    def _tell(self, line: bytes) -> None:
        for child in self._children:
            if not child.has_ended:
                with contextlib.suppress(BrokenPipeError):  # its death is noticed by `_messages`
                    os.write(child.process.stdin.fileno(), line)


def lead_ns(scheduled_s: Sequence[NDArray[np.float64]]) -> int:
    """From "GO" to the epoch, given each shard's instants from there on; NaN is a row with
    parents, which comes after one without. A shard may have none: sessions stay whole."""
    first_s = min(float(np.nanmin(instants)) for instants in scheduled_s if len(instants))
    return max(0, _LEAD_NS - round(first_s * 1e9))
