"""Conducts a run beside Locust's master: `python -m loadgen.web.control_process FD`.

It does what `slobench run` does, with Locust's workers in the place of its own processes, and knows
nothing of Locust: everything to and from the workers goes over the socket FD, which Locust's
process passes on. So neither the page nor the interpreter that draws it takes part in the run.
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

from loadgen.cli.exit_codes import INTERRUPTED, guarded
from loadgen.cli.parse import cache_dir
from loadgen.cli.terminal import print_summary
from loadgen.errors import RunInvalid, SlobenchError, UsageError
from loadgen.run.execute import FinishedRun as Recorded
from loadgen.run.execute import execute
from loadgen.run.run_options import RunOptions, RunSetup
from loadgen.web.assignment import environ_for
from loadgen.web.form import RunForm, read_form
from loadgen.web.relay_pipe import ENDING, Begin, Note, RelayPipe, RunEnded
from loadgen.web.remote_fleet import RemoteFleet
from targets.endpoint import DEFAULT_KEY_ENV

_BEGIN_S = 60.0


def main() -> None:
    line = RelayPipe(socket.socket(fileno=int(sys.argv[1])))
    said: list[RunEnded] = []
    code = guarded(lambda: said.append(_conducted(line)), os.environ)
    line.send(said[0] if said else RunEnded(code, error=_problem(code)))


def _conducted(line: RelayPipe) -> RunEnded:
    """The run, from the first word about it. Whoever interrupted it before gets an answer, too:
    signals were held back until here."""
    try:
        with _interruptible():
            begin = _begun(line)
            recorded = conduct(line, read_form(begin.asked), begin.workers)
    except SlobenchError as error:
        typer.echo(f"slobench: {error}", err=True)
        return RunEnded(error.exit_code, error=str(error))
    except KeyboardInterrupt:
        typer.echo("slobench: interrupted before the first request", err=True)
        return RunEnded(INTERRUPTED, error="stopped before the first request")
    summary = recorded.summary.to_json()
    return RunEnded(
        INTERRUPTED if recorded.was_interrupted else recorded.summary.exit_code,
        directory=str(recorded.directory.resolve()),
        verdict=str(summary["verdict"]),
        reasons=[str(reason) for reason in summary["reasons"]],
    )


def _begun(line: RelayPipe) -> Begin:
    received = line.receive(_BEGIN_S)
    if not received or not isinstance(received[0], Begin):
        raise RunInvalid("nobody says what to conduct")
    return received[0]


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM are heard, and at the end held back again: what is told then is short."""
    for number in ENDING:
        signal.signal(number, signal.default_int_handler)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def conduct(line: RelayPipe, asked: RunForm, workers: Sequence[str]) -> Recorded:
    """The run, recorded and told on the terminal as `slobench run` would tell it."""
    if not asked.target:
        raise UsageError("which server? Give its URL as --target, or as Host in the form")
    scenario, policy = asked.chosen_scenario(), asked.policy()

    def fleet(setup: RunSetup) -> RemoteFleet:
        if not workers:
            raise UsageError("no worker is connected; start one with slobench worker")
        n = min(len(workers), len(setup.plan.schedule), scenario.limits.max_concurrency)
        return RemoteFleet(line, workers[:n], asked.max_skew_s(), policy, setup.log_dir)

    environ = environ_for(asked.target, asked.given_target, os.environ)
    if len(environ) < len(os.environ):
        said = (
            f"{DEFAULT_KEY_ENV} is not sent to {asked.target}: start with it as --target for that"
        )
        line.send(Note(said))
    options = RunOptions(
        out_dir=Path(asked.out) if asked.out else None,
        force=asked.force,
        engine=asked.engine,
        model=asked.model,
        command=["slobench", "web"],
        environ=environ,
        cache_dir=cache_dir(os.environ),
        plugins=asked.plugin_files(),
    )
    console = Console(stderr=True, highlight=False)
    recorded = execute(scenario, asked.target, options, console, open_fleet=fleet)
    print_summary(recorded.summary, as_json=False)
    typer.echo(f"report: {recorded.directory / 'report.html'}", err=True)
    return recorded


def _problem(code: int) -> str:
    return f"the conductor ended with code {code}; the terminal says why"


if __name__ == "__main__":
    main()
