"""What is declared or chosen of a target before it answers: the baseline's keys are made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadgen.errors import UsageError
from loadgen.nightly.nightly_file import OURS
from targets.endpoint import Endpoint, load_target

FAULTS = ("step_delay",)
"""Engine settings that are a fault on purpose: under test, never part of what must agree."""


def without_faults(settings: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in settings.items() if key not in FAULTS}


def declared(
    spec: str,
    settings: Mapping[str, str],
    environ: Mapping[str, str],
    machine: Mapping[str, Any],
    where: str,
) -> dict[str, Any]:
    """What of a target two nights must agree in, as a manifest says it, and the machine that a
    server of ours runs on. Raises UsageError, beginning with `where`."""
    if spec in OURS:
        return _of_ours(spec, without_faults(settings), machine)
    endpoint = _endpoint(spec, environ, where)
    said = _of_another(endpoint, {"gpu", "gpus", "flags"})
    if endpoint.launch is None:
        return said
    return {**said, "kind": "launched", "host": _here(machine)}


def pinned(
    spec: str,
    settings: Mapping[str, str],
    environ: Mapping[str, str],
    machine: Mapping[str, Any],
    where: str,
) -> dict[str, Any]:
    """What of a control two nights must agree in: everything that is declared, for a control is not
    what a night tests. Raises UsageError, beginning with `where`."""
    if spec in OURS:
        return _of_ours(spec, settings, machine)
    endpoint = _endpoint(spec, environ, where)
    said = _of_another(endpoint, None)
    if endpoint.launch is None:
        return {**said, "url": endpoint.url}
    launch = {**endpoint.launch.to_manifest(), "python": endpoint.launch.python}
    return {**said, "kind": "launched", "launch": launch, "host": _here(machine)}


def _of_ours(spec: str, settings: Mapping[str, str], machine: Mapping[str, Any]) -> dict[str, Any]:
    said = {"kind": spec, "settings": dict(settings)}
    return said if spec == "sim" else {**said, "host": _here(machine)}


def _of_another(endpoint: Endpoint, labels: set[str] | None) -> dict[str, Any]:
    """What is declared of somebody else's server; None: with all its labels."""
    said = endpoint.labels.model_dump(include=labels, exclude_none=True)
    return {"kind": "url", "api": endpoint.api, "model": endpoint.model, "labels": said}


def _endpoint(spec: str, environ: Mapping[str, str], where: str) -> Endpoint:
    try:
        return load_target(spec, environ)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _here(machine: Mapping[str, Any]) -> dict[str, Any]:
    return {"cpu_model": machine["cpu_model"], "cpus": machine["cpus"]}
