"""The truth server: scripted streams from a C program that logs what it really did and when.

    with truth_server(folder, ttft_s=0.05, itl_s=0.01) as truth:
        run_some_client(truth.url)         # each request with a header x-seq: its number
        log = truth.finish()               # ends the server; the `with` block would, too
    errors_ns = client_first_token_ns - log.of(request_ids)["first_ns"]

It is the judge of the instrument: one thread, absolute deadlines on a timer of nanoseconds, its own
lateness in the log, and CLOCK_MONOTONIC instants that a client on the same machine can subtract.
For everything but that, the mock (`targets.mock_server`) is the more obliging server.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from loadgen.errors import MissingDependency, TargetError, UsageError, nearest
from targets.child import Child, child_program
from targets.truth_log import TruthLog, read_truth_log

SOURCES = Path(__file__).with_name("truth")
COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra")
_LIBRARIES = ("-lm",)
_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class TruthScript:
    """How the truth server behaves: the options of its command line, `truthd --help`.

    Token k is due `ttft_s + k · itl_s` after the request was read; writes of several tokens are due
    with their first one. `itl_s` 0: each stream in turn as fast as its client reads.
    """

    ttft_s: float = 0.05
    itl_s: float = 0.01
    default_tokens: int = 64  # where a request does not say
    burst: int = 1  # events per write
    tokens_per_event: int = 1
    role: Literal["first", "early", "off"] = "first"  # early: a write of its own, with the head
    finish: Literal["own", "merged"] = "own"  # the chunk of the finish reason, or the last token's
    usage: Literal["on", "off"] = "on"
    usage_delay_s: float = 0.0  # from the last token to the usage and the end of the stream
    done: Literal["on", "off"] = "on"  # off: no [DONE]
    split_bytes: int = 0  # writes cut into pieces of 1 to so many bytes; 0: whole
    split_gap_s: float = 0.0  # between two pieces
    refuse: float = 0.0  # of every tenth of a second, in which the port is closed
    reset: float = 0.0  # of connections reset once accepted
    fail: Sequence[str] = ()  # KIND:SHARE; an HTTP status, cut, hang, inband, reset
    requests_per_connection: int = 0  # 0: any number
    seed: int = 0
    spin_s: float = 60e-6  # polled instead of slept before a deadline
    max_seconds: float = 3600.0

    def arguments(self) -> list[str]:
        """The words of the command line."""
        words: list[str] = []
        for each in fields(self):
            value = getattr(self, each.name)
            values = value if each.name == "fail" else [value]
            words += [word for v in values for word in (_flag(each.name), _word(v))]
        return words


@dataclass
class TruthServer:
    """A running truth server: where it answers, on which core it runs (None: on any), its log."""

    url: str
    cpu: int | None
    client_cpus: frozenset[int]
    log_path: Path
    token_log_path: Path | None
    child: Child

    def finish(self) -> TruthLog:
        """End the server and read what it did. Raises TargetError if it left no log."""
        self.child.end()
        if self.child.exit_code != 0:
            raise TargetError(
                f"the truth server ended with code {self.child.exit_code} and its log cannot be "
                f"trusted; what it said is in {self.child.log}"
            )
        return read_truth_log(self.log_path, self.token_log_path)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keep this thread, and the processes it starts meanwhile, off the server's core."""
        if self.cpu is None:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.client_cpus)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


