"""A scenario: who arrives, what they ask, and against what promise. Frozen, checked, and written as
it reads in YAML.

Durations are seconds and rates per second once read; in YAML both are strings with their unit.
docs/scenarios.md describes every key.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializationInfo,
    ValidationError,
)

from loadgen.document import Document, override, parse_document, write_document
from loadgen.errors import ScenarioError, nearest
from loadgen.measure.slo import Slo, parse_slo
from loadgen.registry import Block
from loadgen.units import Seconds, Share
from loadgen.workload.arrivals import ARRIVALS, Arrivals
from loadgen.workload.lengths import LENGTHS, Lengths, Tokens

_OF_MET_REQUESTS = ("attainment", "goodput", "goodput_output_tokens_per_s")


def _parsed_slo(text: str) -> str:
    parse_slo(text)
    return text


def _grounded(slo: tuple[str, ...]) -> tuple[str, ...]:
    promises = [parse_slo(text) for text in slo]
    for promise in promises:
        if promise.metric in _OF_MET_REQUESTS and all(p.scope == "run" for p in promises):
            raise ValueError(
                f"'{promise.text}' counts requests that keep every per-request promise, and there "
                "is none; add one, e.g. 'ttft <= 500ms'"
            )
    return slo


SloText = Annotated[str, AfterValidator(_parsed_slo)]


class _Strict(Block):
    """YAML has types: "64" is no number and `true` no count."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class SharedPrefix(_Strict):
    """A text of `tokens` tokens in front of every prompt, the same within each of `groups` groups
    (a system prompt). It adds to `input_tokens`."""

    tokens: Tokens
    groups: Annotated[int, Field(ge=1, le=1_000_000)] = 1


class Requests(_Strict):
    """What is asked: lengths in tokens and the sampling temperature."""

    input_tokens: Annotated[Lengths, LENGTHS]
    output_tokens: Annotated[Lengths, LENGTHS]
    shared_prefix: SharedPrefix | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0


class Phases(_Strict):
    """Requests arrive during `warmup` and `measure`; only the latter count. `drain` is how long the
    last ones may take to end."""

    warmup: Seconds = 0.0
    measure: Annotated[Seconds, Field(gt=0)]
    drain: Seconds = 30.0


class Limits(_Strict):
    """What a request may cost the client. At `max_concurrency` in flight a due request is dropped
    and counted, or waits and shows it as latency."""

    timeout: Annotated[Seconds, Field(gt=0)] = 60.0
    max_concurrency: Annotated[int, Field(ge=1, le=1_000_000)] = 2000
    when_full: Literal["drop", "wait"] = "drop"


class StopWhen(_Strict):
    """End the run early when the share of failures over a sliding window reaches `error_rate`."""

    error_rate: Annotated[Share, Field(gt=0)] = 0.5
    over: Annotated[Seconds, Field(gt=0)] = 20.0


class PromptSettings(_Strict):
    """Where prompt text comes from, and whether each run salts it so that a second run misses the
    first one's prefix cache."""

    kind: Literal["synthetic"] = "synthetic"
    salt: Literal["run", "none"] = "run"


class Instrument(_Strict):
    """When the client itself is the bottleneck and the run is invalid: p99 dispatch lateness (None:
    max(5 ms, 2 % of the TTFT limit)), p99 event-loop lag, CPU share, scheduler run delay."""

    lateness: Annotated[Seconds, Field(gt=0)] | None = None
    loop_lag: Annotated[Seconds, Field(gt=0)] = 5e-3
    cpu: Annotated[Share, Field(gt=0)] = 0.9
    run_delay: Annotated[Share, Field(gt=0)] = 0.01


def _fit_for_a_folder(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]{0,63}", name):
        raise ValueError(
            f"{name!r} cannot name a run's folder; begin with a letter and use up to 64 letters, "
            "digits, '_', '.' and '-'"
        )
    return name


def _or_never(value: object) -> object:
    return None if value == "never" else value


def _never_or(stop_when: StopWhen | None, info: SerializationInfo) -> object:
    if stop_when is None:
        return "never"
    return stop_when.model_dump(mode=info.mode, exclude_defaults=info.exclude_defaults)


