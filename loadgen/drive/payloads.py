"""The bytes of each request, made ahead of the instant they are sent."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from loadgen.records import LimitsS, Schedule, own_limits
from targets.base import Adapter, Request
from targets.safe_text import redact


class PromptText(Protocol):
    """What a request says: messages if it has any, else a prompt."""

    @property
    def prompt(self) -> str: ...
    @property
    def messages(self) -> tuple[tuple[str, str], ...]: ...


_AHEAD_S = 10.0
_EAGER_BYTES = 256 << 20


def request_name(run_name: str) -> str:
    """A run's name as `x-request-id` begins with it: visible ASCII, for a directory may be called
    anything and a header not."""
    return re.sub(r"[^!-~]", "_", run_name)


@dataclass(frozen=True, repr=False)
class HttpHead:
    """What is the same in every request to one endpoint. `headers` may hold a secret: no repr."""

    host: str
    base_path: str
    headers: tuple[tuple[str, str], ...]

    def redact(self, text: str) -> str:
        """A text of the server's without what `headers` hold: some echo the key they refuse, and
        an excerpt may end inside it."""
        values = [value for _, value in self.headers]
        bare = [value.partition(" ")[2] for value in values]  # without "Bearer", or whatever it is
        return redact(text, [*values, *bare]) if text else text

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
    `extend` keeps `_AHEAD_S` in front of the clock, and rows with parents as `prepare` is told.

    A row whose words hold the server's own answers (`waits_for` names whose) can only be written
    after `answered`; `prepare` does that between two events of the loop. A row asked for before it
    was encoded (its release was not foreseeable, or came at once) is encoded on the spot and
    counted in `n_late`. `tenants` are the words of tenant_id, "" for one that is not sent;
    `promises` what each class was promised, by class_id.
    """

    def __init__(
        self,
        schedule: Schedule,
        ask: Callable[[int, str | None], PromptText],
        adapter: Adapter,
        head: HttpHead,
        run_name: str,
        tenants: Sequence[str] = ("",),
        waits_for: Callable[[int], int | None] = lambda row: None,
        tokens_per_char: float = 1.0,
        promises: Sequence[LimitsS] = (),
    ) -> None:
        self._schedule, self._ask, self._adapter = schedule, ask, adapter
        self._head, self._run_name, self._tenants = head, request_name(run_name), tenants
        self._waits_for = waits_for
        self._is_child: list[bool] = (schedule["n_parents"] > 0).tolist()
        self._ready: dict[int, bytes] = {}
        self._answers: dict[int, Callable[[], str]] = {}  # parent's row: its answer, to be read
        self._taken: set[int] = set()
        self._own_slo_s, self._promises = own_limits(schedule), promises
        self._next = 0
        self.n_late = 0
        n_bytes = int(schedule["input_tokens"].sum(dtype="u8")) / tokens_per_char
        self._ahead_s = float("inf") if n_bytes < _EAGER_BYTES else _AHEAD_S

    def extend(self, now_s: float, for_s: float = float("inf")) -> bool:
        """Encode rows due before `now_s` + the window, for about `for_s` seconds; True when there
        is more to do at once. Rows that were sent before their turn came are passed over."""
        scheduled_s = self._schedule["scheduled_s"]
        until_s = time.monotonic() + for_s
        while self._next < len(scheduled_s):
            row = self._next
            if scheduled_s[row] > now_s + self._ahead_s:
                return False
            if time.monotonic() > until_s:
                return True
            is_now = not self._is_child[row] or self._ahead_s == float("inf")
            if is_now and row not in self._taken and self._waits_for(row) is None:
                self._ready[row] = self._encode(row)
            self._next += 1
        return False

    def comes_late(self, row: int) -> bool:
        """Whether a row cannot have been encoded before the start."""
        return self._ahead_s != float("inf") or self._waits_for(row) is not None

    def answered(self, row: int, answer: Callable[[], str]) -> None:
        """The answer to a row is in; `answer` reads it, when and if it is needed."""
        self._answers[row] = answer

    def prepare(self, row: int) -> None:
        """Encode a row with parents, if nobody has taken it and everything it says is known."""
        parent = self._waits_for(row)
        if parent is not None and parent not in self._answers:
            return
        if row not in self._ready and row not in self._taken:
            self._ready[row] = self._encode(row)

    def take(self, row: int) -> bytes:
        if self._is_child[row] or row >= self._next:
            self._taken.add(row)
        payload = self._ready.pop(row, None)
        if payload is None:
            self.n_late += 1
            return self._encode(row)
        return payload

    def _encode(self, row: int) -> bytes:
        plan = self._schedule[row]
        request_id = int(plan["request_id"])
        parent = self._waits_for(row)
        answer = None if parent is None else self._answers.pop(parent)()
        asked = self._ask(row, answer)
        request = Request(
            prompt=asked.prompt,
            output_tokens=int(plan["output_tokens"]),
            temperature=round(float(plan["temperature"]), 6),
            messages=asked.messages,
            priority=int(plan["priority"]),
            tenant=self._tenants[int(plan["tenant_id"])],
        )
        ttft_s, tpot_s, e2e_s = self._limits_of(row)
        if ttft_s or tpot_s or e2e_s:
            request = replace(request, ttft_slo_s=ttft_s, tpot_slo_s=tpot_s, e2e_slo_s=e2e_s)
        http = self._adapter.encode(request)
        own = (
            *http.headers,
            ("x-request-id", f"{self._run_name}-{request_id}"),
            ("x-seq", str(request_id)),
        )
        return self._head.request(http.method, http.path, own, http.body)

    def _limits_of(self, row: int) -> LimitsS:
        """What the request was promised: by itself, else as one of its class."""
        class_id = int(self._schedule["class_id"][row])
        everybodys = self._promises[class_id] if class_id < len(self._promises) else (None,) * 3
        own_s = self._own_slo_s.get(row)
        if own_s is None:
            return everybodys
        return tuple(own or other for own, other in zip(own_s, everybodys, strict=True))
