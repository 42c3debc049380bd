"""Encoded bytes of each request, prepared before its send time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from loadgen.archive.request_names import namespace_of, request_name, session_name
from loadgen.drive.dispatch import rows_by_time
from loadgen.manifest.json_section import JsonObject
from loadgen.records import OWN_SLO, SCHEDULE, Edges, LimitsS, Schedule, Times
from loadgen.workload.dialogue import GrowingSchedule
from targets.base import Adapter, Request
from targets.safe_text import SecretForms, redact


class PromptText(Protocol):
    """Content of a request: `messages` if there are any, else `prompt`; `fields` of its body."""

    @property
    def prompt(self) -> str: ...
    @property
    def messages(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def fields(self) -> JsonObject: ...


ENCODE_SHARE = 0.1
"""Share of the time, at most, in which requests are encoded while others are being measured."""
_AHEAD_ROWS = 4096
_AHEAD_BYTES = 256 << 20
_TIMED_BATCHES, _TIMED_ROWS = 4, 32  # by which the time to encode a row is measured
_ID, _NUMBER = "x-request-id", "x-seq"
_PLACE = {name: place for place, name in enumerate(SCHEDULE.names or ())}
_CLASS, _OWN_SLOS = _PLACE["class_id"], [_PLACE[name] for name in OWN_SLO.values()]


@dataclass(frozen=True, repr=False)
class HttpHead:
    """Parts of the HTTP head that all requests to an endpoint share. `body_secrets` are the secrets
    of the body, `query` is empty or starts with `?`. Each of `session_headers` has the name of a
    request's session as its value. No repr: `headers` may hold a secret."""

    host: str
    base_path: str
    headers: tuple[tuple[str, str], ...]
    body_secrets: tuple[str, ...] = ()
    query: str = ""
    session_headers: tuple[str, ...] = ()

    def redact(self, text: str) -> str:
        """A server's text without the values of `headers` and `body_secrets`, also where the text
        ends inside a value: some servers echo a key that they reject."""
        return redact(text, self._secrets()) if text else text

    def secret_forms(self) -> SecretForms:
        """The same values as they may stand in the bytes of a response."""
        return SecretForms(self._secrets())

    def _secrets(self) -> list[str]:
        values = [value for _, value in self.headers]
        bare = [value.partition(" ")[2] for value in values]  # without the scheme, such as "Bearer"
        return [*values, *bare, *self.body_secrets]

    def template(self, method: str, path: str, own: Sequence[tuple[str, str | None]]) -> str:
        """The head of an HTTP/1.1 request with the further headers `own`, each name once: `headers`
        replace `own`, and both replace the defaults. In place of the content length, and of each
        value of `own` that is None, it has `{content-length}` or the name in braces. Source: RFC
        9112."""
        fields: dict[str, str | None] = {"host": self.host, "accept-encoding": "identity"}
        fields |= {name.lower(): value for name, value in (*own, *self.headers)}
        fields["content-length"] = None
        lines = "".join(
            f"{_literal(name)}: {f'{{{name}}}' if value is None else _literal(value)}\r\n"
            for name, value in fields.items()
        )
        return f"{_literal(f'{method} {self.base_path}{path}{self.query}')} HTTP/1.1\r\n{lines}\r\n"


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


