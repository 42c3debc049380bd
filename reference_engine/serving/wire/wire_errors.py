"""Errors of the HTTP API, in the shape of OpenAI's error object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field


@dataclass(eq=False)
class WireError(Exception):
    """An error response. `param` names the field at fault; `more` are further keys of the error
    object; `retry_after_s` becomes the Retry-After header."""

    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    status: int = 400
    more: Mapping[str, object] = field(default_factory=dict)
    retry_after_s: int | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def type(self) -> str:
        """OpenAI's error type, which follows from the status."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


def error_body(error: WireError) -> bytes:
    """The JSON of an error response."""
    fields = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
        **error.more,
    }
    return json.dumps({"error": fields}).encode()