@contextmanager
def truth_server(
    folder: Path,
    *,
    cache_dir: Path | None = None,
    cc: str = "",
    pinned: bool = True,
    with_tokens: bool = False,
    **script: Any,
) -> Iterator[TruthServer]:
    """A truth server for the length of a `with` block; `script` are the fields of TruthScript.

    Its logs go to `folder`. The program is compiled into `cache_dir` (default: `folder`), with `cc`
    if given (see `truth_program`). `pinned`: on a core of its own where there are two or more;
    `TruthServer.apart` keeps the client off it. `with_tokens`: log the instant of every token, too.
    Raises MissingDependency without a C compiler, UsageError for an option it does not know.
    """
    known = [each.name for each in fields(TruthScript)]
    for name in script:
        if name not in known:
            raise UsageError(f"unknown truth server option '{name}'; {nearest(name, known)}")
    folder.mkdir(parents=True, exist_ok=True)
    program = truth_program(cache_dir or folder, cc)
    cpus = frozenset(os.sched_getaffinity(0))
    cpu = _core_besides(cpus) if pinned else None
    log_path, token_log_path = folder / "truth.csv", folder / "truth-tokens.u64"
    words = [*TruthScript(**script).arguments(), "--log", str(log_path)]
    if with_tokens:
        words += ["--token-log", str(token_log_path)]
    if cpu is not None:
        words += ["--cpu", str(cpu)]
    command = [str(program.resolve()), *words]
    with child_program("truthd", command, log_dir=folder, ready_timeout_s=10.0) as child:
        yield TruthServer(
            url=child.url,
            cpu=cpu,
            client_cpus=cpus - {cpu},
            log_path=log_path,
            token_log_path=token_log_path if with_tokens else None,
            child=child,
        )


def _core_besides(cpus: frozenset[int]) -> int | None:
    """A core for the server: one that this thread may not use (a client pinned by `taskset`), else
    the last of several that it may; None on a machine of one core.
    """
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # as far as the container lets us
    others = os.sched_getaffinity(0) - cpus
    os.sched_setaffinity(0, cpus)
    if others:
        return max(others)
    return max(cpus) if len(cpus) > 1 else None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _word(value: object) -> str:
    return f"{value:.9f}" if isinstance(value, float) else str(value)


def truth_program(cache_dir: Path, cc: str = "") -> Path:
    """The compiled program in `cache_dir`, made if this source and compiler have none there yet.

    `cc` is a compiler with flags, as in $CC; without it the first of COMPILERS that is installed is
    taken. Raises MissingDependency where there is none, or where it cannot compile.
    """
    if sys.platform != "linux":
        raise MissingDependency(
            f"the truth server needs Linux (epoll), and this is {sys.platform}; "
            "the mock server (--target mock) runs everywhere"
        )
    compiler = find_compiler(cc)
    program = cache_dir / f"truthd-{_key(compiler)}"
    if not program.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        _compile(compiler, program)
    return program


def find_compiler(cc: str = "") -> list[str]:
    """The command of a C compiler. Raises MissingDependency saying what to install."""
    for command in [shlex.split(cc)] if cc.strip() else [[name] for name in COMPILERS]:
        found = shutil.which(command[0])
        if found is not None:
            return [found, *command[1:]]
    named = f"CC={cc} is not there" if cc.strip() else f"none of {', '.join(COMPILERS)} is there"
    raise MissingDependency(
        f"the truth server is compiled on the machine it runs on, and {named}; install gcc "
        "(Debian, Ubuntu: apt-get install gcc libc6-dev; Fedora: dnf install gcc; "
        "Alpine: apk add gcc musl-dev), or name a compiler in CC"
    )


def _key(compiler: Sequence[str]) -> str:
    """A name for this source under this compiler and these flags."""
    told = subprocess.run(
        [*compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False
    ).stdout
    digest = hashlib.sha256(repr((*compiler, *_FLAGS, *_LIBRARIES)).encode() + told)
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: Sequence[str], program: Path) -> None:
    """Beside its place first, so that no other process ever sees half of it."""
    descriptor, unfinished = tempfile.mkstemp(prefix=program.name, dir=program.parent)
    os.close(descriptor)
    files = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    command = [*compiler, *_FLAGS, "-o", unfinished, *files, *_LIBRARIES]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if result.returncode:
            said = next((line for line in result.stderr.splitlines() if "error" in line), "")
            raise MissingDependency(
                f"{compiler[0]} cannot compile the truth server: "
                f"{said.strip() or f'exit status {result.returncode}'}; are the C library's "
                "headers installed (Debian, Ubuntu: libc6-dev)?"
            )
        os.replace(unfinished, program)
    finally:
        Path(unfinished).unlink(missing_ok=True)
