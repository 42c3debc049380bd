"""The cells of a night, and what two nights of one cell must share to be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadgen.cells.cell import Cell
from loadgen.drive.instrument import host
from loadgen.errors import UsageError
from loadgen.manifest.manifest import LabelsSection
from loadgen.measure.comparison.comparable import Configuration, differences, must_agree
from loadgen.nightly.declared import DeclaredTarget, declared, pinned, without_faults
from loadgen.nightly.nightly_file import OURS, Control, NightlyFile, beside, read_scenarios
from loadgen.run.run_options import RunOptions
from loadgen.workload.scenario import Scenario
from targets.embed import parse_engine


@dataclass(frozen=True)
class NightCell:
    """A cell and its key: two nights are compared where every value of `agrees` is equal. What is
    not in it (version, commit, launch command) is what a night may have changed. `control` is
    measured beside it, if it has one."""

    cell: Cell
    agrees: Mapping[str, object]
    control: Cell | None = None

    @property
    def name(self) -> str:
        return self.cell.name

    @property
    def needs_pace(self) -> bool:
        """Whether its server computes on this machine, and no control tells how fast that is."""
        computes = self.agrees.get("kind") in ("reference", "launched")
        return computes and self.control is None

    @property
    def key(self) -> str:
        """Eight hexadecimal digits of what must agree."""
        text = json.dumps(self.agrees, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def night_cells(
    file: NightlyFile, path: Path, options: RunOptions, engine: str = ""
) -> list[NightCell]:
    """Targets × scenarios × modes, in the order of the file. `engine` are settings on top that are
    under test tonight: they are no part of the key, and no control has them.

    Raises UsageError naming the key of the file that cannot be meant.
    """
    folder, label = path.parent, str(path)
    scenarios = read_scenarios(file, folder, label)
    on_top = parse_engine(engine)
    if on_top and not any(spec in OURS for spec in file.targets.values()):
        raise UsageError("--engine sets up a server of ours, and the file names none")
    machine = host()
    cells = []
    for target, spec, mode, settings in _circumstances(file, label):
        chosen = beside(folder, spec)
        told = declared(chosen, settings, options.environ, machine, f"{label}: targets.{target}")
        control, stays_up = None, False
        if file.control is not None:
            of_control = _control_settings(file.control, spec, settings, parse_engine(file.engine))
            control = beside(folder, file.control.target)
            pin = pinned(control, of_control, options.environ, machine, f"{label}: control")
            stays_up = _is_up_beside(file.control, (spec, settings), of_control)
            agreed_control = pin.to_json() | ({"servers": "together"} if stays_up else {})
        run_options = replace(options, engine=_text({**settings, **on_top}) if mode else "")
        for name, scenario in scenarios.items():
            factors = {"target": target, "scenario": name, **({"mode": mode} if mode else {})}
            full = "_".join(factors.values())
            cell = Cell(full, scenario, chosen, run_options, factors)
            agrees = _agrees(scenario, told)
            if control is None:
                cells.append(NightCell(cell, agrees))
                continue
            as_ever = replace(options, engine=_text(of_control))
            other = Cell(
                f"{full}.control", scenario, control, as_ever, factors, "control", stays_up
            )
            cells.append(NightCell(cell, {**agrees, "control": agreed_control}, other))
    _refuse_shared_folders(cells, file, label)
    return cells


def _refuse_shared_folders(cells: Sequence[NightCell], file: NightlyFile, label: str) -> None:
    """Names are joined by `_` and `.control`, so that those of two circumstances can be one."""
    found: dict[str, str] = {}
    for one in cells:
        keys = [
            f"{factor}s.{name}"
            for factor, name in one.cell.factors.items()
            if factor != "mode" or name in file.modes
        ]
        said = " with ".join(keys)
        sides = {one.name: said}
        if one.control is not None:
            sides[one.control.name] = f"the control of {said}"
        for folder, said in sides.items():
            if folder in found:
                raise UsageError(
                    f"{label}: {found[folder]} and {said} would be kept in one folder, {folder}; "
                    "give one of them another name"
                )
            found[folder] = said


def _circumstances(file: NightlyFile, label: str) -> Iterator[tuple[str, str, str, dict[str, str]]]:
    """Target name and spec, name of the mode and settings ("" and none for somebody else's)."""
    shared = parse_engine(file.engine)
    for target, spec in file.targets.items():
        if spec == "mock":
            yield target, spec, "mock", shared
        elif spec not in ("reference", "sim"):
            yield target, spec, "", {}
        elif not file.modes:
            yield target, spec, str(shared.get("mode", "chunked")), shared
        else:
            for mode, text in file.modes.items():
                yield target, spec, mode, shared | _mode_settings(text, f"{label}: modes.{mode}")


def _mode_settings(text: str, where: str) -> dict[str, str]:
    """`chunked`, or with knobs as `slobench modes` takes them: `chunked:token_budget=512`."""
    from loadgen.lab.mode_spec import read_modes

    try:
        (mode,) = read_modes(text)
    except (UsageError, ValueError) as error:
        problem = str(error).removeprefix("--modes ").removeprefix("--modes: ")
        raise UsageError(f"{where}: {problem}") from None
    return {"mode": mode.kind, **mode.parameters}


def _control_settings(
    control: Control, spec: str, settings: Mapping[str, str], shared: Mapping[str, str]
) -> dict[str, str]:
    """Of a control beside a cell of `spec` with `settings`: the cell's, if it is of the same kind,
    the file's `shared` ones beside somebody else's server; without faults, its own on top."""
    if control.target not in OURS:
        return {}
    of_file = {} if spec in OURS else shared
    base = settings if spec == control.target else of_file
    return without_faults(base) | parse_engine(control.engine)


def _is_up_beside(
    control: Control, cell: tuple[str, Mapping[str, str]], of_control: Mapping[str, str]
) -> bool:
    """Whether the control's server stays up beside that of a cell of this spec and settings."""
    if control.servers is not None:
        return control.servers == "together"
    are_on_cpu = all(
        spec == "mock" or (spec == "reference" and settings.get("device", "cpu") in ("cpu", "toy"))
        for spec, settings in (cell, (control.target, of_control))
    )
    places = [[of.get("port", "0"), of.get("unix", "")] for of in (cell[1], of_control)]
    would_collide = any(a == b and a not in ("0", "") for a, b in zip(*places, strict=True))
    return are_on_cpu and not would_collide


def _agrees(scenario: Scenario, target: DeclaredTarget) -> Configuration:
    labels, declared = target.labels or LabelsSection(), target.to_json()
    return {
        **must_agree(scenario.resolved(), target.kind, target.api, target.model, labels),
        **{key: declared[key] for key in ("kind", "settings", "host") if key in declared},
        "target.labels.flags": labels.flags,
    }


def _text(settings: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in settings.items())


def differing(ours: Mapping[str, object], theirs: Mapping[str, object]) -> Sequence[str]:
    """`key: theirs → ours` for every value that is another one."""
    return [f"{one.key}: {one.a} → {one.b}" for one in differences(theirs, ours)]
