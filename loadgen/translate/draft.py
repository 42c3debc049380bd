"""The flags of another tool's command line, and the draft of the scenario that they become."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import Any, NoReturn

from loadgen.errors import UsageError
from loadgen.manifest.json_section import JsonObject
from loadgen.units import write_duration, write_rate

DEFAULT_MEASURE_S = 60.0
_SHORT_FLAG = re.compile(r"-[A-Za-z]+")
_GOODPUT = {"ttft": "ttft_from_send", "tpot": "tpot", "e2el": "e2e_from_send"}
_OTHER_MEDIA = {"image", "images", "video", "videos", "audio", "audios", "mm", "vision"}
_SECRET = ("api-key", "header", "headers", "H")


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
            elif _SHORT_FLAG.fullmatch(word):
                name = word[1:]
                self._values.setdefault(name, [])
            elif name:
                self._values[name].append(word)
            else:
                raise UsageError(f"'{word}' belongs to no flag of the command line")

    def names(self) -> list[str]:
        """The names of the flags that were not read yet."""
        return list(self._values)

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
        return [" ".join([_written(name), *self._values[name]]) for name in names]


def _written(name: str) -> str:
    return f"-{name}" if len(set(name)) == 1 else f"--{name}"


class Keys:
    """A mapping of another tool (`a=1,b.c=2`, JSON or YAML) whose keys are removed as they are
    read, so that the rest can be listed as missing."""

    def __init__(self, values: Mapping[str, Any], label: str) -> None:
        self._values, self._label = dict(values), label

    def get(self, *names: str) -> Any:
        """The value of the first of these keys that is present; None if there is none."""
        found = [value for name in names if (value := self._values.pop(name, None)) is not None]
        return found[0] if found else None

    def number(self, *names: str) -> float | None:
        """The same as a number. Raises UsageError for any other value."""
        value = self.get(*names)
        try:
            return None if value is None else float(value)
        except (TypeError, ValueError):
            raise UsageError(f"{self._label} {names[0]}={value}: expected a number") from None

    def text(self, *names: str) -> str:
        """The same as text; "" if there is none."""
        value = self.get(*names)
        return "" if value is None else str(value)

    def nested(self, name: str) -> Keys:
        """The mapping under a key; empty if there is none."""
        value = self.get(name)
        is_mapping = isinstance(value, Mapping)
        if value is not None and not is_mapping:
            raise UsageError(f"{self._label} {name}: expected a mapping")
        return Keys(value if is_mapping else {}, f"{self._label} {name}")

    def left(self) -> list[str]:
        """The remaining keys with their values; of keys that may hold a secret, the name alone."""
        return [
            f"{self._label} {key}=…"
            if re.search("key|header|token$|auth|password", key)
            else f"{self._label} {key}={value}"
            for key, value in self._values.items()
        ]


@dataclass
class Draft:
    """The result of a translation: the blocks of the scenario, the target, and remarks.

    `extra_body` is merged over the body of each request and belongs in the target file. `missing`
    lists flags without an equivalent, with reasons; `notes` lists differences in behaviour; `verb`
    and `options` belong to the slobench command. The measured window ends after `measure_s` or with
    the last of `n_requests`, whichever comes first.
    """

    tool: str
    arrivals: JsonObject = field(default_factory=dict)
    requests: JsonObject = field(default_factory=dict)
    session: JsonObject = field(default_factory=dict)
    agents: JsonObject = field(default_factory=dict)
    prompts: JsonObject = field(default_factory=dict)
    limits: JsonObject = field(default_factory=dict)
    classes: JsonObject = field(default_factory=dict)
    stop_when: JsonObject = field(default_factory=dict)
    extra_body: JsonObject = field(default_factory=dict)
    texts_per_request: int | None = None
    slo: list[Any] = field(default_factory=list)
    seed: int | None = None
    warmup_s: float = 0.0
    measure_s: float | None = None
    n_requests: int | None = None
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

    def set_rate(
        self, rate_per_s: float | None, burstiness: float, in_flight: int | None, n_requests: int
    ) -> None:
        """Arrivals by the rules of vLLM and SGLang: n requests at a rate; without a rate a closed
        loop of `in_flight`, or all requests at once."""
        if rate_per_s is None or rate_per_s == float("inf"):
            if in_flight is None:
                self.arrivals = {"kind": "burst", "requests": n_requests}
            else:
                self.set_closed_loop(in_flight)
                self.set_window(None, n_requests, 0.0)
            return
        if burstiness in (1, float("inf")):
            kind = "poisson" if burstiness == 1 else "constant"
            self.arrivals = {"kind": kind, "rate": rate_text(rate_per_s)}
        else:
            self.set_gamma(rate_per_s, burstiness)
        self.set_window(None, n_requests, rate_per_s)

    @property
    def name(self) -> str:
        """The tool's name in a sentence."""
        return {"vllm": "vLLM", "sglang": "SGLang"}.get(self.tool, self.tool)

    def add_body(self, text: str, flag: str) -> None:
        """Add the fields of a JSON object to every request's body. Raises UsageError for other
        text."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"{flag} {text}: is not JSON ({error.msg})") from None
        if not isinstance(fields, dict):
            raise UsageError(f"{flag} {text}: expected a JSON object")
        for key, value in fields.items():
            self.add_field(key, value)

    def add_field(self, key: str, value: Any) -> None:
        """Add a field to every request's body. The temperature belongs to the scenario, and
        ignore_eos and stream are sent in any case."""
        if key == "temperature" and isinstance(value, int | float):
            self.requests["temperature"] = float(value)
        elif key not in ("ignore_eos", "stream", "stream_options"):
            self.extra_body[key] = value

    def add_samplings(self, flags: Flags, names: Iterable[str]) -> None:
        """Add numeric sampling flags, such as `--top-p`, to every request's body."""
        for name in names:
            if (value := flags.number(name)) is not None:
                self.add_field(name.replace("-", "_"), int(value) if value == int(value) else value)

    def add_left(self, keys: Keys) -> None:
        """Record the keys that were not read as missing."""
        for key in keys.left():
            self.add_missing(key, "this translation does not support it")

    def end_naturally(self) -> None:
        """Let the model end its answers; the output length is then an upper limit."""
        self.extra_body |= {"ignore_eos": None, "min_tokens": None}
        self.notes.append(
            f"{self.name} lets the model end its answers: output_tokens are an upper limit"
            " (extra_body in the target file)"
        )

    def set_trace_requests(self, n_requests: int) -> None:
        """End the replay of a trace with its first n requests: a flag of the command, because the
        trace is read when it runs."""
        self.options += ["--num-prompts", str(n_requests)]

    def set_sweep(self, key: str, values: Sequence[str]) -> None:
        """Translate to one run for each value of a scenario key."""
        self.verb = "sweep"
        self.options += ["--over", f"{key}={','.join(values)}"]

    def set_window(self, seconds: float | None, n_requests: float | None, rate: float) -> None:
        """End the measured window with the last of n requests or after `seconds`, whichever comes
        first. Where n may count something else it is `set_duration`: a search chooses its own
        windows, a trace may have fewer requests, and of a session n may count only the first."""
        is_other = self.session or self.arrivals.get("kind") == "trace" or self.verb == "capacity"
        if n_requests is None or is_other:
            self.set_duration(seconds, n_requests, rate)
            return
        self.measure_s, self.n_requests = seconds, int(n_requests)
        if seconds is None and self.arrivals.get("kind") == "users":
            self.notes.append(
                f"the window ends when {n_requests:g} requests are sent, at the latest after 10"
                " minutes (phases.at_most)"
            )

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
                " measures for that time"
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

    def add_goodput(self, flags: Flags) -> None:
        """Add the SLOs of `--goodput ttft:MS tpot:MS e2el:MS`, on the clocks of vLLM and SGLang.
        Raises UsageError for another metric."""
        for pair in flags.texts("goodput") or []:
            name, _, limit_ms = pair.partition(":")
            if name not in _GOODPUT:
                raise UsageError(f"--goodput {pair}: expected ttft:MS, tpot:MS or e2el:MS")
            self.add_slo(_GOODPUT[name], limit_ms)

    def finish(self, flags: Flags, ignored: str) -> Draft:
        """Record the remaining flags as missing, except `ignored` flags that do not affect the
        traffic. Values of flags that may hold a key are not repeated. Raises UsageError for flags
        of requests with other media than text."""
        for name in _SECRET:
            if flags.texts(name) is not None:
                self.add_missing(
                    f"{_written(name)} …", "belongs in a target file (api_key_env, headers)"
                )
        for flag in flags.left(ignored):
            name, _, value = flag.lstrip("-").partition(" ")
            if {*name.split("-")} & _OTHER_MEDIA and value not in ("0", "0.0"):
                refuse(flag, "slobench sends text only; leave it out to measure text")
            self.add_missing(flag, "this translation does not support it")
        return self

    def values(self) -> JsonObject:
        """The mapping of the scenario file."""
        if self.measure_s is None and self.n_requests is None:
            self.measure_s = DEFAULT_MEASURE_S
            self.notes.append(
                f"phases.measure is {DEFAULT_MEASURE_S:g}s, because the command has no duration;"
                " choose one"
            )
        warmup_s = float(f"{self.warmup_s:.4g}")
        phases: JsonObject = {"warmup": write_duration(warmup_s)} if warmup_s else {}
        if self.n_requests is not None:
            phases["requests"] = self.n_requests
        if self.measure_s is not None:
            key = "measure" if self.n_requests is None else "at_most"
            phases[key] = write_duration(float(f"{self.measure_s:.4g}"))
        if self.classes:  # with classes, the shared keys belong in each class
            shared = {"session": self.session} if self.session else {}
            self.classes = {
                name: {**own, **shared, "requests": {**self.requests, **own["requests"]}}
                for name, own in self.classes.items()
            }
            self.requests, self.session = {}, {}
        blocks: JsonObject = {
            "name": f"from_{self.tool}",
            "seed": self.seed,
            "arrivals": self.arrivals,
            "requests": self.requests,
            "session": self.session,
            "agents": self.agents,
            "prompts": self.prompts,
            "classes": self.classes,
            "phases": phases,
            "stop_when": self.stop_when,
            "limits": self.limits,
            "slo": self.slo,
        }
        return {key: value for key, value in blocks.items() if value not in (None, {}, [])}


def refuse(flag: str, remedy: str) -> NoReturn:
    """Raises UsageError for a flag whose traffic cannot be the same in kind."""
    raise UsageError(
        f"{flag}: not translated, because the traffic would be of another kind: {remedy}"
    )


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
