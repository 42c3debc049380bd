"""Command lines in real processes that do not import everything again.

A `ForkServer` starts this file as a process that imports the modules of a run once and then forks
for each command line. The fork has the requested directory, environment and standard streams, and
runs `loadgen.cli.main.main` as its main program: it has its own pid, exit code and signals, and it
forks a load-generating process as `python -m loadgen` does.

Not for tests of imports or of the start of the interpreter, nor for those that read a process's
command line: in /proc every fork has the command line of this file.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

IMPORTED = (
    *(f"loadgen.cli.{name}" for name in ("extend", "lab", "measure", "recorded", "scale")),
    *(f"loadgen.studies.{name}.verb" for name in ("capacity", "compare", "nightly", "sweep")),
    "aiohttp", "encodings.idna", "jinja2", "numpy.ma", "numpy.random", "pyarrow.parquet",
    "rich.live", "typer.rich_utils",
    "loadgen.studies.capacity.run", "loadgen.cli.main", "loadgen.cli.app",
    "loadgen.live.live_histogram", "loadgen.live.progress",
    "loadgen.drive.shard", "loadgen.live.watching",
    "loadgen.measure.aggregate", "loadgen.studies.nightly.run", "loadgen.run.conclude",
    "loadgen.run.execute", "loadgen.run.recording", "loadgen.studies.sweep.run",
    "loadgen.workload.preview", "targets.openai_chat",
    "loadgen.studies.compare.page", "loadgen.studies.nightly.page",
    "reports.run.console", "reports.run.page",
    "loadgen.studies.sweep.page",
)  # fmt: skip
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Keeps numpy and pyarrow from starting threads, which a fork would not have."""
_NUMBER = struct.Struct("i")
_LARGEST_REQUEST = 1 << 18  # bytes; arguments and environment


class ForkServer:
    """`run(...)` is subprocess.run for the command line. `close` ends the process and its forks."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _LARGEST_REQUEST)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                env=os.environ | ONE_THREAD,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def run(
        self, arguments: Sequence[str], cwd: Path, environ: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Raises subprocess.TimeoutExpired; the process and its group are killed then."""
        request = json.dumps([list(arguments), str(cwd), dict(environ)]).encode()
        exit_fd, their_exit_fd = os.pipe()
        with (
            tempfile.TemporaryFile("w+") as stdout,
            tempfile.TemporaryFile("w+") as stderr,
            open(exit_fd, "rb", buffering=0) as numbers,
        ):
            try:
                files = [stdout.fileno(), stderr.fileno(), their_exit_fd]
                socket.send_fds(self._requests, [request], files)
            finally:
                os.close(their_exit_fd)
            (pid,) = _NUMBER.unpack(numbers.read(_NUMBER.size))
            ended, _, _ = select.select([numbers], [], [], timeout_s)
            if not ended:
                os.killpg(pid, signal.SIGKILL)
            (code,) = _NUMBER.unpack(numbers.read(_NUMBER.size))
            texts = []
            for file in (stdout, stderr):
                file.seek(0)
                texts.append(file.read())
        command = ["slobench", *arguments]
        if not ended:
            raise subprocess.TimeoutExpired(command, timeout_s, *texts)
        return subprocess.CompletedProcess(command, code, *texts)

    def close(self) -> None:
        self._requests.close()
        self._process.wait()


def _serve(requests: socket.socket) -> None:
    """Forks for each request; in a fork it returns. Ends the process after the last request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends pytest, which closes the socket
    running: dict[int, tuple[int, int]] = {}  # pidfd → pid, pipe for pid and exit code
    while True:
        readable, _, _ = select.select([requests.fileno(), *running], [], [])
        for pidfd in set(readable) & running.keys():
            pid, exit_fd = running.pop(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):
                os.write(exit_fd, _NUMBER.pack(code))
            os.close(pidfd)
            os.close(exit_fd)
        if requests.fileno() not in readable:
            continue
        request, fds, _, _ = socket.recv_fds(requests, _LARGEST_REQUEST, 3)
        if not request:
            for pid, _ in running.values():
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            os._exit(0)
        stdout_fd, stderr_fd, exit_fd = fds
        pid = os.fork()
        if not pid:
            os.setpgid(0, 0)
            for fd, number in ((stdout_fd, 1), (stderr_fd, 2)):
                os.dup2(fd, number)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            requests.detach()
            _become(*json.loads(request))
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)
        os.close(stdout_fd)
        os.close(stderr_fd)
        os.write(exit_fd, _NUMBER.pack(pid))
        running[os.pidfd_open(pid)] = pid, exit_fd


def _become(arguments: list[str], cwd: str, environ: dict[str, str]) -> None:
    """Sets what `python -m loadgen` would find in `cwd`."""
    import loadgen

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    time.tzset()
    sys.path.insert(0, cwd)
    sys.argv = [str(Path(loadgen.__file__).with_name("__main__.py")), *arguments]


if __name__ == "__main__":
    for name in IMPORTED:
        import_module(name)
    n_threads = len(list(Path("/proc/self/task").iterdir()))
    assert n_threads == 1, f"{n_threads} threads: a fork would lack all but one"
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        _serve(requests)
    from loadgen.cli.main import main

    main()
