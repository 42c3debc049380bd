"""Decision tables: files with an action for every macro-state, per range of load, and the look-up.

A table is either a list of rules written by hand, of which the first that applies decides, or
solved: a list of 1 080 actions with the visit counts it was estimated from. It is valid for the
cost model and the loads it names; without a name, for all.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass
from hashlib import blake2b
from importlib import resources
from itertools import product
from math import exp
from pathlib import Path
from typing import Generic, Literal, Protocol, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from loadgen.errors import UsageError, nearest
from loadgen.registry import Block
from loadgen.system.whole_file import read_result
from reference_engine.smdp.states import FEATURES, N_STATES, Action, MacroState
from reference_engine.state.cost_model import CostModel

_ACTIONS = tuple(Action)
_HYSTERESIS = 0.1

FALLBACK = Action.prefill_fcfs
"""The action where no table is valid."""
UNVISITED = "unvisited"
"""The reason for the fallback where the table never saw the state; the step's action ends with
it."""


class Knobs(Block):
    """Token counts behind the states and actions. Prompts from `long_tokens` on are long;
    `*_budget` are the prompt tokens of a step; slack is tight below the share `tight_share` of the
    TTFT SLO."""

    long_tokens: int = Field(default=2048, ge=1)
    short_budget: int = Field(default=512, ge=1)
    fcfs_budget: int = Field(default=512, ge=1)
    big_budget: int = Field(default=2048, ge=1)
    tight_share: float = Field(default=0.5, ge=0, le=1)


class Rule(Block):
    """The action `do` for states in which every feature in `when` has a listed level. Without
    `when` the rule always applies."""

    name: str = ""
    when: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    do: Action

    @model_validator(mode="after")
    def _check_levels(self) -> Self:
        for feature, levels in self.when.items():
            if feature not in FEATURES:
                raise ValueError(f"unknown feature '{feature}'; {nearest(feature, list(FEATURES))}")
            for level in levels:
                if level not in FEATURES[feature]:
                    known = ", ".join(FEATURES[feature])
                    raise ValueError(f"feature '{feature}' has no level '{level}' (known: {known})")
        return self

    def applies(self, words: dict[str, str]) -> bool:
        return all(words[feature] in levels for feature, levels in self.when.items())


class Sheet(Block):
    """The actions for a range of arrivals per second (None: any), as rules or state by state.

    `visits` counts how often the estimation saw each state (0: the action is a guess). `q_gap` is
    the advantage of the action over the second best, in the solver's cost.
    """

    load_per_s: tuple[float, float] | None = None
    rules: tuple[Rule, ...] = ()
    actions: tuple[int, ...] = ()
    visits: tuple[int, ...] = ()
    q_gap: tuple[float, ...] = ()

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if bool(self.rules) == bool(self.actions):
            raise ValueError("give either rules or actions")
        if self.rules and self.rules[-1].when:
            raise ValueError("the last rule must have no `when`, so that every state has an action")
        for name in ("actions", "visits", "q_gap"):
            n = len(getattr(self, name))
            if n not in (0, N_STATES):
                raise ValueError(f"{name} has {n} entries, there are {N_STATES} states")
        if any(not 0 <= number < len(_ACTIONS) for number in self.actions):
            raise ValueError(f"actions are numbers from 0 to {len(_ACTIONS) - 1}")
        if self.load_per_s is not None and not 0 <= self.load_per_s[0] < self.load_per_s[1]:
            raise ValueError(f"load_per_s must be a range, not {list(self.load_per_s)}")
        return self


class TableFile(Block):
    """A file of tables. It spells out `states` and `actions`, so that a file made for other
    macro-states is rejected and not misread. `cost_model` is the digest of the cost model that the
    tables were solved with."""

    schema_: Literal[1] = Field(alias="schema")
    name: str
    about: str = ""
    cost_model: str | None = None
    states: dict[str, tuple[str, ...]]
    actions: tuple[str, ...]
    knobs: Knobs = Knobs()
    tables: tuple[Sheet, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_version(self) -> Self:
        if list(self.states.items()) != list(FEATURES.items()):
            raise ValueError(f"states are not those of this version: {dict(FEATURES)}")
        if self.actions != _ACTIONS:
            raise ValueError(f"actions are not those of this version: {list(_ACTIONS)}")
        return self


@dataclass(frozen=True, slots=True)
class DecisionTable:
    """A sheet in the form for look-ups, with one entry per state. `is_known` is False for states
    that the estimation never saw."""

    load_per_s: tuple[float, float] | None
    actions: Sequence[Action]
    is_known: Sequence[bool]
    q_gap: Sequence[float | None]

    def covers(self, rate_per_s: float, slack: float = 0.0) -> bool:
        """Whether the table is for this load. `slack` widens its range by a share on both sides."""
        return self.load_per_s is None or is_within(self.load_per_s, rate_per_s, slack)


def is_within(load_per_s: tuple[float, float], rate_per_s: float, slack: float) -> bool:
    """Whether a rate is in a range that is widened by the share `slack` on both sides."""
    low, high = load_per_s
    return low * (1 - slack) <= rate_per_s < high * (1 + slack)


def table_of(sheet: Sheet) -> DecisionTable:
    """The table of a sheet: rules are applied to every state, numbers become actions."""
    if sheet.actions:
        actions = [_ACTIONS[number] for number in sheet.actions]
    else:
        states = product(*FEATURES.values())  # in the order of `MacroState.number`
        words_of = [dict(zip(FEATURES, levels, strict=True)) for levels in states]
        actions = [next(r.do for r in sheet.rules if r.applies(words)) for words in words_of]
    is_known = [count > 0 for count in sheet.visits] or [True] * N_STATES
    return DecisionTable(sheet.load_per_s, actions, is_known, sheet.q_gap or [None] * N_STATES)


class ForLoad(Protocol):
    """A table for a range of load."""

    def covers(self, rate_per_s: float, slack: float = 0.0) -> bool: ...


Table = TypeVar("Table", bound=ForLoad)
File = TypeVar("File", bound=Block)


def pick(tables: Sequence[ForLoad], rate_per_s: float, current: int | None) -> int | None:
    """The index of the table for a load: the current one until the load is 10 % outside its range,
    else the first that covers the load; None where none does."""
    if current is not None and tables[current].covers(rate_per_s, _HYSTERESIS):
        return current
    return next((i for i, table in enumerate(tables) if table.covers(rate_per_s)), None)


def load_table(name: str) -> TableFile:
    """A shipped table by name, or a table file by path.

    Raises UsageError that names the file and the key.
    """
    shipped = resources.files("reference_engine.smdp") / "tables"
    names = sorted(entry.name.removesuffix(".json") for entry in shipped.iterdir())
    if name in names:
        text = (shipped / f"{name}.json").read_text(encoding="utf-8")
        return _parsed(name, text, TableFile)
    return _parsed(name, _text_of(name, f"{nearest(name, names)}, or a file"), TableFile)


def load_file(path: str, kind: type[File]) -> File:
    """A table file of any kind. Raises UsageError that names the file and the key."""
    return _parsed(path, _text_of(path, "name a file that slobench solve wrote"), kind)


def _text_of(path: str, hint: str) -> str:
    try:
        return read_result(Path(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise UsageError(f"no decision table '{path}': {reason}; {hint}") from error


def _parsed(name: str, text: str, kind: type[File]) -> File:
    """A table file from its text. Raises UsageError that names the file and the key."""
    try:
        return kind.model_validate(json.loads(text))
    except json.JSONDecodeError as error:
        raise UsageError(f"{name}: not JSON: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{name}: {key}: {first['msg']}") from error


def digest(cost: CostModel) -> str:
    """A digest of a cost model's kind and coefficients, equal for equal models."""
    fields = asdict(cost) if is_dataclass(cost) else None
    text = json.dumps([type(cost).__name__, fields], sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=8).hexdigest()


