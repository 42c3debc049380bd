"""Lists in scenario files: read from YAML as tuples, and never empty."""

from __future__ import annotations

from typing import TypeVar

from pydantic import AfterValidator, Field

T = TypeVar("T")


def _filled(items: tuple[T, ...]) -> tuple[T, ...]:
    # Field(min_length=1) would say so of every list with one bad entry as well
    if not items:
        raise ValueError("is empty; name at least one")
    return items


FROM_LIST = Field(strict=False)
"""A tuple that YAML writes as a list."""
FILLED = AfterValidator(_filled)
