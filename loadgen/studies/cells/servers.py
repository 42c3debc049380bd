"""Servers of cells: a server stays up while consecutive cells share it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from loadgen.archive.directory import free
from loadgen.archive.engine_logs import ServedRun, adopt_engine_logs
from loadgen.errors import SlobenchError, TargetError
from loadgen.run.target import Server, open_server
from loadgen.studies.cells.cell import Cell

MOST_FAILED_STARTS = 2
"""After so many failed starts a server is not started again."""


class CellServer:
    """A server that is up until `end`. `is_fresh`: it has served no cell but the first; never true
    for a URL, which may have served others."""

    def __init__(self, cell: Cell, log_dir: Path, console: Console) -> None:
        self._logs, self._stack = free(log_dir / cell.name), ExitStack()
        self._runs: list[ServedRun] = []
        opening = open_server(cell.target, cell.options, self._logs, console)
        try:
            self.server: Server = self._stack.enter_context(opening)
        except BaseException:
            adopt_engine_logs(self._logs, ())
            raise
        self._n_opened = 0

    @property
    def is_fresh(self) -> bool:
        return self._n_opened < 2 and self.server.kind != "url"

    def opened(self) -> CellServer:
        self._n_opened += 1
        return self

    def served(self, run: ServedRun) -> None:
        self._runs.append(run)

    def end(self) -> None:
        """Stop the server and give each of its runs its part of the logs."""
        try:
            self._stack.close()
        finally:  # a second interrupt, too, leaves no half-written log
            adopt_engine_logs(self._logs, self._runs)


class CellServers:
    """The servers that are up: a single server, or two where a pair of cells keeps both."""

    def __init__(self, log_dir: Path, console: Console) -> None:
        self._log_dir, self._console = log_dir, console
        self._up: dict[tuple[object, ...], CellServer] = {}
        self._failed = defaultdict[tuple[object, ...], list[SlobenchError]](list)

    def __enter__(self) -> CellServers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._keep_only(())

    def open(self, cell: Cell, beside: Cell | None = None, *, anew: bool = False) -> CellServer:
        """The server of a cell: the running server, or a new server (always new, if `anew`). The
        server of `beside` is up as well; all others are stopped.

        Raises the error of a failed start; that of `beside` as a TargetError with its name.
        """
        row = [cell] if beside is None else [cell, beside]
        self._keep_only([] if anew else [member.server_key for member in row])
        self._start(cell)
        if beside is not None:
            try:
                self._start(beside)
            except SlobenchError as error:
                raise TargetError(f"{beside.name}: {error}") from error
        return self._up[cell.server_key].opened()

    def _start(self, cell: Cell) -> None:
        key = cell.server_key
        if key in self._up:
            if self._up[key].server.ended() is None:
                return
            self._console.print("the server has ended; starting it again", markup=False)
            self._up.pop(key).end()
        failed = self._failed[key]
        if len(failed) >= MOST_FAILED_STARTS:
            raise TargetError(f"not tried again after {len(failed)} failed starts: {failed[-1]}")
        try:
            self._up[key] = CellServer(cell, self._log_dir, self._console)
        except SlobenchError as error:
            failed.append(error)
            raise

    def _keep_only(self, keys: Sequence[tuple[object, ...]]) -> None:
        with ExitStack() as ending:  # an error while a server stops must not keep the others up
            for key in [key for key in self._up if key not in keys]:
                ending.callback(self._up.pop(key).end)
