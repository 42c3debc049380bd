"""Cells of a night, and the settings that two nights of a cell must share to be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadgen.drive.instrument import host
from loadgen.errors import UsageError
from loadgen.manifest.sections import LabelsSection
from loadgen.run.run_options import RunOptions
from loadgen.studies.cells.cell import Cell
from loadgen.studies.compare.comparable import Configuration, must_agree
from loadgen.studies.nightly.declared import DeclaredTarget, declared, pinned, without_faults
from loadgen.studies.nightly.spec import OURS, Control, NightlyFile, read_scenarios, resolved_path
from loadgen.workload.scenario import Scenario
from targets.embed import parse_engine


@dataclass(frozen=True)
class NightCell:
    """A cell with its key. Two nights are compared if all values of `agrees` are equal; other
    settings (version, commit, launch command) may change from night to night. `control`: the
    control measured with the cell, if any."""

    cell: Cell
    agrees: Mapping[str, object]
    control: Cell | None = None

    @property
    def name(self) -> str:
        return self.cell.name

    @property
    def needs_machine_speed(self) -> bool:
        """Whether its server computes on this machine without a control that measures its speed."""
        computes = self.agrees.get("kind") in ("reference", "launched")
        return computes and self.control is None

    @property
    def not_excluded(self) -> str:
        """The causes of a change that only a control excludes; none in virtual time."""
        if self.control is not None or self.agrees.get("clock") == "virtual":
            return ""
        return "a slower or faster machine, another host, a neighbour on it"

    @property
    def key(self) -> str:
        """Eight hexadecimal digits of the digest of `agrees`."""
        text = json.dumps(self.agrees, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def night_cells(
    file: NightlyFile, path: Path, options: RunOptions, engine: str = ""
) -> list[NightCell]:
    """Targets × scenarios × modes, in the order of the file. `engine` adds settings under test:
    they are not part of the key, and no control has them.

    Raises UsageError with the key of the file that is wrong.
    """
    folder, label = path.parent, str(path)
    scenarios = read_scenarios(file, folder, label)
    on_top = parse_engine(engine)
    if on_top and not any(spec in OURS for spec in file.targets.values()):
        raise UsageError(
            "--engine needs a server that slobench starts (reference, sim, mock); the file has none"
        )
    machine = host()
    cells = []
    for target, spec, mode, settings in _circumstances(file, label):
        chosen = resolved_path(folder, spec)
        declared_values = declared(
            chosen, settings, options.environ, machine, f"{label}: targets.{target}"
        )
        control, stays_up = None, False
        if file.control is not None:
            of_control = _control_settings(file.control, spec, settings, parse_engine(file.engine))
            control = resolved_path(folder, file.control.target)
            pin = pinned(control, of_control, options.environ, machine, f"{label}: control")
            stays_up = _stays_up(file.control, (spec, settings), of_control)
            agreed_control = pin.to_json() | ({"servers": "together"} if stays_up else {})
        run_options = replace(options, engine=_text({**settings, **on_top}) if mode else "")
        for name, scenario in scenarios.items():
            factors = {"target": target, "scenario": name, **({"mode": mode} if mode else {})}
            full = "_".join(factors.values())
            cell = Cell(full, scenario, chosen, run_options, factors)
            agrees = _agrees(scenario, declared_values)
            if control is None:
                cells.append(NightCell(cell, agrees))
                continue
            unchanged = replace(options, engine=_text(of_control))
            other = Cell(
                f"{full}.control", scenario, control, unchanged, factors, "control", stays_up
            )
            cells.append(NightCell(cell, {**agrees, "control": agreed_control}, other))
    _refuse_shared_folders(cells, file, label)
    return cells


def _refuse_shared_folders(cells: Sequence[NightCell], file: NightlyFile, label: str) -> None:
    """Raises UsageError if joining names by `_` and `.control` gives two cells one folder."""
    owners: dict[str, str] = {}
    for cell in cells:
        keys = [
            f"{factor}s.{name}"
            for factor, name in cell.cell.factors.items()
            if factor != "mode" or name in file.modes
        ]
        owner = " with ".join(keys)
        folders = {cell.name: owner}
        if cell.control is not None:
            folders[cell.control.name] = f"the control of {owner}"
        for folder, owner in folders.items():
            if folder in owners:
                raise UsageError(
                    f"{label}: {owners[folder]} and {owner} have the same folder, {folder}; "
                    "rename one of them"
                )
            owners[folder] = owner


def _circumstances(file: NightlyFile, label: str) -> Iterator[tuple[str, str, str, dict[str, str]]]:
    """Target name and spec, mode name and settings ("" and {} for servers that slobench does not
    configure)."""
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
    """`chunked`, or with parameters as in `slobench modes`: `chunked:token_budget=512`."""
    from loadgen.studies.modes.spec import read_modes

    try:
        (mode,) = read_modes(text)
    except (UsageError, ValueError) as error:
        problem = str(error).removeprefix("--modes ").removeprefix("--modes: ")
        raise UsageError(f"{where}: {problem}") from None
    return {"mode": mode.kind, **mode.parameters}


def _control_settings(
    control: Control, spec: str, settings: Mapping[str, str], shared: Mapping[str, str]
) -> dict[str, str]:
    """Engine settings of the control of a cell with `spec` and `settings`: those of the cell if the
    control is of the same kind, or the file's `shared` settings if the cell is not a server that
    slobench starts; without faults, and with the control's own settings on top."""
    if control.target not in OURS:
        return {}
    of_file = {} if spec in OURS else shared
    base = settings if spec == control.target else of_file
    return without_faults(base) | parse_engine(control.engine)


def _stays_up(
    control: Control, cell: tuple[str, Mapping[str, str]], of_control: Mapping[str, str]
) -> bool:
    """Whether the control's server stays up together with that of a cell (spec, settings)."""
    if control.servers is not None:
        return control.servers == "together"
    are_on_cpu = all(
        spec == "mock" or (spec == "reference" and settings.get("device", "cpu") in ("cpu", "toy"))
        for spec, settings in (cell, (control.target, of_control))
    )
    places = [[s.get("port", "0"), s.get("unix", "")] for s in (cell[1], of_control)]
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
