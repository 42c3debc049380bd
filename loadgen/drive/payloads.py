"""The bytes of each request, made ahead of the instant they are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loadgen.records import Schedule
from targets.base import Adapter, Request

_AHEAD_S = 10.0
_EAGER_BYTES = 256 << 20


@dataclass(frozen=True, repr=False)
class HttpHead:
    """What is the same in every request to one endpoint. `headers` may hold a secret: no repr."""

    host: str
    base_path: str
    headers: tuple[tuple[str, str], ...]

    def request(
        self, method: str, path: str, own: tuple[tuple[str, str], ...], body: bytes
    ) -> bytes:
        """A whole HTTP/1.1 request. Source: RFC 9112."""
        fields = [
            ("host", self.host),
            ("accept", "text/event-stream, application/json"),
            ("accept-encoding", "identity"),
            *self.headers,
            *own,
            ("content-length", str(len(body))),
        ]
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
        return f"{method} {self.base_path}{path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


class Payloads:
    """Encoded requests by row: all of them before the start where they fit, else a window that
    `extend` keeps `_AHEAD_S` in front of the clock. A row asked for before it was encoded (its
    release was not foreseeable) is encoded on the spot and counted in `n_late`."""

    def __init__(
        self,
        schedule: Schedule,
        render: Callable[[int], str],
        adapter: Adapter,
        head: HttpHead,
        run_name: str,
        temperature: float,
    ) -> None:
        self._schedule, self._render, self._adapter = schedule, render, adapter
        self._head, self._run_name, self._temperature = head, run_name, temperature
        self._ready: dict[int, bytes] = {}
        self._next = 0
        self.n_late = 0
        fits = int(schedule["input_tokens"].sum(dtype="u8")) * 6 < _EAGER_BYTES
        self._ahead_s = float("inf") if fits else _AHEAD_S

    def extend(self, now_s: float, at_most: int | None = None) -> bool:
        """Encode rows due before `now_s` + the window, at most so many; False when none is left."""
        scheduled_s = self._schedule["scheduled_s"]
        while self._next < len(scheduled_s) and (at_most is None or at_most > 0):
            if scheduled_s[self._next] > now_s + self._ahead_s:
                return False
            self._ready[self._next] = self._encode(self._next)
            self._next += 1
            at_most = None if at_most is None else at_most - 1
        return self._next < len(scheduled_s)

    def take(self, row: int) -> bytes:
        payload = self._ready.pop(row, None)
        if payload is None:
            self.n_late += 1
            return self._encode(row)
        return payload

    def _encode(self, row: int) -> bytes:
        request_id = int(self._schedule["request_id"][row])
        request = Request(
            prompt=self._render(row),
            output_tokens=int(self._schedule["output_tokens"][row]),
            temperature=self._temperature,
        )
        http = self._adapter.encode(request)
        own = (
            *http.headers,
            ("x-request-id", f"{self._run_name}-{request_id}"),
            ("x-seq", str(request_id)),
        )
        return self._head.request(http.method, http.path, own, http.body)
