"""How to start a server under test: what a target file's `launch:` says, and the command, readiness
and environment that follow from it.

`{host}`, `{port}`, `{model}` and `{python}` in a command or an environment value are filled in;
`${NAME}` is taken from slobench's own environment and never shown, so that a key is in no file.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from loadgen.errors import TargetFileError, nearest
from loadgen.manifest import LaunchSection
from loadgen.registry import Block
from loadgen.units import Seconds
from targets.secret_words import hide_secrets

PLACEHOLDERS = ("host", "model", "port", "python")
_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")  # the braces of JSON have quotes in between
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_KEY_FLAG = re.compile(r"--?api[-_]?key(=(?P<value>.*))?", re.IGNORECASE | re.DOTALL)
_NEEDS_ESCAPE, _ESCAPED = re.compile(r"[\\\"`]"), r"\\\g<0>"
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class ServerPreset(NamedTuple):
    """How one project's server is started. `model` are the words that name the model; they are left
    out where no model is named and the server has a default.
    """

    engine: str
    program: tuple[str, ...]
    model: tuple[str, ...]
    rest: tuple[str, ...]
    ready: str = "/health"
    needs_model: bool = True


_WHERE = ("--host", "{host}", "--port", "{port}")
PRESETS: Mapping[str, ServerPreset] = {
    "vllm": ServerPreset("vllm", ("vllm", "serve"), ("{model}",), _WHERE),
    # The metrics of SGLang and llama.cpp are off unless asked for.
    "sglang": ServerPreset(
        "sglang",
        ("{python}", "-m", "sglang.launch_server"),
        ("--model-path", "{model}"),
        (*_WHERE, "--enable-metrics"),
    ),
    "llama_cpp": ServerPreset(
        "llama.cpp", ("llama-server",), ("-m", "{model}"), (*_WHERE, "--metrics"), needs_model=False
    ),
    "transformers": ServerPreset("transformers", ("transformers", "serve"), ("{model}",), _WHERE),
    "reference": ServerPreset(
        "reference",
        ("{python}", "-P", "-u", "-m", "reference_engine"),
        ("--shape", "{model}"),
        _WHERE,
        ready="/ready",  # its /health is 200 while the model still loads
        needs_model=False,
    ),
}


def _words(value: Any) -> Any:
    """A command line as one string or as a list; numbers in a list are words too."""
    if isinstance(value, str):
        return shlex.split(value)
    if isinstance(value, list | tuple):
        return [_word(item) for item in value]
    return value


def _word(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


def _word_values(value: Any) -> Any:
    return {k: _word(v) for k, v in value.items()} if isinstance(value, dict) else value


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]


class Ready(Block):
    """When the server may be measured: `path` answers 200."""

    path: str = Field(default="", pattern=r"^(/.*)?$")
    timeout: Seconds = 900.0  # loading and compiling a large model takes minutes


class Stop(Block):
    """How the server is ended: `signal` to its process group, SIGKILL after `timeout`."""

    signal: str = "SIGTERM"
    timeout: Seconds = 30.0

    @field_validator("signal")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in signal.Signals.__members__:
            known = ("SIGINT", "SIGQUIT", "SIGTERM", "SIGKILL", "SIGHUP")
            raise ValueError(f"no signal '{name}'; {nearest(name, known)}")
        return name


class Launch(Block):
    """What a target file says under `launch`. A `command` replaces the preset's own; the preset
    then still says where readiness is asked and what the engine is called.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    preset: str | None = None
    command: Words = Field(default=(), repr=False)  # words and values may hold secrets
    model: str = ""
    args: Words = Field(default=(), repr=False)
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    env: Annotated[dict[str, str], BeforeValidator(_word_values)] = Field(
        default_factory=dict, repr=False
    )
    cwd: Path | None = None
    python: str = ""
    ready: Ready = Ready()
    stop: Stop = Stop()

    @field_validator("ready", mode="before")
    @classmethod
    def _bare_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("preset")
    @classmethod
    def _known_preset(cls, name: str | None) -> str | None:
        if name is not None and name not in PRESETS:
            raise ValueError(f"unknown preset '{name}'; {nearest(name, PRESETS)}")
        return name

    @model_validator(mode="after")
    def _can_be_started(self) -> Launch:
        preset = self._preset
        if preset is None and not self.command:
            raise ValueError(f"name a preset ({', '.join(PRESETS)}) or write a command")
        if preset is not None and preset.needs_model and not (self.model or self.command):
            raise ValueError(f"preset {self.preset} needs the model to load: add model: …")
        words = (*self._template(), *self.env.values())
        for name in (n for word in words for n in _PLACEHOLDER.findall(word)):
            if name not in PLACEHOLDERS:
                raise ValueError(f"unknown placeholder {{{name}}}; {nearest(name, PLACEHOLDERS)}")
        if not self.port and not any("{port}" in word for word in words):
            raise ValueError(
                "nothing tells the server its port: put {port} into command, args or env, "
                "or say with port: which one it takes"
            )
        _refuse_literal_key(self._template())
        return self

    @property
    def _preset(self) -> ServerPreset | None:
        return PRESETS[self.preset] if self.preset is not None else None

    @property
    def engine(self) -> str | None:
        """What the engine is called in labels; None where no preset says it."""
        return self._preset.engine if self._preset is not None else None

    @property
    def connect_host(self) -> str:
        """Where to reach it: an address to listen on everywhere is none to connect to."""
        return _ANY_ADDRESS.get(self.host, self.host)

    def plan(self, port: int, this_python: str, environ: Mapping[str, str]) -> LaunchPlan:
        """Everything filled in; port 0 is one that is not known yet and stays a placeholder.
        Raises TargetFileError for a variable that is not set."""
        values = {
            "host": self.host,
            "model": self.model,
            "port": str(port) if port else "{port}",
            "python": self.python or this_python,
        }
        words = tuple(_fill(word, values) for word in self._template())
        shown, hidden = hide_secrets(words)
        own = {name: _fill(value, values) for name, value in self.env.items()}
        return LaunchPlan(
            command=tuple(_expand(word, environ, "launch.command") for word in words),
            shown=_shell_line(shown),
            env={
                **environ,
                **{k: _expand(v, environ, f"launch.env.{k}") for k, v in own.items()},
            },
            secrets=(
                *hidden,
                *(
                    environ[name]
                    for text in (*words, *own.values())
                    for name in _VARIABLE.findall(text)
                    if environ.get(name)
                ),
            ),
            cwd=self.cwd,
            ready_path=self.ready.path or (self._preset.ready if self._preset else "/v1/models"),
            ready_timeout_s=self.ready.timeout,
            stop_signal=signal.Signals[self.stop.signal],
            stop_timeout_s=self.stop.timeout,
        )

    def to_manifest(self) -> LaunchSection:
        """What a run records: the command as written, but for what looks like a secret, and the
        names of the variables set."""
        return LaunchSection(
            preset=self.preset,
            command=_shell_line(hide_secrets(self._template())[0]),
            model=self.model,
            env=tuple(sorted(self.env)),
        )

    def _template(self) -> tuple[str, ...]:
        preset = self._preset
        if self.command or preset is None:
            return (*self.command, *self.args)
        model = preset.model if self.model else ()
        return (*preset.program, *model, *preset.rest, *self.args)


