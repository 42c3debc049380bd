"""The start form: slobench's options in the form and on Locust's command line, and the run that
they describe. Words, no secrets."""

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
from loadgen.cli.scale import IN_FORM as TRAFFIC_IN_FORM
from loadgen.cli.scale import PLUGINS, TARGET
from loadgen.errors import UsageError, nearest
from loadgen.web.run_protocol import Policy
from loadgen.workload.scenario import Scenario, shipped_scenarios

POLICIES: tuple[Policy, ...] = ("continue", "abort")
IN_FORM = {
    "scenario": "Traffic and SLO of the run. `slobench list scenarios` describes each scenario.",
    "slo": "SLO in place of the scenario's, e.g. ttft<=500ms; p99(tpot)<=50ms",
    "rate": "Arrivals per second, e.g. 8/s. Empty: the scenario's value.",
    "duration": "Length of the measured window, e.g. 60s. Empty: the scenario's value.",
    "warmup": "Time before the measured window, e.g. 5s. Empty: the scenario's value.",
    "seed": "Another seed draws another schedule. Empty: the scenario's value.",
    "model": "The API's model field. Empty: from /v1/models.",
}
_ON_COMMAND_LINE = {
    "settings": ("--set", "Scenario keys, e.g. arrivals.cv=2; several with ;"),
    "engine": ("--engine", "Settings of reference or mock, e.g. mode=chunked,shape=tiny"),
    "out": ("--out", "Directory of the first run. Default: runs/<scenario>-<time>"),
    "plugins": ("--plugin", "Python files that register kinds; several with ;"),
    "traffic": ("--traffic", 'Further traffic flags as JSON, e.g. {"concurrency": 8}'),
    "max_skew": ("--max-skew", "Largest difference between the workers' starts. Default: 50ms"),
}
OURS = ("reference", "mock")
FROM_FLAGS = "command_line"
"""The scenario that the traffic flags make without a file."""
_FIRST = "quickstart"


class RunForm(msgspec.Struct, frozen=True):
    """The fields of the form as words and numbers; an empty field keeps the scenario's value. `slo`
    and `settings` may hold several values, separated by `;`."""

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
    traffic: str = ""
    given_target: str = ""  # --target of the command line: the API key is for this server

    def chosen_scenario(self) -> Scenario:
        """The scenario with the form's changes. Raises UsageError or ScenarioError."""
        flags = ScenarioFlags(
            scenario=None if self.scenario == FROM_FLAGS else self.scenario or None,
            slo=several(self.slo) or None,
            seed=_seed(self.seed),
            set_=several(self.settings),
            plugin=self.plugin_files(),
        )
        return choose_scenario(flags, self._traffic_flags())

    def _traffic_flags(self) -> TrafficFlags:
        """Raises UsageError for a `traffic` that is no object of traffic flags."""
        in_form: dict[str, Any] = {name: getattr(self, name) for name in TRAFFIC_IN_FORM}
        try:
            others = msgspec.json.decode(self.traffic or "{}", type=dict[str, Any])
            return TrafficFlags(**others, **{k: value or None for k, value in in_form.items()})
        except (msgspec.MsgspecError, TypeError) as error:
            raise UsageError(f"--traffic {self.traffic}: {error}") from None

    def plugin_files(self) -> list[Path]:
        return [Path(word) for word in several(self.plugins)]

    def max_skew_s(self) -> float:
        return read_duration_s("--max-skew", self.max_skew)

    def loss_policy(self) -> Policy:
        """The policy for the loss of a worker. Raises UsageError for an unknown word."""
        return read_choice("--on-worker-loss", self.on_worker_loss, POLICIES)


def several(text: str) -> list[str]:
    """The parts of a text between semicolons."""
    return [part.strip() for part in text.split(";") if part.strip()]


