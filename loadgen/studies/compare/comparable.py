"""The configuration that two sides of a comparison must share, and the factor: what may differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.errors import UsageError
from loadgen.manifest.sections import LabelsSection, Manifest

MUST_AGREE = (
    "scenario",
    "clock",
    "target.api",
    "target.model",
    "target.labels.gpu",
    "target.labels.gpus",
)
"""Where these differ, a difference in latency cannot be attributed to the version or the flags."""

Configuration = dict[str, object]
"""Dotted key → its value in JSON."""

_OF_THE_TARGET = ("kind", "url", "policy", "labels", "launch", "extra_body", "connections",
                  "session_header", "trace_context")  # fmt: skip
_ASIDE = ("name", "seed", "slo", "instrument", "schema")
"""Scenario keys that do not change what is sent (a seed changes which draw of it)."""


@dataclass(frozen=True, slots=True)
class ConfigDifference:
    """A configuration key and its values on both sides (None: missing)."""

    key: str
    a: Any
    b: Any


def refusal(a: Sequence[Manifest], b: Sequence[Manifest], vary: Sequence[str] = ()) -> list[str]:
    """The reasons why manifests are not comparable, a line per key; empty where they are.

    Every run must agree with the first in the keys of `MUST_AGREE`, except those that `vary`
    allows, and the runs of a side must have the same configuration.
    """
    known = {*MUST_AGREE, *(key for m in (*a, *b) for key in fixed(m))}
    for key in vary:
        if not any(_is_under(name, key) for name in known):
            raise UsageError(
                f"--vary {key}: no such key; the keys that must agree are {', '.join(MUST_AGREE)}"
            )
    lines = [
        f"{difference.key}: A has {_shown(difference.a)}, B has {_shown(difference.b)}"
        for difference in _first_differences([*a, *b], fixed)
        if not any(_is_under(difference.key, key) for key in vary)
    ]
    for side, manifests in (("A", a), ("B", b)):
        lines += [
            f"within {side}, {difference.key}: {_shown(difference.a)} and {_shown(difference.b)}"
            for difference in _first_differences(manifests, factor)
            if not difference.key.startswith(("host.", "target.url"))
        ]
    return lines


def changes(a: Manifest, b: Manifest) -> list[ConfigDifference]:
    """Configuration keys in which B differs from A: the possible causes of a difference."""
    return [*differences(fixed(a), fixed(b)), *differences(factor(a), factor(b))]


def slos_of(manifest: Manifest) -> tuple[object, ...]:
    """Every SLO of a run, those of its classes included, to be compared by equality."""
    own = {name: traffic.slo for name, traffic in manifest.classes.items()}
    return manifest.slo, tuple(sorted(own.items()))


def fixed(manifest: Manifest) -> Configuration:
    """The keys of a run that both sides must share."""
    target = manifest.target
    agreed = must_agree(
        manifest.scenario.resolved, target.kind, target.api, target.model, target.labels
    )
    sharing = manifest.prompt_sharing  # older replays of a trace kept less of it
    return {**agreed, "prompt_sharing": sharing} if sharing else agreed


def must_agree(
    scenario: Mapping[str, object],
    kind: str,
    api: str | None,
    model: str | None,
    labels: LabelsSection,
) -> Configuration:
    """The traffic of a resolved scenario, without its SLOs, and the API, model and GPUs of a
    target."""
    sent = {key: value for key, value in scenario.items() if key not in _ASIDE}
    classes = sent.get("classes")
    if isinstance(classes, Mapping):
        sent["classes"] = {
            name: {key: value for key, value in traffic.items() if key != "slo"}
            for name, traffic in classes.items()
        }
    return {
        **_flat("scenario", sent),
        "clock": "virtual" if kind == "sim" else "real",
        "target.api": api,
        "target.model": model,
        "target.labels.gpu": labels.gpu,
        "target.labels.gpus": labels.gpus,
    }


def factor(manifest: Manifest) -> Configuration:
    """The keys of a run that may differ between the sides."""
    target = manifest.target.to_json()
    found = _flat("target", {key: target.get(key) for key in _OF_THE_TARGET})
    if manifest.target.kind in ("reference", "mock", "launched"):
        found.pop("target.url", None)  # a port of the moment
    return {
        **{
            key: value
            for key, value in found.items()
            if key not in MUST_AGREE and not key.startswith("target.labels.gpu")
        },
        "git": manifest.git,
        "slobench": manifest.slobench,
        "host.hostname": manifest.host.hostname,
        "host.cpus": manifest.host.cpus,
    }


def _flat(prefix: str, value: object) -> Configuration:
    if isinstance(value, Mapping):
        return {
            k: v
            for name, inner in value.items()
            for k, v in _flat(f"{prefix}.{name}", inner).items()
        }
    return {prefix: value}


def differences(a: Mapping[str, object], b: Mapping[str, object]) -> list[ConfigDifference]:
    """Keys of two configurations with different values, in the order of A."""
    keys = [*a, *(key for key in b if key not in a)]
    return [ConfigDifference(k, a.get(k), b.get(k)) for k in keys if a.get(k) != b.get(k)]


def _first_differences(
    manifests: Sequence[Manifest], keys: Callable[[Manifest], Configuration]
) -> list[ConfigDifference]:
    """The differences from the first manifest, each key once."""
    found: dict[str, ConfigDifference] = {}
    for other in manifests[1:]:
        for difference in differences(keys(manifests[0]), keys(other)):
            found.setdefault(difference.key, difference)
    return list(found.values())


def _is_under(key: str, prefix: str) -> bool:
    return (
        key == prefix
        or key.startswith(prefix + ".")
        or key == f"target.{prefix}"
        or key == f"target.labels.{prefix}"
    )


def _shown(value: object) -> str:
    return "nothing" if value is None else str(value)
