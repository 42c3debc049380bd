"""Controlling side of the load-generating processes: starts them, sends each its task, sets the
common epoch, forwards stops, and detects a process that dies.

Load is generated in processes of its own because a redraw of the live view takes 5-15 ms, by which
timestamps in the same process would be late (docs/decisions/0003).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loadgen.drive.file_limit import file_limit_problem
from loadgen.drive.shard_process import PreforkedShard, ShardProcess
from loadgen.drive.stall_watch import HURRIED_STALL_S, STALL_S, WATCH_EVERY_S
from loadgen.drive.task import ShardTask
from loadgen.drive.worker_messages import (
    BadMessage,
    CommandWriter,
    MessageReader,
    ReceivedParts,
)
from loadgen.errors import RunInvalid
from loadgen.manifest.json_section import JsonObject, read_section
from loadgen.manifest.sections import LiveQuantiles, WorkerSection
from loadgen.manifest.self_report import SelfReport

_LEAD_NS = 50_000_000  # from "GO" to the first row, so that every shard arms its alarm in time
_READY_S = 60.0
_POLL_S = 0.1

OnBeat = Callable[[int, JsonObject], None]


class Divisible(Protocol):
    """Load that can be divided among any number of processes."""

    def tasks(self, n_shards: int) -> Sequence[ShardTask]: ...


@dataclass
class _Child:
    number: int
    process: ShardProcess
    commands: CommandWriter
    reader: MessageReader = field(default_factory=MessageReader)
    received: set[str] = field(default_factory=set)  # kinds of messages
    report: SelfReport | None = None
    has_ended: bool = False
    killed: str = ""  # the reason
    parts: ReceivedParts = field(default_factory=ReceivedParts)
    is_garbled: bool = False  # a line that it wrote was no message

    @property
    def is_over(self) -> bool:
        """Whether its last message has come; the process itself may still be ending."""
        return self.has_ended or self.report is not None

    def kill(self, reason: str) -> None:
        """Kills the process; the end of its output follows."""
        self.killed = f"{reason}: killed"
        self.process.kill()

    def read(self, data: bytes) -> list[JsonObject]:
        """The messages that `data` completes. A line that is no message, or a report that is none,
        is the process's death: it is killed."""
        if self.is_garbled:
            return []
        try:
            messages = self.reader.feed(data)
            for message in messages:
                if message["kind"] == "part":
                    self.parts.add(message)
                elif message["kind"] == "done":
                    where = f"the report of worker {self.number}"
                    self.report = read_section(message.get("instrument"), SelfReport, where)
        except (BadMessage, RunInvalid) as error:
            self.is_garbled = True
            self.kill(str(error))
            return []
        return messages

    def end_reason(self) -> str:
        """Why it ended before it was done."""
        return self.killed or self.process.exit_report()

    def kill_if_idle(self) -> None:
        """Kills a process that starts, but gets no further."""
        if not (self.is_over or self.killed) and self.process.is_idle(time.monotonic()):
            self.kill(f"no progress for {STALL_S:g} s")


@dataclass(frozen=True)
class CutShort:
    """Reason and time (monotonic ns) of a run that its fleet of shards ended."""

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
    """Result of the shards: the reports of those that finished, and by shard number the reason of
    those that died. `parts` are rows that a shard could not write: the content of its part files
    by name. `remote` describes workers on other machines; `cut_short` is set if the fleet ended the
    run before all rows were released."""

    epoch_ns: int
    reports: list[SelfReport] = field(default_factory=list)
    dead: dict[int, str] = field(default_factory=dict)
    remote: RemoteWorkers | None = None
    cut_short: CutShort | None = None
    parts: dict[str, bytes] = field(default_factory=dict)


