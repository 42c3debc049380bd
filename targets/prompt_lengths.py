"""The measurement of prompt lengths by the server's own token counts: the line from characters to
tokens, and the requests of a calibration beyond it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import NamedTuple, Protocol, Self

from targets.base import Request
from targets.preflight_result import CharacterFit, two_point_fit
from targets.probe_request import ProbeAnswer

_FIT_CHARS = 128  # of the shorter prompt
_LONGER = 4  # the longer prompt has at least so many times the characters
_FIT_TOKENS = 2000  # about, of the longer prompt at most
_ANSWER_TOKENS = 64  # room for a template and an answer in a short context
_CALIBRATION_S = 60.0  # a server that needs longer for a dozen small prompts is not calibrated

Point = tuple[int, int]  # characters, prompt tokens


class ProbePrompt(Protocol):
    """A prompt to count: the messages if there are any, else the prompt."""

    @property
    def prompt(self) -> str: ...
    @property
    def messages(self) -> tuple[tuple[str, str], ...]: ...


CountRequests = Generator[tuple[ProbePrompt, ...], tuple[int | None, ...], tuple[bool | None, str]]
Calibrate = Callable[[CharacterFit | None, int], CountRequests]
"""(line of two prompts, longest prompt in tokens) → a generator. It yields prompts to count
together, receives their token counts, and returns `ok` and `detail` of the check."""
FirstPrompts = Callable[[int], Sequence[ProbePrompt]]
"""Longest prompt in tokens → the first prompts of the calibration that do not depend on the
line."""


class MeasuredLengths(NamedTuple):
    """The line (None: no line) and the check `prompt_fit`."""

    fit: CharacterFit | None
    ok: bool | None
    detail: str


class LengthProbe:
    """Measures lengths with requests of a single output token. `text_of(n)` returns about n
    characters of the workload's own text; `calibrate` continues from the line, and `first_prompts`
    are counted at the same time as the line. An async context manager that leaves no request
    behind.
    """

    def __init__(
        self,
        send: Callable[[Request], Awaitable[ProbeAnswer]],
        text_of: Callable[[int], str],
        calibrate: Calibrate | None,
        max_input_tokens: int,
        max_model_len: int | None,
        first_prompts: FirstPrompts,
    ) -> None:
        self._send, self._text_of, self._calibrate = send, text_of, calibrate
        self._first_prompts = first_prompts
        self._max_input_tokens = max_input_tokens
        self._limit = min(_FIT_TOKENS, (max_model_len or 2 * _FIT_TOKENS) - _ANSWER_TOKENS)
        # The point of the preflight's completion, which is still in progress at first.
        self._completion: asyncio.Future[Point | None] = asyncio.Future()
        self._task: asyncio.Task[MeasuredLengths] | None = None
        self._n_failed = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def start(self) -> None:
        """Begin to measure, at the same time as the server's other work."""
        if self._task is None:
            self._task = asyncio.create_task(self._measure())

    async def result(self, completion: Point | None) -> MeasuredLengths:
        """The lengths, once the server has no other work. The point of the preflight's completion
        replaces the shorter prompt of the line if the server rejects the longer prompt. If requests
        failed while the server had other work, they are repeated."""
        self._completion.set_result(completion)
        was_started = self._task is not None
        self.start()
        assert self._task is not None
        lengths = await self._task
        is_doubtful = was_started and self._n_failed and not lengths.ok
        return await self._measure() if is_doubtful else lengths

    async def _measure(self) -> MeasuredLengths:
        if self._calibrate is not None:
            first = self._first_prompts(self._limit)
            counting = asyncio.gather(*map(self._count, first))
            fit, counts = await asyncio.gather(self._line(), counting)
            counted = list(zip(first, counts, strict=True))
            return MeasuredLengths(fit, *await self._calibrated(self._calibrate, fit, counted))
        fit = await self._line()
        if fit is None:
            return MeasuredLengths(None, None, "not possible: prompt lengths are estimates")
        per_token = 1 / fit.tokens_per_char
        detail = f"{per_token:.2f} characters per token, {fit.overhead_tokens:.1f} overhead"
        return MeasuredLengths(fit, True, detail)

    async def _line(self) -> CharacterFit | None:
        """The line through two prompts of different lengths, counted together; through a longer
        prompt instead of the second if the workload's prompts are longer still."""
        texts = (self._text_of(_FIT_CHARS), self._text_of(_LONGER * _FIT_CHARS))
        first, longer = await asyncio.gather(*map(self._point, texts))
        if first is not None:
            target = max(1, min(self._max_input_tokens, _FIT_TOKENS))
            n_chars = target * first[0] // max(1, first[1])
            if n_chars > _LONGER * _FIT_CHARS:
                longer = await self._point(self._text_of(n_chars)) or longer
            longer = longer or await self._point(self._text_of(2 * _FIT_CHARS))
        shorter, longer = (await self._completion, first) if longer is None else (first, longer)
        return two_point_fit(shorter, longer)

    async def _calibrated(
        self,
        calibrate: Calibrate,
        fit: CharacterFit | None,
        counted: Sequence[tuple[ProbePrompt, int | None]],
    ) -> tuple[bool | None, str]:
        """Run the calibration and return its check. A prompt in `counted` is not sent again; any
        other is sent twice if the first answer has no count."""

        async def count(prompt: ProbePrompt) -> int | None:
            for counted_prompt, tokens in counted:
                if counted_prompt == prompt and tokens is not None:
                    return tokens
            return await self._count(prompt) or await self._count(prompt)

        steps = calibrate(fit, self._limit)
        until_s = time.monotonic() + _CALIBRATION_S
        try:
            prompts = next(steps)
            while True:
                counts: tuple[int | None, ...] = (None,) * len(prompts)
                if time.monotonic() < until_s:
                    counts = tuple(await asyncio.gather(*map(count, prompts)))
                prompts = steps.send(counts)
        except StopIteration as end:
            ok, detail = end.value
            return ok, detail

    async def _count(self, prompt: ProbePrompt) -> int | None:
        """The server's count of a prompt's tokens; None if not stated."""
        request = Request(prompt=prompt.prompt, messages=prompt.messages, output_tokens=1)
        return _prompt_tokens(await self._answer(request))

    async def _point(self, text: str) -> Point | None:
        return point_of(text, await self._answer(Request(prompt=text, output_tokens=1)))

    async def _answer(self, request: Request) -> ProbeAnswer:
        answer = await self._send(request)
        self._n_failed += answer.is_transient
        return answer


def point_of(text: str, answer: ProbeAnswer) -> Point | None:
    """(characters, tokens) of an answer's prompt; None if the server does not state the tokens."""
    tokens = _prompt_tokens(answer)
    return None if tokens is None else (len(text), tokens)


def _prompt_tokens(answer: ProbeAnswer) -> int | None:
    usage = answer.usage if answer.problem is None else None
    return None if usage is None else usage.input_tokens
