"""What a run was asked to be, as the form and the command line give it: words, nothing secret."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadgen.cli.flags import ScenarioFlags, TrafficFlags
from loadgen.cli.parse import choose_scenario, read_choice, read_duration_s
from loadgen.cli.scale import PLUGINS, TARGET
from loadgen.errors import UsageError, nearest
from loadgen.web.run_protocol import Policy
from loadgen.workload.scenario import Scenario, shipped_scenarios

POLICIES: tuple[Policy, ...] = ("continue", "abort")
IN_FORM = {
    "scenario": "What is sent, and what is promised. `slobench list scenarios` says more.",
    "rate": "Arrivals per second, e.g. 8/s. Empty: as the scenario says.",
    "duration": "Length of the measured window, e.g. 60s. Empty: as the scenario says.",
    "warmup": "Uncounted time before it, e.g. 5s. Empty: as the scenario says.",
    "seed": "Another seed draws another schedule. Empty: as the scenario says.",
    "slo": "Promises in place of the scenario's, e.g. ttft<=500ms; p99(tpot)<=50ms",
    "model": "The API's model field. Empty: from /v1/models.",
}
_ON_COMMAND_LINE = {
    "settings": ("--set", "Scenario keys, e.g. arrivals.cv=2; several with ;"),
    "engine": ("--engine", "Settings of reference or mock, e.g. mode=chunked,shape=tiny"),
    "out": ("--out", "The run's directory; of the first run only. Default: runs/<scenario>-<time>"),
    "plugins": ("--plugin", "Python files that register kinds; several with ;"),
    "max_skew": ("--max-skew", "Most by which workers may start apart. Default: 50ms"),
}
OURS = ("reference", "mock")
_FIRST = "quickstart"


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


def add_options(parser: Any) -> None:
    """For Locust's `init_command_line_parser`."""
    names = scenarios(sys.argv, os.environ)
    for name, text in IN_FORM.items():
        if name == "scenario":
            first = _given(sys.argv, os.environ) or _FIRST
            parser.add_argument("--scenario", choices=names, default=first, help=text)
        else:
            parser.add_argument(f"--{name}", default="", help=text)
    for name, (flag, text) in _ON_COMMAND_LINE.items():
        parser.add_argument(flag, dest=name, default="", help=text, include_in_web_ui=False)
    parser.add_argument(
        "--force", action="store_true", help="Overwrite --out", include_in_web_ui=False
    )
    parser.add_argument(
        "--on-worker-loss",
        dest="on_worker_loss",
        choices=POLICIES,
        default="continue",
        help="What the loss of a worker means for the others",
        include_in_web_ui=False,
    )


def scenarios(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """What the form offers: the shipped ones, and the one that was named at the start."""
    given = _given(argv, environ)
    return [*([given] if given and given not in shipped_scenarios() else []), *shipped_scenarios()]


def _given(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """The value of `--scenario`, before anything is parsed."""
    found = environ.get("LOCUST_SCENARIO", "")
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word == "--scenario":
            found = following
        elif word.startswith("--scenario="):
            found = word.partition("=")[2]
    return found


def of_this_machine(options: Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which a worker finds the plugins and the target file that its own command
    line names, as that of a single process or of `--processes` does. Those that are set stay."""
    found = {}
    if plugins := several(options.plugins or ""):
        found[PLUGINS] = os.pathsep.join(str(Path(word).resolve()) for word in plugins)
    host = options.host or ""
    if host not in OURS and "://" not in host and Path(host).is_file():
        found[TARGET] = str(Path(host).resolve())
    return {name: value for name, value in found.items() if not environ.get(name)}


class Settings:
    """Options as they were at the start. The form may change what it shows and nothing else: it
    can neither name files to read, write or run, nor start a server from a target file."""

    def __init__(self, options: Namespace) -> None:
        self._fixed: dict[str, object] = {
            name: getattr(options, name) for name in (*_ON_COMMAND_LINE, "force", "on_worker_loss")
        }
        self._fixed["max_skew"] = self._fixed["max_skew"] or "50ms"
        self._host = options.host or os.environ.get("OPENAI_BASE_URL", "")
        self._scenarios = scenarios(sys.argv, os.environ)
        self._n_runs = 0

    def asked(self, options: Namespace) -> RunForm:
        """A run as the form asks for it now. Raises UsageError."""
        self._n_runs += 1
        return self._read(options, self._fixed["out"] if self._n_runs == 1 else "")

    def check(self, options: Namespace, form: Mapping[str, str]) -> None:
        """That what a form says can be a run, before Locust takes it: it would close the form.
        Raises UsageError or ScenarioError. Plugins are not read in this process; with them, only
        the run itself tells."""
        said = {name: form[name] for name in (*IN_FORM, "host") if name in form}
        found = self._read(Namespace(**{**vars(options), **said}), "")
        if not found.plugins:
            found.chosen_scenario()

    def _read(self, options: Namespace, out: object) -> RunForm:
        words = {name: str(getattr(options, name, "") or "").strip() for name in IN_FORM}
        if words["scenario"] not in self._scenarios:
            raise UsageError(f"scenario: {nearest(words['scenario'], self._scenarios)}")
        target = (options.host or self._host).strip()
        if not target:
            raise UsageError("Host: write the server's URL, or reference or mock for one of ours")
        if target not in (*OURS, self._host) and "://" not in target:
            raise UsageError(
                f"Host {target!r}: write a URL, reference or mock; a target file is given on the "
                "command line"
            )
        fixed = {**self._fixed, "out": out}
        if target not in OURS:
            fixed["engine"] = ""
        return read_form({**fixed, **words, "target": target, "given_target": self._host})
