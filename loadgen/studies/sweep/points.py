"""Cells of a sweep: each key of a point goes to the scenario, the target or the engine."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from loadgen.errors import UsageError, nearest
from loadgen.run.execute import SIMULATED
from loadgen.run.run_options import RunOptions
from loadgen.run.target import OURS
from loadgen.studies.cells.cell import Cell
from loadgen.studies.sweep.axes import Axis, How, Point, label, points
from loadgen.workload.scenario import Scenario, varied
from loadgen.workload.traffic_flags import CLOSED_LOOPS
from targets.embed import parse_engine
from targets.endpoint import Endpoint, load_target
from targets.safe_text import hide_secrets

_SAFE = re.compile(r"[A-Za-z0-9_.=/+-]{1,40}")
_MOST_CHARACTERS = 100


@dataclass(frozen=True)
class Base:
    """Scenario, target and options that all cells share."""

    scenario: Scenario
    target: str
    options: RunOptions


def cells_of(base: Base, axes: Sequence[Axis], how: How) -> list[Cell]:
    """A cell per point, checked as far as possible without a server. Raises UsageError."""
    for axis in axes:
        _check_key(axis.key)
        _check_shown(axis)
    names = _short_names([axis.key for axis in axes])
    return [_cell(base, point, names) for point in points(axes, how)]


def _cell(base: Base, point: Point, names: dict[str, str]) -> Cell:
    target, options = str(point.get("target", base.target)), base.options
    engine = parse_engine(options.engine)
    scenario_keys: dict[str, Any] = {}
    loop: dict[str, Any] = {}
    settings = list(options.target_settings)
    for key, value in point.items():
        root, _, rest = key.partition(".")
        if root == "engine":
            engine |= {rest.replace("-", "_"): label(value)} if rest else parse_engine(str(value))
        elif key == "model":
            options = replace(options, model=str(value))
        elif root in Endpoint.model_fields:
            settings.append(f"{key}={json.dumps(value)}")
        elif key in CLOSED_LOOPS:
            loop[key] = value
        elif key != "target":
            scenario_keys[key] = value
    text = ",".join(f"{key}={value}" for key, value in engine.items())
    options = replace(options, engine=text, target_settings=settings)
    cell = Cell(
        "+".join(f"{names[key]}={_slug(label(value))}" for key, value in point.items()),
        varied(base.scenario, scenario_keys, "--over", loop)
        if scenario_keys or loop
        else base.scenario,
        target,
        options,
        {key: label(value) for key, value in point.items()},
    )
    _check_target(cell)
    return _named(cell)


def _check_key(key: str) -> None:
    root = key.partition(".")[0]
    scenario = {field.alias or name for name, field in Scenario.model_fields.items()}
    known = {*scenario, *Endpoint.model_fields, "engine", "target", *CLOSED_LOOPS} - {
        "schema",
        "name",
        "url",
    }
    if root not in known:
        raise UsageError(
            f"--over {key}: is no key of a scenario or a target file, nor engine.… or target; "
            f"{nearest(root, known)}"
        )


def _check_shown(axis: Axis) -> None:
    """Reject secrets among the values: they would be in folder names, tables, files and pages.
    Raises UsageError, which does not repeat the secret."""
    name = axis.key.rpartition(".")[2]
    is_header = axis.key.partition(".")[0] == "headers"
    if any(_holds_secret(name, value, is_header) for value in axis.values):
        raise UsageError(
            f"--over {axis.key}: the secret would appear in names, tables and files; write a"
            " target file for each value, with ${NAME} in place of the secret, and vary the file:"
            " --over target=a.yaml,b.yaml"
        )


def _holds_secret(name: str, value: object, is_header: bool) -> bool:
    text = label(value)
    if is_header:
        return "${" not in text
    listed = [str(element) for element in value] if isinstance(value, list) else text.split()
    return bool(hide_secrets([f"{name}={text}"])[1] or hide_secrets(listed)[1])


def _check_target(cell: Cell) -> None:
    """Check a cell's target and its settings, as far as possible without a server. Raises
    UsageError."""
    options = cell.options
    if cell.target == SIMULATED:
        from loadgen.lab.sim_options import read_settings, sim_options

        sim_options(read_settings(options.engine))
    if cell.target == SIMULATED or cell.target in OURS:
        if options.target_settings:
            key = options.target_settings[0].partition("=")[0]
            raise UsageError(
                f"--over {key}: belongs to a target file, and {cell.target} has none; its settings "
                "are engine.…"
            )
        return
    if options.engine:
        raise UsageError(
            "engine settings are for reference, sim and mock; set up your own server in its target "
            "file: launch.args, launch.env"
        )
    load_target(cell.target, options.environ, options.target_settings)


def _named(cell: Cell) -> Cell:
    """The cell with a name that is short enough for a folder."""
    if len(cell.name) <= _MOST_CHARACTERS:
        return cell
    return replace(cell, name=f"{cell.name[: _MOST_CHARACTERS - 9]}-{_digest(cell.name)}")


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, or all of it where two keys end alike."""
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)
    }


def _slug(text: str) -> str:
    """A value as part of a folder name; it depends on no other value."""
    safe = re.sub(r"[^A-Za-z0-9_.+-]+", "_", text)[:40]
    return safe if _SAFE.fullmatch(text) else f"{safe}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
