"""Plug-ins by name: a kind is one class, its fields are its YAML keys, its one method is its
behaviour.

Ours are declared as entry points in pyproject.toml (`name = "module:Class"`) like anybody else's,
and loaded on lookup: knowing that a kind exists imports nothing.
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
from loadgen.units import as_data

T = TypeVar("T")


class Block(BaseModel):
    """A mapping in a file: immutable, and an unknown key is an error that names the nearest one."""

    # Built on first use: a command needs some of the kinds in a module, never all of them.
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
        known = [field.alias or name for name, field in cls.model_fields.items()]
        is_secret = cls.model_config.get("hide_input_in_errors", False)
        raise ValidationError.from_exception_data(
            cls.__name__, _named(details, known), hide_input=is_secret
        )


class Strict(Block):
    """A block without conversions: the text "64" is no number and `true` no count."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Plugin(Block):
    """Base of every kind: its fields are its keys, and `kind` is the name it is found by."""

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


class Registry(Generic[P]):
    """The kinds of one family. `noun` is the word for messages; `shorthand` turns a bare YAML
    value into a mapping.

    As a pydantic annotation (`arrivals: Annotated[Arrivals, ARRIVALS]`) it builds the field from
    what a file says and writes it back, with the key path of every mistake inside it.
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
        """Add a class under its `kind` (a decorator, for files given with `--plugin`); the later
        one wins."""
        self._local[cls.kind] = cls
        return cls

    @cached_property
    def _declared(self) -> EntryPoints:
        found: EntryPoints = _installed().select(group=self.group)
        return found

    def names(self) -> list[str]:
        return sorted({*self._local, *self._declared.names})

    def get(self, kind: str) -> type[P]:
        """The class of a kind. Raises UnknownKind with the nearest known name."""
        if kind in self._local:
            return self._local[kind]
        for point in self._declared.select(name=kind):
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
        except UnknownKind as error:  # the mistake sits at the key `kind`, not at the block
            line = _line_error("unknown_kind", str(error), ("kind",), spec)
            raise ValidationError.from_exception_data(self.noun, [line]) from None


@cache
def _installed() -> Any:
    """All entry points (of a type that changed with Python 3.12). Asked for once: it reads the
    metadata of every installed package, some 10 ms."""
    return entry_points()


def _named(details: list[ErrorDetails], known: list[str]) -> list[InitErrorDetails]:
    """The same mistakes with each unknown key's nearest neighbour, less the required keys that were
    only misspelt: those are one mistake, not two."""
    unknown = {d["loc"]: str(d["loc"][-1]) for d in details if d["type"] == "extra_forbidden"}
    hints = {loc: f"unknown key '{key}'; {nearest(key, known)}" for loc, key in unknown.items()}
    told = "".join(hints.values())
    return [
        _line_error("unknown_key", hints[detail["loc"]], detail["loc"], detail["input"])
        if detail["loc"] in hints
        else _line_error(detail["type"], detail["msg"], detail["loc"], detail["input"])
        for detail in details
        if detail["type"] != "missing" or f"did you mean '{detail['loc'][-1]}'?" not in told
    ]


def _line_error(kind: str, message: str, loc: tuple[int | str, ...], got: Any) -> InitErrorDetails:
    text = PydanticCustomError(kind, "{message}", {"message": message})
    return InitErrorDetails(type=text, loc=loc, input=got)