@dataclass(frozen=True, repr=False)
class LaunchPlan:
    """A command ready to be run. `command`, `env` and `secrets` hold secrets: no repr; `shown` does
    not."""

    command: tuple[str, ...]
    shown: str
    env: Mapping[str, str]
    secrets: tuple[str, ...]
    cwd: Path | None
    ready_path: str
    ready_timeout_s: float
    stop_signal: signal.Signals
    stop_timeout_s: float


def _shell_line(words: Sequence[str]) -> str:
    """The words as one would type them; a variable stays one for the shell too."""
    line = " ".join(_quoted(word) if "${" in word else shlex.quote(word) for word in words)
    return line.replace("'{port}'", "{port}")


def _quoted(word: str) -> str:
    return f'"{_NEEDS_ESCAPE.sub(_ESCAPED, word)}"'


def _fill(text: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values[match[1]], text)


def _expand(text: str, environ: Mapping[str, str], where: str) -> str:
    def value(match: re.Match[str]) -> str:
        if not environ.get(match[1]):
            raise TargetFileError(
                f"{where}: environment variable {match[1]} is not set; export {match[1]}=…"
            )
        return environ[match[1]]

    return _VARIABLE.sub(value, text)


def _refuse_literal_key(words: Sequence[str]) -> None:
    """Raises ValueError, which never quotes it, for an API key written out in a file."""
    for word, after in _with_next(words):
        flag = _KEY_FLAG.fullmatch(word)
        if flag is None:
            continue
        value = flag["value"] if flag["value"] is not None else after
        if value and "${" not in value and not value.startswith("-"):
            raise ValueError(
                "a key is not written to a file: export it and write --api-key ${NAME} with the "
                "variable's name"
            )


def _with_next(words: Sequence[str]) -> Iterable[tuple[str, str]]:
    return zip(words, [*words[1:], ""], strict=True)