class Shards:
    """`n` running shards; a context manager, so that no process outlives it. They import their
    modules in parallel with the controlling process and then wait for their tasks.

    `run` returns when every shard has written its part or died; its callbacks may call `stop`.
    `plugins` are Python files that each shard runs before it reads its task. `preforked` may hold a
    process that becomes the first shard. A shard without progress for `stall_s` is killed.
    """

    def __init__(
        self,
        n: int,
        log_dir: Path,
        plugins: Sequence[Path] = (),
        preforked: PreforkedShard | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        self._stall_s, self._looked_s = stall_s, 0.0
        self._n, self._log_dir, self._plugins = n, log_dir, tuple(plugins)
        self._preforked = preforked
        self._lead_ns = _LEAD_NS
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Shards:
        try:
            for number in range(self._n):
                process = self._process(number)
                commands = CommandWriter(process.stdin.fileno())
                child = _Child(number, process, commands)
                self._children.append(child)
                os.set_blocking(child.process.stdout.fileno(), False)
                self._selector.register(child.process.stdout, selectors.EVENT_READ, child)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._selector.close()
        try:
            with contextlib.ExitStack() as ends:  # ends every process, even after an error
                for child in reversed(self._children):
                    ends.callback(child.process.end)
        except OSError as lost_log:
            if error is None:
                raise
            error.add_note(f"{lost_log.filename}: {lost_log.strerror}")

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children]

    def await_started(self) -> None:
        """Waits until every process has imported its modules, so that the imports take no CPU time
        from another measurement."""
        self._await("started")

    def hand_over(self, job: Divisible) -> None:
        """Sends each shard its task, for which it prepares at once. Raises RunInvalid if a shard
        dies, or cannot open its connections."""
        tasks = job.tasks(self._n)
        if problem := file_limit_problem(max(task.n_preopen for task in tasks)):
            raise RunInvalid(problem)
        for child, task in zip(self._children, tasks, strict=True):
            self._hand_over(child, task)
        self._lead_ns = lead_ns([task.schedule["scheduled_s"] for task in tasks])

    def run(
        self,
        on_beat: OnBeat,
        on_start: Callable[[int], None],
        on_idle: Callable[[], None],
        on_death: Callable[[int, str], None] = lambda shard, reason: None,
    ) -> Outcome:
        """Starts all shards at the same epoch and waits for their ends.

        `on_start` receives the epoch (monotonic ns); `on_beat` a shard's number and its progress
        message, four times a second per shard; `on_death` the number of a shard whose output closes
        before it is done, and the reason. `on_idle` is called at least ten times a second.
        """
        self._await("ready")
        outcome = Outcome(epoch_ns=time.monotonic_ns() + self._lead_ns)
        self._broadcast("GO", str(outcome.epoch_ns))
        on_start(outcome.epoch_ns)

        def watch() -> None:
            on_idle()
            self._kill_stalled()

        for child, message in self._messages(float("inf"), watch):
            if message["kind"] == "beat":
                on_beat(child.number, message)
            elif message["kind"] == "end" and child.report is None:
                on_death(child.number, child.end_reason())
        for child in self._children:
            outcome.parts |= child.parts.whole
            if child.report is None:
                outcome.dead[child.number] = child.end_reason()
                continue
            outcome.reports.append(child.report)
            if child.report.broken:
                outcome.dead[child.number] = child.report.broken
        return outcome

    def stop(self, reason: str, drain_s: float, *, sends_waiting: bool = False) -> None:
        """See `Dispatcher.stop`."""
        command = "STOP_RELEASES" if sends_waiting else "STOP"
        self._broadcast(command, f"{drain_s:f}", reason)

    def hurry(self, *, is_last: bool) -> None:
        """Waits only for shards that make progress; with `is_last`, for none."""
        self._stall_s = min(self._stall_s, HURRIED_STALL_S)
        for child in self._children:
            if is_last and not child.is_over:
                child.kill("you gave up its rows")

    def _is_time_to_look(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._looked_s + WATCH_EVERY_S:
            return False
        self._looked_s = now_s
        return True

    def _kill_stalled(self) -> None:
        """Kills each shard without progress."""
        if not self._is_time_to_look():
            return
        now_s = time.monotonic()
        for child in self._children:
            is_working = not (child.is_over or child.killed)
            if is_working and child.process.is_stalled(now_s, self._stall_s):
                child.kill(f"no progress for {self._stall_s:g} s")

    def _process(self, number: int) -> ShardProcess:
        log = self._log_dir / f"shard-{number}.log"
        process = self._preforked.take() if self._preforked is not None else None
        if process is None:
            return ShardProcess.logging_to(log)
        try:
            process.keep_log(log)
        except OSError:
            process.end()
            raise
        return process

    def _hand_over(self, child: _Child, task: ShardTask) -> None:
        data = pickle.dumps((self._plugins, pickle.dumps(task, protocol=5)), protocol=5)
        view, fd = memoryview(len(data).to_bytes(8, "big") + data), child.process.stdin.fileno()
        try:
            while view:
                try:
                    view = view[os.write(fd, view) :]
                except BlockingIOError:
                    child.kill_if_idle()
                    select.select([], [fd], [], WATCH_EVERY_S)
        except BrokenPipeError:
            raise RunInvalid(
                f"worker {child.number} died at its start: {child.end_reason()}"
            ) from None

    def _await(self, kind: str) -> None:
        """Reads messages until every shard has sent a message of this kind. Kills a shard that has
        not and makes no progress."""

        def watch() -> None:
            if self._is_time_to_look():
                for child in self._children:
                    if kind not in child.received:
                        child.kill_if_idle()

        deadline_s = time.monotonic() + _READY_S
        for child, message in self._messages(deadline_s, watch):
            child.received.add(message["kind"])
            if all(kind in child.received for child in self._children):
                return
            if child.has_ended and kind not in child.received:
                break
        late = [child for child in self._children if kind not in child.received]
        child = next((child for child in late if child.has_ended), late[0])
        how = "died at its start" if child.has_ended else f"was not {kind} within {_READY_S:g} s"
        raise RunInvalid(f"worker {child.number} {how}: {child.end_reason()}")

    def _messages(
        self, deadline_s: float, on_idle: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[_Child, JsonObject]]:
        """Yields messages until every shard is done or dead, or the deadline has passed."""
        while any(not child.is_over for child in self._children):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            on_idle()
            self._flush_commands()
            for key, _ in self._selector.select(min(left_s, _POLL_S)):
                child: _Child = key.data
                data = child.process.stdout.read(1 << 16)
                if not data:
                    child.has_ended = True
                    self._selector.unregister(child.process.stdout)
                    yield child, {"kind": "end"}
                    continue
                for message in child.read(data):
                    yield child, message

    def _flush_commands(self) -> None:
        for child in self._children:
            child.commands.flush()

    def _broadcast(self, *words: str) -> None:
        for child in self._children:
            if not child.has_ended:
                # `_messages` detects its end, and `_kill_stalled` that it reads nothing
                child.commands.write(*words)


def lead_ns(scheduled_s: Sequence[NDArray[np.float64]]) -> int:
    """Time from "GO" to the epoch, ns, such that the first row is due at least `_LEAD_NS` after
    "GO". `scheduled_s` has an array per shard: NaN for rows with parents, and empty if the plan has
    fewer sessions than shards."""
    first_s = min(float(np.nanmin(times_s)) for times_s in scheduled_s if len(times_s))
    return max(0, _LEAD_NS - round(first_s * 1e9))