class Scenario(_Strict):
    """One traffic situation and its promise; equal scenarios give equal schedules."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    name: Annotated[str, AfterValidator(_fit_for_a_folder)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    arrivals: Annotated[Arrivals, ARRIVALS]
    requests: Requests
    phases: Phases
    limits: Limits = Limits()
    stop_when: Annotated[
        StopWhen | None, BeforeValidator(_or_never), PlainSerializer(_never_or, when_used="json")
    ] = StopWhen()
    prompts: PromptSettings = PromptSettings()
    slo: Annotated[tuple[SloText, ...], Field(strict=False), AfterValidator(_grounded)] = ()
    instrument: Instrument = Instrument()

    @property
    def horizon_s(self) -> float:
        """How long requests arrive: warm-up and measured window together."""
        return self.phases.warmup + self.phases.measure

    def promises(self) -> tuple[Slo, ...]:
        """The SLO expressions, parsed, in the order they are written."""
        return tuple(parse_slo(text) for text in self.slo)

    @property
    def lateness_limit_s(self) -> float:
        """The p99 dispatch lateness above which a run is invalid: as set, or max(5 ms, 2 % of the
        tightest TTFT limit)."""
        if self.instrument.lateness is not None:
            return self.instrument.lateness
        limits_s = [promise.limit for promise in self.promises() if promise.metric == "ttft_s"]
        return max(5e-3, 0.02 * min(limits_s, default=0.0))

    def resolved(self) -> dict[str, Any]:
        """Every key with its value, defaults included, as JSON; `model_validate` reads it back."""
        return self.model_dump(mode="json", by_alias=True)

    def to_yaml(self) -> str:
        """The scenario as a file that reads back as an equal one: units as strings, and no key that
        equals its default except `schema`, which every file carries."""
        values = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return write_document({"schema": self.schema_version, **values})


def load_scenario(
    path_or_name: str | Path, overrides: Sequence[str] | Mapping[str, object] = ()
) -> Scenario:
    """A scenario from a file, or a shipped one by name (`quickstart`, `scenarios/quickstart.yaml`),
    with `a.b=c` settings applied on top.

    Raises ScenarioError with one `file:line: key.path: problem` line for every mistake.
    """
    label, text = read_source(path_or_name)
    document = parse_document(text, label, ScenarioError)
    document.values.setdefault("name", _name_from(label))
    override(document, overrides)
    return _checked(document)


def scenario_from_flags(
    *,
    rate: str,
    input_len: int | Mapping[str, object],
    output_len: int | Mapping[str, object],
    duration: str,
    warmup: str = "0s",
    max_concurrency: int | None = None,
    slo: Sequence[str] = (),
    seed: int = 0,
    name: str = "command_line",
    overrides: Sequence[str] | Mapping[str, object] = (),
) -> Scenario:
    """The Poisson scenario that a command line without a file describes. Raises ScenarioError that
    names the flag."""
    values: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "arrivals": {"kind": "poisson", "rate": rate},
        "requests": {"input_tokens": input_len, "output_tokens": output_len},
        "phases": {"warmup": warmup, "measure": duration},
        "limits": {} if max_concurrency is None else {"max_concurrency": max_concurrency},
        "slo": list(slo),
    }
    document = Document("command line", ScenarioError, values)
    document.sources = {
        ("seed",): "--seed",
        ("arrivals", "rate"): "--rate",
        ("requests", "input_tokens"): "--input-len",
        ("requests", "output_tokens"): "--output-len",
        ("phases", "measure"): "--duration",
        ("phases", "warmup"): "--warmup",
        ("limits", "max_concurrency"): "--max-concurrency",
        ("slo",): "--slo",
    }
    override(document, overrides)
    return _checked(document)


def shipped_scenarios() -> list[str]:
    """The names of the scenarios that come with slobench, sorted."""
    folder = importlib.resources.files("scenarios")
    files = [file.name for file in folder.iterdir() if file.name.endswith(".yaml")]
    return sorted(name.removesuffix(".yaml") for name in files)


def read_source(path_or_name: str | Path) -> tuple[str, str]:
    """(label, text) of a scenario file or a shipped scenario; the label is what messages call it.

    Raises ScenarioError when there is none, or it cannot be read as UTF-8.
    """
    path = Path(path_or_name)
    name = path.name.removesuffix(".yaml")
    is_shipped_name = path.parent in (Path(), Path("scenarios"))
    try:
        if path.is_file() or not is_shipped_name:
            return str(path), path.read_bytes().decode("utf-8-sig")
        resource = importlib.resources.files("scenarios").joinpath(f"{name}.yaml")
        return f"scenarios/{name}.yaml", resource.read_text("utf-8")
    except FileNotFoundError:
        hint = nearest(name, shipped_scenarios())
        problem = f"no such file, and no scenario '{name}' is shipped; {hint}"
        raise ScenarioError(f"{path_or_name}: {problem}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ScenarioError(f"{path_or_name}:{line}: is not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise ScenarioError(f"{path_or_name}: cannot be read: {error.strerror}") from None


def _name_from(label: str) -> str:
    letters = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(label).stem)[:64]
    return letters if letters[:1].isalpha() else f"s{letters[:63]}"


def _checked(document: Document) -> Scenario:
    try:
        scenario = Scenario.model_validate(document.values)
    except ValidationError as error:
        document.note_validation(error)
        document.raise_mistakes()
        raise
    document.raise_mistakes()  # duplicate keys and the like
    return scenario
