"""Sections of a JSON file as typed, frozen values, read with messages that name the key."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, KeysView
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from loadgen.errors import RunInvalid

S = TypeVar("S")
JsonObject = dict[str, Any]  # decoded JSON or YAML; its reader checks the keys
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|(\[\.\.\.\])")

if TYPE_CHECKING:
    NumberOrNull = float
else:

    class _OfFloats(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, float)

    class NumberOrNull(metaclass=_OfFloats):
        """A float that is null in JSON where it is NaN or infinite; null is read as NaN."""


class JsonSection(msgspec.Struct, frozen=True):
    """A JSON object; its fields are the keys. A subclass with `omit_defaults` leaves out the keys
    that hold their default, so that a reader can tell whether they apply.

    `section["key"]`, `section.get("key")` and `dict(section)` read the JSON form, for notebooks.
    """

    def to_json(self) -> JsonObject:
        content: JsonObject = msgspec.json.decode(encoded(self))
        return content

    def __getitem__(self, key: str) -> Any:
        return self.to_json()[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.to_json().get(key, default)

    def keys(self) -> KeysView[str]:
        return self.to_json().keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_json())

    def __contains__(self, key: object) -> bool:
        return key in self.to_json()


def encoded(value: object) -> bytes:
    """JSON of sections and plain values; scalars of numpy are written as numbers, NaN and
    infinities as null. Raises TypeError for any other type."""
    return msgspec.json.encode(value, enc_hook=_plain_number)


def _plain_number(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a value of type {type(value).__name__} in a JSON file")


def read_section(content: object, section: type[S], where: str) -> S:
    """A section from decoded JSON; keys that it does not have are skipped. Raises RunInvalid that
    names `where`, the key and its value for content of another form."""
    try:
        return msgspec.convert(content, section, dec_hook=_number_or_nan)
    except msgspec.ValidationError as error:
        raise RunInvalid(f"{where}: {_mistake(str(error), content)}") from None


def _number_or_nan(kind: type, value: object) -> float:
    if kind is not NumberOrNull:
        raise NotImplementedError(f"a field of type {kind}")
    if value is None:
        return math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ValueError("Expected `float | null`")


def _mistake(message: str, content: object) -> str:
    """`window.warmup_s: expected float, found "2 s"`, from msgspec's message."""
    problem, _, place = message.partition(" - at `$")
    path = place.removesuffix("`")
    missing = re.fullmatch("Object missing required field `(.*)`", problem)
    if missing is not None:
        return f"{path}.{missing[1]}: this key is missing".removeprefix(".")
    value, is_known = content, True
    for key, index, other in _STEP.findall(path):
        is_known = is_known and not other  # msgspec does not name a key of a mapping
        if is_known:
            value = value[key or int(index)]  # type: ignore[index]  # msgspec took the same path
    expected = re.sub(r", got .*", "", problem).replace("`", "").replace("Expected", "expected")
    if problem.startswith("Invalid enum value"):
        expected = "unknown value"
    found = f", found {_quoted(value)}" if is_known else ""
    return f"{path}: {expected}{found}".lstrip(".: ")


def _quoted(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:60]}…"
