"""Pydantic fields for quantities with a unit, and models as plain data.

Apart from `loadgen.units`, so that reading a flag imports no pydantic (50 ms).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, PlainSerializer
from pydantic_core import PydanticSerializationError

from loadgen.errors import interrupt_behind
from loadgen.units import (
    parse_duration_s,
    parse_level_per_s,
    parse_rate_per_s,
    parse_share,
    write_duration,
    write_level,
    write_rate,
    write_share,
)


def as_data(
    model: BaseModel, mode: str = "json", *, exclude_defaults: bool = False
) -> dict[str, Any]:
    """A model as plain data; in mode `json` durations and rates are strings.

    Raises KeyboardInterrupt if Ctrl-C arrives during the call. Pydantic replaces it by an error of
    its own, and nested serializers lose the cause, so every serializer calls this function: the
    code that saves a run's measurements waits for KeyboardInterrupt.
    """
    try:
        return model.model_dump(mode=mode, by_alias=True, exclude_defaults=exclude_defaults)
    except PydanticSerializationError as error:
        raise interrupt_behind(error) or error from None


Seconds = Annotated[
    float, BeforeValidator(parse_duration_s), PlainSerializer(write_duration, when_used="json")
]
"""A pydantic field: a duration string in files, seconds in Python."""
Rate = Annotated[
    float, BeforeValidator(parse_rate_per_s), PlainSerializer(write_rate, when_used="json")
]
"""A pydantic field: a rate string in files, events per second in Python."""
Level = Annotated[
    float, BeforeValidator(parse_level_per_s), PlainSerializer(write_level, when_used="json")
]
"""A rate that may be zero, for rates that vary in time."""
Share = Annotated[
    float, BeforeValidator(parse_share), PlainSerializer(write_share, when_used="json")
]
"""A pydantic field: a percentage or a fraction in files, a fraction in [0, 1] in Python."""
