"""Describes every registered kind, for `slobench list` and the JSON schema."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from rich.console import Group
from rich.table import Table

from loadgen.manifest.json_section import JsonObject
from loadgen.registry import Plugin, Registry

FAMILIES: Mapping[str, str] = {
    "arrivals": "loadgen.workload.arrivals:ARRIVALS",
    "lengths": "loadgen.workload.lengths:LENGTHS",
    "durations": "loadgen.workload.durations:DURATIONS",
    "popularities": "loadgen.workload.requests:POPULARITIES",
    "prompts": "loadgen.workload.texts:PROMPTS",
    "traces": "loadgen.workload.traces.trace:TRACES",
    "presets": "",
    "apis": "targets.base:TARGETS",
    "modes": "reference_engine.policies.base:POLICIES",
    "executors": "reference_engine.executors.base:EXECUTORS",
    "scenarios": "",
}
"""Family → `module:REGISTRY`; scenarios are files and presets a table."""


def describe(family: str) -> list[JsonObject]:
    """An entry per kind, with the keys `kind`, `what` (the first sentence of its docstring) and
    `parameters` ({name: {type, default}})."""
    if family == "scenarios":
        return _scenarios()
    if family == "presets":
        return _presets()
    registry = registry_of(family)
    return [_kind(registry, kind) for kind in registry.names()]


def registry_of(family: str) -> Registry[Any]:
    """The registry of a family that is neither `scenarios` nor `presets`."""
    module, _, name = FAMILIES[family].partition(":")
    registry: Registry[Any] = getattr(importlib.import_module(module), name)
    return registry


def tables(entries: Mapping[str, Sequence[Mapping[str, Any]]]) -> Group:
    """The entries of `describe` as tables for the terminal."""
    return Group(*(_table(family, kinds) for family, kinds in entries.items()))


def names_of_families(entries: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """The names of the kinds, a row per family."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("family", no_wrap=True, style="bold")
    table.add_column("kinds")
    for family, kinds in entries.items():
        table.add_row(family, ", ".join(kind["kind"] for kind in kinds))
    return table


def _kind(registry: Registry[Any], kind: str) -> JsonObject:
    try:
        cls: type[Plugin] = registry.get(kind)
    except ModuleNotFoundError as error:  # an optional package, e.g. torch, is not installed
        return _bare(kind, f"not available: needs {error.name}")
    parameters = {
        field.alias or name: {
            "type": _type_name(field.annotation),
            "default": "required"
            if field.is_required()
            else _plain(field.get_default(call_default_factory=True)),
        }
        for name, field in cls.model_fields.items()
    }
    what = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    if cls.kind != kind:
        return _bare(kind, f"Another name of {cls.kind}.")
    return {"kind": kind, "what": what, "parameters": parameters}


def _scenarios() -> list[JsonObject]:
    from loadgen.workload.scenario import read_source, shipped_scenarios

    first_lines = {name: read_source(name)[1].splitlines()[0] for name in shipped_scenarios()}
    return [_bare(name, line.removeprefix("# ")) for name, line in first_lines.items()]


def _presets() -> list[JsonObject]:
    from loadgen.workload.presets import CATALOGUE

    return [
        _bare(name, f"{', '.join(preset.slos)}. {preset.why} ({preset.source})")
        for name, preset in CATALOGUE.items()
    ]


def _bare(kind: str, what: str) -> JsonObject:
    return {"kind": kind, "what": what, "parameters": {}}


def _plain(default: Any) -> Any:
    """A default as JSON: a kind by its name, a block as a mapping."""
    if isinstance(default, Plugin):
        return default.kind
    return default.model_dump(mode="json") if isinstance(default, BaseModel) else default


def _type_name(annotation: Any) -> str:
    return getattr(annotation, "__name__", str(annotation).replace("typing.", ""))


def _table(family: str, kinds: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=family, title_justify="left", title_style="bold", box=None, pad_edge=False)
    has_parameters = any(kind["parameters"] for kind in kinds)
    table.add_column("kind", no_wrap=True)
    if has_parameters:
        table.add_column("parameters", ratio=1)
    table.add_column("description", ratio=2)
    for kind in kinds:
        words = [
            name if detail["default"] == "required" else f"{name}={detail['default']}"
            for name, detail in kind["parameters"].items()
        ]
        parameters = [", ".join(words)] if has_parameters else []
        table.add_row(kind["kind"], *parameters, kind["what"])
    return table
