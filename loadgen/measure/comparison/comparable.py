"""What two sides of a comparison must share, and what may differ between them: the factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.errors import UsageError

MUST_AGREE = ("scenario", "clock", "target.api", "target.model", "target.labels.gpu",
              "target.labels.gpus")  # fmt: skip
"""Where these differ, a difference in latency says nothing about the version or the flags."""

_OF_THE_TARGET = ("kind", "url", "policy", "labels", "launch", "extra_body", "connections")
_ASIDE = ("name", "seed", "slo", "instrument", "schema")
"""Scenario keys that do not change what is sent (a seed changes which draw of it)."""


@dataclass(frozen=True, slots=True)
class ConfigDifference:
    """One configuration key and its values on both sides (None: not there)."""

    key: str
    a: Any
    b: Any


def refusal(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], vary: Sequence[str] = ()
) -> list[str]:
    """Why manifests are not comparable, one line per key; empty where they are.

    Every run must agree with the first in what `MUST_AGREE` names, but for the keys `vary` allows,
    and each side must be of one configuration.
    """
    known = {*MUST_AGREE, *(key for m in (*a, *b) for key in fixed(m))}
    for key in vary:
        if not any(_is_under(name, key) for name in known):
            raise UsageError(f"--vary {key}: no such key among what must agree: "
                             f"{', '.join(MUST_AGREE)}")  # fmt: skip
    lines = [
        f"{found.key}: {_say(found.a)} against {_say(found.b)}"
        for found in _first_differences([*a, *b], fixed)
        if not any(_is_under(found.key, key) for key in vary)
    ]
    for side, manifests in (("A", a), ("B", b)):
        lines += [
            f"within {side}, {found.key}: {_say(found.a)} and {_say(found.b)}"
            for found in _first_differences(manifests, factor)
            if not found.key.startswith(("host.", "target.url"))
        ]
    return lines


def changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[ConfigDifference]:
    """Configuration keys in which B differs from A: what may have caused a difference."""
    return [*_differences(fixed(a), fixed(b)), *_differences(factor(a), factor(b))]


def slos_of(manifest: Mapping[str, Any]) -> tuple[Any, ...]:
    """Every SLO a run was made with, those of its classes included, to be compared by equality."""
    classes = manifest.get("classes") or {}
    own = {name: tuple(stated.get("slo") or ()) for name, stated in classes.items()}
    return tuple(manifest.get("slo") or ()), tuple(sorted(own.items()))


def fixed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    resolved = (manifest.get("scenario") or {}).get("resolved") or {}
    sent = {key: value for key, value in resolved.items() if key not in _ASIDE}
    classes = sent.get("classes") or {}
    sent["classes"] = {name: {k: v for k, v in stated.items() if k != "slo"}
                       for name, stated in classes.items()}  # fmt: skip
    target = manifest.get("target") or {}
    labels = target.get("labels") or {}
    is_virtual = target.get("kind") == "sim"
    return {
        **_flat("scenario", sent),
        "clock": "virtual" if is_virtual else "real",
        "target.api": target.get("api"),
        "target.model": target.get("model"),
        "target.labels.gpu": labels.get("gpu"),
        "target.labels.gpus": labels.get("gpus"),
    }


def factor(manifest: Mapping[str, Any]) -> dict[str, Any]:
    target = manifest.get("target") or {}
    found = _flat("target", {key: target.get(key) for key in _OF_THE_TARGET})
    if target.get("kind") in ("reference", "mock", "launched"):
        found.pop("target.url", None)  # a port of the moment
    host = manifest.get("host") or {}
    return {
        **{key: value for key, value in found.items()
           if key not in MUST_AGREE and not key.startswith("target.labels.gpu")},
        "git": manifest.get("git"),
        "slobench": manifest.get("slobench"),
        "host.hostname": host.get("hostname"),
        "host.cpus": host.get("cpus"),
    }  # fmt: skip


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {k: v for name, inner in value.items()
                for k, v in _flat(f"{prefix}.{name}", inner).items()}  # fmt: skip
    return {prefix: value}


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[ConfigDifference]:
    keys = [*a, *(key for key in b if key not in a)]
    return [ConfigDifference(k, a.get(k), b.get(k)) for k in keys if a.get(k) != b.get(k)]


def _first_differences(manifests: Sequence[Mapping[str, Any]], keys: Any) -> list[ConfigDifference]:
    """Against the first, each key once."""
    found: dict[str, ConfigDifference] = {}
    for other in manifests[1:]:
        for difference in _differences(keys(manifests[0]), keys(other)):
            found.setdefault(difference.key, difference)
    return list(found.values())


def _is_under(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(prefix + ".") or key == f"target.{prefix}" or (
        key == f"target.labels.{prefix}")  # fmt: skip


def _say(value: Any) -> str:
    return "nothing" if value is None else str(value)
