"""A typer group that imports and builds a verb only when a command line names it.

Building a command from its signature takes about 4 ms, importing the modules of all verbs 90 ms;
there are 30 verbs. The help page needs neither: it shows their docstrings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from itertools import takewhile, zip_longest
from types import CodeType
from typing import Annotated, Any, get_type_hints

from typer import BadParameter, Option, Typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.models import CommandInfo

from loadgen.errors import UsageError

PANELS = {
    "Measure": {
        "run": "loadgen.cli.measure",
        "preview": "loadgen.cli.measure",
        "validate": "loadgen.cli.measure",
        "fit": "loadgen.cli.measure",
        "doctor": "loadgen.studies.doctor.verb",
        "demo": "loadgen.studies.demo.verb",
        "init": "loadgen.cli.measure",
        "report": "loadgen.cli.recorded",
        "import": "loadgen.cli.foreign",
        "export": "loadgen.cli.recorded",
        "verify": "loadgen.cli.recorded",
    },
    "Decide": {
        "rescore": "loadgen.cli.recorded",
        "judge": "loadgen.cli.foreign",
        "compare": "loadgen.studies.compare.verb",
        "nightly": "loadgen.studies.nightly.verb",
        "alarms": "loadgen.studies.nightly.verb",
        "capacity": "loadgen.studies.capacity.verb",
        "size": "loadgen.studies.size.verb",
        "sweep": "loadgen.studies.sweep.verb",
    },
    "Engine lab": {
        "serve": "loadgen.cli.lab",
        "simulate": "loadgen.cli.lab",
        "modes": "loadgen.studies.modes.verb",
        "calibrate": "loadgen.studies.calibrate.verb",
        "solve": "loadgen.studies.solve.verb",
        "tune": "loadgen.studies.tune.verb",
        "claims": "loadgen.studies.claims.verb",
    },
    "Scale": {
        "web": "loadgen.cli.scale",
        "worker": "loadgen.cli.scale",
        "collect": "loadgen.cli.scale",
        "locustfile": "loadgen.cli.scale",
    },
    "Extend": {
        "list": "loadgen.cli.extend",
        "from": "loadgen.cli.extend",
    },
}
"""Panel of the help page → verb → its module, in the order of the page. A study has its verb in
its own folder."""
VERBS = {verb: module for verbs in PANELS.values() for verb, module in verbs.items()}


_LAUNCHING = frozenset(
    {"run", "capacity", "sweep", "nightly", "compare", "calibrate", "doctor", "web"}
)
"""The verbs that may start a server from a target file."""
_NoLaunch = Annotated[
    bool,
    Option(
        "--no-launch",
        help="Refuse a target file with `launch:`: its command is a program that runs here.",
    ),
]
_ATTACHED = re.compile(r"-[A-Za-z]\d\w*", re.ASCII)  # a value without a blank: -c10


class VerbGroup(TyperGroup):
    """A group whose commands come from `VERBS`."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.commands = _Commands()  # type: ignore[assignment]  # typer only reads it

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super(VerbGroup, self._listing()).format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        listing_ctx = copy(ctx)
        listing_ctx.command = self._listing()
        return super().shell_complete(listing_ctx, incomplete)

    def _listing(self) -> VerbGroup:
        """This group with commands that have a name, a docstring and a panel only."""
        listing = copy(self)
        listing.commands = {
            verb: TyperCommand(verb, help=docstring(verb), rich_help_panel=panel)
            for panel, verbs in PANELS.items()
            for verb in verbs
        }
        return listing

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and "://" in args[0]:
            raise UsageError(f"a URL is a target; write slobench run --target {args[0]}")
        if args and args[0] not in VERBS:
            from loadgen.cli.peer_flags import VERB_HINTS

            if (hint := VERB_HINTS.get(args[0])) is not None:
                raise UsageError(f"there is no verb {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


class Verb(TyperCommand):
    """A command whose error for a flag of another tool names ours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(takewhile(lambda word: word != "--", args))
        self._check_flags(words)
        self._check_urls(words)
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except BadParameter as error:
            raise self._named(error, given) from None

    def _check_flags(self, words: list[str]) -> None:
        from loadgen.cli.peer_flags import hint_for, several_loads

        known = {flag for param in self.params for flag in (*param.opts, *param.secondary_opts)}
        for word, following in zip_longest(words, words[1:], fillvalue=""):
            flag, equals, attached = word.partition("=")
            if _ATTACHED.fullmatch(word):
                flag = word[:2]
            if flag not in known:
                if hint := hint_for(self.name or "", flag):
                    raise UsageError(f"there is no {flag}; {hint}")
                continue
            value = attached if equals else following
            if line := several_loads(self.name or "", flag, value):
                raise UsageError(f"{flag} {value}: expected a single value; {line}")

    def _check_urls(self, words: list[str]) -> None:
        """A URL as the first word of a verb that takes no words."""
        takes_words = any(param.param_type_name == "argument" for param in self.params)
        if words and "://" in words[0] and not takes_words:
            raise UsageError(f"a URL is a target; write slobench {self.name} --target {words[0]}")

    def _named(self, error: BadParameter, words: list[str]) -> Exception:
        """The error with the given value, or with the example of this verb."""
        from loadgen.cli.peer_flags import other_length

        if error.param is None:
            return error
        if not error.message:
            example = (self.epilog or "").removeprefix("Example: ")
            return UsageError(f"{self.name}: {error.param.opts[0]} is missing; e.g. {example}")
        if "valid integer" not in error.message:
            return error
        for word, following in zip_longest(words, words[1:], fillvalue=""):
            flag, equals, attached = word.partition("=")
            if flag in error.param.opts:
                value = attached if equals else following
                return UsageError(f"{flag} {value}: expected a whole number{other_length(flag)}")
        return error


class _Commands(Mapping[str, Any]):
    """Name → click's command."""

    def __getitem__(self, name: str) -> Any:
        return command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


@cache
def command(name: str) -> Any:
    """The click command of a verb. Raises KeyError for an unknown verb."""
    verbs: Typer = import_module(VERBS[name]).verbs
    alone = Typer(rich_markup_mode="rich", add_completion=False)
    alone.registered_commands = [c for c in verbs.registered_commands if _name(c) == name]
    for info in alone.registered_commands:
        info.cls = Verb
        if name in _LAUNCHING:
            assert info.callback is not None, "a verb has a function"
            info.callback = _with_no_launch(info.callback)
    return get_command(alone)


def docstring(verb: str) -> str:
    """The docstring of a verb's function, read from the code of its module, which is not run. The
    name of the function is the verb, with an underscore where the bare word is taken."""
    for constant in _code(VERBS[verb]).co_consts:
        if isinstance(constant, CodeType) and constant.co_name in {verb, f"{verb}_"}:
            text = constant.co_consts[0] if constant.co_consts else None
            return text if isinstance(text, str) else ""
    raise KeyError(verb)


@cache
def _code(module: str) -> CodeType:
    spec = find_spec(module)
    code: CodeType = spec.loader.get_code(module)  # type: ignore[union-attr]  # it is a module
    return code


def _with_no_launch(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb with the option of every verb that may start a server from a target file. It sets the
    variable that is read where a server is started, so that child processes refuse, too."""

    @wraps(verb)
    def launching(*, no_launch: bool, **values: Any) -> None:
        if no_launch:
            from loadgen.run.target import NO_LAUNCH

            os.environ[NO_LAUNCH] = "1"
        verb(**values)

    hints = {**get_type_hints(verb, include_extras=True), "no_launch": _NoLaunch}
    parameters = [
        Parameter(parameter.name, Parameter.KEYWORD_ONLY, default=parameter.default)
        for parameter in signature(verb).parameters.values()
    ]
    parameters.append(Parameter("no_launch", Parameter.KEYWORD_ONLY, default=False))
    launching.__signature__ = Signature(  # type: ignore[attr-defined]
        [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]
    )
    launching.__annotations__ = hints
    return launching


def _name(verb: CommandInfo) -> str:
    return verb.name or str(getattr(verb.callback, "__name__", ""))
