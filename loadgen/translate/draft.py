"""The flags of another tool's command line, and the draft of the scenario that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import Any

from loadgen.errors import UsageError
from loadgen.manifest.json_section import JsonObject
from loadgen.units import write_duration, write_rate

DEFAULT_MEASURE_S = 60.0


class Flags:
    """`--name value`, `--name=value` and bare `--name`; a repeated flag keeps all its values.

    Reading a flag removes it; the flags that remain at the end have no translation.
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
        """All values of the first of these names on the command line; None if there is none."""
        for name in names:
            if name in self._values:
                return self._values.pop(name)
        return None

    def text(self, *names: str) -> str | None:
        """The last value of a flag. Raises UsageError for a flag without a value."""
        values = self.texts(*names)
        if values is None:
            return None
        if not values:
            raise UsageError(f"--{names[0]} has no value")
        return values[-1]

    def number(self, *names: str) -> float | None:
        """The last value as a number, also `inf`. Raises UsageError for any other text."""
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

    def left(self, ignored: str) -> list[str]:
        """The remaining flags with their values, without the blank-separated names `ignored`."""
        names = [name for name in self._values if name not in ignored.split()]
        return [" ".join([f"--{name}", *self._values[name]]) for name in names]


@dataclass
class Draft:
    """The result of a translation: the blocks of the scenario, the target, and remarks.

    `missing` lists flags without an equivalent, with reasons; `notes` lists differences in
    behaviour; `verb` and `options` belong to the slobench command.
    """

    tool: str
    arrivals: JsonObject = field(default_factory=dict)
    requests: JsonObject = field(default_factory=dict)
    session: JsonObject = field(default_factory=dict)
    prompts: JsonObject = field(default_factory=dict)
    limits: JsonObject = field(default_factory=dict)
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

    def add_missing(self, flag: str, reason: str) -> None:
        """Record a flag without an equivalent."""
        self.missing.append(f"{flag}: {reason}")

    def set_closed_loop(self, users: int) -> None:
        """Keep `users` requests in flight: each response is followed by the next request."""
        self.arrivals = {"kind": "users", "users": users, "think": "0s"}

    def set_gamma(self, rate_per_s: float, burstiness: float) -> None:
        """Gamma arrivals; `burstiness` is the shape of the gaps, so cv = 1/√burstiness."""
        cv = float(f"{1 / sqrt(burstiness):.6g}")
        self.arrivals = {"kind": "gamma", "rate": rate_text(rate_per_s), "cv": cv}

    def set_sweep(self, key: str, values: Sequence[str]) -> None:
        """Translate to one run for each value of a scenario key."""
        self.verb = "sweep"
        self.options += ["--over", f"{key}={','.join(values)}"]

    def set_duration(self, seconds: float | None, n_requests: float | None, rate: float) -> None:
        """Set the measured window to `seconds` or, without them, to the time that n requests take
        at the rate."""
        if seconds is not None:
            self.measure_s = seconds
            if n_requests is not None:
                self.notes.append(
                    f"it stops after {n_requests:g} requests or {seconds:g} s, whichever comes"
                    " first; slobench measures for a fixed time"
                )
        elif n_requests is not None and 0 < rate < float("inf"):
            self.measure_s = n_requests / rate
            self.notes.append(
                f"{n_requests:g} requests at {rate:g}/s take about {self.measure_s:.4g} s; slobench"
                " measures for that time, because a fixed number of requests would bias arrivals"
            )
        elif n_requests is not None:
            self.notes.append(
                f"it ends after {n_requests:g} requests; slobench measures for a fixed time"
            )

    def limit_in_flight(self, n: int, note: str) -> None:
        """Let requests wait while n are in flight."""
        self.limits = {"max_concurrency": n, "when_full": "wait"}
        self.notes.append(note)

    def add_slo(self, metric: str, limit_ms: str) -> None:
        """Add a per-request SLO."""
        self.slo.append(f"{metric} <= {write_duration(float(limit_ms) / 1000)}")

    def finish(self, flags: Flags, ignored: str) -> Draft:
        """Record the remaining flags as missing, except `ignored` flags that do not affect the
        traffic. Values of flags that may hold a key are not repeated."""
        for name in ("api-key", "header", "headers", "H"):
            if flags.texts(name) is not None:
                self.add_missing(f"--{name} …", "belongs in a target file (api_key_env, headers)")
        for flag in flags.left(ignored):
            self.add_missing(flag, "this translation does not support it")
        return self

    def values(self) -> JsonObject:
        """The mapping of the scenario file."""
        if self.measure_s is None:
            self.measure_s = DEFAULT_MEASURE_S
            self.notes.append(
                f"phases.measure is {DEFAULT_MEASURE_S:g}s, because the command has no duration;"
                " choose one"
            )
        blocks: JsonObject = {
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
    """A rate as in scenarios. Raises UsageError unless it is positive and finite."""
    if not 0 < rate_per_s < float("inf"):
        raise UsageError(f"a rate of {rate_per_s:g} per second cannot be scheduled")
    return write_rate(rate_per_s)


def around(mean: float, sd: float, low: float | None = None, high: float | None = None) -> Any:
    """A length: fixed, or normal between the bounds (by default 1 and mean + 6 sd)."""
    if not sd:
        return round(mean)
    least = max(1, round(low)) if low is not None else 1
    most = round(high) if high is not None else ceil(mean + 6 * sd)
    return {"kind": "normal", "mean": mean, "sd": sd, "min": least, "max": most}
