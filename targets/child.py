"""A server of ours as a child process: started, waited for, its output kept, and reaped whatever
happens.

The child prints `READY http://host:port` on stdout when it listens. All it writes goes to one log
file and never to our stdout. It runs in a process group of its own, so a Ctrl-C at the terminal
reaches us alone and the child still serves while we drain; it ends with SIGTERM, then SIGKILL. If
we are killed outright, it notices by itself (`--parent-pid`).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from loadgen.errors import MissingDependency, SlobenchError, TargetError, UsageError

_READY = re.compile(rb"READY ((?:https?://|unix:)\S+)")
_INSTALL = re.compile(r"pip install|slobench\[|No module named|is not installed")


@dataclass(frozen=True)
class Child:
    """A running child: where it answers, its process id, its log."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative, a signal's number."""
        return self.process.poll()

    def end(self, grace_s: float = 5.0) -> None:
        """End it now instead of at the end of the `with` block; what it writes then is there."""
        _reap(self.process, grace_s)


@contextmanager
def child_server(
    name: str,
    module: str,
    arguments: Sequence[str],
    *,
    log_dir: Path,
    ready_timeout_s: float = 120.0,
    grace_s: float = 5.0,
) -> Iterator[Child]:
    """Run `python -m module arguments… --parent-pid OURS` for the duration of a `with` block.

    The log is `log_dir/name.log`. Raises what the child's end before READY means: MissingDependency
    or UsageError for exit code 2, TargetError otherwise or when it is not ready in time; one line,
    from the end of its log.
    """
    # -P: a folder called like one of ours in the working directory is not what we mean to run.
    command = [sys.executable, "-P", "-u", "-m", module, *arguments]
    with child_program(
        name, command, log_dir=log_dir, ready_timeout_s=ready_timeout_s, grace_s=grace_s
    ) as child:
        yield child


@contextmanager
def child_program(
    name: str,
    command: Sequence[str],
    *,
    log_dir: Path,
    ready_timeout_s: float = 120.0,
    grace_s: float = 5.0,
) -> Iterator[Child]:
    """`child_server` for any program of ours that says READY and knows `--parent-pid`."""
    log_dir.mkdir(parents=True, exist_ok=True)
    log = log_dir / f"{name}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*command, "--parent-pid", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=sink,
            start_new_session=True,
        )
        pump = _Pump(process, sink)
        try:
            url = pump.wait_ready(ready_timeout_s)
            if url is None:
                raise _never_ready(name, process, log, ready_timeout_s, grace_s)
            yield Child(name, url, log, process)
        finally:
            _reap(process, grace_s)
            pump.join(grace_s)


class _Pump(threading.Thread):
    """Copies the child's stdout to its log, so that a full pipe never stops it, and finds the READY
    line.

    The child writes its stderr there itself. Both hold the same open file and so the same offset:
    lines may interleave but never overwrite each other.
    """

    def __init__(self, process: subprocess.Popen[bytes], sink: IO[bytes]) -> None:
        super().__init__(name="child-stdout", daemon=True)
        assert process.stdout is not None, "the child was started without a stdout pipe"
        self._stdout, self._sink = process.stdout, sink
        self._told = threading.Event()
        self._url: str | None = None
        self.start()

    def run(self) -> None:
        with self._stdout:
            for line in self._stdout:
                self._sink.write(line)
                self._sink.flush()
                match = _READY.match(line)
                if match is not None:
                    self._url = match[1].decode()
                    self._told.set()
        self._told.set()

    def wait_ready(self, timeout_s: float) -> str | None:
        """The URL, or None if the child closed its stdout or said nothing in time."""
        self._told.wait(timeout_s)
        return self._url


def _never_ready(
    name: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float, grace_s: float
) -> SlobenchError:
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.5 if process.poll() is None else 0)  # stdout closes just before the exit
    code = process.poll()
    if code is None:
        _reap(process, grace_s)
        return TargetError(
            f"{name} was not ready after {timeout_s:g} s and was stopped; its log is {log}"
        )
    said = _last_line(log)
    if code == 2:
        return (MissingDependency if _INSTALL.search(said) else UsageError)(f"{name}: {said}")
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return TargetError(f"{name} {ended} before it was ready: {said} (log: {log})")


def _last_line(log: Path) -> str:
    """The last line of a log that says something, without a leading `error:`."""
    with log.open("rb") as lines:
        last = deque((line for line in lines if line.strip()), maxlen=1)
    text = last[0].decode("utf-8", "replace").strip() if last else "it wrote nothing"
    return re.sub(r"^(?:\S+: )?error: ", "", text, flags=re.IGNORECASE)[:500]


def _reap(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM to the child's group, SIGKILL after `grace_s`, and its exit status collected: no
    zombie, no orphan.
    """
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    _signal_group(process, signal.SIGKILL)  # whatever of the group outlived its leader
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # the group is gone
        os.killpg(process.pid, number)
