"""What the verbs of the command line do: wiring between arguments, functions and the terminal."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import typer
from rich.console import Console

from loadgen.errors import SlobenchError, UsageError, nearest
from loadgen.plugins import load_plugin
from loadgen.units import parse_duration_s, parse_share

if TYPE_CHECKING:
    from loadgen.measure.summary import Summary
    from loadgen.workload.scenario import Scenario

_NO_VERDICT = 3
_INTERRUPTED = 130
_INTERNAL = 4
_COLUMNS = 100


def version() -> str:
    from importlib.metadata import version as installed

    return installed("slobench")


_FLAG_KEYS = {
    "rate": "arrivals.rate",
    "input_len": "requests.input_tokens",
    "output_len": "requests.output_tokens",
    "duration": "phases.measure",
    "warmup": "phases.warmup",
    "max_concurrency": "limits.max_concurrency",
    "slo": "slo",
    "seed": "seed",
}
_NEEDED_FLAGS = ("rate", "input_len", "output_len", "duration")


def choose_scenario(
    source: str | None, settings: Sequence[str], plugins: Sequence[Path], **flags: Any
) -> Scenario:
    """A file with flags and settings on top, or, without a file, the flags themselves."""
    from loadgen.workload.scenario import load_scenario, scenario_from_flags

    for plugin in plugins:
        load_plugin(plugin)
    given = {name: value for name, value in flags.items() if value is not None}
    if source is not None:
        on_top = [f"{_FLAG_KEYS[name]}={json.dumps(value)}" for name, value in given.items()]
        return load_scenario(source, [*on_top, *settings])
    missing = ", ".join("--" + n.replace("_", "-") for n in _NEEDED_FLAGS if n not in given)
    if missing:
        raise UsageError(
            f"which traffic? Name a scenario (see `slobench list scenarios`), or add {missing}"
        )
    return scenario_from_flags(**given, overrides=list(settings))


def run(
    scenario: Scenario,
    target: str | None,
    model: str,
    engine: str,
    out: Path | None,
    force: bool,
    workers: str,
    transport: str,
    confidence: float | None,
    plugins: Sequence[Path],
    as_json: bool,
    scrape: bool = True,
) -> int:
    """Run, print the table and the verdict, and return the exit code."""
    from loadgen.run import execute
    from loadgen.run_options import RunOptions

    chosen = target or os.environ.get("OPENAI_BASE_URL")
    if not chosen:
        raise UsageError(
            "which server? Add --target URL, a target file, or `reference` for the bundled engine "
            "(OPENAI_BASE_URL is not set either)"
        )
    options = RunOptions(
        out_dir=out,
        force=force,
        n_workers=_workers(workers),
        transport=_transport(transport),
        engine=engine,
        model=model,
        confidence=_confidence(confidence),
        command=["slobench", *sys.argv[1:]],
        environ=dict(os.environ),
        cache_dir=cache_dir(os.environ),
        plugins=plugins,
        scrape=scrape,
    )
    finished = execute(scenario, chosen, options, Console(stderr=True, highlight=False))
    _tell(finished.summary, as_json)
    typer.echo(f"report: {finished.directory / 'report.html'}", err=True)
    return _INTERRUPTED if finished.was_interrupted else finished.summary.exit_code


def print_launch(target: str | None) -> None:
    """The command a target file starts its server with, and nothing is started."""
    from loadgen.target import launch_line

    if target is None:
        raise UsageError("--print-launch: which target file? Add --target FILE")
    typer.echo(launch_line(target, os.environ))


def modes(
    scenario: Scenario,
    modes_text: str,
    rates_text: str | None,
    n_seeds: int,
    target: str,
    engine: str,
    out: Path | None,
    workers: str,
    confidence: float | None,
    plugins: Sequence[Path],
    as_json: bool,
) -> int:
    """Run the same requests against each mode and put the results side by side."""
    from loadgen.lab.mode_spec import read_modes, read_rates
    from loadgen.lab.modes import Comparison, check_directory, check_target, compare
    from loadgen.lab.simulated_engine import read_settings

    check_target(target)
    asked = Comparison(
        scenario,
        read_modes(modes_text),
        target,
        read_settings(engine),
        None if rates_text is None else read_rates(rates_text),
        n_seeds,
        _confidence(confidence) or 0.95,
        _workers(workers),
        plugins,
        ["slobench", *sys.argv[1:]],
        cache_dir(os.environ),
    )
    directory = out or Path("runs") / f"modes-{scenario.name}-{datetime.now():%Y%m%d-%H%M%S}"
    check_directory(directory)
    compared = compare(asked, directory, Console(stderr=True, highlight=False))
    if compared.facts["n_done"]:
        from loadgen.lab.modes_files import write_all

        write_all(compared.facts, directory, cache_dir(os.environ))
        if as_json:
            _print_json(compared.facts)
        else:
            from reports.modes_view import tables

            stdout().print(tables(compared.facts))
        typer.echo(f"report: {directory / 'modes.html'}", err=True)
    return _INTERRUPTED if compared.was_interrupted else 0


def report(
    runs: Sequence[Path], slo: Sequence[str] | None, confidence: float | None, as_json: bool
) -> None:
    """Recompute and re-render recorded runs."""
    from loadgen.conclusion import conclude

    told = []
    for directory in runs:
        summary = conclude(directory, slo, _confidence(confidence), cache_dir(os.environ))
        told.append(summary.to_json())
        if not as_json:
            _tell(summary, as_json)
        typer.echo(f"report: {directory / 'report.html'}", err=True)
    if as_json:  # one object for one run, a list for several
        _print_json(told[0] if len(told) == 1 else told)


def promises(slo: Sequence[str] | None, goodput: Sequence[str] | None) -> list[str] | None:
    """What `--slo` and `--goodput` ask together; None where neither is given."""
    from loadgen.measure.slo import from_goodput

    if not slo and not goodput:
        return None
    try:
        return [*(slo or ()), *from_goodput(goodput or ())]
    except ValueError as error:
        raise UsageError(f"--goodput {error}") from None


def rescore(
    directory: Path,
    slo: Sequence[str] | None,
    definitions: Sequence[str],
    window: str | None,
    confidence: float | None,
    as_json: bool,
) -> int:
    """A recorded run under other promises, another window or other tools' definitions; files stay
    as they are."""
    from dataclasses import asdict

    from loadgen.drive.store import read_run
    from loadgen.measure.aggregate import summarize
    from loadgen.measure.definitions import DEFINITIONS
    from loadgen.measure.definitions import rescore as under
    from loadgen.measure.judgement import plain
    from loadgen.measure.window import with_window
    from reports.definitions_view import table

    known = [*DEFINITIONS, "all"]
    for name in definitions:
        if name not in known:
            raise UsageError(f"--definition: unknown tool '{name}'; {nearest(name, known)}")
    found = read_run(directory)
    if window is not None:
        found = with_window(found, window)
    summary = summarize(found, slo=slo, confidence=_confidence(confidence))
    names = (
        tuple(DEFINITIONS)
        if "all" in definitions
        else tuple(dict.fromkeys(["slobench", *definitions]))
    )
    rows = under(found, names) if definitions else []
    if as_json:
        _print_json({**summary.to_json(), "definitions": plain([asdict(row) for row in rows])})
    else:
        _tell(summary, as_json)
        if rows:
            stdout().print(table(rows))
    return summary.exit_code


def compare(
    sides: Sequence[str],
    is_aa: bool,
    fail_on: str,
    metrics: Sequence[str],
    margins: Sequence[str],
    confidence: float,
    effect: str | None,
    noise: Path | None,
    vary: Sequence[str],
    within_run: bool,
    html: Path | None,
    as_json: bool,
) -> int:
    """Compare sets of runs, or measure what equal ones differ by; the exit code."""
    from loadgen.comparison import read_margins, read_noise, read_side
    from loadgen.measure.compare import judge_sides
    from loadgen.measure.judgement import FAIL_ON, Options, exit_code
    from loadgen.measure.measures import measure
    from reports.compare_view import table

    if fail_on not in FAIL_ON:
        raise UsageError(f"--fail-on: unknown verdict '{fail_on}'; {nearest(fail_on, FAIL_ON)}")
    size = None if effect is None else _share("--effect", effect)
    if is_aa:
        return _noise(sides, metrics, 0.05 if size is None else size, confidence, as_json)
    if len(sides) != 2:
        raise UsageError(
            f"which two sides? Name A and B, each a run, runs separated by commas, or a folder of "
            f"runs; got {len(sides)}. For equal runs: --aa"
        )
    options = Options(
        metrics=metrics,
        margins=read_margins(margins),
        confidence=confidence,
        effect=size,
        noise=read_noise(noise) if noise else {},
        vary=vary,
        within_run=within_run,
    )
    for text in metrics:  # before any run is read
        measure(text)
    a, b = (read_side(side) for side in sides)
    found = judge_sides(a, b, options)
    if html is not None:
        from reports.compare_page import write

        write(found, a, b, options, html, cache_dir(os.environ))
        typer.echo(f"page: {html}", err=True)
    if as_json:
        _print_json(found.to_json())
    else:
        stdout().print(table(found))
    code = exit_code(found.verdict, fail_on)
    if (
        code == 0
        and found.verdict in ("inconclusive", "invalid")
        and "GITHUB_ACTIONS" in os.environ
    ):
        typer.echo(f"::warning::slobench compare: {found.verdict}", err=True)
    return code


def _noise(
    sides: Sequence[str], metrics: Sequence[str], effect: float, confidence: float, as_json: bool
) -> int:
    """What equal runs differ by, as a table or as `--noise` reads it."""
    from loadgen.comparison import noise_json, read_side
    from loadgen.measure.compare import GATED, noise_of_sides
    from loadgen.measure.measures import measure
    from reports.compare_view import noise_rows, noise_table

    runs = [run for side in sides for run in read_side(side)]
    if not runs:
        raise UsageError("--aa: which runs? Name three or more equal ones")
    found = noise_of_sides(runs, metrics)
    units = {text: measure(text).metric.unit for text in found}
    alpha = 2 * (1 - confidence) / max(1, len(metrics or GATED))  # as a two-sided test takes it
    if as_json:
        rows = noise_rows(found, units, effect, alpha)
        _print_json({**noise_json(runs, found), "effect": effect, "planning": rows})
    else:
        stdout().print(noise_table(noise_rows(found, units, effect, alpha), effect))
    return 0


def preview(scenario: Scenario, as_json: bool, html: Path | None, parquet: Path | None) -> None:
    """The planned schedule in numbers, as a page, and as a table."""
    from loadgen.workload.preview import preview as describe
    from loadgen.workload.schedule import make_plan

    plan = make_plan(scenario)
    facts = describe(scenario, *plan)
    for note in trace_notes(scenario):
        typer.echo(f"note: {note}", err=True)
    if html is not None:
        from reports.preview_page import write

        classes = scenario.names().classes
        write(facts, plan.schedule, classes, scenario.to_yaml(), html, cache_dir(os.environ))
        typer.echo(f"page: {html}", err=True)
    if parquet is not None:
        from loadgen.drive.store import write_schedule_file

        write_schedule_file(parquet, plan.schedule, scenario.names())
        typer.echo(f"schedule: {parquet}", err=True)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    from reports.preview_view import tables

    stdout().print(tables(facts))


def trace_notes(scenario: Scenario) -> list[str]:
    """What reading the scenario's traces dropped, reordered or approximated."""
    from loadgen.workload.trace_arrivals import TraceArrivals

    kinds = [scenario.arrivals, *(asked.arrivals for asked in scenario.classes.values())]
    replays = [kind for kind in kinds if isinstance(kind, TraceArrivals)]
    return [f"{kind.path}: {note}" for kind in replays for note in kind.notes()]


