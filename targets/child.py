"""Servers of this project as child processes: started, waited for until they are ready, and reaped
in every case.

The child prints `READY http://host:port` on stdout once it listens. All its output goes to one log
file and never to our stdout. It runs in a process group of its own, so that a Ctrl-C at the
terminal reaches only slobench and the child still serves while the run drains. It is ended with
SIGTERM, then SIGKILL. If slobench is killed outright, the child notices by itself
(`--parent-pid`).
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.errors import MissingDependency, SlobenchError, TargetError, UsageError
from targets.safe_text import redact, strip_controls

_READY = re.compile(rb"READY ((?:https?://|unix:)\S+)")
_INSTALL = re.compile(r"pip install|slobench\[|No module named|is not installed")
_TAIL_BYTES = 16_384


@dataclass(frozen=True)
class Child:
    """A running child: its URL, its process, its log."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the child runs; negative: the number of the signal that killed it."""
        return self.process.poll()

    def end(self, grace_s: float = 5.0) -> None:
        """End the child before the end of the `with` block; the files that it writes at its end are
        complete."""
        _reap(self.process, grace_s)


def child_server(
    name: str,
    module: str,
    arguments: Sequence[str],
    *,
    log_dir: Path,
    ready_timeout_s: float = 120.0,
    grace_s: float = 5.0,
    environ: Mapping[str, str] | None = None,
) -> AbstractContextManager[Child]:
    """`child_program` for `python -m module arguments…`."""
    # -P: a folder in the working directory named like a package of ours must not be run.
    command = [sys.executable, "-P", "-u", "-m", module, *arguments]
    return child_program(
        name,
        command,
        log_dir=log_dir,
        ready_timeout_s=ready_timeout_s,
        grace_s=grace_s,
        environ=environ,
    )


@contextmanager
def child_program(
    name: str,
    command: Sequence[str],
    *,
    log_dir: Path,
    ready_timeout_s: float = 120.0,
    grace_s: float = 5.0,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Run `command… --parent-pid OURS` while the `with` block runs, which begins at READY.
    `environ` is added to this process's environment.

    The log is `log_dir/name.log`. A child that ends before READY raises MissingDependency or
    UsageError for exit code 2, otherwise TargetError; so does a child that is not ready in time.
    The message is one line; for a child that ended it holds the last line of the log.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    log = log_dir / f"{name}.log"
    with log.open("wb", buffering=0) as sink:
        process = subprocess.Popen(
            [*command, "--parent-pid", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=sink,
            env={**os.environ, **(environ or {})},
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
    """Copies the child's stdout to its log, so that the child never blocks on a full pipe, and
    finds the READY line.

    The child writes its stderr to the log directly. Both hold the same open file and so the same
    offset: lines may interleave but never overwrite each other. Lines that a full disk does not
    take are dropped: a child that blocks on its pipe would answer no request.
    """

    def __init__(self, process: subprocess.Popen[bytes], sink: io.RawIOBase) -> None:
        super().__init__(name="child-stdout", daemon=True)
        assert process.stdout is not None, "the child was started without a stdout pipe"
        self._stdout, self._sink = process.stdout, sink
        self._ready_or_closed = threading.Event()
        self._url: str | None = None
        self.start()

    def run(self) -> None:
        with self._stdout:
            for line in self._stdout:
                with suppress(OSError):
                    self._sink.write(line)
                match = _READY.match(line)
                if match is not None:
                    self._url = match[1].decode()
                    self._ready_or_closed.set()
        self._ready_or_closed.set()

    def wait_ready(self, timeout_s: float) -> str | None:
        """The URL; None if the child closed its stdout or was not ready in time."""
        self._ready_or_closed.wait(timeout_s)
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
    last_line = next(iter(log_tail(log, n_lines=1)), "it wrote nothing")
    reason = re.sub(r"^(?:\S+: )?error: ", "", last_line.strip(), flags=re.IGNORECASE)
    if code == 2:
        return (MissingDependency if _INSTALL.search(reason) else UsageError)(f"{name}: {reason}")
    return TargetError(f"{name} {exit_text(code)} before it was ready: {reason} (log: {log})")


def exit_text(code: int) -> str:
    """The end of a process in words; a negative code is the number of a signal."""
    if code >= 0:
        return f"ended with code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def log_tail(log: Path, secrets: Sequence[str] = (), n_lines: int = 15) -> list[str]:
    """The last lines of a log that are not blank, without secrets and control characters."""
    try:
        with log.open("rb") as source:
            source.seek(max(0, source.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = source.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    # A terminal shows the text after the last CR of a line; a CR at its end is half of a CRLF.
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n")]
    shown = [strip_controls(line).rstrip() for line in lines]
    return [redact(line, secrets)[:500] for line in shown if line.strip()][-n_lines:]


def _reap(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM to the child's group, SIGKILL after `grace_s`, and its exit status collected: no
    zombie, no orphan.
    """
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    _signal_group(process, signal.SIGKILL)  # for members of the group that outlived the child
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # the group has ended
        os.killpg(process.pid, number)
