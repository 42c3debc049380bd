"""The result of a night, as it is stored, printed and returned."""

from __future__ import annotations

from typing import Any

from loadgen.manifest.json_section import JsonSection
from loadgen.studies.nightly.values import TrendPoint
from loadgen.studies.nightly.verdict import CellVerdict, NightWord

SCHEMA = 1


class NightRun(JsonSection, frozen=True, kw_only=True):
    """A run of a cell and of its control, in directories relative to that of the night. `reasons`
    state why it was left out; empty if it was not."""

    name: str
    directory: str
    control_directory: str | None
    reasons: tuple[str, ...]


class CellResult(CellVerdict, frozen=True, kw_only=True):
    """A cell of a night: its verdict, the settings that its nights share (`agrees`, and their
    digest `key`), its runs, and by measure text its trend over the nights."""

    factors: dict[str, str]
    key: str
    agrees: dict[str, Any]
    control: dict[str, Any] | None
    runs: tuple[NightRun, ...]
    trends: dict[str, list[TrendPoint]]


class NightResult(JsonSection, frozen=True, kw_only=True):
    """The content of nightly.json."""

    schema: int = SCHEMA
    kind: str = "nightly"
    night: str
    started_utc: str
    verdict: NightWord
    exit_code: int
    fail_on: str
    confidence: float
    window: int
    repeats: int
    file: str
    baseline: str
    directory: str
    link: str
    command: list[str]
    cells: tuple[CellResult, ...]
