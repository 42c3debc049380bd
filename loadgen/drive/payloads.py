"""Encoded bytes of each request, prepared before its send time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from loadgen.drive.request_names import namespace_of, request_name
from loadgen.records import LimitsS, Schedule, own_limits
from targets.base import Adapter, Request
from targets.safe_text import redact


class PromptText(Protocol):
    """Content of a request: `messages` if there are any, else `prompt`."""

    @property
    def prompt(self) -> str: ...
    @property
    def messages(self) -> tuple[tuple[str, str], ...]: ...


_AHEAD_S = 10.0
_EAGER_BYTES = 256 << 20


@dataclass(frozen=True, repr=False)
class HttpHead:
    """Parts of the HTTP head that all requests to an endpoint share. `body_secrets` are the secrets
    of the body. No repr: `headers` may hold a secret."""

    host: str
    base_path: str
    headers: tuple[tuple[str, str], ...]
    body_secrets: tuple[str, ...] = ()

    def redact(self, text: str) -> str:
        """A server's text without the values of `headers` and `body_secrets`, also where the text
        ends inside a value: some servers echo a key that they reject."""
        values = [value for _, value in self.headers]
        bare = [value.partition(" ")[2] for value in values]  # without the scheme, such as "Bearer"
        return redact(text, [*values, *bare, *self.body_secrets]) if text else text

    def request(
        self, method: str, path: str, own: tuple[tuple[str, str], ...], body: bytes
    ) -> bytes:
        """An HTTP/1.1 request with the further headers `own`, each name once: `headers` replace
        `own`, and both replace the defaults. Source: RFC 9112."""
        fields = {"host": self.host, "accept-encoding": "identity"}
        fields |= {name.lower(): value for name, value in (*own, *self.headers)}
        fields["content-length"] = str(len(body))
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{method} {self.base_path}{path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


class Payloads:
    """Encoded requests by row.

    A schedule of up to about 256 MiB is encoded before the start. Of a larger schedule, `extend`
    encodes the rows due in the next 10 s, and `prepare` the rows with parents. A row whose prompt
    quotes the server's answer to another row (`waits_for(row)`, None if it quotes none) can be
    encoded only after `answered`; `prepare` does that, between two events of the loop. `take`
    encodes a row that is not ready and counts it in `n_late`.

    `render(row, answer)` returns the content of a row. `tenants` are the names by tenant_id, "" for
    a tenant that is not sent; `slo_limits_s` are the limits of each class by class_id. Requests
    that belong to no run are not `is_numbered`.
    """

    def __init__(
        self,
        schedule: Schedule,
        render: Callable[[int, str | None], PromptText],
        adapter: Adapter,
        head: HttpHead,
        run_name: str,
        tenants: Sequence[str] = ("",),
        waits_for: Callable[[int], int | None] = lambda row: None,
        tokens_per_char: float = 1.0,
        slo_limits_s: Sequence[LimitsS] = (),
        is_numbered: bool = True,
    ) -> None:
        self._schedule, self._render, self._adapter = schedule, render, adapter
        self._head, self._namespace, self._tenants = head, namespace_of(run_name), tenants
        self._waits_for, self._is_numbered = waits_for, is_numbered
        self._is_child: list[bool] = (schedule["n_parents"] > 0).tolist()
        self._ready: dict[int, bytes] = {}
        self._answers: dict[int, Callable[[], str]] = {}  # parent's row: function that reads it
        self._taken: set[int] = set()
        self._own_limits_s, self._class_limits_s = own_limits(schedule), slo_limits_s
        self._next = 0
        self.n_late = 0
        n_bytes = int(schedule["input_tokens"].sum(dtype="u8")) / tokens_per_char
        self._ahead_s = float("inf") if n_bytes < _EAGER_BYTES else _AHEAD_S

    def extend(self, now_s: float, for_s: float = float("inf")) -> bool:
        """Encodes the rows due within the window, for about `for_s` seconds. Returns True if rows
        of the window remain. Rows that are sent already are skipped."""
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
        """Whether a row with parents is encoded only after the start."""
        return self._ahead_s != float("inf") or self._waits_for(row) is not None

    def answered(self, row: int, answer: Callable[[], str]) -> None:
        """Stores the answer to a row; `answer` is called only if a later row quotes it."""
        self._answers[row] = answer

    def prepare(self, row: int) -> None:
        """Encodes a row with parents, unless it is taken or quotes an answer still to come."""
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
        content = self._render(row, answer)
        request = Request(
            prompt=content.prompt,
            output_tokens=int(plan["output_tokens"]),
            temperature=round(float(plan["temperature"]), 6),
            messages=content.messages,
            priority=int(plan["priority"]),
            tenant=self._tenants[int(plan["tenant_id"])],
        )
        ttft_s, tpot_s, e2e_s = self._limits_of(row)
        if ttft_s or tpot_s or e2e_s:
            request = replace(request, ttft_slo_s=ttft_s, tpot_slo_s=tpot_s, e2e_slo_s=e2e_s)
        http = self._adapter.encode(request)
        own = (
            *http.headers,
            ("x-request-id", request_name(self._namespace, request_id)),
            *((("x-seq", str(request_id)),) if self._is_numbered else ()),
        )
        return self._head.request(http.method, http.path, own, http.body)

    def _limits_of(self, row: int) -> LimitsS:
        """TTFT, TPOT and E2E limit of a request: its own, if any, else its class's."""
        class_id = int(self._schedule["class_id"][row])
        limits_s = self._class_limits_s
        of_class_s = limits_s[class_id] if class_id < len(limits_s) else (None,) * 3
        own_s = self._own_limits_s.get(row, of_class_s)
        return tuple(own or other for own, other in zip(own_s, of_class_s, strict=True))
