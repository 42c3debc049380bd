"""The extended preflight of a doctor: distance, connections, framing, chunking and prefix cache of
a server. All times are taken on our monotonic clock; times that the server states are not used.

It sends about fifty small requests, never two at a time. Like the preflight it never raises for the
behaviour of the server: a check that cannot be made says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from targets import preflight_checks
from targets.base import Adapter, Request
from targets.endpoint import Endpoint
from targets.http_session import Disconnected, HttpSession
from targets.preflight_checks import EXTENDED_CHECKS, Chunking, ConnectionCounts, Head, Repeats
from targets.preflight_result import Preflight, PreflightCheck
from targets.probe_request import ProbeAnswer, connect, fetch_models, send, send_probe
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

TextOf = Callable[[int, int], str]  # (number of characters, about; number of the text) → text


async def extended_preflight(
    endpoint: Endpoint, preflight: Preflight, text_of: TextOf, timeout_s: float = 30.0
) -> tuple[PreflightCheck, ...]:
    """The checks of EXTENDED_CHECKS, in that order, of a server that passed its preflight; that of
    chunks only where answers are streamed.
    `text_of` returns a different text for each number."""
    async with HttpSession(endpoint.route) as session:
        run = _ExtendedRun(endpoint, preflight, text_of, timeout_s, session)
        names = [n for n in EXTENDED_CHECKS if n != "chunking" or preflight.adapter.stream]
        return tuple([await run.check(name) for name in names])


class _Unknown(Exception):
    """A check cannot be made; does not leave `check`."""


@dataclass
class _ExtendedRun:
    """An extended preflight in progress."""

    endpoint: Endpoint
    preflight: Preflight
    text_of: TextOf
    timeout_s: float
    session: HttpSession
    n_texts: int = 0
    small: tuple[int, int] = (0, 0)  # small requests, and the connections that they used
    keep_alive: str = ""

    async def check(self, name: str) -> PreflightCheck:
        checks = {
            "round_trip": self._round_trip,
            "http": self._http,
            "connections": self._connections,
            "chunking": self._chunking,
            "prefix_cache": self._prefix_cache,
        }
        try:
            check = await checks[name]()
        except _Unknown as unknown:
            check = PreflightCheck(name, None, str(unknown))
        except TimeoutError:
            check = PreflightCheck(name, None, f"no answer within {self.timeout_s:g} s")
        except OSError as error:
            check = PreflightCheck(name, None, self.endpoint.error_text(error))
        return replace(check, detail=self.endpoint.redact(strip_controls(check.detail)))

    @property
    def adapter(self) -> Adapter:
        return self.preflight.adapter

    async def _round_trip(self) -> PreflightCheck:
        connect_s = [await connect(self.endpoint, self.timeout_s) for _ in range(_CONNECTS)]
        n_before, request_s = self.session.n_opened, []
        for _ in range(_SMALL_REQUESTS):
            start_s = time.monotonic()
            models = await fetch_models(self.session, self.endpoint, self.timeout_s)
            request_s.append(time.monotonic() - start_s)
            if not models.status:
                raise _Unknown(f"{models.request}: {models.problem}")
        self.small = (_SMALL_REQUESTS, self.session.n_opened - n_before)
        return preflight_checks.round_trip(connect_s, request_s[1:])  # the first had to connect

    async def _http(self) -> PreflightCheck:
        for _ in range(_ATTEMPTS - 1):
            with suppress(Disconnected):  # a connection closed unannounced
                return preflight_checks.http(await self._head())
        return preflight_checks.http(await self._head())

    async def _head(self) -> Head:
        request = self.adapter.encode(Request(self._new_text(64), 2))
        async with send(self.session, self.endpoint, request, self.timeout_s) as response:
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
                is_streamed=self.adapter.stream,
            )

    async def _connections(self) -> PreflightCheck:
        n_before = self.session.n_opened
        for _ in range(_STREAMS):
            await self._answer(self._new_text(64), 1)
        # The first stream may use a connection that was open before it.
        n_streams = max(1, self.session.n_opened - n_before)
        return preflight_checks.connections(
            ConnectionCounts(*self.small, _STREAMS, n_streams, self.keep_alive)
        )

    async def _chunking(self) -> PreflightCheck:
        """Check the answer that came in most reads: a client without the CPU for a while joins
        chunks."""
        answers = [await self._answer(self._new_text(64), _LONG_ANSWER)]
        while len(answers) < _ATTEMPTS and all(map(_is_blocked, answers)):
            answers.append(await self._answer(self._new_text(64), _LONG_ANSWER))
        answer = max(answers, key=lambda answer: len(answer.token_reads_s))
        n_running = answer.n_counted_events
        stated = answer.usage.output_tokens if answer.usage else None
        return preflight_checks.chunking(
            Chunking(
                tokens=stated if stated is not None and answer.is_possible(stated) else None,
                chunks=answer.n_token_events,
                reads=len(answer.token_reads_s),
                is_counted=n_running == answer.n_token_events,
            )
        )

    async def _prefix_cache(self) -> PreflightCheck:
        n_chars = self._long_prompt_chars()
        await self._answer(self._new_text(n_chars), 1)  # a server may warm up at a new length
        cold, warm = [], []
        for _ in range(_PAIRS):
            text = self._new_text(n_chars)
            cold.append(await self._answer(text, 1))
            warm.append(await self._answer(text, 1))
        usage = cold[-1].usage
        return preflight_checks.prefix_cache(
            Repeats(
                prompt_tokens=usage.input_tokens if usage else None,
                cold_s=[answer.first_token_s for answer in cold],
                warm_s=[answer.first_token_s for answer in warm],
                cold_cached=[a.usage.cached_tokens if a.usage else None for a in cold],
                warm_cached=[a.usage.cached_tokens if a.usage else None for a in warm],
            )
        )

    def _long_prompt_chars(self) -> int:
        """The characters of a prompt of about 2000 tokens, or half of the model's maximum."""
        n_tokens = min(_LONG_PROMPT_TOKENS, (self.preflight.max_model_len or 2**20) // 2)
        fit = self.preflight.fit
        if fit is None:
            return round(n_tokens / _TOKENS_PER_CHAR)
        return max(1, round((n_tokens - fit.overhead_tokens) / fit.tokens_per_char))

    def _new_text(self, n_chars: int) -> str:
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
            raise _Unknown("the answer has no token")
        return answer


def _is_blocked(answer: ProbeAnswer) -> bool:
    """Whether chunks came in blocks."""
    n_per_read = preflight_checks.chunks_per_read(answer.n_token_events, len(answer.token_reads_s))
    return n_per_read > preflight_checks.BLOCK
