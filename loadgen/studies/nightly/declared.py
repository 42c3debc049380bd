"""Settings of a target that are known before it answers: the keys of the baseline."""

from __future__ import annotations

from collections.abc import Mapping

from loadgen.errors import UsageError
from loadgen.manifest.json_section import JsonSection
from loadgen.manifest.sections import HostSection, LabelsSection, LaunchSection
from loadgen.studies.nightly.spec import OURS
from targets.endpoint import Endpoint, load_target

FAULTS = ("step_delay",)
"""Engine settings that inject a fault: they are under test, never part of a key."""


class DeclaredMachine(JsonSection, frozen=True):
    """The host of a server that slobench starts."""

    cpu_model: str
    cpus: int | None


class DeclaredLaunch(LaunchSection, frozen=True, kw_only=True):
    """The command that starts a server, with the Python of its target file."""

    python: str


class DeclaredTarget(JsonSection, frozen=True, kw_only=True, omit_defaults=True):
    """The settings that two nights must share: `settings` of a server that slobench starts, the
    declarations of the target file for any other; `host` if the server runs on this machine."""

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
    """The settings of a target that two nights must share, in the form of a manifest, with the host
    of a server that slobench starts. Raises UsageError that begins with `where`."""
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
    """The settings of a control that two nights must share: all of them, because a control is not
    under test. Raises UsageError that begins with `where`."""
    if spec in OURS:
        return _of_ours(spec, settings, machine)
    endpoint = _endpoint(spec, environ, where)
    section, launch = endpoint.to_manifest(), endpoint.launch
    own_launch = None
    if section.launch is not None and launch is not None:
        own = section.launch
        own_launch = DeclaredLaunch(
            preset=own.preset,
            command=own.command,
            model=own.model,
            env=own.env,
            python=launch.python,
        )
    return DeclaredTarget(
        kind="url" if launch is None else "launched",
        api=endpoint.api,
        model=endpoint.model,
        labels=section.labels,
        url=endpoint.shown_url if launch is None else None,
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
