"""Completion of values in a shell: scenarios, SLO presets, targets, families of kinds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_TARGETS = ("reference", "sim", "mock", "http://localhost:8000")


def scenarios(incomplete: str) -> list[str]:
    """Shipped scenarios, and YAML files below the words typed so far."""
    from loadgen.workload.scenario import shipped_scenarios

    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    files = [str(path) for path in sorted(folder.glob("*.yaml"))] if folder.is_dir() else []
    return _beginning(incomplete, [*shipped_scenarios(), *files])


def slos(incomplete: str) -> list[str]:
    from loadgen.workload.presets import PRESETS

    return _beginning(incomplete, [*PRESETS, "p99(ttft)<=", "p99(tpot)<=", "ttft<=", "tpot<="])


def targets(incomplete: str) -> list[str]:
    files = sorted(str(path) for path in Path().glob("*.yaml"))
    return _beginning(incomplete, [*_TARGETS, *files])


def families(incomplete: str) -> list[str]:
    from loadgen.cli.kinds import FAMILIES

    return _beginning(incomplete, FAMILIES)


def settings(incomplete: str) -> list[str]:
    """Settings of `--set` that choose an arrival kind, and the keys of a scenario."""
    from loadgen.workload.arrivals import ARRIVALS
    from loadgen.workload.scenario import Scenario

    kinds = [f"arrivals.kind={kind}" for kind in ARRIVALS.names()]
    return _beginning(incomplete, [*kinds, *(f"{key}." for key in Scenario.model_fields)])


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
