"""`slobench demo truth`: the same load from slobench and other load generators to the truth server,
in turns.

Each run has a server of its own on a core of its own, and the tool has the other cores. In every
round each tool runs once with a steady server and once with one that stalls; the order turns from
round to round, so that a drift of the machine meets all tools alike.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from loadgen.archive.store import read_run
from loadgen.drive.instrument import host
from loadgen.errors import RunInvalid, UsageError
from loadgen.foreign.read import imported_runs
from loadgen.measure.aggregate import summarize
from loadgen.records import Run
from loadgen.run.manifest import recorded_command, version
from loadgen.studies.demo.bounded_command import Finished, finished
from loadgen.studies.demo.figures import figures_of, held_per_s, recorded, rows_behind, true
from loadgen.studies.demo.page import render
from loadgen.studies.demo.peers import (
    SLOBENCH,
    Peer,
    installed,
    program_of,
    values_of,
    version_of,
    word_tokenizer,
    words,
)
from loadgen.studies.demo.result import PHASES, Demo, Load, Observation, Phase, State, Tool
from loadgen.studies.study import Place, Study
from loadgen.system.endings import exit_words
from targets.safe_text import strip_controls
from targets.truth_log import TruthLog
from targets.truth_server import truth_server

DEMO = Study("demo", "demonstration", Demo, resumes=False)
PAGE = "report.html"
N_PEERS = 2
"""How many of the installed tools run where none is named."""
_ENVIRON = {"NO_COLOR": "1"}
_START_S = 120.0  # a tool may take so much longer than the load
_VERSION_S = 20.0
_VERDICTS = (0, 1, 3)  # exit codes of `slobench run` that leave a run


@dataclass(frozen=True)
class DemoSpec:
    """`peers` are all that are known, slobench first; `chosen` the names of those to run, None: the
    first N_PEERS that are installed. `tokenizer` is a Hugging Face folder, None: one of words that
    is made for the purpose."""

    load: Load
    limit_s: float
    peers: Mapping[str, Peer]
    chosen: tuple[str, ...] | None = None
    tokenizer: Path | None = None
    cache_dir: Path | None = None
    cc: str = ""
    command: Sequence[str] = ()

    def selected(self) -> list[str]:
        """The names of the tools that run."""
        there = [name for name in installed(self.peers) if name != SLOBENCH]
        others = there[:N_PEERS] if self.chosen is None else self.chosen
        return [SLOBENCH, *(name for name in there if name in others)]


@dataclass
class _Running:
    """The results so far."""

    observations: dict[str, list[Observation]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class _Failed(Exception):
    """A tool that left no result."""


def demonstrate(place: Place[Demo], spec: DemoSpec, console: Console) -> Demo:
    """Runs the tools; writes demo.json and the page. A tool that fails is not run again. Raises
    MissingDependency without a C compiler."""
    selected = spec.selected()
    tokenizer = spec.tokenizer or word_tokenizer(place.directory)
    running = _Running({name: [] for name in selected})
    for number in range(spec.load.rounds):
        turn = number % len(selected)
        for phase in PHASES:
            for name in (*selected[turn:], *selected[:turn]):
                if name in running.failures:
                    continue
                label = f"round {number + 1}, {phase}: {name}"
                try:
                    found = _observed(
                        place.directory, spec, running, tokenizer, name, phase, number
                    )
                except _Failed as error:
                    running.failures[name] = str(error)
                    label += f" failed: {error}"
                else:
                    running.observations[name].append(found)
                    label += f", {found.reported.n} requests"
                    label += "".join(f"; INVALID: {problem}" for problem in found.invalid)
                console.print(label, markup=False, soft_wrap=True)
        place.write(_result(spec, running))
    result = _result(spec, running)
    place.write_text(PAGE, render(result, spec.cache_dir))
    return result


def _observed(
    directory: Path,
    spec: DemoSpec,
    running: _Running,
    tokenizer: Path,
    name: str,
    phase: Phase,
    number: int,
) -> Observation:
    """A run of a tool. Raises _Failed without a result of it."""
    peer, load = spec.peers[name], spec.load
    place = f"{list(spec.peers).index(name)}-{re.sub(r'[^a-z0-9]+', '-', name.lower())}"
    folder = directory / f"{phase}-{number + 1}" / place
    out = folder / "out"
    out.mkdir(parents=True)
    script: dict[str, Any] = {"ttft_s": load.ttft_s, "itl_s": load.itl_s}
    if phase == "stalls":
        script |= {"stall_every": load.stall_every, "stall_s": load.stall_s}
    with truth_server(
        folder, cache_dir=spec.cache_dir, cc=spec.cc, with_tokens=True, **script
    ) as server:
        values = values_of(
            peer,
            url=server.url,
            rate_per_s=load.rate_per_s,
            seconds=load.seconds,
            input_tokens=load.input_tokens,
            output_tokens=load.output_tokens,
            seed=number + 1,
            tokenizer=tokenizer,
            out=out,
        )
        line = words(peer.command, values)
        with server.client_cores():
            done = _finished(_ours(line), load.seconds + _START_S)
        log = server.finish()
    (folder / "output.txt").write_text(done.output)
    _check_end(done, is_ours=name == SLOBENCH)
    run = _run_of(out / peer.result)
    if name not in running.versions:
        running.versions[name] = _version(peer, run)
    return _observation(run, log, done, phase, number)


def _finished(line: Sequence[str], limit_s: float) -> Finished:
    try:
        return finished(line, _ENVIRON, limit_s)
    except OSError as error:
        raise _Failed(f"{line[0]}: {error.strerror or error}") from None


def _ours(line: list[str]) -> list[str]:
    """The command line, with this program in place of the word slobench."""
    return [sys.executable, "-P", "-m", "loadgen", *line[1:]] if line[0] == SLOBENCH else line


def _check_end(done: Finished, *, is_ours: bool) -> None:
    if done.is_cut:
        raise _Failed(f"had not ended after {done.ended_s - done.started_s:.0f} s")
    if done.exit_code not in (_VERDICTS if is_ours else (0,)):
        lines = _lines(done.output)
        errors = [line for line in lines if "error" in line.lower()]
        reason = next(reversed(errors or lines), "no output")
        raise _Failed(f"{exit_words(done.exit_code)}: {reason[:200]}")


def _lines(output: str) -> list[str]:
    """The lines with text, without control characters."""
    lines = (strip_controls(line).strip() for line in output.splitlines())
    return [line for line in lines if line]


def _run_of(path: Path) -> Run:
    """The run in a file or run directory of a tool. Raises _Failed for none."""
    try:
        if path.is_dir() and (path / "manifest.json").exists():
            return read_run(path)
        return next(run for _, run in imported_runs([path], (), version()))
    except (UsageError, RunInvalid) as error:
        raise _Failed(str(error).splitlines()[0]) from None


def _version(peer: Peer, run: Run) -> str:
    """The version that the tool's file states, else that of its package, else of `--version`."""
    if run.manifest.imported is None:
        return run.manifest.slobench
    program = program_of(peer)
    if run.manifest.imported.version or program is None:
        return run.manifest.imported.version
    found = version_of(peer, program)
    if found or not peer.distribution:
        return found
    done = _finished([str(program), "--version"], _VERSION_S)
    words_of_first = next(iter(_lines(done.output)), "").split()
    return words_of_first[-1] if words_of_first and not done.exit_code else ""


