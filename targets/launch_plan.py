"""The `launch:` block of a target file, and the command, environment and readiness check of the
server under test that follow from it.

`{host}`, `{port}`, `{model}` and `{python}` in a command or an environment value are filled in.
`${NAME}` is replaced by that variable of slobench's own environment and never shown, so that no
file holds a key.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from loadgen.errors import TargetFileError, nearest
from loadgen.fields import Seconds
from loadgen.manifest.sections import LaunchSection
from loadgen.registry import Block
from targets.safe_text import hide_secrets

PLACEHOLDERS = ("host", "model", "port", "python")
_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")  # the braces of JSON have quotes in between
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_KEY_FLAG = re.compile(r"--?api[-_]?key(=(?P<value>.*))?", re.IGNORECASE | re.DOTALL)
_NEEDS_ESCAPE, _ESCAPED = re.compile(r"[\\\"`]"), r"\\\g<0>"
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class ServerPreset(NamedTuple):
    """The start command of a project's server. The words `model` name the model; they are left
    out if no model is given and the server has a default.
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
    # SGLang and llama.cpp serve metrics only with a flag.
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
    """The words of a command line given as a string or as a list, whose numbers become words."""
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
    """The readiness check: `path` answers 200."""

    path: str = Field(default="", pattern=r"^(/.*)?$")
    timeout: Seconds = 900.0  # loading and compiling a large model takes minutes


class Stop(Block):
    """The end of the server: `signal` to its process group, SIGKILL after `timeout`."""

    signal: str = "SIGTERM"
    timeout: Seconds = 30.0

    @field_validator("signal")
    @classmethod
    def _existing_signal(cls, name: str) -> str:
        if name not in signal.Signals.__members__:
            common = ("SIGINT", "SIGQUIT", "SIGTERM", "SIGKILL", "SIGHUP")
            raise ValueError(f"no signal '{name}'; {nearest(name, common)}")
        return name


class Launch(Block):
    """The `launch` block of a target file. A `command` replaces that of the preset; the preset then
    still sets the readiness path and the engine's label.
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
    def _existing_preset(cls, name: str | None) -> str | None:
        if name is not None and name not in PRESETS:
            raise ValueError(f"unknown preset '{name}'; {nearest(name, PRESETS)}")
        return name

    @model_validator(mode="after")
    def _is_startable(self) -> Launch:
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
                "the server does not receive its port: put {port} into command, args or env, "
                "or set port: to the port that it uses"
            )
        _reject_literal_key(self._template())
        return self

    @property
    def _preset(self) -> ServerPreset | None:
        return PRESETS[self.preset] if self.preset is not None else None

    @property
    def engine(self) -> str | None:
        """The engine's name in labels; None without a preset."""
        return self._preset.engine if self._preset is not None else None

    @property
    def connect_host(self) -> str:
        """The host to connect to: loopback for a server that listens on all addresses."""
        return _ANY_ADDRESS.get(self.host, self.host)

    def plan(self, port: int, this_python: str, environ: Mapping[str, str]) -> LaunchPlan:
        """The plan with all placeholders filled in; port 0 is not chosen yet and stays `{port}`.
        Raises TargetFileError for a variable that is not set."""
        values = {
            "host": self.host,
            "model": self.model,
            "port": str(port) if port else "{port}",
            "python": self.python or this_python,
        }
        words = tuple(_fill(word, values) for word in self._template())
        shown, hidden = hide_secrets(words)
        env = {name: _fill(value, values) for name, value in self.env.items()}
        variables = [n for text in (*words, *env.values()) for n in _VARIABLE.findall(text)]
        return LaunchPlan(
            command=tuple(_expand(word, environ, "launch.command") for word in words),
            shown=_shell_line(shown),
            env={
                **environ,
                **{k: _expand(v, environ, f"launch.env.{k}") for k, v in env.items()},
            },
            secrets=(*hidden, *(environ[name] for name in variables if environ.get(name))),
            cwd=self.cwd,
            ready_path=self.ready.path or (self._preset.ready if self._preset else "/v1/models"),
            ready_timeout_s=self.ready.timeout,
            stop_signal=signal.Signals[self.stop.signal],
            stop_timeout_s=self.stop.timeout,
        )

    def to_manifest(self) -> LaunchSection:
        """The record in a run's manifest: the command as written, without words that look like
        secrets, and the names of the variables that it sets."""
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
    """A command ready to run. `command`, `env` and `secrets` hold secrets, so there is no repr;
    `shown` holds none."""

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
    """The words in shell notation; `${NAME}` stays a variable for the shell too."""
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


def _reject_literal_key(words: Sequence[str]) -> None:
    """Raises ValueError, which never quotes the key, for an API key written out in a file."""
    for word, next_word in zip(words, [*words[1:], ""], strict=True):
        flag = _KEY_FLAG.fullmatch(word)
        if flag is None:
            continue
        value = flag["value"] if flag["value"] is not None else next_word
        if value and "${" not in value and not value.startswith("-"):
            raise ValueError(
                "a file holds no key: export the key and write --api-key ${NAME} with the "
                "variable's name"
            )
