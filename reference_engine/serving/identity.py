"""The constant properties of a server: its model, limits and version."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from loadgen.errors import nearest
from reference_engine.serving.wire.wire_errors import WireError

_ANSWER_PREFIXES = ("cmpl-", "chatcmpl-", "resp-", "msg-")


def possible_ids(name: str) -> tuple[str, ...]:
    """The request ids that a client may mean: its own `x-request-id` or the engine's id, and the
    engine's id within the `id` of an answer."""
    inner = (name.removeprefix(p) for p in _ANSWER_PREFIXES if name.startswith(p))
    return (name, *inner)


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """Properties that do not change while the server runs. `cache` holds the settings of the KV
    memory; `started_utc` is in Unix seconds."""

    model: str
    max_model_len: int
    version: str
    device: str
    cache: Mapping[str, str] = field(default_factory=dict)
    started_utc: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, model: str | None) -> None:
        """Raises WireError (404) if `model` is the name of another model."""
        if model is not None and model != self.model:
            raise WireError(
                f"model '{model}' is not served here; {nearest(model, [self.model])}",
                param="model",
                code="model_not_found",
                status=404,
            )
