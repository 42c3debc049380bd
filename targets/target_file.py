"""A target file's YAML with the line of every key, so that each mistake is one line that says where
it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from loadgen.errors import TargetFileError, nearest

Path = tuple[str, ...]


@dataclass(frozen=True)
class TargetFile:
    """The mapping a file holds, its name for messages, and the 1-based line of each key path."""

    name: str
    values: Mapping[str, Any]
    lines: Mapping[Path, int]

    def at(self, path: Path) -> str:
        """`file:line: key.path` of a key, or of its nearest known parent."""
        known = path
        while known and known not in self.lines:
            known = known[:-1]
        where = f"{self.name}:{self.lines[known]}" if known in self.lines else self.name
        return f"{where}: {'.'.join(path)}" if path else where


def parse_target_file(text: str, name: str) -> TargetFile:
    """Read the YAML of a target file. Raises TargetFileError on bad YAML, a repeated key, or
    anything but a mapping.
    """
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise TargetFileError(f"{name}:{line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise TargetFileError(f"{name}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or tree is None:
        raise TargetFileError(
            f"{name}: expected 'url: http://…' and other keys, found {values!r:.60}"
        )
    lines: dict[Path, int] = {}
    for path, line in _keys(tree, ()):
        if path in lines:
            raise TargetFileError(
                f"{name}:{line}: {'.'.join(path)}: repeated; first on line {lines[path]}"
            )
        lines[path] = line
    return TargetFile(name, values, lines)


def explain(error: ValidationError, file: TargetFile, model: type[BaseModel]) -> TargetFileError:
    """Every mistake pydantic found, one `file:line: key: problem` line each; values are never
    repeated.
    """
    return TargetFileError(
        "\n".join(_line(e, file, model) for e in error.errors(include_input=False))
    )


def _line(error: ErrorDetails, file: TargetFile, model: type[BaseModel]) -> str:
    path = tuple(str(part) for part in error["loc"])
    kind, message = error["type"], error["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return f"{file.at(path)}: unknown key; {_fix(path, model)}"
    if kind == "missing":
        return f"{file.at(path)}: missing; write e.g. {path[-1]}: http://localhost:8000"
    if kind == "string_type":
        message += " (put it in quotes)"
    return f"{file.at(path)}: {message}"


def _fix(path: Path, model: type[BaseModel]) -> str:
    if path == ("api_key",):
        return "a key is not written to a file: export it and name its variable in api_key_env"
    fields = model.model_fields
    for part in path[:-1]:
        inner = fields[part].annotation
        assert isinstance(inner, type), path
        assert issubclass(inner, BaseModel), path
        fields = inner.model_fields
    return nearest(path[-1], fields)


def _keys(node: yaml.Node, path: Path) -> Iterator[tuple[Path, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            yield inner, key.start_mark.line + 1
            yield from _keys(value, inner)
