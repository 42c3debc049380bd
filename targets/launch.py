"""A server under test that slobench starts itself: waited for, watched, and ended in every case.

    with launched(endpoint, environ, run_dir / "logs", print) as server:
        measure(server.endpoint)

A supervisor process (`targets.supervisor`) runs between slobench and the server. The server and all
processes that it started end with the block, and also if slobench is killed outright. A Ctrl-C at
the terminal reaches only slobench, so the server still serves while a run drains. All its output
goes to `logs/server.log`.
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
from targets.address import bracketed
from targets.child import exit_text, log_tail
from targets.endpoint import Endpoint
from targets.launch_plan import Launch, LaunchPlan
from targets.safe_text import strip_controls

LOG_NAME = "server.log"
_POLL_S = 0.2
_REQUEST_S = 5.0  # for a readiness request; a server that computes may answer late
_SUPERVISOR_S = 10.0  # for the supervisor, in addition to the server's own time to stop

OnWait = Callable[[float, str], None]  # seconds waited, the last line of the log


@dataclass(frozen=True)
class Launched:
    """A launched server that is ready: its endpoint and its process."""

    endpoint: Endpoint
    command: str
    log: Path
    _supervisor: _Supervisor = field(repr=False)
    _secrets: tuple[str, ...] = field(repr=False)

    @property
    def pid(self) -> int:
        return self._supervisor.pid

    def ended(self) -> str | None:
        """The end of the server in words, with the last line of its log; None while it runs."""
        if self._supervisor.is_running():
            return None
        last_line = log_tail(self.log, self._secrets, n_lines=1)
        wrote = f"; its last line: {last_line[0]}" if last_line else ""
        return f"the server under test {self._supervisor.end_text()}{wrote}"


@contextmanager
def launched(
    endpoint: Endpoint, environ: Mapping[str, str], log_dir: Path, on_wait: OnWait
) -> Iterator[Launched]:
    """Run `endpoint.launch` for the length of a `with` block that begins when the server is ready.

    Until then `on_wait` is called several times a second. Raises UsageError (a taken port, a
    missing program), TargetFileError (a variable that is not set), or TargetError with the last
    lines of the log if the server ends early or is not ready in time.
    """
    launch = endpoint.launch
    assert launch is not None, "this target file launches nothing"
    port = launch.port or _free_port(launch)
    if launch.port:
        _reject_taken(launch, port)
    plan = launch.plan(port, sys.executable, environ)
    served = endpoint.at(f"http://{bracketed(launch.connect_host)}:{port}", launch.engine)
    log_dir.mkdir(parents=True, exist_ok=True)
    secrets = (*plan.secrets, *endpoint.secrets())
    supervisor = _Supervisor(plan, log_dir / LOG_NAME)
    try:
        supervisor.wait_started(plan)
        _wait_ready(served, plan, supervisor, secrets, on_wait)
        yield Launched(served, plan.shown, supervisor.log, supervisor, secrets)
    finally:
        supervisor.stop()


class _Supervisor:
    """Our side of the supervisor process, which reports the server's process id and exit code."""

    def __init__(self, plan: LaunchPlan, log: Path) -> None:
        self.log, self.pid = log, 0
        self._grace_s = plan.stop_timeout_s + _SUPERVISOR_S
        self._code: int | None = None
        self._failure = ""
        self._reported, self._ended = threading.Event(), threading.Event()
        log.touch()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "targets.supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C at the terminal must not reach it
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
        with suppress(BrokenPipeError):  # the listener notices its end
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        self._listener = threading.Thread(target=self._listen, name="supervisor", daemon=True)
        self._listener.start()

    def wait_started(self, plan: LaunchPlan) -> None:
        self._reported.wait()
        if self._failure:
            raise UsageError(f"launch: cannot start {plan.shown!r}: {self._failure}")

    def wait(self, timeout_s: float) -> bool:
        """Whether the server ended within this time."""
        return self._ended.wait(timeout_s)

    def is_running(self) -> bool:
        return not self._ended.is_set()

    def end_text(self) -> str:
        if self._code is None:
            return "was lost: its supervisor process was killed"
        return exit_text(self._code)

    def stop(self) -> None:
        """End the server and all processes that it started; returns when none is left."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(self._grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.pid and self._code is None:  # the supervisor was killed before it could do so
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
                    self._failure = rest
                elif word == "EXIT":
                    self._code = int(rest)
                    self._ended.set()
                self._reported.set()
        self._reported.set()
        self._ended.set()


def _wait_ready(
    served: Endpoint,
    plan: LaunchPlan,
    supervisor: _Supervisor,
    secrets: tuple[str, ...],
    on_wait: OnWait,
) -> None:
    start_s = time.monotonic()
    while True:
        waited_s = time.monotonic() - start_s
        if not supervisor.is_running():
            reason = f"{supervisor.end_text()} before it was ready"
            raise _never_ready(reason, plan, supervisor, secrets)
        status = _readiness_status(served, plan.ready_path)
        if status == "200" and supervisor.is_running():
            return
        if waited_s >= plan.ready_timeout_s:
            waited = format_duration(plan.ready_timeout_s)
            reason = f"was not ready after {waited} (GET {plan.ready_path} {status})"
            raise _never_ready(reason, plan, supervisor, secrets)
        on_wait(waited_s, next(iter(log_tail(supervisor.log, secrets, 1)), ""))
        supervisor.wait(_POLL_S)


def _readiness_status(served: Endpoint, path: str) -> str:
    """The status of a readiness request, or the reason for having none."""
    address = served.address
    connection = http.client.HTTPConnection(address.host, address.port, timeout=_REQUEST_S)
    try:
        connection.request("GET", path, headers=dict(served.request_headers()))
        return str(connection.getresponse().status)
    except TimeoutError:
        return f"was not answered within {_REQUEST_S:g} s"
    except (OSError, http.client.HTTPException) as error:
        return f"was not answered ({strip_controls(str(error))[:80] or type(error).__name__})"
    finally:
        connection.close()


def _never_ready(
    reason: str, plan: LaunchPlan, supervisor: _Supervisor, secrets: tuple[str, ...]
) -> SlobenchError:
    lines = log_tail(supervisor.log, secrets)
    output = "\n".join(f"  {line}" for line in lines) or "  (it wrote nothing)"
    return TargetError(f"the launched server {reason}: {plan.shown}\n{output}")


def _free_port(launch: Launch) -> int:
    """A port that is free now. If another process takes it before the server starts, the server
    reports that and ends."""
    with _bound(launch, 0) as listener:
        return int(listener.getsockname()[1])


def _reject_taken(launch: Launch, port: int) -> None:
    """Raises UsageError for a taken port: its server would answer instead of ours and be
    measured."""
    try:
        _bound(launch, port).close()
    except OSError as error:
        raise UsageError(
            f"launch.port: {port} on {launch.host} is taken ({error.strerror}); choose another, "
            "or 0 for any free port"
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
