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
    "fields",
    "streaming",
    "usage",
    "ignore_eos",
    "finish_reason",
    "max_model_len",
    "prompt_fit",
    "run_requests",
)
CHECKS_WITHOUT_TOKENS = (*CHECKS[:4], "results", "usage", *CHECKS[8:])
"""The checks of a codec whose answers have no tokens."""


@dataclass(frozen=True)
class PreflightCheck:
    """A line of the preflight. `ok` None: unknown, not checked, or worth a look but no fault.
    `is_stop`: a run would be meaningless. `consequence` is the effect on measuring, shown by the
    doctor. `is_checked` is False where an earlier failure left no way to check.
    """

    check: str
    ok: bool | None
    detail: str
    consequence: str = ""
    is_stop: bool = False
    is_checked: bool = True


def unchecked(name: str) -> PreflightCheck:
    """The line of a check that an earlier failure left out."""
    return PreflightCheck(name, None, "not checked", is_checked=False)


class RunRequest(NamedTuple):
    """A request as the run sends it: its lengths in words, and its bytes."""

    lengths: str
    payload: bytes


class Longest(NamedTuple):
    """The request of a plan with the most tokens, prompt and answer together; `place` is the
    `file:line` of its prompt, "" for a prompt that is not recorded."""

    input_tokens: int
    output_tokens: int
    place: str = ""


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
    `models` are those that the server lists, each with its longest sequence; None: no list.
    `longest_wait_s` is the longest time to the first token of an answer, 0 without any.
    """

    adapter: Adapter
    checks: tuple[PreflightCheck, ...]
    fit: CharacterFit | None = None
    max_model_len: int | None = None
    fatal: str | None = None
    models: dict[str, int | None] | None = None
    longest_wait_s: float = 0.0

    @property
    def model(self) -> str:
        return self.adapter.model

    def or_raise(self) -> Preflight:
        """The result itself. Raises TargetError if a run would be meaningless."""
        if self.fatal is not None:
            raise TargetError(self.fatal)
        return self


class FieldChange(NamedTuple):
    """A change of a field of the codec after a rejection; `is_named`: the rejection names it."""

    field: str
    value: object
    is_named: bool


class _Optional(NamedTuple):
    """A field of the codec that a server may reject: the words that name it in a rejection, and its
    value after the rejection."""

    words: tuple[str, ...]
    value: object
    shown: str


_OPTIONAL = {
    "continuous_usage": _Optional(
        ("continuous_usage", "stream_options"), False, "stream_options.continuous_usage_stats"
    ),
    "ignore_eos": _Optional(("ignore_eos",), False, "ignore_eos"),
    "min_tokens": _Optional(("min_tokens",), False, "min_tokens"),
    "include_usage": _Optional(
        ("stream_options", "include_usage"), False, "stream_options.include_usage"
    ),
    "sends_temperature": _Optional(
        ("temperature",), False, "temperature (the server's default applies)"
    ),
    "limit_field": _Optional(
        ("max_completion_tokens", "max_tokens"), "max_completion_tokens", "max_tokens"
    ),
    "documents_field": _Optional(("texts",), "texts", "documents"),
}  # in order of how often servers reject them
_RENAMED = {
    "limit_field": "max_completion_tokens replaces max_tokens",
    "documents_field": "texts replaces documents",
}


def after_rejection(adapter: Adapter, status: int, body: str) -> FieldChange | None:
    """The change of the adapter after a 400 or 422: of a field that the body names, else of the
    next optional field. None for another status, and if nothing is left to change."""
    if status not in (400, 422):
        return None
    left = [
        (field, option)
        for field, option in _OPTIONAL.items()
        if getattr(adapter, field, option.value) != option.value  # codecs may lack a field
        and (field != "min_tokens" or adapter.ignore_eos)  # sent only with it
        and (adapter.stream or field not in ("continuous_usage", "include_usage"))
    ]
    for field, option in left:
        if any(word in body for word in option.words):
            return FieldChange(field, option.value, True)
    return FieldChange(left[0][0], left[0][1].value, False) if left else None


def fields_check(requested: Adapter, accepted: Adapter) -> PreflightCheck:
    """The fields of the first request that the server refused."""
    changed = [f for f in _OPTIONAL if getattr(accepted, f, None) != getattr(requested, f, None)]
    refused = [_OPTIONAL[field].shown for field in changed if field not in _RENAMED]
    details = [f"refused and not sent: {', '.join(refused)}"] if refused else []
    details += [words for field, words in _RENAMED.items() if field in changed]
    ok = False if "sends_temperature" in changed else None if refused else True
    return PreflightCheck("fields", ok, "; ".join(details) or "all accepted")


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