class Payloads:
    """Encoded requests by row, at most about 4096 of them or 256 MiB at a time.

    A schedule that is not larger is encoded before the start, except rows that quote an answer. Of
    a larger schedule, `extend` encodes the next rows without parents, in order of their scheduled
    time, and `prepare` the rows with parents as soon as a parent is sent. Where rows are due faster
    than they can be encoded meanwhile, as many more are encoded before the start. A row whose
    prompt quotes the server's answer to another row (`waits_for(row)`, None if it quotes none) can
    be encoded only after `answered`; `prepare` does that, between two events of the loop. `take`
    encodes a row that is not ready and counts it in `n_late`.

    `render(row, answer, reasoning)` returns the content of a row. `tenants` are the names by
    tenant_id, "" for a tenant that is not sent; `slo_limits_s` are the limits of each class by
    class_id. Requests that belong to no run are not `is_numbered`. `on_rows` receives the rows of
    `add_rows` first, so that `render` and `waits_for` have them.
    """

    def __init__(
        self,
        schedule: Schedule,
        render: Callable[[int, str | None, str], PromptText],
        adapter: Adapter,
        head: HttpHead,
        run_name: str,
        tenants: Sequence[str] = ("",),
        waits_for: Callable[[int], int | None] = lambda row: None,
        tokens_per_char: float = 1.0,
        slo_limits_s: Sequence[LimitsS] = (),
        is_numbered: bool = True,
        on_rows: Callable[[Schedule, Edges], None] = lambda rows, edges: None,
    ) -> None:
        self._on_rows = on_rows
        self._rows, self._render, self._adapter = GrowingSchedule(schedule), render, adapter
        self._head, self._namespace, self._tenants = head, namespace_of(run_name), tenants
        self._waits_for, self._is_numbered = waits_for, is_numbered
        self._ready: dict[int, bytes] = {}  # the window
        self._prepared: dict[int, bytes] = {}  # rows with parents
        self._answers: dict[int, Callable[[], tuple[str, str]]] = {}  # by the parent's row
        self._is_taken = bytearray(len(schedule))
        self._has_own_limits = any(schedule[name].any() for name in OWN_SLO.values())
        self._class_limits_s = slo_limits_s
        self._heads: dict[object, str] = {}  # templates by method, path and headers of the codec
        self.n_late = 0
        n_bytes = int(schedule["input_tokens"].sum(dtype="u8")) / tokens_per_char
        self._n_ahead = min(
            _AHEAD_ROWS, max(1, round(_AHEAD_BYTES * len(schedule) / (n_bytes + 1)))
        )
        self.is_whole = len(schedule) <= self._n_ahead
        """Whether every row that quotes no answer is encoded before the start."""
        self._order = np.arange(len(schedule)) if self.is_whole else rows_by_time(schedule)
        self._times_s = schedule["scheduled_s"][self._order]
        self._next = 0  # in `_order`

    def encode_first(self) -> None:
        """Encodes the rows to be ready at the start."""
        if not self.is_whole:
            row_s = min(self._batch_s() for _ in range(_TIMED_BATCHES)) / _TIMED_ROWS
            self._n_ahead = max(self._n_ahead, rows_ahead(self._times_s, ENCODE_SHARE / row_s))
        self.extend()

    def _batch_s(self) -> float:
        """The time to encode `_TIMED_ROWS` further rows, seconds; infinite if fewer are left."""
        started_s = time.monotonic()
        for _ in range(_TIMED_ROWS):
            if self._next == len(self._order):
                return float("inf")
            self._encode_next()
        return time.monotonic() - started_s

    def extend(self, for_s: float = float("inf")) -> bool:
        """Encodes further rows, for about `for_s` seconds, until the window is full. Returns True
        if it is not full and rows remain. Rows that are sent already are skipped."""
        until_s = time.monotonic() + for_s
        while self._next < len(self._order) and len(self._ready) < self._n_ahead:
            if time.monotonic() > until_s:
                return True
            self._encode_next()
        return False

    def _encode_next(self) -> None:
        row = int(self._order[self._next])
        self._next += 1
        if not self._is_taken[row] and self._waits_for(row) is None:
            self._ready[row] = self._encode(row)

    def add_rows(self, rows: Schedule, edges: Edges) -> None:
        """Adds rows with parents after the last."""
        self._on_rows(rows, edges)
        self._rows.add_rows(rows)
        self._is_taken += bytes(len(rows))

    def comes_late(self, row: int) -> bool:
        """Whether a row with parents is encoded only after the start."""
        return not self.is_whole or self._waits_for(row) is not None

    def quotes(self, row: int) -> int | None:
        """The row whose answer is in the prompt of a row; None without one."""
        return self._waits_for(row)

    def answered(self, row: int, answer: Callable[[], tuple[str, str]]) -> None:
        """Stores the answer to a row; `answer` returns its text and its reasoning, and is called
        only if a later row quotes it."""
        self._answers[row] = answer

    def prepare(self, row: int) -> None:
        """Encodes a row with parents, unless it is taken or quotes an answer still to come."""
        parent = self._waits_for(row)
        if parent is not None and parent not in self._answers:
            return
        if not (self._is_taken[row] or row in self._ready or row in self._prepared):
            self._prepared[row] = self._encode(row)

    def take(self, row: int) -> bytes:
        self._is_taken[row] = 1
        payload = self._ready.pop(row, None) or self._prepared.pop(row, None)
        if payload is None:
            self.n_late += 1
            return self._encode(row)
        return payload

    def _encode(self, row: int) -> bytes:
        plan: Any = self._rows[row].item()  # a field of a numpy row takes 0.1 µs more
        request_id = plan[_PLACE["request_id"]]
        parent = self._waits_for(row)
        answer = (None, "") if parent is None else self._answers.pop(parent)()
        content = self._render(row, *answer)
        ttft_s, tpot_s, e2e_s = self._limits_of(plan)
        http = self._adapter.encode(
            Request(
                prompt=content.prompt,
                output_tokens=plan[_PLACE["output_tokens"]],
                temperature=round(plan[_PLACE["temperature"]], 6),
                messages=content.messages,
                fields=content.fields,
                priority=plan[_PLACE["priority"]],
                tenant=self._tenants[plan[_PLACE["tenant_id"]]],
                ttft_slo_s=ttft_s,
                tpot_slo_s=tpot_s,
                e2e_slo_s=e2e_s,
            )
        )
        head = self._heads.get((http.method, http.path, http.headers))
        if head is None:
            numbers = ((_NUMBER, None),) if self._is_numbered else ()
            sessions = ((name, None) for name in self._head.session_headers)
            own = (*http.headers, *sessions, (_ID, None), *numbers)
            head = self._head.template(http.method, http.path, own)
            self._heads[http.method, http.path, http.headers] = head
        values = {
            _ID: request_name(self._namespace, request_id),
            _NUMBER: request_id,
            "content-length": len(http.body),
        }
        if self._head.session_headers:
            session = session_name(self._namespace, plan[_PLACE["session_id"]])
            values |= dict.fromkeys(self._head.session_headers, session)
        return head.format_map(values).encode("latin-1") + http.body

    def _limits_of(self, plan: tuple[Any, ...]) -> LimitsS:
        """TTFT, TPOT and E2E limit of a request: its own, if any, else its class's."""
        class_id, limits_s = plan[_CLASS], self._class_limits_s
        of_class_s = limits_s[class_id] if class_id < len(limits_s) else (None,) * 3
        if not self._has_own_limits:
            return of_class_s
        own_s = [plan[place] for place in _OWN_SLOS]
        return tuple(own or other for own, other in zip(own_s, of_class_s, strict=True))


def rows_ahead(times_s: Times, rows_per_s: float) -> int:
    """The rows that must be ready at any time, if `rows_per_s` are encoded from time 0 on, so that
    each of the rows due at `times_s` [n] (seconds, sorted) is ready in time: the largest number of
    rows due in an interval beyond those encoded in it."""
    if not len(times_s):
        return 0
    surplus = np.arange(1, len(times_s) + 1) - rows_per_s * np.maximum(times_s, 0.0)
    lowest = np.minimum(0.0, np.minimum.accumulate(surplus - 1.0))  # at most `rows_ahead` are ready
    return int(np.ceil((surplus - lowest).max() - 1e-9))
