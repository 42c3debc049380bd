"""What is declared or chosen of a target before it answers: the baseline's keys are made of it."""

from __future__ import annotations

from collections.abc import Mapping

from loadgen.errors import UsageError
from loadgen.manifest.json_section import JsonSection
from loadgen.manifest.manifest import HostSection, LabelsSection, LaunchSection
from loadgen.nightly.nightly_file import OURS
from targets.endpoint import Endpoint, load_target

FAULTS = ("step_delay",)
"""Engine settings that are a fault on purpose: under test, never part of what must agree."""


class DeclaredMachine(JsonSection, frozen=True):
    """The machine that a server of ours runs on."""

    cpu_model: str
    cpus: int | None


class DeclaredLaunch(LaunchSection, frozen=True, kw_only=True):
    """The command that starts a server, and the Python that a target file names for it."""

    python: str


class DeclaredTarget(JsonSection, frozen=True, kw_only=True, omit_defaults=True):
    """What two nights must agree in. A server of ours has `settings`, any other what its target
    file declares; `host` is there where the server runs on this machine."""

    kind: str
    api: str | None = None
    model: str | None = None
    labels: LabelsSection | None = None
    settings: dict[str, str] | None = None
    url: str | None = None
    launch: DeclaredLaunch | None = None
    host: DeclaredMachine | None = None


def without_faults(settings: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in settings.items() if key not in FAULTS}


def declared(
    spec: str,
    settings: Mapping[str, str],
    environ: Mapping[str, str],
    machine: HostSection,
    where: str,
) -> DeclaredTarget:
    """What of a target two nights must agree in, as a manifest says it, and the machine that a
    server of ours runs on. Raises UsageError, beginning with `where`."""
    if spec in OURS:
        return _of_ours(spec, without_faults(settings), machine)
    endpoint = _endpoint(spec, environ, where)
    labels = endpoint.labels
    is_launched = endpoint.launch is not None
    return DeclaredTarget(
        kind="launched" if is_launched else "url",
        api=endpoint.api,
        model=endpoint.model,
        labels=LabelsSection(gpu=labels.gpu, gpus=labels.gpus, flags=labels.flags),
        host=_here(machine) if is_launched else None,
    )


def pinned(
    spec: str,
    settings: Mapping[str, str],
    environ: Mapping[str, str],
    machine: HostSection,
    where: str,
) -> DeclaredTarget:
    """What of a control two nights must agree in: everything that is declared, for a control is not
    what a night tests. Raises UsageError, beginning with `where`."""
    if spec in OURS:
        return _of_ours(spec, settings, machine)
    endpoint = _endpoint(spec, environ, where)
    section, launch = endpoint.to_manifest(), endpoint.launch
    own_launch = None
    if section.launch is not None and launch is not None:
        own = section.launch
        own_launch = DeclaredLaunch(
            preset=own.preset, command=own.command, model=own.model, env=own.env,
            python=launch.python,
        )  # fmt: skip
    return DeclaredTarget(
        kind="url" if launch is None else "launched",
        api=endpoint.api,
        model=endpoint.model,
        labels=section.labels,
        url=endpoint.url if launch is None else None,
        launch=own_launch,
        host=None if launch is None else _here(machine),
    )


def _of_ours(spec: str, settings: Mapping[str, str], machine: HostSection) -> DeclaredTarget:
    host = None if spec == "sim" else _here(machine)
    return DeclaredTarget(kind=spec, settings=dict(settings), host=host)


def _endpoint(spec: str, environ: Mapping[str, str], where: str) -> Endpoint:
    try:
        return load_target(spec, environ)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _here(machine: HostSection) -> DeclaredMachine:
    return DeclaredMachine(machine.cpu_model, machine.cpus)
