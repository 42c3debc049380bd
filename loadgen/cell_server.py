"""The servers that cells are measured on, kept up while those in a row share them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from loadgen.cell import Cell
from loadgen.drive.engine_logs import ServedRun, adopt_engine_logs
from loadgen.errors import SlobenchError, TargetError
from loadgen.run import choice_of
from loadgen.run_directory import free
from loadgen.target import Server, open_server

MOST_RUNS_OF_A_PAIR = 2
"""Runs that a server which is up together with another one serves before both are started anew, so
that what two starts of a server differ by is in what two runs differ by, and not in a night."""
MOST_FAILED_STARTS = 2
"""A server that did not start so often is not waited for again."""


class CellServer:
    """One server, up until `end`. `n_opened` counts the cells it was given to."""

    def __init__(self, cell: Cell, log_dir: Path, console: Console) -> None:
        self._logs, self._runs, self._stack = (
            free(log_dir / cell.name),
            list[ServedRun](),
            ExitStack(),
        )
        opening = open_server(choice_of(cell.target, cell.options), self._logs, console)
        self.server: Server = self._stack.enter_context(opening)
        self.n_opened = 0

    @property
    def is_fresh(self) -> bool:
        """Whether nobody has asked it anything yet; what others sent to a URL, nobody knows."""
        return self.n_opened < 2 and self.server.kind != "url"

    def served(self, run: ServedRun) -> None:
        self._runs.append(run)

    def end(self) -> None:
        """End it and give its runs their parts of its logs."""
        self._stack.close()
        adopt_engine_logs(self._logs, self._runs)


class CellServers:
    """One server at a time, or two where a cell is measured beside one whose server stays up."""

    def __init__(self, log_dir: Path, console: Console) -> None:
        self._log_dir, self._console = log_dir, console
        self._up: dict[tuple[object, ...], CellServer] = {}
        self._failed = defaultdict[tuple[object, ...], list[SlobenchError]](list)

    def __enter__(self) -> CellServers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._keep_only(())

    def open(
        self, cell: Cell, beside: Cell | None = None, *, is_second: bool = False
    ) -> CellServer:
        """The server of a cell: the one that is up, or a new one in its place. That of `beside` is
        up as well then; all others have ended. None of a pair is started anew for its second run
        because of how many it served.

        Raises what starting one of them raises, with the name of `beside` where that is the one.
        """
        row = [cell] if beside is None else [cell, beside]
        self._keep_only([one.server_key for one in row])
        n_most = max((one.n_opened for one in self._up.values()), default=0)
        if beside is not None and not is_second and n_most >= MOST_RUNS_OF_A_PAIR:
            self._keep_only(())
        self._start(cell)
        if beside is not None:
            try:
                self._start(beside)
            except SlobenchError as error:
                raise TargetError(f"{beside.name}: {error}") from error
        found = self._up[cell.server_key]
        found.n_opened += 1
        return found

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
        with ExitStack() as ending:  # all of them, whatever the end of one says
            for key in [key for key in self._up if key not in keys]:
                ending.callback(self._up.pop(key).end)
