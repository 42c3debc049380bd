"""Flags of the verbs that run on Locust."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli import web_command as command
from loadgen.cli.flags import Duration, Plugin, Rate, Seed, Set, Slo, Warmup

PANEL = "Scale"
verbs = typer.Typer()


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench web --headless --workers 2 --scenario quickstart --target mock",
)
def web(
    scenario: Annotated[
        str, typer.Option(help="A scenario file or a shipped one; the form offers them all.")
    ] = "",
    target: Annotated[str, typer.Option(help="A URL, a target file, `reference` or `mock`.")] = "",
    headless: Annotated[
        bool, typer.Option("--headless", help="No page: start at once, end with the verdict.")
    ] = False,
    workers: Annotated[
        int, typer.Option(min=0, help="Workers to start on this machine; 0: one process for all.")
    ] = 0,
    expect_workers: Annotated[
        int, typer.Option(min=0, help="Wait for so many `slobench worker` from elsewhere.")
    ] = 0,
    rate: Rate = None,
    duration: Duration = None,
    warmup: Warmup = None,
    slo: Slo = None,
    seed: Seed = None,
    set_: Set = None,
    model: Annotated[str, typer.Option(help="The API's model field.")] = "",
    engine: Annotated[str, typer.Option(help="Settings of `reference` or `mock`.")] = "",
    out: Annotated[
        Path | None, typer.Option(help="The run's directory. Default: runs/<scenario>-<time>.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the run in --out.")] = False,
    plugin: Plugin = None,
    max_skew: Annotated[
        str, typer.Option(help="Most by which workers may start apart, else no start.")
    ] = "50ms",
    on_worker_loss: Annotated[
        str, typer.Option(help="continue, or abort: what the others do when a worker is lost.")
    ] = "continue",
    web_host: Annotated[
        str, typer.Option(help="Where the page listens; 0.0.0.0 is everywhere.")
    ] = command.LOOPBACK,
    web_port: Annotated[int, typer.Option(min=1, max=65535, help="Its port.")] = 8089,
    web_login: Annotated[
        bool,
        typer.Option("--web-login", help="Ask for the password in SLOBENCH_WEB_PASSWORD."),
    ] = False,
    master_host: Annotated[
        str, typer.Option(help="Where workers from elsewhere connect; 0.0.0.0 is everywhere.")
    ] = command.LOOPBACK,
    master_port: Annotated[int, typer.Option(min=1, max=65535, help="Its port.")] = 5557,
) -> None:
    """Run on Locust: its page with our numbers, and load from as many machines as it takes."""
    command.web(
        command.asked(
            scenario, target, rate, duration, warmup, slo or [], seed, set_ or [], model, engine,
            out, plugin or [], max_skew, on_worker_loss,
        ),
        ["--force"] if force else [],
        command.Where(
            headless, workers, expect_workers, web_host, web_port, master_host, master_port,
            web_login,
        ),
    )  # fmt: skip


@verbs.command(rich_help_panel=PANEL, epilog="Example: slobench worker --master 10.0.0.5")
def worker(
    master: Annotated[str, typer.Option(help="The machine on which `slobench web` waits.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Its --master-port.")] = 5557,
    target: Annotated[
        Path | None,
        typer.Option(help="A target file of this machine, for header values and certificates."),
    ] = None,
    plugin: Plugin = None,
) -> None:
    """Generate load for a `slobench web` on another machine; the API key is this machine's own."""
    command.worker(master, port, target, plugin or [])


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: locust -f $(slobench locustfile) --host http://localhost:8000",
)
def locustfile() -> None:
    """Print the path of the locustfile that slobench brings."""
    typer.echo(command.locustfile())