def fit(trace: Path, format_text: str, as_json: bool) -> None:
    """A scenario that looks like a trace on stdout, and how well it does on stderr."""
    from pydantic import ValidationError

    from loadgen.document import parse_document
    from loadgen.workload.fit import fit_text
    from loadgen.workload.traces.trace import TRACES
    from reports.fit_view import tables

    asked = parse_document(f"format: {format_text}", "--format", UsageError)
    try:
        reader = TRACES.build(asked.values["format"])
    except ValidationError as error:
        asked.note_validation(error)
        asked.raise_mistakes()
        raise
    except ValueError as error:
        raise UsageError(f"--format: {error}") from None
    text, facts = fit_text(trace, reader)
    if as_json:
        typer.echo(json.dumps({"scenario": text, **facts}, indent=2))
        return
    typer.echo(text, nl=False)
    Console(stderr=True, highlight=False).print(tables(facts))


def validate(sources: Sequence[str], settings: Sequence[str], plugins: Sequence[Path]) -> int:
    """Read and plan every scenario; all mistakes are told, and any makes the exit code 2."""
    from loadgen.workload.scenario import load_scenario
    from loadgen.workload.schedule import make_schedule

    for plugin in plugins:
        load_plugin(plugin)
    if not sources:
        raise UsageError("which scenarios? Name one or more files, or ask for --schema")
    exit_code = 0
    for source in sources:
        try:
            n = len(make_schedule(load_scenario(source, settings)))
        except UsageError as error:
            exit_code = error.exit_code
            for line in str(error).splitlines():
                where = "" if line.startswith(source) else f"{source}: "
                typer.echo(f"{where}{line}", err=True)
        else:
            typer.echo(f"{source}: ok ({n} requests)")
    return exit_code


