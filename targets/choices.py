"""Body fields that request several answers at once. A request is one stream: the gaps between
tokens of several interleaved streams belong to none of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COUNTS = (
    "n",
    "best_of",
    "num_return_sequences",
    "num_generations",
    "candidate_count",
    "candidatecount",
    "num_beams",
)
"""Numbers of answers, in lower case: OpenAI, vLLM, Hugging Face, Gemini."""
_SWITCHES = ("use_beam_search",)
_INSIDE = ("extra_body", "sampling_params", "parameters", "generation_config", "generationconfig")
"""Objects of a body that hold such fields, in lower case."""


def several_answers(body: Mapping[str, Any], place: str = "extra_body") -> str | None:
    """The error message for a body that requests several answers; None for another. `place` is the
    key of the body."""
    for key, value in body.items():
        at, name = f"{place}.{key}", str(key).lower()
        if isinstance(value, Mapping):
            found = several_answers(value, at) if name in _INSIDE else None
            if found is not None:
                return found
            continue
        is_several = name in _SWITCHES and value is True
        if is_several or (name in _COUNTS and (_number(value) or 1) > 1):
            return (
                f"{at}: several answers per request are several streams in one, whose "
                "TPOT and ITL cannot be told apart; remove it, and send as many requests instead"
            )
    return None


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
