"""Registries of plug-ins by name: a kind is a class with its YAML keys as fields.

Built-in kinds and those of other packages are declared as entry points (`name = "module:Class"` in
pyproject.toml) and imported on lookup; listing the names of a family imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property
from importlib.metadata import EntryPoints, entry_points
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ModelWrapValidatorHandler,
    SerializationInfo,
    ValidationError,
    model_validator,
)
from pydantic_core import (
    CoreSchema,
    ErrorDetails,
    InitErrorDetails,
    PydanticCustomError,
    core_schema,
)

from loadgen.errors import UnknownKind, nearest
from loadgen.fields import as_data
from loadgen.manifest.json_section import JsonObject

T = TypeVar("T")


class Block(BaseModel):
    """A mapping in a file: immutable; the error for an unknown key names the nearest valid key."""

    # Validators are built on first use: a command needs some of the kinds in a module, never all.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @model_validator(mode="wrap")
    @classmethod
    def _name_unknown_keys(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            details = error.errors()
            if all(detail["type"] != "extra_forbidden" for detail in details):
                raise
        keys = [field.alias or name for name, field in cls.model_fields.items()]
        is_secret = cls.model_config.get("hide_input_in_errors", False)
        raise ValidationError.from_exception_data(
            cls.__name__, _with_hints(details, keys), hide_input=is_secret
        )


class Strict(Block):
    """A block without type conversion: the text "64" is not a number and `true` is not a count."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Plugin(Block):
    """Base of every kind: its fields are its YAML keys, `kind` is its registered name."""

    kind: ClassVar[str]


def _not_empty(items: tuple[T, ...]) -> tuple[T, ...]:
    # Field(min_length=1) would also complain about every list with one invalid item
    if not items:
        raise ValueError("is empty; name at least one")
    return items


FROM_LIST = Field(strict=False)
"""A tuple field that YAML writes as a list."""
FILLED = AfterValidator(_not_empty)
"""A list with at least one item."""

P = TypeVar("P", bound=Plugin)


def bare_word(spec: object) -> Mapping[str, object] | None:
    """The shorthand of a family whose kinds need no parameters: the name of the kind alone."""
    return {"kind": spec} if isinstance(spec, str) else None


class Registry(Generic[P]):
    """The kinds of one family. `noun` names the family in messages; `shorthand` turns a bare YAML
    value into a mapping, or returns None.

    As a pydantic annotation (`arrivals: Annotated[Arrivals, ARRIVALS]`) a registry validates and
    serializes the field; errors inside the kind keep their full key path.
    """

    def __init__(
        self,
        group: str,
        noun: str,
        shorthand: Callable[[object], Mapping[str, object] | None] | None = None,
    ) -> None:
        self.group, self.noun, self._shorthand = group, noun, shorthand
        self._local: dict[str, type[P]] = {}

    def register(self, cls: type[P]) -> type[P]:
        """Add a class under its `kind`, replacing an earlier class of that name (a decorator for
        `--plugin` files)."""
        self._local[cls.kind] = cls
        return cls

    @cached_property
    def _declared(self) -> EntryPoints:
        declared: EntryPoints = _installed().select(group=self.group)
        return declared

    def names(self) -> list[str]:
        return sorted({*self._local, *self._declared.names})

    def get(self, kind: str) -> type[P]:
        """The class of a kind. Raises UnknownKind that names the nearest registered kind."""
        if kind in self._local:
            return self._local[kind]
        for point in self._declared.select(name=kind):
            cls: type[P] = point.load()
            return cls
        raise UnknownKind(f"unknown {self.noun} '{kind}'; {nearest(kind, self.names())}")

    def build(self, spec: object) -> P:
        """An instance from `{kind: …, **parameters}` or a shorthand; an instance is returned as is.

        Raises UnknownKind, ValueError (not a mapping, no `kind`) or pydantic's ValidationError with
        the parameter's path.
        """
        if isinstance(spec, Plugin):
            return spec  # type: ignore[return-value]  # the caller built it from this family
        if not isinstance(spec, Mapping) and self._shorthand is not None:
            spec = self._shorthand(spec) or spec
        if not isinstance(spec, Mapping) or not isinstance(spec.get("kind"), str):
            known = ", ".join(self.names())
            raise ValueError(
                f"expected {{kind: …}} naming the {self.noun} (known: {known}), got {spec!r}"
            )
        parameters: JsonObject = {k: v for k, v in spec.items() if k != "kind"}
        return self.get(spec["kind"]).model_validate(parameters)

    def dump(self, plugin: P, info: SerializationInfo) -> dict[str, object]:
        """The inverse of `build`: `{kind: …, **parameters}`, `kind` first."""
        parameters = as_data(plugin, info.mode, exclude_defaults=info.exclude_defaults)
        return {"kind": plugin.kind, **parameters}

    def __iter__(self) -> Iterator[type[P]]:
        return (self.get(name) for name in self.names())

    def __get_pydantic_core_schema__(
        self, source: type[P], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.chain_schema(
            [
                core_schema.no_info_plain_validator_function(self._build_field),
                core_schema.is_instance_schema(source),
            ],
            serialization=core_schema.plain_serializer_function_ser_schema(
                self.dump, info_arg=True
            ),
        )

    def _build_field(self, spec: object) -> P:
        try:
            return self.build(spec)
        except UnknownKind as error:  # locate the error at the key `kind`, not at the block
            line = _line_error("unknown_kind", str(error), ("kind",), spec)
            raise ValidationError.from_exception_data(self.noun, [line]) from None


@cache
def _installed() -> Any:
    """All entry points (their type changed with Python 3.12). Cached, because reading the metadata
    of every installed package takes some 10 ms."""
    return entry_points()


def _with_hints(details: list[ErrorDetails], keys: list[str]) -> list[InitErrorDetails]:
    """The same errors, each unknown key with the nearest valid one.

    A misspelt required key is one mistake: its "missing" error is left out.
    """
    unknown = {d["loc"]: str(d["loc"][-1]) for d in details if d["type"] == "extra_forbidden"}
    hints = {loc: f"unknown key '{key}'; {nearest(key, keys)}" for loc, key in unknown.items()}
    all_hints = "".join(hints.values())
    return [
        _line_error("unknown_key", hints[detail["loc"]], detail["loc"], detail["input"])
        if detail["loc"] in hints
        else _line_error(detail["type"], detail["msg"], detail["loc"], detail["input"])
        for detail in details
        if detail["type"] != "missing" or f"did you mean '{detail['loc'][-1]}'?" not in all_hints
    ]


def _line_error(
    kind: str, message: str, loc: tuple[int | str, ...], value: Any
) -> InitErrorDetails:
    text = PydanticCustomError(kind, "{message}", {"message": message})
    return InitErrorDetails(type=text, loc=loc, input=value)
