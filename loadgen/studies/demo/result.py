"""The result of a demonstration, as it is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loadgen.manifest.json_section import JsonSection, NumberOrNull
from loadgen.manifest.sections import HostSection
from loadgen.studies.demo.figures import Figures

SCHEMA = 1
Phase = Literal["steady", "stalls"]
PHASES: tuple[Phase, ...] = ("steady", "stalls")


@dataclass(frozen=True, slots=True)
class Load:
    """The load that every tool gets, Poisson arrivals, and the server's script: TTFT, ITL, and in
    the phase `stalls` one step in `stall_every` that is `stall_s` longer."""

    rate_per_s: float
    seconds: float
    rounds: int
    input_tokens: int
    output_tokens: int
    ttft_s: float
    itl_s: float
    stall_every: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class Observation:
    """A run of a tool. `n_others` further requests of it reached the server: tests of the server,
    and requests that did not succeed. `cpu_s` and `peak_mb` are of the whole command.
    `server_late_p99_s` is the lateness of the server itself. `invalid`: the failed validity checks
    of a run of slobench."""

    phase: Phase
    round: int
    truth: Figures
    reported: Figures
    n_others: int
    held_per_s: NumberOrNull
    cpu_s: float
    cpu_us_per_token: float
    peak_mb: float
    server_late_p99_s: NumberOrNull
    invalid: tuple[str, ...]


State = Literal["measured", "failed", "not selected", "not installed"]


class Tool(JsonSection, frozen=True, kw_only=True):
    """A load generator: its settings (`command`, and the page that describes them), and its runs.
    `reason` is why it failed, or how it is installed."""

    name: str
    version: str
    command: str
    settings: str
    state: State
    reason: str
    observations: tuple[Observation, ...]

    def of(self, phase: Phase) -> list[Observation]:
        """The runs of a phase."""
        return [one for one in self.observations if one.phase == phase]


class Demo(JsonSection, frozen=True, kw_only=True):
    """Reported and true latencies of several tools; the content of demo.json. `exit_code` is 3
    where slobench has no valid result, else 0."""

    schema: int = SCHEMA
    kind: str = "demo"
    slobench: str
    command: tuple[str, ...]
    host: HostSection
    load: Load
    limit_s: float
    tools: tuple[Tool, ...]
    exit_code: int
