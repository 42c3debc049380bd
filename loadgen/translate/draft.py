"""A command line of another tool, taken apart, and the scenario it becomes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from loadgen.errors import UsageError
from loadgen.units import write_duration, write_rate

DEFAULT_MEASURE_S = 60.0


class Flags:
    """`--name value`, `--name=value` and bare `--name`; a flag given twice keeps all its values.

    Reading a flag takes it away: what is left at the end, nobody understood.
    """

    def __init__(self, words: Sequence[str], short: dict[str, str] | None = None) -> None:
        self._values: dict[str, list[str]] = {}
        name = ""
        for word in words:
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
                name = name.replace("_", "-")
                self._values.setdefault(name, []).extend([value] if equals else [])
            elif word in (short or {}):
                name = (short or {})[word]
                self._values.setdefault(name, [])
            elif name:
                self._values[name].append(word)
            else:
                raise UsageError(f"'{word}' belongs to no flag of the command line")

    def texts(self, *names: str) -> list[str] | None:
        """All values of the first of these names that was given, and takes it away; None where none
        was."""
        for name in names:
            if name in self._values:
                return self._values.pop(name)
        return None

    def text(self, *names: str) -> str | None:
        """The last value of a flag. Raises UsageError where it was given without one."""
        values = self.texts(*names)
        if values is None:
            return None
        if not values:
            raise UsageError(f"--{names[0]} has no value")
        return values[-1]

    def number(self, *names: str) -> float | None:
        """The last value as a number (`inf` is one). Raises UsageError where it is none."""
        text = self.text(*names)
        try:
            return None if text is None else float(text)
        except ValueError:
            raise UsageError(f"--{names[0]} {text}: expected a number") from None

    def count(self, *names: str) -> int | None:
        """The last value as a whole number."""
        value = self.number(*names)
        if value is not None and value != int(value):
            raise UsageError(f"--{names[0]} {value}: expected a whole number")
        return None if value is None else int(value)

    def has(self, *names: str) -> bool:
        """Whether a switch was given."""
        return self.texts(*names) is not None

    def drop(self, names: Iterable[str]) -> None:
        """Take flags away that have nothing to do with the traffic."""
        for name in names:
            self._values.pop(name, None)

    def left(self) -> list[str]:
        """What nobody read, as it was written."""
        return [" ".join([f"--{name}", *values]) for name, values in self._values.items()]


@dataclass
class Draft:
    """What a translation fills in: the scenario's blocks, the target, and what the user must know.

    `missing` names flags without an equivalent, each with the reason; `notes` says where the
    equivalent behaves otherwise; `verb` and `options` are those of the command that runs it.
    """

    tool: str
    arrivals: dict[str, Any] = field(default_factory=dict)
    requests: dict[str, Any] = field(default_factory=dict)
    session: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    slo: list[Any] = field(default_factory=list)
    seed: int | None = None
    measure_s: float | None = None
    url: str = "http://localhost:8000"
    model: str = ""
    api: str = "chat"
    verb: str = "run"
    options: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lacks(self, flag: str, why: str) -> None:
        """Record a flag that has no equivalent."""
        self.missing.append(f"{flag}: {why}")

    def set_closed_loop(self, users: int) -> None:
        """Always `users` requests in flight: each answer brings the next request."""
        self.arrivals = {"kind": "users", "users": users, "think": "0s"}

    def set_sweep(self, key: str, values: Sequence[str]) -> None:
        """One run for each value of a scenario key."""
        self.verb = "sweep"
        self.options += ["--over", f"{key}={','.join(values)}"]

    def set_duration(self, seconds: float | None, n_requests: float | None, rate: float) -> None:
        """The measured window: the seconds asked for, or those that n requests take at the rate."""
        if seconds is not None:
            self.measure_s = seconds
            if n_requests is not None:
                self.notes.append(
                    f"it stops after {n_requests:g} requests or {seconds:g} s, whichever comes"
                    " first; slobench measures for a time"
                )
        elif n_requests is not None and 0 < rate < float("inf"):
            self.measure_s = n_requests / rate
            self.notes.append(
                f"{n_requests:g} requests at {rate:g}/s take about {self.measure_s:.4g} s; slobench"
                " measures for that time, because a fixed number of requests would bias arrivals"
            )
        elif n_requests is not None:
            self.notes.append(
                f"it ends after {n_requests:g} requests; slobench measures for a time"
            )

    def lacks_secrets(self, flags: Flags) -> None:
        """Take flags that may hold a key away, and never repeat what they say."""
        for name in ("api-key", "api_key", "header", "headers", "H"):
            if flags.texts(name) is not None:
                self.lacks(f"--{name} …", "goes into a target file (api_key_env, headers)")

    def values(self) -> dict[str, Any]:
        """The mapping of the scenario file."""
        if self.measure_s is None:
            self.measure_s = DEFAULT_MEASURE_S
            self.notes.append(
                f"phases.measure is {DEFAULT_MEASURE_S:g}s: the command says no time, so choose one"
            )
        blocks: dict[str, Any] = {
            "name": f"from_{self.tool}",
            "seed": self.seed,
            "arrivals": self.arrivals,
            "requests": self.requests,
            "session": self.session,
            "prompts": self.prompts,
            "phases": {"measure": write_duration(float(f"{self.measure_s:.4g}"))},
            "limits": self.limits,
            "slo": self.slo,
        }
        return {key: value for key, value in blocks.items() if value not in (None, {}, [])}


def rate_text(rate_per_s: float) -> str:
    """A rate as scenarios write it. Raises UsageError unless it is positive."""
    if not 0 < rate_per_s < float("inf"):
        raise UsageError(f"a rate of {rate_per_s:g} per second cannot be scheduled")
    return write_rate(rate_per_s)


def around(mean: float, sd: float, low: float | None = None, high: float | None = None) -> Any:
    """A length: fixed, or normal between the ends (1, and six deviations above, where none is)."""
    if not sd:
        return round(mean)
    least = max(1, round(low)) if low is not None else 1
    most = round(high) if high is not None else ceil(mean + 6 * sd)
    return {"kind": "normal", "mean": mean, "sd": sd, "min": least, "max": most}
