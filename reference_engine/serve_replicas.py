"""Several equal servers as one program: a process per replica, each on a port of its own.

It contains no router. An existing router in front of the ports spreads the requests.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType

from loadgen.errors import SlobenchError, UsageError
from loadgen.system.endings import ending_signals, exit_words
from reference_engine.serve import (
    OPERATOR_TOKEN,
    bind,
    operator_token,
    print_ready,
    print_token,
    run,
)
from reference_engine.serving.serve_options import ServeOptions

_LOST = 4  # exit code if a replica ended by itself, as of a server whose engine failed
_LAST_PORT = 65_535


def run_replicas(options: ServeOptions, n_replicas: int) -> int:
    """Serve as `n_replicas` processes until a signal ends all; returns the exit code.

    The ports are `options.port`, the next, and so on; with port 0 they are free ports. Once all
    replicas accept requests, `READY http://host:port` is printed for each, in the order of the
    ports. The first replica starts alone, so that an error in the options is printed once. A
    replica that ends by itself is reported on stderr; the others go on, and the exit code is 4.
    An error before READY is a line on stderr and the exit code of the replica.
    """
    try:
        with ExitStack() as stack:
            listeners = [
                stack.enter_context(bind(options.host, p)) for p in ports(options, n_replicas)
            ]
            token = operator_token(options, os.environ)
            if token.is_random:
                assert token.token is not None, "a random token is a token"
                os.environ[OPERATOR_TOKEN] = token.token  # the same for all replicas
            replicas = Replicas(options, listeners)
            is_ready = replicas.start(1) and replicas.start(n_replicas - 1)
    except SlobenchError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the caller shows this line
        return error.exit_code
    if not is_ready:
        replicas.stop()
    else:
        if token.is_random:
            print_token(token)
        replicas.print_ready()
    return replicas.join()


def ports(options: ServeOptions, n_replicas: int) -> Sequence[int]:
    """The ports of the replicas. Raises UsageError beyond the last port."""
    first, last = options.port, options.port + n_replicas - 1
    if not first:
        return [0] * n_replicas
    if last > _LAST_PORT:
        raise UsageError(f"--port {first}: {n_replicas} replicas need the ports up to {last}")
    return range(first, last + 1)


@dataclass
class _Replica:
    """A server process. `ready` receives its URL once it accepts requests."""

    name: str
    process: BaseProcess
    ready: Connection
    url: str = ""

    def is_ready(self) -> bool:
        """Wait until the replica accepts requests or has ended."""
        wait([self.ready, self.process.sentinel])
        with suppress(EOFError):
            if self.ready.poll():
                self.url = self.ready.recv()
        return bool(self.url)


class Replicas:
    """The processes. From the start of the first, the signals that end this program end them."""

    def __init__(self, options: ServeOptions, listeners: Sequence[socket.socket]) -> None:
        self._options, self._listeners = options, listeners
        self._replicas: list[_Replica] = []
        self._is_stopping = False
        for number in ending_signals():
            signal.signal(number, self._stop)

    def start(self, n: int) -> bool:
        """Start the next `n` replicas at once; whether all of them accept requests."""
        first = len(self._replicas)
        for index in range(first, first + n):
            # A signal must not run this process's handler in the child, nor miss the child.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, ending_signals())
            try:
                if self._is_stopping:
                    return False
                self._replicas.append(self._started(index))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return all(replica.is_ready() for replica in self._replicas[first:])

    def print_ready(self) -> None:
        """READY lines on stdout, process ids on stderr."""
        for replica in self._replicas:
            print_ready(replica.url)
        for replica in self._replicas:
            line = f"{replica.name}: {replica.url}, process {replica.process.pid}"
            print(line, file=sys.stderr, flush=True)  # noqa: T201 - for the user

    def join(self) -> int:
        """Wait until every replica has ended, and report each that ends by itself; the exit
        code."""
        code = 0
        living = {replica.process.sentinel: replica for replica in self._replicas}
        while living:
            for sentinel in wait(list(living)):
                assert isinstance(sentinel, int), "a sentinel is a descriptor"
                replica = living.pop(sentinel)
                replica.process.join()
                ended = replica.process.exitcode or 0
                if self._is_stopping:
                    code = code or max(ended, 0)
                    continue
                code = _LOST
                line = (
                    f"{replica.name} ({replica.url}): {exit_words(ended)}; "
                    f"{len(living)} of {len(self._replicas)} replicas go on"
                )
                print(line, file=sys.stderr, flush=True)  # noqa: T201 - for the user
        return code

    def stop(self) -> None:
        """End all replicas: SIGTERM. Again: their running requests end at once."""
        self._is_stopping = True
        for replica in self._replicas:
            if replica.process.is_alive():
                replica.process.terminate()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stop()

    def _started(self, index: int) -> _Replica:
        name = f"replica-{index + 1}"
        options, listener = self._options, self._listeners[index]
        changes = {"port": listener.getsockname()[1], "parent_pid": os.getpid()}
        if options.log_dir is not None:
            changes["log_dir"] = options.log_dir / name
        chosen = options.model_copy(update=changes)
        receiver, sender = multiprocessing.Pipe(duplex=False)
        others = [other for other in self._listeners if other is not listener]
        process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(chosen, listener, others, sender), name=name
        )
        process.start()
        sender.close()
        listener.close()  # the port of a replica that has ended refuses connections
        return _Replica(name, process, receiver)


def _serve(
    options: ServeOptions,
    listener: socket.socket,
    others: Sequence[socket.socket],
    ready: Connection,
) -> None:
    """The program of a replica."""
    os.setpgid(0, 0)  # Ctrl-C in a terminal reaches the parent only
    for number in ending_signals():
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ending_signals())
    for other in others:
        other.close()
    sys.exit(run(options, listener, ready.send))
