"""JSON of which only usable members are read: a member of another form than its field is absent."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec

T = TypeVar("T", bound=msgspec.Struct)
_COUNT_DIGITS = 12  # more than any count has


class Unusable(ValueError):
    """A member that may not be absent has another form than its field."""


def decode_usable(data: bytes | msgspec.Raw, wanted: type[T], strict: frozenset[str]) -> T:
    """JSON as `wanted`, a msgspec Struct all of whose fields are optional.

    At every depth a member that does not fit its field is left out, and an element that does not
    fit is left out of its list. Raises ValueError for data that is no JSON object, and Unusable for
    a member named in `strict` that does not fit, unless it is empty.
    """
    members = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    values = {}
    for field in msgspec.structs.fields(wanted):
        if field.encode_name not in members:
            continue
        try:
            values[field.name] = _usable(members[field.encode_name], field.type, strict)
        except Unusable:
            raise
        except ValueError as error:
            if field.name in strict and _holds(members[field.encode_name]):
                raise Unusable(str(error)) from None
    return wanted(**values)


def _holds(data: msgspec.Raw) -> bool:
    """Whether a value is neither null nor empty; text that is not UTF-8 is something."""
    try:
        return bool(msgspec.json.decode(data))
    except ValueError:
        return True


def _usable(data: msgspec.Raw, wanted: Any, strict: frozenset[str]) -> Any:
    """Raises ValueError for a value that does not fit `wanted`."""
    try:
        return msgspec.json.decode(data, type=wanted)
    except ValueError:
        inner = _without_none(wanted)
        if get_origin(inner) is list:
            return _usable_elements(data, get_args(inner)[0], strict)
        if isinstance(get_origin(inner) or inner, type(msgspec.Struct)):
            return decode_usable(data, inner, strict)
        if (get_args(inner) or (inner,))[0] is int:
            return msgspec.convert(_plain_count(msgspec.json.decode(data)), type=wanted)
        raise


def _plain_count(stated: Any) -> Any:
    """12 for "12" and 12.0; any other value as it is."""
    if isinstance(stated, str) and stated.isascii() and stated.isdigit():
        return int(stated[:_COUNT_DIGITS])
    return int(stated) if isinstance(stated, float) and stated.is_integer() else stated


def _usable_elements(data: msgspec.Raw, wanted: Any, strict: frozenset[str]) -> list[Any]:
    elements = []
    for element in msgspec.json.decode(data, type=list[msgspec.Raw]):
        try:
            elements.append(_usable(element, wanted, strict))
        except Unusable:
            raise
        except ValueError:
            continue
    return elements


def _without_none(wanted: Any) -> Any:
    """The kind of an optional field; the field's own type if it has several kinds."""
    if get_origin(wanted) not in (Union, UnionType):
        return wanted
    kinds = [kind for kind in get_args(wanted) if kind is not NoneType]
    return kinds[0] if len(kinds) == 1 else wanted