def schema(plugins: Sequence[Path]) -> None:
    """The JSON schema of the scenario format."""
    from loadgen.schema import scenario_schema

    for plugin in plugins:
        load_plugin(plugin)
    typer.echo(json.dumps(scenario_schema(), indent=2, ensure_ascii=False))


def translate(text: str, as_json: bool) -> None:
    """The scenario of another tool's command line on stdout, what does not carry over on stderr."""
    from dataclasses import asdict

    from loadgen.translate.command_line import translate as translated

    found = translated(text)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    typer.echo(found.scenario_yaml, nl=False)
    for line in found.missing:
        typer.echo(f"no equivalent: {line}", err=True)
    for line in found.notes:
        typer.echo(f"note: {line}", err=True)
    if found.target_yaml:
        typer.echo(f"save as target.yaml:\n{found.target_yaml}", err=True, nl=False)
    typer.echo(f"save as scenario.yaml, then run: {found.command}", err=True)


def doctor(
    target: str | None, prove: bool, budget: str, model: str, engine: str, as_json: bool
) -> int:
    """Examine this machine, the numbers made on it, or a server; the exit code."""
    from loadgen.doctor.visit import visit_machine, visit_target, visit_truth
    from loadgen.target import Choice
    from reports.doctor_view import tables

    console, cache = Console(stderr=True, highlight=False), cache_dir(os.environ)
    cc = os.environ.get("CC", "")
    if target is not None:
        if prove:
            raise UsageError("--prove is about this machine, --target about a server: choose one")
        facts = visit_target(Choice(target, engine, model, dict(os.environ)), console)
    elif model or engine:
        raise UsageError("--model and --engine belong to --target: which server?")
    else:
        visit = visit_truth if prove else visit_machine
        facts = visit(_budget_s(budget), cache, cc, console)
    if as_json:
        _print_json(facts.to_json())
    else:
        stdout().print(tables(facts.to_json()))
    return facts.exit_code


