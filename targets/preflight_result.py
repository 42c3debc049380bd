"""What a preflight found, and the pure parts of finding it: what to stop asking for, and the prompt
fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from loadgen.errors import TargetError
from targets.base import Adapter

CHECKS = (
    "reachable",
    "models",
    "completion",
    "streaming",
    "usage",
    "ignore_eos",
    "finish_reason",
    "max_model_len",
    "prompt_fit",
)


@dataclass(frozen=True)
class PreflightCheck:
    """One line of the preflight. `ok` None: not known, not asked, or worth a look but no fault.
    `consequence` is what it means for measuring, where a doctor says so.
    """

    check: str
    ok: bool | None
    detail: str
    consequence: str = ""


class CharacterFit(NamedTuple):
    """prompt tokens ≈ overhead_tokens + tokens_per_char · characters, from two prompts of the
    workload's own text.
    """

    overhead_tokens: float
    tokens_per_char: float


@dataclass(frozen=True)
class Preflight:
    """What the probe found. `adapter` is the one given, with the model filled in and what the
    server refuses off.
    """

    adapter: Adapter
    checks: tuple[PreflightCheck, ...]
    fit: CharacterFit | None = None
    max_model_len: int | None = None
    fatal: str | None = None

    @property
    def model(self) -> str:
        return self.adapter.model

    @property
    def is_output_exact(self) -> bool:
        """Whether answers have the asked length; else it is a limit."""
        return self.adapter.ignore_eos and self._ok("ignore_eos") is True

    def _ok(self, name: str) -> bool | None:
        return next(check.ok for check in self.checks if check.check == name)

    def or_raise(self) -> Preflight:
        """Itself, or TargetError where a run would be meaningless."""
        if self.fatal is not None:
            raise TargetError(self.fatal)
        return self


def without_refused(adapter: Adapter, status: int, said: str) -> Adapter | None:
    """The adapter with one thing less asked, when a 400 or 422 may be about it; None when nothing
    is left to drop.

    What the answer names goes first; else running usage, then ignore_eos, then usage, in order of
    how often servers do not know them.
    """
    if status not in (400, 422):
        return None
    limit_field = getattr(adapter, "limit_field", None)  # of codecs that have two names for it
    if limit_field == "max_tokens" and "max_completion_tokens" in said:
        return adapter.model_copy(update={"limit_field": "max_completion_tokens"})
    steps: list[tuple[str, tuple[str, ...]]] = [
        ("continuous_usage", ("continuous_usage", "stream_options")),
        ("ignore_eos", ("ignore_eos", "min_tokens")),
        ("include_usage", ("stream_options", "include_usage")),
    ]
    asked = [step for step in steps if getattr(adapter, step[0])]
    named = [step for step in asked if any(word in said for word in step[1])]
    for name, _ in named or asked:
        return adapter.model_copy(update={name: False})
    return None


def two_point_fit(
    shorter: tuple[int, int] | None, longer: tuple[int, int] | None
) -> CharacterFit | None:
    """The line through two (characters, tokens) points; None unless both exist and tokens grow with
    characters.
    """
    if shorter is None or longer is None or longer[0] <= shorter[0] or longer[1] <= shorter[1]:
        return None
    slope = (longer[1] - shorter[1]) / (longer[0] - shorter[0])
    return CharacterFit(shorter[1] - slope * shorter[0], slope)