def _observation(run: Run, log: TruthLog, done: Finished, phase: Phase, number: int) -> Observation:
    try:
        rows = rows_behind(run, log)
    except KeyError as error:
        raise _Failed(error.args[0]) from None
    reported = figures_of(recorded(run))
    if not reported.n or not len(rows):
        raise _Failed("no request succeeded")
    checks = summarize(run).validity.checks if run.manifest.imported is None else ()
    n_tokens = int(log.rows["sent_tokens"].sum())
    return Observation(
        phase=phase,
        round=number + 1,
        truth=figures_of(true(rows, log)),
        reported=reported,
        n_others=len(log.rows) - len(rows),
        held_per_s=held_per_s(rows),
        cpu_s=done.cpu_s,
        cpu_us_per_token=1e6 * done.cpu_s / n_tokens,
        peak_mb=done.peak_mb,
        server_late_p99_s=1e-9 * float(np.percentile(rows["late_max_ns"], 99)),
        invalid=tuple(c.detail or c.name for c in checks if c.is_gate and c.ok is False),
    )


def _result(spec: DemoSpec, running: _Running) -> Demo:
    tools = tuple(_tool(spec, running, name, peer) for name, peer in spec.peers.items())
    ours = next(tool for tool in tools if tool.name == SLOBENCH)
    is_valid = ours.state == "measured" and not any(one.invalid for one in ours.observations)
    return Demo(
        slobench=version(),
        command=tuple(recorded_command(spec.command)),
        host=host(),
        load=spec.load,
        limit_s=spec.limit_s,
        tools=tools,
        exit_code=0 if is_valid else 3,
    )


def _tool(spec: DemoSpec, running: _Running, name: str, peer: Peer) -> Tool:
    state: State = "not installed" if program_of(peer) is None else "not selected"
    reason = peer.install if state == "not installed" else f"add --peer '{name}'"
    if name in running.observations:
        state, reason = "measured", ""
    if name in running.failures:
        state, reason = "failed", running.failures[name]
    return Tool(
        name=name,
        version=running.versions.get(name, ""),
        command=peer.command,
        settings=peer.settings,
        state=state,
        reason=reason,
        observations=tuple(running.observations.get(name, ())),
    )
