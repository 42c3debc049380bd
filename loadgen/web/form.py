"""What a run was asked to be, as the form and the command line give it: words, nothing secret."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from loadgen.cli.flags import ScenarioFlags, TrafficFlags
from loadgen.cli.parse import choose_scenario, read_choice, read_duration_s
from loadgen.errors import UsageError
from loadgen.web.run_protocol import Policy
from loadgen.workload.scenario import Scenario

POLICIES: tuple[Policy, ...] = ("continue", "abort")


class RunForm(msgspec.Struct, frozen=True):
    """Every field as a word or a number; empty means: as the scenario says. `slo` and `set` may
    hold several, with `;` between them."""

    scenario: str
    target: str
    rate: str = ""
    duration: str = ""
    warmup: str = ""
    seed: str = ""
    slo: str = ""
    settings: str = ""
    model: str = ""
    engine: str = ""
    out: str = ""
    force: bool = False
    max_skew: str = "50ms"
    on_worker_loss: str = "continue"
    plugins: str = ""
    given_target: str = ""  # on the command line: the server that the API key is for

    def chosen_scenario(self) -> Scenario:
        """Raises UsageError or ScenarioError."""
        flags = ScenarioFlags(
            scenario=self.scenario or None,
            slo=several(self.slo) or None,
            seed=_seed(self.seed),
            set_=several(self.settings),
            plugin=self.plugin_files(),
        )
        traffic = TrafficFlags(
            rate=self.rate or None, duration=self.duration or None, warmup=self.warmup or None
        )
        return choose_scenario(flags, traffic)

    def plugin_files(self) -> list[Path]:
        return [Path(word) for word in several(self.plugins)]

    def max_skew_s(self) -> float:
        return read_duration_s("--max-skew", self.max_skew)

    def policy(self) -> Policy:
        """What the loss of a worker means. Raises UsageError for an unknown word."""
        return read_choice("--on-worker-loss", self.on_worker_loss, POLICIES)


def several(text: str) -> list[str]:
    """The parts between semicolons."""
    return [part.strip() for part in text.split(";") if part.strip()]


def _seed(text: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal():
        raise UsageError(f"--seed {text}: expected a whole number")
    return int(text)


def read_form(values: Mapping[str, object]) -> RunForm:
    """Raises UsageError for values that are none."""
    try:
        return msgspec.convert(dict(values), RunForm)
    except msgspec.ValidationError as error:
        raise UsageError(f"what was asked cannot be read: {error}") from None
