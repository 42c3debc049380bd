"""The servers that cells are measured on, kept up while those in a row share them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from loadgen.cells.cell import Cell
from loadgen.drive.engine_logs import ServedRun, adopt_engine_logs
from loadgen.errors import SlobenchError, TargetError
from loadgen.run.directory import free
from loadgen.run.execute import target_choice
from loadgen.run.target import Server, open_server

MOST_FAILED_STARTS = 2
"""A server that did not start so often is not waited for again."""


class CellServer:
    """One server, up until `end`. `is_fresh`: nobody has asked it anything before the cell that it
    was opened for; what others sent to a URL, nobody knows."""

    def __init__(self, cell: Cell, log_dir: Path, console: Console) -> None:
        self._logs, self._stack = free(log_dir / cell.name), ExitStack()
        self._runs: list[ServedRun] = []
        opening = open_server(target_choice(cell.target, cell.options), self._logs, console)
        self.server: Server = self._stack.enter_context(opening)
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

    def open(self, cell: Cell, beside: Cell | None = None, *, anew: bool = False) -> CellServer:
        """The server of a cell: the one that is up, or a new one in its place (always, if `anew`).
        That of `beside` is up as well then; all others have ended.

        Raises what starting one of them raises, with the name of `beside` where that is the one.
        """
        row = [cell] if beside is None else [cell, beside]
        self._keep_only([] if anew else [one.server_key for one in row])
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
        with ExitStack() as ending:  # all of them, whatever the end of one says
            for key in [key for key in self._up if key not in keys]:
                ending.callback(self._up.pop(key).end)