class ArrivalRate:
    """Arrivals per second. An arrival of t seconds ago has the weight e^(-t/`window_s`)."""

    def __init__(self, window_s: float) -> None:
        self._window_s, self._rate, self._at_s = window_s, 0.0, 0.0

    def arrive(self, now_s: float) -> None:
        self._rate, self._at_s = self.per_s(now_s) + 1 / self._window_s, now_s

    def per_s(self, now_s: float) -> float:
        return self._rate * exp((self._at_s - now_s) / self._window_s)


class Choice(Generic[Table]):
    """The choice of a file's table for the present load. `fallbacks` counts the decisions that no
    table made, by reason; `out_of_load` and `other_cost_model` are counted here."""

    def __init__(self, tables: Sequence[Table], cost_model: str | None, window_s: float) -> None:
        self.fallbacks, self.arrival_rate = Counter[str](), ArrivalRate(window_s)
        self._tables, self._cost_model = tables, cost_model
        self._fits_cost: bool | None = None  # None until the first decision names the cost model
        self._current: int | None = None

    def at(self, cost: CostModel, now_s: float) -> tuple[Table | None, str]:
        """The table, or None and the reason."""
        if self._fits_cost is None:
            self._fits_cost = self._cost_model in (None, digest(cost))
        if not self._fits_cost:
            return None, self.note("other_cost_model")
        self._current = pick(self._tables, self.arrival_rate.per_s(now_s), self._current)
        table = self.current
        return table, "" if table is not None else self.note("out_of_load")

    @property
    def current(self) -> Table | None:
        """The table of the last decision; None where none covered the load."""
        return None if self._current is None else self._tables[self._current]

    def note(self, reason: str) -> str:
        """Counts a fallback."""
        self.fallbacks[reason] += 1
        return reason


class Lookup:
    """Look-up of actions in a file of tables, in the table for the present load. `fallbacks` counts
    the decisions that no table made, by reason: `unvisited`, `out_of_load`, `other_cost_model`."""

    def __init__(self, file: TableFile, window_s: float) -> None:
        self.file = file
        tables = [table_of(sheet) for sheet in file.tables]
        self._choice = Choice(tables, file.cost_model, window_s)
        self.fallbacks, self.arrival_rate = self._choice.fallbacks, self._choice.arrival_rate

    def decide(self, state: MacroState, cost: CostModel, now_s: float) -> tuple[Action, str]:
        """The action, and the reason if it is the fallback ("" if it is from a table)."""
        table, reason = self._choice.at(cost, now_s)
        if table is None:
            return FALLBACK, reason
        if not table.is_known[state.number]:
            return FALLBACK, self._choice.note(UNVISITED)
        return table.actions[state.number], ""

    @property
    def table(self) -> DecisionTable | None:
        """The table of the last decision; None where none covered the load."""
        return self._choice.current
