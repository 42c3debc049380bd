"""Reading and writing of the YAML files that people edit, with file, line and key path for every
mistake.

Surprising features of YAML 1.1 are switched off: `on`, `off`, `yes` and `no` are words, `1:30` is
not a number in base 60, a duplicate key is a mistake, and anchors, tags and dates do not exist.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from loadgen.errors import UsageError
from loadgen.system.whole_file import read_regular

_MOST_BYTES = 4 << 20
KeyPath = tuple[str | int, ...]

_CORE_SCALARS = {  # the YAML 1.2 core schema: pattern, and its possible first characters
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "null": (r"null|Null|NULL|~|", ("n", "N", "~", "")),
    "int": (r"[-+]?[0-9]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        "-+.0123456789",
    ),
}


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    by_letter: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, (pattern, letters) in _CORE_SCALARS.items():
        entry = (f"tag:yaml.org,2002:{tag}", re.compile(rf"^(?:{pattern})$"))
        for letter in letters:
            by_letter.setdefault(letter, []).append(entry)
    return by_letter


_SURROGATE = re.compile("[\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # untyped in the stubs
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            problem = "anchors and aliases are not part of the format; write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _resolvers()


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = repr(value).removesuffix(".0")
    kind = "int" if text.removeprefix("-").isdecimal() else "float"  # 220, not 220.0
    return dumper.represent_scalar(f"tag:yaml.org,2002:{kind}", text)


_Dumper.add_representer(float, _represent_float)


@dataclass(frozen=True, order=True)
class Mistake:
    """One mistake in a document; mistakes sort by line."""

    line: int
    where: str
    path: str
    problem: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.path, self.problem) if part)


@dataclass
class Document:
    """Plain values, the line of each, and the mistakes found while reading them.

    `label` names the file in messages; `error` is the exception class to raise. `sources` maps the
    key paths that a flag set to that flag (`--set`, `--rate`); their mistakes name the flag instead
    of a line.
    """

    label: str
    error: type[UsageError]
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[KeyPath, int] = field(default_factory=dict)
    sources: dict[KeyPath, str] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def note(self, path: KeyPath, problem: str) -> None:
        """Record a mistake at a key path; for a missing key, at the line of its block."""
        dotted = ".".join(str(part) for part in path)
        for length in range(len(path), -1, -1):
            origin = path[:length]
            if origin in self.sources:
                self.mistakes.append(Mistake(0, self.sources[origin], dotted, problem))
                return
            if origin in self.lines:
                line = self.lines[origin]
                self.mistakes.append(Mistake(line, f"{self.label}:{line}", dotted, problem))
                return
        self.mistakes.append(Mistake(0, self.label, dotted, problem))

    def note_validation(self, error: ValidationError, quotes_values: bool = True) -> None:
        """Record every line of a pydantic error in plain words. Without `quotes_values` the values
        in the file are not repeated, because they may be secret."""
        for detail in error.errors(include_url=False):
            self.note(detail["loc"], _problem(detail, quotes_values))

    def raise_mistakes(self) -> None:
        """Raise `error` with one line per mistake, if there are any."""
        if self.mistakes and Path(self.label).is_symlink():
            line = min(mistake.line for mistake in self.mistakes)
            raise self.error(_unquoted(self.label, line))
        if self.mistakes:
            raise self.error("\n".join(str(mistake) for mistake in sorted(set(self.mistakes))))


def read_file(path: Path) -> bytes:
    """The content of a file that people write. Raises OSError, also for anything but a regular file
    and for more than 4 MiB; neither is read."""
    return read_regular(path, _MOST_BYTES)


def parse_document(text: str, label: str, error: type[UsageError]) -> Document:
    """A mapping from YAML text. Raises `error` if the text is not a YAML mapping; smaller mistakes
    (duplicate keys, tags) are recorded in the document."""
    document = Document(label, error)
    try:
        node = _Loader(text).get_single_node()
        if node is None:
            raise error(f"{label}: is empty; expected a mapping of keys")
        values = _plain(node, (), document)
    except yaml.MarkedYAMLError as invalid:
        mark = invalid.problem_mark or invalid.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = ", ".join(part for part in (invalid.context, invalid.problem) if part)
        if Path(label).is_symlink():
            raise error(_unquoted(label, mark.line + 1 if mark else 0)) from None
        raise error(f"{label}{line}: {problem}") from None
    except yaml.reader.ReaderError as invalid:
        number = text.count("\n", 0, invalid.position) + 1
        raise error(f"{label}:{number}: {invalid.reason} (U+{invalid.character:04X})") from None
    except RecursionError:
        raise error(f"{label}: is nested too deeply") from None
    if not isinstance(values, dict):
        kind = "a list" if isinstance(values, list) else "a single value"
        raise error(f"{label}:1: expected a mapping of keys, got {kind}")
    document.values = values
    return document


def _unquoted(label: str, line: int) -> str:
    """The mistake of a link: it may lead to a file that the user did not mean, with secrets."""
    return (
        f"{label}{f':{line}' if line else ''}: has a mistake; it is a link to another file, whose "
        "content is not shown here: name that file itself to see it"
    )


def override(
    document: Document, settings: Sequence[str] | Mapping[str, object], flag: str = "--set"
) -> None:
    """Set values by dotted path: `arrivals.rate=20/s` with YAML syntax on the right, or a mapping
    from path to value. Messages name `flag` as their source. Raises the document's error for a
    setting that cannot be applied."""
    pairs = (
        list(settings.items())
        if isinstance(settings, Mapping)
        else [_split_setting(setting, flag, document.error) for setting in settings]
    )
    for dotted, value in pairs:
        _set(document, dotted, value, flag)


def write_document(values: Mapping[str, object]) -> str:
    """YAML text of a mapping, laid out for people: a line per inner block and per list item."""
    return "".join(
        yaml.dump(
            {key: value},
            Dumper=_Dumper,
            default_flow_style=None if isinstance(value, dict) else False,
            sort_keys=False,
            allow_unicode=True,
            width=100,
        )
        for key, value in values.items()
    )


def _plain(node: yaml.Node, path: KeyPath, document: Document) -> Any:
    document.lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        return _plain_mapping(node, path, document)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*path, i), document) for i, item in enumerate(node.value)]
    return _plain_scalar(node, path, document)


def _plain_mapping(node: yaml.MappingNode, path: KeyPath, document: Document) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
        here = (*path, key)
        if key in values:
            first = document.lines[here]
            document.mistakes.append(
                Mistake(
                    line,
                    f"{document.label}:{line}",
                    ".".join(map(str, here)),
                    f"duplicate key, first on line {first}; keep one",
                )
            )
            continue
        document.lines[here] = line
        values[key] = _plain(value_node, here, document)
    return values


def _plain_scalar(node: yaml.Node, path: KeyPath, document: Document) -> Any:
    text = str(node.value)
    match node.tag.removeprefix("tag:yaml.org,2002:"):
        case "str":
            if _SURROGATE.search(text):
                line = node.start_mark.line + 1
                where = f"{document.label}:{line}"
                problem = "a surrogate (\\ud800 … \\udfff) is no character; write the character"
                document.mistakes.append(Mistake(line, where, ".".join(map(str, path)), problem))
                return ""
            return text
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int" if len(text) < 30:
            return int(text)
        case "int" | "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    document.note(path, f"the tag {node.tag} is not part of the format; write the plain value")
    return text


def _split_setting(setting: str, flag: str, error: type[UsageError]) -> tuple[str, Any]:
    dotted, equals, text = setting.partition("=")
    if not equals or not dotted.strip():
        raise error(f"{flag} {setting}: expected key.path=value, e.g. arrivals.rate=20/s")
    label = f"{flag} {setting}"
    parsed = parse_document(f"value: {text}", label, error)
    parsed.raise_mistakes()
    return dotted.strip(), parsed.values["value"]


def _set(document: Document, dotted: str, value: object, flag: str) -> None:
    path: KeyPath = tuple(int(p) if p.isdecimal() else p for p in dotted.split("."))
    block: Any = document.values
    for depth, part in enumerate(path[:-1], start=1):
        if isinstance(block, dict) and block.get(str(part)) is None:
            block[str(part)] = {}
        block = _member(document, block, path[:depth], flag)
    if isinstance(block, dict):
        block[str(path[-1])] = value
    else:
        _member(document, block, path, flag)
        block[path[-1]] = value
    for places in (document.lines, document.sources):  # of what the value replaces
        for place in [place for place in places if place[: len(path)] == path]:
            del places[place]
    document.sources[path] = flag


def _member(document: Document, block: Any, path: KeyPath, flag: str) -> Any:
    part = path[-1]
    if isinstance(block, dict):
        return block[str(part)]
    if isinstance(block, list) and isinstance(part, int) and part < len(block):
        return block[part]
    dotted, above = (".".join(map(str, p)) for p in (path, path[:-1]))
    raise document.error(f"{flag} {dotted}: {above} is {_shown(block)}, which has no '{part}'")


def _problem(detail: ErrorDetails, quotes_value: bool) -> str:
    message = detail["msg"]
    got = f", got {_shown(detail['input'])}" if quotes_value else ""
    match detail["type"]:
        case "missing":
            return "this key is required"
        case "unknown_key" | "unknown_kind":
            return message
        case "model_type" | "dict_type":
            return f"expected a mapping of keys{got}"
        case "string_type" | "string_sub_type":
            return f"must be text{got}; put it in quotes"
        case "value_error":
            return message.removeprefix("Value error, ")
        case "tuple_type" | "list_type":
            return f"must be a list{got}"
    return f"{message.replace('Input should', 'must', 1)}{got}"


def _shown(value: object) -> str:
    shortened = reprlib.Repr()
    shortened.maxstring = shortened.maxother = 60
    return "nothing" if value is None else shortened.repr(value)
