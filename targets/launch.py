"""A server under test that slobench starts itself: waited for, watched, and ended whatever happens.

    with launched(endpoint, environ, run_dir / "logs", print) as server:
        measure(server.endpoint)

A warden process (`targets.supervisor`) stands between: the server and all it started end with the
block, and also when slobench is killed outright. A Ctrl-C at the terminal reaches slobench alone,
so the server still serves while a run drains. All it writes goes to `logs/server.log`.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.errors import SlobenchError, TargetError, UsageError
from loadgen.units import format_duration
from targets.endpoint import Endpoint
from targets.launch_plan import Launch, LaunchPlan
from targets.safe_text import redact, strip_controls

LOG_NAME = "server.log"
_POLL_S = 0.2
_ATTEMPT_S = 5.0  # one question about readiness; a server that computes may answer late
_WARDEN_S = 10.0  # for the warden, beyond what the server was given
_TAIL_BYTES = 16_384
_TAIL_LINES = 15

OnWait = Callable[[float, str], None]  # seconds waited, the last line of the log


@dataclass(frozen=True)
class Launched:
    """A server that is up: what to measure, and the process behind it."""

    endpoint: Endpoint
    command: str
    log: Path
    _warden: _Warden = field(repr=False)
    _secrets: tuple[str, ...] = field(repr=False)

    @property
    def pid(self) -> int:
        return self._warden.pid

    def ended(self) -> str | None:
        """How the server ended and what it last wrote; None while it runs."""
        if self._warden.running():
            return None
        last = tail(self.log, self._secrets)[-1:]
        wrote = f"; it last wrote: {last[0]}" if last else ""
        return f"the server under test {self._warden.how()}{wrote}"


@contextmanager
def launched(
    endpoint: Endpoint, environ: Mapping[str, str], log_dir: Path, on_wait: OnWait
) -> Iterator[Launched]:
    """Run `endpoint.launch` for the length of a `with` block that begins when it is ready.

    `on_wait` is called several times a second until then. Raises UsageError (a port that is taken,
    a program that is not there), TargetFileError (a variable that is not set) or TargetError with
    the last lines of its log, where it ends or is not ready in time.
    """
    launch = endpoint.launch
    assert launch is not None, "this target file launches nothing"
    port = launch.port or _free_port(launch)
    if launch.port:
        _refuse_taken(launch, port)
    plan = launch.plan(port, sys.executable, environ)
    served = endpoint.at(f"http://{_in_url(launch.connect_host)}:{port}", launch.engine)
    log_dir.mkdir(parents=True, exist_ok=True)
    secrets = (*plan.secrets, *endpoint.secrets())
    warden = _Warden(plan, log_dir / LOG_NAME)
    try:
        warden.wait_started(plan)
        _wait_ready(served, plan, warden, secrets, on_wait)
        yield Launched(served, plan.shown, warden.log, warden, secrets)
    finally:
        warden.stop()


def tail(log: Path, secrets: tuple[str, ...] = (), n_lines: int = _TAIL_LINES) -> list[str]:
    """The last lines of a log that say something, fit to be shown."""
    try:
        with log.open("rb") as source:
            source.seek(max(0, source.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = source.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    lines = [strip_controls(line.rsplit("\r", 1)[-1]).rstrip() for line in text.split("\n")]
    return [redact(line, secrets)[:500] for line in lines if line.strip()][-n_lines:]


class _Warden:
    """Our end of the warden process: it says the server's process id, and how it ended."""

    def __init__(self, plan: LaunchPlan, log: Path) -> None:
        self.log, self.pid = log, 0
        self._grace_s = plan.stop_timeout_s + _WARDEN_S
        self._code: int | None = None
        self._failed = ""
        self._told, self._over = threading.Event(), threading.Event()
        log.touch()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "targets.supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C at the terminal is not meant for it
        )
        order = {
            "command": plan.command,
            "env": dict(plan.env),
            "cwd": str(plan.cwd) if plan.cwd else None,
            "log": str(log.resolve()),
            "stop_signal": int(plan.stop_signal),
            "stop_timeout_s": plan.stop_timeout_s,
        }
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its end is noticed by the listener
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        self._listener = threading.Thread(target=self._listen, name="warden", daemon=True)
        self._listener.start()

    def wait_started(self, plan: LaunchPlan) -> None:
        self._told.wait()
        if self._failed:
            raise UsageError(f"launch: cannot start {plan.shown!r}: {self._failed}")

    def wait(self, timeout_s: float) -> bool:
        """Whether the server ended within this time."""
        return self._over.wait(timeout_s)

    def running(self) -> bool:
        return not self._over.is_set()

    def how(self) -> str:
        if self._code is None:
            return "was lost: the process that watched over it was killed"
        if self._code >= 0:
            return f"ended with code {self._code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-self._code).name}"
        return f"was killed by signal {-self._code}"

    def stop(self) -> None:
        """End the server and everything it started; returns when nothing of it is left."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(self._grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.pid and self._code is None:  # the warden did not live to do it
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._listener.join()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                word, _, rest = line.decode().strip().partition(" ")
                if word == "PID":
                    self.pid = int(rest)
                elif word == "FAILED":
                    self._failed = rest
                elif word == "EXIT":
                    self._code = int(rest)
                    self._over.set()
                self._told.set()
        self._told.set()
        self._over.set()


def _wait_ready(
    served: Endpoint, plan: LaunchPlan, warden: _Warden, secrets: tuple[str, ...], on_wait: OnWait
) -> None:
    start_s = time.monotonic()
    while True:
        waited_s = time.monotonic() - start_s
        if not warden.running():
            raise _never_ready(f"{warden.how()} before it was ready", plan, warden, secrets)
        answer = _ask(served, plan.ready_path)
        if answer == "200" and warden.running():
            return
        if waited_s >= plan.ready_timeout_s:
            why = f"was not ready after {format_duration(plan.ready_timeout_s)}"
            asked = f"GET {plan.ready_path} {answer}"
            raise _never_ready(f"{why} ({asked})", plan, warden, secrets)
        on_wait(waited_s, next(iter(tail(warden.log, secrets, 1)), ""))
        warden.wait(_POLL_S)


def _ask(served: Endpoint, path: str) -> str:
    """The status a readiness question was answered with, or why it was not."""
    address = served.address
    connection = http.client.HTTPConnection(address.host, address.port, timeout=_ATTEMPT_S)
    try:
        connection.request("GET", path, headers=dict(served.request_headers()))
        return str(connection.getresponse().status)
    except TimeoutError:
        return f"was not answered within {_ATTEMPT_S:g} s"
    except (OSError, http.client.HTTPException) as error:
        return f"was not answered ({strip_controls(str(error))[:80] or type(error).__name__})"
    finally:
        connection.close()


def _never_ready(
    why: str, plan: LaunchPlan, warden: _Warden, secrets: tuple[str, ...]
) -> SlobenchError:
    lines = tail(warden.log, secrets)
    said = "\n".join(f"  {line}" for line in lines) or "  (it wrote nothing)"
    return TargetError(f"the launched server {why}: {plan.shown}\n{said}")


def _free_port(launch: Launch) -> int:
    """A port nobody listens on now. Between this and the server's start somebody might take it; the
    server then says so and ends."""
    with _bound(launch, 0) as listener:
        return int(listener.getsockname()[1])


def _refuse_taken(launch: Launch, port: int) -> None:
    """Another server on the port would answer for ours, and be measured."""
    try:
        _bound(launch, port).close()
    except OSError as error:
        raise UsageError(
            f"launch.port: {port} on {launch.host} is taken ({error.strerror}); choose another, "
            "or 0 for a free one"
        ) from None


def _bound(launch: Launch, port: int) -> socket.socket:
    host = launch.host
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise UsageError(f"launch.host: {host}: {error.strerror}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
