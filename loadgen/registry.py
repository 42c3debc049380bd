"""Plug-ins by name: a kind is one class, its fields are its YAML keys, its one method is its
behaviour.

Ours are declared as entry points in pyproject.toml (`name = "module:Class"`) like anybody else's,
and loaded on lookup: knowing that a kind exists imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from loadgen.errors import UnknownKind, nearest


class Plugin(BaseModel):
    """Base of every kind: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: ClassVar[str]


P = TypeVar("P", bound=Plugin)


class Registry(Generic[P]):
    """The kinds of one family. `noun` is the word for messages; `shorthand` turns a bare YAML
    value into a mapping."""

    def __init__(
        self,
        group: str,
        noun: str,
        shorthand: Callable[[object], Mapping[str, object] | None] | None = None,
    ) -> None:
        self.group, self.noun, self._shorthand = group, noun, shorthand
        self._local: dict[str, type[P]] = {}

    def register(self, cls: type[P]) -> type[P]:
        """Add a class under its `kind` (a decorator, for files given with `--plugin`); the later
        one wins."""
        self._local[cls.kind] = cls
        return cls

    def names(self) -> list[str]:
        return sorted({*self._local, *entry_points(group=self.group).names})

    def get(self, kind: str) -> type[P]:
        """The class of a kind. Raises UnknownKind with the nearest known name."""
        if kind in self._local:
            return self._local[kind]
        for point in entry_points(group=self.group, name=kind):
            cls: type[P] = point.load()
            return cls
        raise UnknownKind(f"unknown {self.noun} '{kind}'; {nearest(kind, self.names())}")

    def build(self, spec: object) -> P:
        """An instance from `{kind: …, **parameters}`, a shorthand, or an instance (returned as it
        is).

        Raises UnknownKind, ValueError (no mapping, no `kind`) or pydantic's ValidationError with
        the parameter's path.
        """
        if isinstance(spec, Plugin):
            return spec  # type: ignore[return-value]  # built by the caller from this family
        if not isinstance(spec, Mapping) and self._shorthand is not None:
            spec = self._shorthand(spec) or spec
        if not isinstance(spec, Mapping) or not isinstance(spec.get("kind"), str):
            known = ", ".join(self.names())
            raise ValueError(
                f"expected {{kind: …}} naming the {self.noun} (known: {known}), got {spec!r}"
            )
        parameters: dict[str, Any] = {k: v for k, v in spec.items() if k != "kind"}
        return self.get(spec["kind"]).model_validate(parameters)

    def __iter__(self) -> Iterator[type[P]]:
        return (self.get(name) for name in self.names())