def init(directory: Path) -> None:
    """Write the files a new project begins with."""
    from loadgen.starter import write_starter

    for path in write_starter(directory):
        typer.echo(f"wrote {path}")
    where = "" if directory == Path() else f"cd {directory} && "
    typer.echo(f"next: {where}slobench run slobench/chat.yaml --target reference", err=True)


def serve(
    options: Mapping[str, Any],
    drain: str | None,
    knobs: Sequence[str],
    plugins: Sequence[Path],
    as_json: bool,
) -> int:
    """The bundled engine in the foreground."""
    from reference_engine.serve import run as serve_until_stopped
    from reference_engine.serve_options import choose

    for plugin in plugins:
        load_plugin(plugin)
    drain_s = {} if drain is None else {"drain_s": _duration_s("--drain", drain)}
    try:
        chosen = choose({**options, **drain_s}, knobs)
    except UsageError as error:  # the server's options are this command's flags
        where, _, problem = str(error).partition(": ")
        key, _, rest = problem.partition(": ")
        if where != "options":
            raise
        raise UsageError(f"--{key.replace('_', '-')}: {rest}") from None
    if as_json:
        typer.echo(json.dumps({"options": chosen.model_dump(mode="json")}))
    return serve_until_stopped(chosen)


def list_kinds(family: str | None, plugins: Sequence[Path], as_json: bool) -> None:
    """Every registered kind with its parameters."""
    from loadgen.kinds import FAMILIES, describe

    for plugin in plugins:
        load_plugin(plugin)
    if family is not None and family not in FAMILIES:
        raise UsageError(f"unknown family '{family}'; {nearest(family, FAMILIES)}")
    found = {name: describe(name) for name in ([family] if family else FAMILIES)}
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from loadgen.kinds import tables

    stdout().print(tables(found))


