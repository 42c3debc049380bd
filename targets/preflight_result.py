"""The result of a preflight, and the pure functions behind it: the next field to leave out of a
rejected request, and the prompt fit.
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
    """A line of the preflight. `ok` None: unknown, not checked, or worth a look but no fault.
    `consequence` is the effect on measuring, shown by the doctor.
    """

    check: str
    ok: bool | None
    detail: str
    consequence: str = ""


class CharacterFit(NamedTuple):
    """prompt tokens ≈ overhead_tokens + tokens_per_char · characters, fitted to two prompts of the
    workload's own text.
    """

    overhead_tokens: float
    tokens_per_char: float


@dataclass(frozen=True)
class Preflight:
    """The result. `adapter` is the given codec with the model filled in and the features that the
    server rejects switched off. `fatal` is the reason why a run would be meaningless, if it would.
    """

    adapter: Adapter
    checks: tuple[PreflightCheck, ...]
    fit: CharacterFit | None = None
    max_model_len: int | None = None
    fatal: str | None = None

    @property
    def model(self) -> str:
        return self.adapter.model

    def or_raise(self) -> Preflight:
        """The result itself. Raises TargetError if a run would be meaningless."""
        if self.fatal is not None:
            raise TargetError(self.fatal)
        return self


def without_rejected(adapter: Adapter, status: int, body: str) -> Adapter | None:
    """The adapter with one feature less, if a 400 or 422 may be about a feature; None if none is
    left.

    A feature that the body names goes first; otherwise running usage, then ignore_eos, then usage,
    in order of how often servers reject them.
    """
    if status not in (400, 422):
        return None
    limit_field = getattr(adapter, "limit_field", None)  # of codecs with two names for the limit
    if limit_field == "max_tokens" and "max_completion_tokens" in body:
        return adapter.model_copy(update={"limit_field": "max_completion_tokens"})
    features: list[tuple[str, tuple[str, ...]]] = [
        ("continuous_usage", ("continuous_usage", "stream_options")),
        ("ignore_eos", ("ignore_eos", "min_tokens")),
        ("include_usage", ("stream_options", "include_usage")),
    ]
    requested = [(name, words) for name, words in features if getattr(adapter, name)]
    named = [name for name, words in requested if any(word in body for word in words)]
    for name in named or [name for name, _ in requested]:
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
