"""The questions a doctor asks a server beyond the preflight: distance, connections, framing,
chunking, prefix cache. All by our own monotonic clock; no clock of the server's is believed.

About fifty small requests, one at a time. Like the preflight it never raises for what a server
does: what could not be found out is a check that says why.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from targets import preflight_checks
from targets.base import Adapter, Request
from targets.endpoint import Endpoint
from targets.http_session import Disconnected, HttpSession
from targets.preflight_checks import EXAMINED, Chunking, ConnectionCounts, Head, Repeats
from targets.preflight_result import Preflight, PreflightCheck
from targets.probe_request import ProbeAnswer, connect, fetch_models, send_probe
from targets.safe_text import strip_controls

_CONNECTS = 5
_SMALL_REQUESTS = 20
_STREAMS = 4
_LONG_ANSWER = 64
_PAIRS = 3
_READ_BYTES = 1 << 20
_ATTEMPTS = 3  # as in the preflight: a server may fail one request in ten
_LONG_PROMPT_TOKENS = 2000
_TOKENS_PER_CHAR = 0.25

TextOf = Callable[[int, int], str]  # (about so many characters, which text) → a text of its own


async def examine(
    endpoint: Endpoint, found: Preflight, text_of: TextOf, timeout_s: float = 30.0
) -> tuple[PreflightCheck, ...]:
    """The checks of EXAMINED, in that order, of a server that passed its preflight."""
    async with HttpSession(endpoint.route) as session:
        patient = _Patient(endpoint, found, text_of, timeout_s, session)
        return tuple([await patient.check(name) for name in EXAMINED])


class _Unknown(Exception):
    """A question without an answer; leaves no further than `check`."""


@dataclass
class _Patient:
    endpoint: Endpoint
    found: Preflight
    text_of: TextOf
    timeout_s: float
    session: HttpSession
    n_texts: int = 0
    small: tuple[int, int] = (0, 0)  # small requests, and the connections they took
    keep_alive: str = ""

    async def check(self, name: str) -> PreflightCheck:
        questions: dict[str, Callable[[], Awaitable[PreflightCheck]]] = {
            "round_trip": self._round_trip,
            "http": self._http,
            "connections": self._connections,
            "chunking": self._chunking,
            "prefix_cache": self._prefix_cache,
        }
        try:
            found = await questions[name]()
            return replace(found, detail=self.endpoint.redact(strip_controls(found.detail)))
        except _Unknown as unknown:
            return PreflightCheck(name, None, self.endpoint.redact(strip_controls(str(unknown))))
        except TimeoutError:
            return PreflightCheck(name, None, f"no answer within {self.timeout_s:g} s")
        except OSError as error:
            return PreflightCheck(name, None, self.endpoint.error_text(error))

    @property
    def adapter(self) -> Adapter:
        return self.found.adapter

    async def _round_trip(self) -> PreflightCheck:
        connect_s = [await connect(self.endpoint, self.timeout_s) for _ in range(_CONNECTS)]
        opened, request_s = self.session.n_opened, []
        for _ in range(_SMALL_REQUESTS):
            start_s = time.monotonic()
            models = await fetch_models(self.session, self.endpoint, self.timeout_s)
            request_s.append(time.monotonic() - start_s)
            if not models.status:
                raise _Unknown(f"GET /v1/models: {models.problem}")
        self.small = (_SMALL_REQUESTS, self.session.n_opened - opened)
        return preflight_checks.round_trip(connect_s, request_s[1:])  # the first one connected

    async def _http(self) -> PreflightCheck:
        for _ in range(_ATTEMPTS - 1):
            with suppress(Disconnected):  # a connection closed unannounced
                return preflight_checks.http(await self._head())
        return preflight_checks.http(await self._head())

    async def _head(self) -> Head:
        sent = self.adapter.encode(Request(self._text(64), 2))
        async with self.session.request(
            sent.method,
            self.endpoint.address.http_url + sent.path,
            [*sent.headers, *self.endpoint.request_headers()],
            sent.body,
            self.timeout_s,
        ) as response:
            await response.read(_READ_BYTES)
            if response.status != 200:
                raise _Unknown(f"answered {response.status}")
            self.keep_alive = response.header("keep-alive").decode("latin-1")
            return Head(
                version=response.version,
                content_type=response.content_type,
                content_encoding=response.header("content-encoding").decode("latin-1").lower(),
                is_chunked=b"chunked" in response.header("transfer-encoding").lower(),
                has_length=bool(response.header("content-length")),
            )

    async def _connections(self) -> PreflightCheck:
        opened = self.session.n_opened
        for _ in range(_STREAMS):
            await self._answer(self._text(64), 1)
        # The first stream may use a connection that was left open before it.
        streams = max(1, self.session.n_opened - opened)
        return preflight_checks.connections(
            ConnectionCounts(*self.small, _STREAMS, streams, self.keep_alive)
        )

    async def _chunking(self) -> PreflightCheck:
        """Of the answer that came in most pieces: a client that was kept from reading saw fewer."""
        answers = [await self._answer(self._text(64), _LONG_ANSWER)]
        while len(answers) < _ATTEMPTS and not any(map(_is_in_pieces, answers)):
            answers.append(await self._answer(self._text(64), _LONG_ANSWER))
        answer = max(answers, key=lambda one: len(one.token_reads_s))
        usage = answer.usage
        running = [d for d in answer.deltas if d.is_token and d.usage is not None]
        return preflight_checks.chunking(
            Chunking(
                tokens=usage.output_tokens if usage else None,
                chunks=answer.n_token_events,
                reads=len(answer.token_reads_s),
                is_counted=len(running) == answer.n_token_events,
            )
        )

    async def _prefix_cache(self) -> PreflightCheck:
        n_chars = self._long_prompt_chars()
        await self._answer(self._text(n_chars), 1)  # a server may warm up at a new length
        cold, warm = [], []
        for _ in range(_PAIRS):
            text = self._text(n_chars)
            cold.append(await self._answer(text, 1))
            warm.append(await self._answer(text, 1))
        counts = [answer.usage.input_tokens if answer.usage else None for answer in cold]
        return preflight_checks.prefix_cache(
            Repeats(
                prompt_tokens=counts[-1],
                cold_s=[answer.first_token_s for answer in cold],
                warm_s=[answer.first_token_s for answer in warm],
                cold_cached=[_cached(answer) for answer in cold],
                warm_cached=[_cached(answer) for answer in warm],
            )
        )

    def _long_prompt_chars(self) -> int:
        """Characters of a prompt of some 2000 tokens, or half of what the model takes."""
        n_tokens = min(_LONG_PROMPT_TOKENS, (self.found.max_model_len or 2**20) // 2)
        fit = self.found.fit
        if fit is None:
            return round(n_tokens / _TOKENS_PER_CHAR)
        return max(1, round((n_tokens - fit.overhead_tokens) / fit.tokens_per_char))

    def _text(self, n_chars: int) -> str:
        """A text that was not sent before."""
        self.n_texts += 1
        return self.text_of(n_chars, self.n_texts)

    async def _answer(self, prompt: str, tokens: int) -> ProbeAnswer:
        request = Request(prompt=prompt, output_tokens=tokens)
        for _ in range(_ATTEMPTS):
            answer = await send_probe(
                self.session, self.endpoint, self.adapter, request, self.timeout_s
            )
            if answer.problem is None or not answer.is_transient:
                break
        if answer.problem is not None:
            raise _Unknown(answer.problem)
        if not answer.token_reads_s:
            raise _Unknown("the answer carried no token")
        return answer


def _is_in_pieces(answer: ProbeAnswer) -> bool:
    return (
        preflight_checks.per_read(answer.n_token_events, len(answer.token_reads_s))
        <= preflight_checks.BLOCK
    )


def _cached(answer: ProbeAnswer) -> int | None:
    return answer.usage.cached_tokens if answer.usage else None
