"""The verb sweep, of the panel Decide: from flags or a sweep file to cells, runs and a table."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadgen.cli.exit_codes import INTERRUPTED, NO_VERDICT
from loadgen.cli.flags import (
    CaCert,
    Full,
    ScenarioFlags,
    StudyFlags,
    TrafficFlags,
    WaitReady,
    WatchFlags,
    Workers,
    with_flags,
)
from loadgen.cli.parse import (
    base_options,
    choose_scenario,
    read_confidence,
    read_wait_s,
    read_workers,
    shared_watch,
    slo_flags,
    target_settings,
    with_unit,
)
from loadgen.cli.terminal import print_json, stderr, stdout
from loadgen.errors import UsageError, nearest

if TYPE_CHECKING:
    from loadgen.run.run_options import RunOptions
    from loadgen.studies.sweep.points import Base
    from loadgen.studies.sweep.run import Swept
    from loadgen.studies.sweep.spec import SweepFile, SweepSpec

verbs = typer.Typer()
FIRST_SLO = "interactive-chat"
"""The preset of a first look."""
FAIL_ON = ("missed", "no_verdict")
_MISSED = 1
_LOAD_OF = {
    "rate": "rate",
    "arrivals.rate": "rate",
    "users": "concurrency",
    "concurrency": "concurrency",
}
"""Swept key → the kind of load that it sets in every cell."""
_FIRST_LOADS: Mapping[str, object] = {"rate": "1/s", "concurrency": 1}
"""The load of a scenario before the cells set theirs."""


@verbs.command(
    epilog="Example: slobench sweep quickstart --target sim --over rate=2/s,4/s,8/s "
    "--over engine.mode=chunked,static",
)
@with_flags
def sweep(
    flags: ScenarioFlags,
    traffic: TrafficFlags,
    watch: WatchFlags,
    study: StudyFlags,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="A key that varies: a scenario key, engine.…, target, or a key of a target file "
            "such as launch.args; values with commas, or from:to:step; repeatable.",
        ),
    ] = None,
    grid: Annotated[
        bool | None,
        typer.Option("--grid/--zip", help="All combinations, or the k-th values together."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="A URL, a target file, `reference`, `sim` or `mock`."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Settings of `reference`, `sim` or `mock` in every cell.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The API's model field.")] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Runs of each cell, with seeds of their own. Default: 3.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="The latency to trade off. Default: 'p99(ttft)'.")
    ] = None,
    throughput: Annotated[
        str | None,
        typer.Option(help="The throughput, per GPU. Default: output_tokens_per_s; or goodput, …"),
    ] = None,
    along: Annotated[
        str | None, typer.Option(help="The swept key that lines follow. Default: the load.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show cells, order and duration; run nothing.")
    ] = False,
    drain: Annotated[
        str | None,
        typer.Option(help="Time for a server to finish before the next cell. Default: 30s."),
    ] = None,
    reset_cache: Annotated[
        bool | None,
        typer.Option("--reset-cache/--keep-cache", help="Empty its prefix cache before each run."),
    ] = None,
    order_seed: Annotated[
        int | None, typer.Option(help="Another seed runs the cells in another order.")
    ] = None,
    confidence: Annotated[str | None, typer.Option(help="Of the intervals. Default: 95%.")] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(help="`missed`: exit code 1 for a missed SLO; `no_verdict`: also 3."),
    ] = None,
    ca_cert: CaCert = None,
    workers: Workers = "auto",
    wait_ready: WaitReady = None,
    full: Full = False,
) -> None:
    """Run many cells in turn and show which trade latency for throughput best. The scenario may
    also be a sweep file (a scenario file with a key `over:`). With --target alone: five rates up to
    what the server can take, in about three minutes. With --out DIR --resume alone: the sweep in
    that directory goes on."""
    from loadgen.studies.study import end
    from loadgen.studies.sweep.run import SWEEP, run_sweep
    from loadgen.studies.sweep.spec import sweep_spec
    from loadgen.studies.sweep.view import ending, tables

    keys = {
        "target": target,
        "engine": engine,
        "model": model,
        "repeats": repeats,
        "metric": metric,
        "throughput": throughput,
        "along": along,
        "reset_cache": reset_cache,
        "drain": None if drain is None else with_unit(drain, "s"),
        "order_seed": order_seed,
        "confidence": read_confidence(confidence),
        "how": None if grid is None else "grid" if grid else "zip",
    }
    if fail_on is not None and fail_on not in FAIL_ON:
        raise UsageError(f"--fail-on: unknown verdict '{fail_on}'; {nearest(fail_on, FAIL_ON)}")
    of_runs = {
        "n_workers": read_workers(workers),
        "wait_ready_s": read_wait_s(wait_ready),
        "target_settings": target_settings(ca_cert),
    }
    is_new = not over and not study.resume
    if is_new and target is not None and flags.states_no_traffic(traffic):
        options = base_options(flags.plugin, engine=engine or "", model=model or "", **of_runs)
        raise typer.Exit(_first_look(target, options, flags, traffic, study, ca_cert))
    file = _sweep_file(flags.scenario, study, over or [], keys)
    base = _base(file, flags, traffic, of_runs)
    spec = sweep_spec(file, base)
    _check_engines(spec)
    name = base.scenario.name
    if dry_run:
        _print_forecast(spec, study.out or SWEEP.default(name), study.json)
        return
    command = base.options.command
    with (
        shared_watch(watch, [cell.target for cell in spec.cells]) as each,
        SWEEP.opened(name, study.out, resume=study.resume, command=command) as place,
    ):
        spec = replace(spec, cells=[cell.watched(each) for cell in spec.cells])
        swept = run_sweep(place, file, base, spec, stderr())
    end(
        swept.result.to_json(),
        lambda: tables(swept.result),
        as_json=study.json,
        exit_code=exit_code(swept, fail_on),
        files={"report": swept.directory / "report.html"},
        ending=lambda: ending(swept.result),
        is_full=full,
    )


def _first_look(
    target: str,
    options: RunOptions,
    flags: ScenarioFlags,
    traffic: TrafficFlags,
    study: StudyFlags,
    ca_cert: Path | None,
) -> int:
    """Finds five rates, prints the command of a sweep over them, and runs it; the exit code."""
    from loadgen.cli.lazy_verbs import command
    from loadgen.studies.sweep.first_rates import find_rates
    from loadgen.studies.sweep.run import SWEEP

    slos = slo_flags(flags.slo, flags.goodput) or [FIRST_SLO]
    input_len, output_len = traffic.input_len or 256, traffic.output_len or 64
    _print_plan(input_len, output_len, slos)
    try:
        with nullcontext() if study.out is None else SWEEP.opened("first look", study.out):
            rates = find_rates(
                target, options, stderr(), input_len=input_len, output_len=output_len
            )
    except KeyboardInterrupt:
        return INTERRUPTED
    words = _first_sweep(target, options, input_len, output_len, slos, rates)
    words += [] if study.out is None else ["--out", str(study.out)]
    words += [] if ca_cert is None else ["--ca-cert", str(ca_cert)]
    typer.echo(f"running: {shlex.join(['slobench', 'sweep', *words])}", err=True)
    code = command("sweep").main(
        args=[*words, *(["--json"] if study.json else [])],
        prog_name="slobench sweep",
        standalone_mode=False,
    )
    return int(code or 0)


def _print_plan(input_len: int, output_len: int, slos: Sequence[str]) -> None:
    """Prints what a first look does, and how long it takes."""
    from loadgen.studies.sweep.first_rates import LEAST_S, MOST_S
    from loadgen.units import format_duration
    from loadgen.workload.presets import PRESETS

    limits = f" ({', '.join(PRESETS[FIRST_SLO])})" if slos == [FIRST_SLO] else ""
    least_s, most_s = 5 * 23.0 + LEAST_S, 5 * 33.0 + MOST_S
    typer.echo(
        f"no traffic given: short runs find the rates, then a sweep over five rates of "
        f"{input_len}-token prompts and {output_len}-token answers, SLO {', '.join(slos)}{limits}: "
        f"about {format_duration(least_s)}, at most {format_duration(most_s)} and the starts of "
        "servers. Ctrl-C keeps the finished runs.",
        err=True,
    )


def _first_sweep(
    target: str,
    options: RunOptions,
    input_len: int,
    output_len: int,
    slos: Sequence[str],
    rates: Sequence[float],
) -> list[str]:
    """The words of a sweep over the rates of a first look, without `--out`."""
    from loadgen.units import write_rate

    return [
        *("--target", target, "--input-len", str(input_len), "--output-len", str(output_len)),
        *("--warmup", "3s", "--duration", "20s", "--set", "phases.drain=10s", "--repeats", "1"),
        *(word for slo in slos for word in ("--slo", slo)),
        *("--over", f"rate={','.join(write_rate(rate) for rate in rates)}"),
        *(word for path in options.plugins for word in ("--plugin", str(path))),
        *(("--model", options.model) if options.model else ()),
        *(("--engine", options.engine) if options.engine else ()),
    ]


def _sweep_file(
    source: str | None, study: StudyFlags, over: Sequence[str], keys: Mapping[str, Any]
) -> SweepFile:
    """The sweep file that the flags name, with the flags on top, or one made of the flags. Without
    a scenario, `--resume` names that of its directory. `keys` are those of a sweep file, None where
    not set."""
    from loadgen.archive import checksums
    from loadgen.studies.sweep.axes import read_axis
    from loadgen.studies.sweep.spec import (
        FILE,
        SCENARIO,
        is_sweep_file,
        read_sweep_file,
        sweep_from_flags,
    )

    on_top = {key: value for key, value in keys.items() if value is not None}
    axes = [read_axis(text) for text in over]
    if axes:
        on_top["over"] = {axis.key: list(axis.values) for axis in axes}
        if len(on_top["over"]) < len(axes):
            raise UsageError("--over: the same key twice; write all its values in one --over")
    if study.resume and source is None:
        if study.out is None:
            raise UsageError("--resume: name the directory of the study with --out")
        if not (study.out / FILE).is_file():
            raise UsageError(f"--resume: {study.out} holds no sweep (no {FILE})")
        checksums.check_own(study.out, FILE, SCENARIO)
        return read_sweep_file(study.out / FILE, on_top)
    if source is not None and is_sweep_file(source):
        return read_sweep_file(Path(source), on_top)
    return sweep_from_flags(on_top)


def _base(
    file: SweepFile, flags: ScenarioFlags, traffic: TrafficFlags, of_runs: Mapping[str, Any]
) -> Base:
    """The scenario, target and options of a cell before its factors are applied. `of_runs` are
    further fields of RunOptions."""
    from loadgen.studies.sweep.points import Base
    from loadgen.studies.sweep.spec import is_sweep_file

    named = file.scenario or ("" if is_sweep_file(flags.scenario) else flags.scenario)
    flags = replace(flags, scenario=named or None)
    loads = {_LOAD_OF[key] for key in file.over if key in _LOAD_OF}
    if traffic.rate is not None and "concurrency" in loads:
        raise UsageError(
            "--rate is an open loop, and --over concurrency a closed loop: leave --rate out, or "
            "vary the limit of requests in flight with --over limits.max_concurrency=…"
        )
    defaults = {name: value for name, value in _FIRST_LOADS.items() if name in loads}
    scenario = choose_scenario(flags, traffic, settings=file.settings(), defaults=defaults)
    target = file.target or os.environ.get("OPENAI_BASE_URL", "")
    if not target and "target" not in file.over:
        raise UsageError(
            "no target: add --target URL, a target file, reference, sim or mock, or vary it: "
            "--over target=… (OPENAI_BASE_URL is not set either)"
        )
    options = base_options(flags.plugin, engine=file.engine, model=file.model, **of_runs)
    return Base(scenario, target, options)


def _check_engines(spec: SweepSpec) -> None:
    """Raises UsageError for settings that the bundled engine refuses, before any cell runs."""
    from reference_engine.serving.serve_options import choose

    for cell in spec.cells:
        if cell.target == "reference":
            choose({}, [setting for setting in cell.options.engine.split(",") if setting])


def _print_forecast(spec: SweepSpec, directory: Path, as_json: bool) -> None:
    """Prints the runs of a sweep in their order, and how long they take."""
    from loadgen.studies.cells.cell import check_cells
    from loadgen.studies.sweep.run import forecast
    from loadgen.studies.sweep.view import forecast_table

    check_cells(spec.cells, directory)
    estimate = forecast(spec, directory)
    facts = {
        "directory": str(directory),
        "turns": [
            {
                "cell": planned.cell.name,
                "repeat": planned.repeat,
                "factors": dict(planned.cell.factors),
                "is_done": planned.is_done,
            }
            for planned in estimate.turns
        ],
        "arrivals_s": estimate.arrivals_s,
        "drain_s": estimate.drain_s,
        "n_starts": estimate.n_starts,
    }
    if as_json:
        print_json(facts)
    else:
        stdout().print(forecast_table(facts))


def exit_code(swept: Swept, fail_on: str | None) -> int:
    """130 after an interrupt; 3 where a run could not be made or a cell has no valid run; a missed
    SLO or a run without a verdict counts only with --fail-on."""
    if swept.was_interrupted:
        return INTERRUPTED
    codes, result = {run.exit_code for run in swept.runs}, swept.result
    if result.n_failed or result.without_valid_run:
        return NO_VERDICT
    if fail_on == "no_verdict" and NO_VERDICT in codes:
        return NO_VERDICT
    return _MISSED if fail_on is not None and _MISSED in codes else 0
