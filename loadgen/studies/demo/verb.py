"""The verb demo, of the panel Measure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli import parse
from loadgen.cli.flags import Json
from loadgen.cli.terminal import stderr
from loadgen.errors import UsageError, nearest
from loadgen.units import parse_rate_per_s

ALL = "all"
verbs = typer.Typer()


@verbs.command(epilog="Example: slobench demo truth --duration 5s")
def demo(
    name: Annotated[str, typer.Argument(help="The demonstration: truth.")],
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="A load generator to run next to slobench, or `all`; repeatable. Default: the "
            "first two that are installed."
        ),
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(help="A YAML file with other settings, or further load generators."),
    ] = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="Print the settings as such a file, and end.")
    ] = False,
    rate: Annotated[str, typer.Option(help="Requests per second (Poisson).")] = "40/s",
    duration: Annotated[str, typer.Option(help="Length of each run.")] = "10s",
    rounds: Annotated[
        int, typer.Option(min=1, help="Runs of each load generator with each server.")
    ] = 2,
    input_len: Annotated[int, typer.Option(min=1, help="Input tokens of a request.")] = 64,
    output_len: Annotated[int, typer.Option(min=2, help="Output tokens of a request.")] = 64,
    ttft: Annotated[str, typer.Option(help="The server's TTFT.")] = "50ms",
    itl: Annotated[str, typer.Option(help="The server's time per token after the first.")] = "10ms",
    stall_every: Annotated[
        int, typer.Option(min=1, help="In the second half: one step in so many stalls.")
    ] = 200,
    stall: Annotated[str, typer.Option(help="Length of a stall.")] = "300ms",
    limit: Annotated[
        str, typer.Option(help="How far a reported TTFT may be from the true one.")
    ] = "5ms",
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face folder for the others. Default: 2 000 made-up words."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the study. Default: runs/demo-….")
    ] = None,
    json: Json = False,
) -> None:
    """Compare what load generators report with what a server logged: the same load, in turns, from
    slobench and from others that are installed; then again while one step in 200 stalls.

    Needs a C compiler for the server, no GPU and no network.
    """
    from loadgen.studies.demo.peers import SLOBENCH, installed, read_settings, settings_text
    from loadgen.studies.demo.result import Load
    from loadgen.studies.demo.run import DEMO, PAGE, DemoSpec, demonstrate
    from loadgen.studies.demo.view import lines
    from loadgen.studies.study import end
    from targets.truth_server import truth_program

    parse.read_choice("demo", name, ("truth",))
    known = read_settings(peers)
    if settings:
        typer.echo(settings_text(known), nl=False)
        return
    others = [other for other in known if other != SLOBENCH]
    spec = DemoSpec(
        load=Load(
            rate_per_s=_rate_per_s(rate),
            seconds=_positive_s("--duration", duration),
            rounds=rounds,
            input_tokens=input_len,
            output_tokens=output_len,
            ttft_s=parse.read_duration_s("--ttft", ttft),
            itl_s=_positive_s("--itl", itl),
            stall_every=stall_every,
            stall_s=_positive_s("--stall", stall),
        ),
        limit_s=parse.read_duration_s("--limit", limit),
        peers=known,
        chosen=_chosen(peer, others),
        tokenizer=_folder(tokenizer),
        cache_dir=parse.cache_dir(os.environ),
        cc=os.environ.get("CC", ""),
        command=parse.base_options(None).command,
    )
    if spec.cache_dir is not None:
        truth_program(spec.cache_dir, spec.cc)  # refuses before the directory is made
    if spec.chosen is None and not [word for word in installed(known) if word != SLOBENCH]:
        stderr().print("no other load generator is installed: slobench alone", markup=False)
    with DEMO.opened(name, out, command=spec.command) as place:
        result = demonstrate(place, spec, stderr())
    end(
        result.to_json(),
        lambda: "\n".join(lines(result)),
        as_json=json,
        exit_code=result.exit_code,
        files={"result": place.directory / DEMO.file, "report": place.directory / PAGE},
    )


def _chosen(named: Sequence[str] | None, known: Sequence[str]) -> tuple[str, ...] | None:
    if named is None:
        return None
    if ALL in named:
        return tuple(known)
    for word in named:
        if word not in known:
            raise UsageError(f"--peer {word}: unknown load generator; {nearest(word, known)}")
    return tuple(named)


def _rate_per_s(text: str) -> float:
    try:
        return parse_rate_per_s(text)
    except ValueError as error:
        raise UsageError(f"--rate {error}; write e.g. 40/s") from None


def _positive_s(flag: str, text: str) -> float:
    value_s = parse.read_duration_s(flag, text)
    if value_s <= 0:
        raise UsageError(f"{flag} {text}: expected a time above 0 s")
    return value_s


def _folder(tokenizer: Path | None) -> Path | None:
    if tokenizer is not None and not tokenizer.is_dir():
        raise UsageError(f"--tokenizer {tokenizer}: is no folder")
    return tokenizer
