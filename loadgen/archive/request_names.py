"""The `x-request-id` of each request of a run, and the way back from a server's log.

    namespace = uuid5(NAMESPACE_URL, run)
    x-request-id = uuid5(namespace, str(request_id))

    trace id = the digits of x-request-id, where `traceparent` is sent

A UUID, because some servers reject any other id (llama-cpp-python: 400). It is derived, so no table
holds it. Source of uuid5: RFC 9562 section 5.5.
"""

from __future__ import annotations

import re
from functools import cached_property
from hashlib import sha1
from uuid import NAMESPACE_URL, UUID, uuid5

from loadgen.records import Run

_UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")


def namespace_of(run_name: str) -> bytes:
    """The namespace of a run's request ids, 16 bytes."""
    return uuid5(NAMESPACE_URL, run_name).bytes


def request_name(namespace: bytes, request_id: int) -> str:
    """The `x-request-id` of a request. Computed without a UUID object, which takes three times as
    long, because a request may be encoded only when it is due."""
    digest = bytearray(sha1(b"%b%d" % (namespace, request_id), usedforsecurity=False).digest())
    digest[6] = digest[6] & 0x0F | 0x50  # version 5
    digest[8] = digest[8] & 0x3F | 0x80  # the variant of RFC 9562
    text = digest.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:32]}"


def trace_parent(name: str) -> str:
    """The W3C trace context of a request with this name: its hexadecimal digits are the trace id,
    and the first 16 of them the span id. Sampled.

    Source: W3C Recommendation Trace Context (2021), section 3.2."""
    digits = name.replace("-", "")
    return f"00-{digits}-{digits[:16]}-01"


def session_name(namespace: bytes, session_id: int) -> str:
    """The name of a session, the same in all its requests: uuid5(namespace, "session <id>")."""
    return str(uuid5(UUID(bytes=namespace), f"session {session_id}"))


class RequestNames:
    """The names of the requests 0 … `n_requests` − 1 of a run, as they stand in a server's log."""

    def __init__(self, run_name: str, n_requests: int) -> None:
        self._namespace, self._n_requests = namespace_of(run_name), n_requests
        self._run_name = run_name

    @classmethod
    def of(cls, run: Run) -> RequestNames:
        return cls(run.manifest.run, int(run.schedule_rows["request_id"][-1]) + 1)

    @cached_property
    def _request_ids(self) -> dict[str, int]:
        return {request_name(self._namespace, n): n for n in range(self._n_requests)}

    def request_id(self, name: str) -> int | None:
        """The request_id of a name; None for a request of another run or of a preflight."""
        return self._request_ids.get(name)

    def readable(self, text: str) -> str:
        """`text` with `<run>-<request_id>` in place of each name of this run."""
        return _UUID.sub(lambda found: self._readable(found[0]), text)

    def _readable(self, name: str) -> str:
        request_id = self._request_ids.get(name)
        return name if request_id is None else f"{self._run_name}-{request_id}"
