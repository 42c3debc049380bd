"""The candidates of a search: modes with every combination of the knobs that apply to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.errors import UsageError, nearest
from loadgen.lab.sim_options import SimOptions, sim_options
from loadgen.studies.modes.spec import Mode, read_values
from loadgen.workload.scenario import Scenario
from reference_engine.policies.base import POLICIES, Policy

Knobs = Mapping[str, Sequence[str]]
"""Setting → the values to try, as they are written."""

_MOST = 1000


@dataclass(frozen=True)
class TuneSpec:
    """The settings of a search. `settings` apply to every candidate. The search has `n_seeds`
    seeds from the scenario's on, the confirmation as many after these, on `target`."""

    scenario: Scenario
    modes: Sequence[Mode]
    knobs: Knobs
    target: str = "sim"
    settings: dict[str, str] = field(default_factory=dict)
    n_seeds: int = 8
    confidence: float = 0.95
    n_workers: int = 1
    plugins: Sequence[Path] = ()
    command: Sequence[str] = ()
    cache_dir: Path | None = None

    @property
    def simulated_settings(self) -> dict[str, str]:
        """The settings of the search: the bundled engine is simulated as on a CPU."""
        hardware = {"hardware": "cpu"} if self.target == "reference" else {}
        return {**hardware, **self.settings}


def candidates(spec: TuneSpec) -> list[Mode]:
    """The modes with each combination of their knobs, each once, in the order of the values. A knob
    is a parameter of a mode, or a setting of the engine; a mode without a parameter is tried
    without it. Raises UsageError for a knob of no mode, and for values that do not fit."""
    of_engine = {*SimOptions.all_keys()} - _parameters(POLICIES)
    known = of_engine | _parameters(POLICIES.get(mode.kind) for mode in spec.modes)
    for key in spec.knobs:
        if key not in known:
            raise UsageError(f"--knob {key}: no setting of these modes; {nearest(key, known)}")
    found: dict[str, Mode] = {}
    for mode in spec.modes:
        own = POLICIES.get(mode.kind).model_fields
        keys = [key for key in spec.knobs if key in own or key in of_engine]
        for values in itertools.product(*(spec.knobs[key] for key in keys)):
            tried = Mode(mode.kind, {**mode.parameters, **dict(zip(keys, values, strict=True))})
            sim_options({**spec.simulated_settings, **tried.parameters, "mode": tried.kind})
            found.setdefault(tried.label, tried)
    if len(found) > _MOST:
        raise UsageError(f"--knob: {len(found)} combinations; at most {_MOST} are searched")
    return list(found.values())


def _parameters(kinds: Iterable[type[Policy]]) -> set[str]:
    return {key for kind in kinds for key in kind.model_fields}


def read_knobs(texts: Sequence[str]) -> Knobs:
    """`token_budget=256,512` of each text. Raises UsageError for another form and a repeated key
    or value."""
    knobs: dict[str, list[str]] = {}
    for text in texts:
        if (found := read_values(text)) is None:
            raise UsageError(
                f"--knob {text}: expected key=value,value, e.g. token_budget=256,512,1024"
            )
        name, values = found
        if name in knobs or len(set(values)) < len(values):
            raise UsageError(f"--knob {text}: a key or value appears twice")
        knobs[name] = values
    return knobs