def _seed(text: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal():
        raise UsageError(f"--seed {text}: expected a whole number")
    return int(text)


def read_form(values: Mapping[str, object]) -> RunForm:
    """Raises UsageError for values of a wrong type."""
    try:
        return msgspec.convert(dict(values), RunForm)
    except msgspec.ValidationError as error:
        raise UsageError(f"the form cannot be read: {error}") from None


def add_options(parser: Any) -> None:
    """Adds slobench's options to Locust's parser (event `init_command_line_parser`)."""
    names = scenarios(sys.argv, os.environ)
    for name, text in IN_FORM.items():
        if name == "scenario":
            first = names[0] if names[0] not in shipped_scenarios() else _FIRST
            first = _scenario_option(sys.argv, os.environ) or first
            parser.add_argument("--scenario", choices=names, default=first, help=text)
        else:
            parser.add_argument(f"--{name}", default="", help=text)
    for name, (flag, text) in _ON_COMMAND_LINE.items():
        parser.add_argument(flag, dest=name, default="", help=text, include_in_web_ui=False)
    parser.add_argument(
        "--allowed-host",
        default="",
        help="Further names of the page; several with ;",
        include_in_web_ui=False,
    )
    parser.add_argument(
        "--force", action="store_true", help="Overwrite --out", include_in_web_ui=False
    )
    parser.add_argument(
        "--on-worker-loss",
        dest="on_worker_loss",
        choices=POLICIES,
        default="continue",
        help="After the loss of a worker, continue or abort the run of the others",
        include_in_web_ui=False,
    )


def scenarios(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The scenarios in the form: that of the command line, which may be of its traffic flags, and
    the shipped scenarios."""
    chosen = _scenario_option(argv, environ)
    if not chosen and "--traffic" in argv:
        chosen = FROM_FLAGS
    return [
        *([chosen] if chosen and chosen not in shipped_scenarios() else []),
        *shipped_scenarios(),
    ]


def _scenario_option(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """The value of `--scenario`, read before the options are parsed."""
    scenario = environ.get("LOCUST_SCENARIO", "")
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word == "--scenario":
            scenario = following
        elif word.startswith("--scenario="):
            scenario = word.partition("=")[2]
    return scenario


def worker_environ(options: Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables by which a worker finds the plugins and the target file of its own
    command line, as in a single process or with `--processes`. Variables that are already set stay.
    """
    variables = {}
    if plugins := several(options.plugins or ""):
        variables[PLUGINS] = os.pathsep.join(str(Path(word).resolve()) for word in plugins)
    host = options.host or ""
    if host not in OURS and "://" not in host and Path(host).is_file():
        variables[TARGET] = str(Path(host).resolve())
    return {name: value for name, value in variables.items() if not environ.get(name)}


class Settings:
    """The options at the start. The form may change its own fields only: it cannot name files to
    read, write or run, and cannot start a server from a target file."""

    def __init__(self, options: Namespace) -> None:
        self._fixed: dict[str, object] = {
            name: getattr(options, name) for name in (*_ON_COMMAND_LINE, "force", "on_worker_loss")
        }
        self._fixed["max_skew"] = self._fixed["max_skew"] or "50ms"
        self._host = options.host or os.environ.get("OPENAI_BASE_URL", "")
        self._scenarios = scenarios(sys.argv, os.environ)
        self._n_runs = 0

    def next_run(self, options: Namespace) -> RunForm:
        """The next run, with the form's present values. Raises UsageError."""
        self._n_runs += 1
        return self._read(options, self._fixed["out"] if self._n_runs == 1 else "")

    def check(self, options: Namespace, form: Mapping[str, str]) -> None:
        """Checks a form before Locust accepts it: Locust would close it. Raises UsageError or
        ScenarioError. This process loads no plugins; with plugins, mistakes in the scenario show
        when the run starts."""
        values = {name: form[name] for name in (*IN_FORM, "host") if name in form}
        run = self._read(Namespace(**{**vars(options), **values}), "")
        if not run.plugins:
            run.chosen_scenario()

    def _read(self, options: Namespace, out: object) -> RunForm:
        texts = {name: str(getattr(options, name, "") or "").strip() for name in IN_FORM}
        if texts["scenario"] not in self._scenarios:
            raise UsageError(f"scenario: {nearest(texts['scenario'], self._scenarios)}")
        target = (options.host or self._host).strip()
        if not target:
            raise UsageError(
                "Host: enter the server's URL, or reference or mock for a bundled server"
            )
        is_url = target.lower().startswith(("http://", "https://"))
        if not (is_url or target in (*OURS, self._host)):
            raise UsageError(
                f"Host {target!r}: enter an http:// or https:// URL, reference or mock; a target "
                "file and a Unix domain socket can only be named on the command line (--target)"
            )
        fixed = {**self._fixed, "out": out}
        if target not in OURS:
            fixed["engine"] = ""
        return read_form({**fixed, **texts, "target": target, "given_target": self._host})
