"""The truth server: a C program that streams by script and logs the instant of every write.

    with truth_server(folder, ttft_s=0.05, itl_s=0.01) as truth:
        run_some_client(truth.url)         # each request with a header x-seq: its number
        log = truth.finish()               # ends the server; so does the end of the block
    errors_ns = client_first_token_ns - log.rows_of(request_ids)["first_ns"]

It is the reference for the accuracy of the load generator: a single thread, absolute deadlines on a
nanosecond timer, its own lateness in the log, and CLOCK_MONOTONIC instants that a client on the
same machine can subtract. For other tests the mock server (`targets.mock_server`) is simpler.

The program is compiled from `targets/truth` by the machine's own C compiler, once for each source
and compiler.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from loadgen.errors import MissingDependency, TargetError, UsageError, nearest
from loadgen.system.c_programs import CProgram
from targets.child import Child, child_program
from targets.truth_log import TruthLog, read_truth_log

PROGRAM = CProgram(
    Path(__file__).with_name("truth"),
    "truthd",
    "the truth server",
    ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra"),
)


@dataclass(frozen=True, kw_only=True)
class TruthScript:
    """The behaviour of the truth server: the options of its command line, `truthd --help`.

    Token k is due `ttft_s + k · itl_s` after the request was read; a write of several tokens is due
    with its first token. `itl_s` 0: each stream in turn as fast as its client reads.
    """

    ttft_s: float = 0.05
    itl_s: float = 0.01
    stall_every: int = 0  # one step in so many of all streams stalls; 0: none
    stall_s: float = 0.0  # by so much; first tokens are steps of their own, never held back
    default_tokens: int = 64  # for a request without a limit
    burst: int = 1  # events per write
    tokens_per_event: int = 1
    role: Literal["first", "early", "off"] = "first"  # early: a write of its own, with the head
    finish: Literal["own", "merged"] = (
        "own"  # finish reason in a chunk of its own or the last token's
    )
    usage: Literal["on", "off"] = "on"
    usage_delay_s: float = 0.0  # from the last token to the usage and the end of the stream
    done: Literal["on", "off"] = "on"  # off: no [DONE]
    split_bytes: int = 0  # cut writes into pieces of 1 to so many bytes; 0: whole
    split_gap_s: float = 0.0  # between two pieces
    refuse: float = 0.0  # share of every 0.1 s in which the port is closed
    reset: float = 0.0  # share of connections reset once accepted
    fail: Sequence[str] = ()  # KIND:SHARE; an HTTP status, cut, hang, inband, reset
    requests_per_connection: int = 0  # 0: any number
    seed: int = 0
    spin_s: float = 60e-6  # polling instead of sleeping before a deadline
    max_seconds: float = 3600.0

    def arguments(self) -> list[str]:
        """The words of the command line."""
        words: list[str] = []
        for option in fields(self):
            value = getattr(self, option.name)
            flag = "--" + option.name.replace("_", "-")
            for item in value if option.name == "fail" else [value]:
                words += [flag, f"{item:.9f}" if isinstance(item, float) else str(item)]
        return words


@dataclass
class TruthServer:
    """A running truth server: its URL, its core (None: not pinned), its log."""

    url: str
    cpu: int | None
    client_cpus: frozenset[int]
    log_path: Path
    token_log_path: Path | None
    child: Child

    def finish(self) -> TruthLog:
        """End the server and read its log. Raises TargetError if the server failed."""
        self.child.end()
        if self.child.exit_code != 0:
            raise TargetError(
                f"the truth server ended with code {self.child.exit_code}, so its log may be "
                f"incomplete; its output is in {self.child.log}"
            )
        return read_truth_log(self.log_path, self.token_log_path)

    @contextmanager
    def client_cores(self) -> Iterator[None]:
        """Keep this thread, and the processes that it starts in the block, off the server's
        core."""
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
    if given (see `truth_program`). `pinned`: on a core of its own if there are two or more;
    `TruthServer.client_cores` keeps the client off it. `with_tokens`: log the instant of every
    token. Raises MissingDependency without a C compiler, UsageError for an unknown option.
    """
    options = [option.name for option in fields(TruthScript)]
    for name in script:
        if name not in options:
            raise UsageError(f"unknown truth server option '{name}'; {nearest(name, options)}")
    folder.mkdir(parents=True, exist_ok=True)
    program = truth_program(cache_dir or folder, cc)
    cpus = frozenset(os.sched_getaffinity(0))
    cpu = _server_core(cpus) if pinned else None
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


def _server_core(cpus: frozenset[int]) -> int | None:
    """A core for the server: a core that this thread may not use (a client pinned by `taskset`),
    else the last of several that it may use; None on a machine with a single core.
    """
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # a container may allow fewer cores
    others = os.sched_getaffinity(0) - cpus
    os.sched_setaffinity(0, cpus)
    if others:
        return max(others)
    return max(cpus) if len(cpus) > 1 else None


def truth_program(cache_dir: Path, cc: str = "") -> Path:
    """The compiled program in `cache_dir`, compiled if there is none for this source and compiler.

    `cc` is a compiler with flags, as in $CC. Raises MissingDependency if there is none, or if it
    cannot compile the program.
    """
    if sys.platform != "linux":
        raise MissingDependency(
            f"the truth server needs Linux (epoll), and this is {sys.platform}; "
            "the mock server (--target mock) runs everywhere"
        )
    return PROGRAM.compiled(cache_dir, cc)
