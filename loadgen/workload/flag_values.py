"""Values of flags, as the command line and the Python API take them, for a scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.errors import UsageError, nearest
from loadgen.units import is_bare_number
from loadgen.workload.traffic_flags import FLAGS

if TYPE_CHECKING:
    from loadgen.workload.scenario import Scenario

_ALL_AT_ONCE = (
    "--rate inf: all requests at once measure only their own queue; use --concurrency N (N requests"
    " in flight, the next starts when one ends), or --set 'arrivals={kind: burst, requests: N}'"
)
KEYWORDS = (*FLAGS, "slo", "goodput", "seed", "settings")
"""Flags on a scenario as keywords of the Python API; `settings` is `--set`."""


def scenario_of(scenario: Scenario | Path | str, given: Mapping[str, Any]) -> Scenario:
    """A scenario, or that of a file or of a shipped name, with the values of `KEYWORDS` on top.
    Raises UsageError."""
    from loadgen.workload.scenario import Scenario, load_scenario, varied

    values = {name: value for name, value in given.items() if value is not None}
    settings = values.pop("settings", ())
    slos = slo_flags(_texts(values.pop("slo", None)), _texts(values.pop("goodput", None)))
    values = with_units(values if slos is None else {**values, "slo": slos})
    if not isinstance(scenario, Scenario):
        return load_scenario(scenario, settings, flags=values)
    if not values and not settings:
        return scenario
    if not isinstance(settings, Mapping):
        settings = dict(setting.split("=", 1) for setting in settings)
    return varied(scenario, settings, flags=values)


def _texts(value: str | Sequence[str] | None) -> Sequence[str] | None:
    return [value] if isinstance(value, str) else value


def with_units(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of traffic flags, bare numbers with the unit of their flag. Raises UsageError for
    an infinite rate."""
    found = dict(values)
    for name, flag in FLAGS.items():
        if flag.unit and name in found:
            found[name] = with_unit(str(found[name]), flag.unit)
    if found.get("rate") in ("inf", "inf/s"):
        raise UsageError(_ALL_AT_ONCE)
    return found


def with_unit(text: str, unit: str) -> str:
    """A flag's value with its unit: `8` as `8/s`. Files need the unit; on a command line the flag
    leaves no doubt."""
    return f"{text.strip()}{unit}" if is_bare_number(text) else text


def slo_flags(slo: Sequence[str] | None, goodput: Sequence[str] | None) -> list[str] | None:
    """The SLOs of `--slo` and `--goodput`; None where neither is given. `--slo` also takes the name
    of a preset, and `<` for `<=`."""
    from loadgen.measure.slo import from_goodput, parse_slo, with_allowed_operator
    from loadgen.workload.presets import PRESETS, SloPreset, expanded

    if not slo and not goodput:
        return None
    entries: list[str | SloPreset] = []
    for text in slo or ():
        name = text.strip().removeprefix("preset:")
        if name in PRESETS:
            entries.append(SloPreset(preset=name))
            continue
        try:
            entries.append(parse_slo(with_allowed_operator(text)).text)
        except ValueError as error:
            raise UsageError(f"--slo: {error}{_nearest_preset(text)}") from None
    try:
        return [*expanded(entries), *from_goodput(goodput or ())]
    except ValueError as error:
        raise UsageError(f"--goodput {error}") from None


def _nearest_preset(text: str) -> str:
    """A hint for a text without an operator, which may be meant as a preset."""
    from loadgen.workload.presets import PRESETS

    return "" if set(text) & set("<>=≤≥") else f", or a preset: {nearest(text.strip(), PRESETS)}"