def guarded(body: Callable[[], object], environ: Mapping[str, str]) -> int:
    """Run a command line and turn every way to fail into one message and an exit code."""
    try:
        body()
    except SlobenchError as error:
        for line in str(error).splitlines():
            typer.echo(f"slobench: {line}", err=True)
        return error.exit_code
    except SystemExit as end:  # typer's way to say that it is done, usage errors included
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == _INTERRUPTED:
            typer.echo("slobench: interrupted", err=True)
        return code
    except BrokenPipeError:  # `slobench … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a directory that went away
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"slobench: {where}{error.strerror or error}", err=True)
        return _NO_VERDICT
    except Exception as error:  # the process boundary: a bug of ours, kept for the report
        path = _keep_traceback(environ)
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        typer.echo(f"slobench: internal error: {what}", err=True)
        typer.echo(f"slobench: the details are in {path}; please report them", err=True)
        return _INTERNAL
    return 0


def leave(code: int) -> NoReturn:
    """End the process as it is. Taking apart all that a run imports would keep the user waiting for
    0.1 s on an idle machine, and what is written is written."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # nobody reads it any more
        pass
    except OSError as error:  # `> /dev/full`
        typer.echo(f"slobench: standard output: {error.strerror or error}", err=True)
        code = code or _NO_VERDICT
    if threading.active_count() > 1:
        sys.exit(code)  # somebody is still at work, and is waited for
    os._exit(code)


def cache_dir(environ: Mapping[str, str]) -> Path | None:
    """Where things that are slow to make are kept. Source: XDG Base Directory Specification."""
    base = environ.get("XDG_CACHE_HOME") or (
        f"{environ['HOME']}/.cache" if environ.get("HOME") else ""
    )
    return Path(base) / "slobench" if base else None


def stdout() -> Console:
    """Where data goes; wide enough for the result table where there is no terminal to ask."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def _tell(summary: Summary, as_json: bool) -> None:
    if as_json:
        _print_json(summary.to_json())
        return
    from reports.console import table

    stdout().print(table(summary))


def _budget_s(text: str) -> float:
    try:
        seconds = parse_duration_s(text)
    except ValueError as error:
        raise UsageError(f"--budget: {error}") from None
    if not 1.0 <= seconds <= 3600.0:
        raise UsageError(f"--budget {text}: expected 1s to 1h")
    return seconds


def _workers(text: str) -> int:
    """0 means: as many as needed."""
    if text == "auto":
        return 0
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"--workers {text}: expected a positive number or auto")


def _share(flag: str, text: str) -> float:
    try:
        return parse_share(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def _duration_s(flag: str, text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def _transport(word: str) -> Literal["fast", "aiohttp"]:
    known: tuple[Literal["fast"], Literal["aiohttp"]] = ("fast", "aiohttp")
    for transport in known:
        if word == transport:
            return transport
    raise UsageError(f"--transport {word}: {nearest(word, known)}")


def _confidence(value: float | None) -> float | None:
    if value is not None and not 0.5 <= value < 1:
        raise UsageError(f"--confidence {value}: expected a value from 0.5 to below 1, e.g. 0.95")
    return value


def _keep_traceback(environ: Mapping[str, str]) -> Path:
    """The traceback, in the cache directory or, if that cannot be written, in the current one."""
    name = f"error-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.txt"
    for directory in (cache_dir(environ), Path()):
        if directory is None:
            continue
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / name
            path.write_text(f"slobench {version()}, {sys.argv}\n{traceback.format_exc()}")
        except OSError:
            continue
        return path
    return Path(os.devnull)
