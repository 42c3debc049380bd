"""What cannot be served, in the shape of OpenAI's error object."""

from __future__ import annotations

import json
from collections.abc import Mapping


class WireError(Exception):
    """An answer to a request that cannot be served. `param` is the field at fault; `more` are
    further keys of the error object; `retry_after_s` becomes the Retry-After header."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        type_: str = "invalid_request_error",
        more: Mapping[str, object] | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.code = message, param, code
        self.status, self.type = status, type_
        self.more, self.retry_after_s = dict(more or {}), retry_after_s


def error_body(error: WireError) -> bytes:
    """The OpenAI error object."""
    what = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return json.dumps({"error": {**what, **error.more}}).encode()


def error_event(error: WireError) -> bytes:
    """An error after the stream began: in band, since the status line is gone."""
    return b"data: " + error_body(error) + b"\n\n"
