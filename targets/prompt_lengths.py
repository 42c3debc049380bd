"""What a server makes of prompts of known lengths, by its own counts: the line from characters to
tokens, and whatever a calibration wants to know beyond it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import NamedTuple, Protocol, Self

from targets.base import Request
from targets.preflight_result import CharacterFit, two_point_fit
from targets.probe_request import ProbeAnswer

_FIT_CHARS = 128  # of the shorter prompt
_LONGER = 4  # times that, of the longer one at least
_FIT_TOKENS = 2000  # about, of the longer prompt at most
_ANSWER_TOKENS = 64  # room left for a template and an answer where the context is short
_CALIBRATION_S = 60.0  # a server that takes longer over a dozen small prompts is not calibrated

Point = tuple[int, int]  # characters, prompt tokens


class ProbePrompt(Protocol):
    """What a question says: messages if it has any, else a prompt."""

    @property
    def prompt(self) -> str: ...
    @property
    def messages(self) -> tuple[tuple[str, str], ...]: ...


Questions = Generator[tuple[ProbePrompt, ...], tuple[int | None, ...], tuple[bool | None, str]]
Calibrate = Callable[[CharacterFit | None, int], Questions]
"""From the line of two prompts and the longest prompt to ask, in tokens: questions to the server
that are asked together, to be sent its counts of prompt tokens, and at the end a check's `ok` and
detail."""
Ahead = Callable[[int], Sequence[ProbePrompt]]
"""What a calibration will ask before anything else, as far as that is known without the line; given
the longest prompt to ask."""


class MeasuredLengths(NamedTuple):
    """The line, if there is one, and the check `prompt_fit`."""

    fit: CharacterFit | None
    ok: bool | None
    detail: str


class LengthProbe:
    """Asks for one token at a time. `text_of(n)` gives about n characters of the workload's own
    text; `calibrate` asks on from the line, and `ahead` beside it. An async context manager that
    leaves nothing asked."""

    def __init__(
        self,
        ask: Callable[[Request], Awaitable[ProbeAnswer]],
        text_of: Callable[[int], str],
        calibrate: Calibrate | None,
        max_input_tokens: int,
        max_model_len: int | None,
        ahead: Ahead = lambda limit: (),
    ) -> None:
        self._ahead = ahead
        self._ask, self._text_of, self._calibrate = ask, text_of, calibrate
        self._max_input_tokens = max_input_tokens
        self._limit = min(_FIT_TOKENS, (max_model_len or 2 * _FIT_TOKENS) - _ANSWER_TOKENS)
        self._known: asyncio.Future[Point | None] = asyncio.get_running_loop().create_future()
        self._asking: asyncio.Task[MeasuredLengths] | None = None
        self._n_failed = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    def begin(self) -> None:
        """Ask from now on, beside whatever else the server is busy with."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._find())

    async def found(self, known: Point | None) -> MeasuredLengths:
        """What came of it; the server has nothing else to do any more. `known`, the completion's,
        stands in as the shorter point of the line where no longer one is taken. Where a server
        failed while it had more than this to do, it is asked once more."""
        self._known.set_result(known)
        had_begun = self._asking is not None
        self.begin()
        assert self._asking is not None
        found = await self._asking
        return await self._find() if had_begun and self._n_failed and not found.ok else found

    async def _find(self) -> MeasuredLengths:
        if self._calibrate is not None:
            ahead = self._ahead(self._limit)
            beside = asyncio.gather(*map(self._counted, ahead))
            fit, counts = await asyncio.gather(self._line(), beside)
            known = list(zip(ahead, counts, strict=True))
            return MeasuredLengths(fit, *await self._calibrated(self._calibrate, fit, known))
        fit = await self._line()
        if fit is None:
            return MeasuredLengths(None, None, "not possible: prompt lengths are estimates")
        per_token = 1 / fit.tokens_per_char
        detail = f"{per_token:.2f} characters per token, {fit.overhead_tokens:.1f} overhead"
        return MeasuredLengths(fit, True, detail)

    async def _line(self) -> CharacterFit | None:
        """Two prompts of different lengths, asked together, give the line from characters to prompt
        tokens; where the workload's prompts are longer still, one more."""
        texts = (self._text_of(_FIT_CHARS), self._text_of(_LONGER * _FIT_CHARS))
        first, longer = await asyncio.gather(*map(self._point, texts))
        if first is not None:
            target = max(1, min(self._max_input_tokens, _FIT_TOKENS))
            n_chars = target * first[0] // max(1, first[1])
            if n_chars > _LONGER * _FIT_CHARS:
                longer = await self._point(self._text_of(n_chars)) or longer
            longer = longer or await self._point(self._text_of(2 * _FIT_CHARS))
        shorter, longer = (await self._known, first) if longer is None else (first, longer)
        return two_point_fit(shorter, longer)

    async def _calibrated(
        self,
        calibrate: Calibrate,
        fit: CharacterFit | None,
        known: Sequence[tuple[ProbePrompt, int | None]],
    ) -> tuple[bool | None, str]:
        """Ask what a calibration wants to know, twice where the server would not say, but not what
        is `known`; what it makes of that is the check's result."""

        async def count(words: ProbePrompt) -> int | None:
            for asked, tokens in known:
                if asked == words and tokens is not None:
                    return tokens
            return await self._counted(words) or await self._counted(words)

        steps = calibrate(fit, self._limit)
        until_s = time.monotonic() + _CALIBRATION_S
        try:
            questions = next(steps)
            while True:
                counts: tuple[int | None, ...] = (None,) * len(questions)
                if time.monotonic() < until_s:
                    counts = tuple(await asyncio.gather(*map(count, questions)))
                questions = steps.send(counts)
        except StopIteration as end:
            ok, detail = end.value
            return ok, detail

    async def _counted(self, words: ProbePrompt) -> int | None:
        """The server's count of a prompt's tokens; None where it would not say."""
        request = Request(prompt=words.prompt, messages=words.messages, output_tokens=1)
        return _tokens_of(await self._answer(request))

    async def _point(self, text: str) -> Point | None:
        return point_of(text, await self._answer(Request(prompt=text, output_tokens=1)))

    async def _answer(self, request: Request) -> ProbeAnswer:
        answer = await self._ask(request)
        self._n_failed += answer.is_transient
        return answer


def point_of(text: str, answer: ProbeAnswer) -> Point | None:
    """What an answer says about its prompt's length; None where the server would not say."""
    tokens = _tokens_of(answer)
    return None if tokens is None else (len(text), tokens)


def _tokens_of(answer: ProbeAnswer) -> int | None:
    usage = answer.usage if answer.problem is None else None
    return None if usage is None else usage.input_tokens
