"""The server that cells are measured on, kept up while those in a row share it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from loadgen.cell import Cell
from loadgen.drive.engine_logs import ServedRun, adopt_engine_logs
from loadgen.run import choice_of
from loadgen.run_directory import free
from loadgen.target import Server, open_server


class CellServer:
    """At most one server at a time, kept up while the cells in a row share it."""

    def __init__(self, log_dir: Path, console: Console) -> None:
        self._log_dir, self._console = log_dir, console
        self._key: tuple[object, ...] = ()
        self._stack = ExitStack()
        self._server: Server | None = None
        self._runs: list[ServedRun] = []
        self._logs = log_dir
        self.is_fresh = True

    def __enter__(self) -> CellServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def open(self, cell: Cell) -> Server:
        """The server of a cell: the one that is up, or a new one in its place."""
        if self._server is not None and self._key == cell.server_key:
            if self._server.ended() is None:
                self.is_fresh = False
                return self._server
            self._console.print("the server has ended; starting it again", markup=False)
        self._close()
        self._logs = free(self._log_dir / cell.name)
        opening = open_server(choice_of(cell.target, cell.options), self._logs, self._console)
        self._server, self._key = self._stack.enter_context(opening), cell.server_key
        self.is_fresh = self._server.kind != "url"  # what others sent before, nobody knows
        return self._server

    def served(self, run: ServedRun) -> None:
        self._runs.append(run)

    def _close(self) -> None:
        """End the server and give its runs their parts of its logs."""
        self._server, runs, self._runs = None, self._runs, []
        self._stack.close()
        adopt_engine_logs(self._logs, runs)
