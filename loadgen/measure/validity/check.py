"""One line of the validity table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ValidityCheck:
    """One line of the validity table. `ok` None: not known here. A failed `is_gate` invalidates."""

    name: str
    ok: bool | None
    detail: str
    is_gate: bool = False
