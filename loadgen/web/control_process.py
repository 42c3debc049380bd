"""The process that controls a run next to Locust's master: `python -m loadgen.web.control_process
FD`.

It does the work of `slobench run`, with Locust's workers in place of its own processes, and does
not use Locust: all messages to and from the workers go over the socket FD, and Locust's process
relays them. Neither the page nor the interpreter that draws it can disturb the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer
from rich.console import Console

from loadgen.cli import standard_streams
from loadgen.cli.exit_codes import INTERRUPTED, guarded
from loadgen.cli.terminal import print_summary
from loadgen.errors import RunInvalid, SlobenchError, UsageError
from loadgen.measure.summary import Summary
from loadgen.run.execute import FinishedRun, execute
from loadgen.run.run_options import RunOptions, RunSetup
from loadgen.system.cache_directory import cache_dir
from loadgen.web.assignment import environ_for
from loadgen.web.form import RunForm, read_form
from loadgen.web.relay_pipe import ENDING, STOP, Begin, Note, Recording, RelayPipe, RunEnded
from loadgen.web.remote_fleet import RemoteFleet
from reports.run.verdict_section import slo_head, slo_rows
from targets.endpoint import DEFAULT_KEY_ENV

_BEGIN_S = 60.0


def main() -> None:
    standard_streams.install()
    line = RelayPipe(socket.socket(fileno=int(sys.argv[1])))
    results: list[RunEnded] = []
    code = guarded(lambda: results.append(_result(line)), os.environ)
    problem = f"the control process ended with exit code {code}; the terminal has the reason"
    line.send(results[0] if results else RunEnded(code, error=problem))


def _result(line: RelayPipe) -> RunEnded:
    """The result of the run. An interrupt before this call is answered too: signals were blocked
    until here."""
    try:
        with _interruptible():
            begin = _receive_begin(line)
            finished = run_with_workers(line, read_form(begin.form), begin.workers)
    except SlobenchError as error:
        typer.echo(f"slobench: {error}", err=True)
        return RunEnded(error.exit_code, error=str(error))
    except KeyboardInterrupt:
        typer.echo("slobench: interrupted before the first request", err=True)
        return RunEnded(INTERRUPTED, error="stopped before the first request")
    summary = finished.summary.to_json()
    return RunEnded(
        INTERRUPTED if finished.was_interrupted else finished.summary.exit_code,
        directory=str(finished.directory.resolve()),
        verdict=str(summary["verdict"]),
        reasons=[str(reason) for reason in summary["reasons"]],
        slo=slo_table(finished.summary),
    )


def slo_table(summary: Summary) -> list[list[str]]:
    """The SLOs of all traffic and of each class as on the run's page, the head first; empty
    without SLOs."""
    rows = [[f"{c.text} {c.small}".strip() for c in cells] for cells in slo_rows(summary)]
    return [list(slo_head(summary)), *rows] if rows else []


def _receive_begin(line: RelayPipe) -> Begin:
    received = line.receive(_BEGIN_S)
    if not received or not isinstance(received[0], Begin):
        raise RunInvalid("the master sent no run to start")
    return received[0]


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Unblocks Ctrl-C and SIGTERM, and blocks them again at the end: only the short answer
    follows."""
    for number in ENDING:
        signal.signal(number, signal.default_int_handler)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def run_with_workers(line: RelayPipe, form: RunForm, workers: Sequence[str]) -> FinishedRun:
    """Runs and records the form's scenario, and prints the summary as `slobench run` does."""
    if not form.target:
        raise UsageError("no server: give its URL as --target, or as Host in the form")
    scenario, on_loss = form.chosen_scenario(), form.loss_policy()

    def fleet(setup: RunSetup) -> RemoteFleet:
        if not workers:
            raise UsageError("no worker is connected; start one with slobench worker")
        n = min(len(workers), len(setup.plan.schedule), scenario.limits.max_concurrency)
        line.send(Recording(str(setup.directory)))
        return RemoteFleet(line, workers[:n], form.max_skew_s(), on_loss, setup.log_dir)

    environ = environ_for(form.target, form.given_target, os.environ)
    if len(environ) < len(os.environ):
        reason = f"give {form.target} as --target at the start to send it"
        line.send(Note(f"{DEFAULT_KEY_ENV} is not sent to this server; {reason}"))
    options = RunOptions(
        out_dir=Path(form.out) if form.out else None,
        force=form.force,
        engine=form.engine,
        model=form.model,
        command=["slobench", "web"],
        environ=environ,
        cache_dir=cache_dir(os.environ),
        plugins=form.plugin_files(),
        stop_names={STOP: "Stop on the page"},
    )
    console = Console(stderr=True, highlight=False, markup=False)
    finished = execute(scenario, form.target, options, console, open_fleet=fleet)
    print_summary(finished.summary, as_json=False, directory=finished.directory)
    typer.echo(f"report: {finished.directory / 'report.html'}", err=True)
    return finished


if __name__ == "__main__":
    main()
