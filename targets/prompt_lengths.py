"""The measurement of prompt lengths by the server's own token counts: the line from characters to
tokens, and the requests of a calibration beyond it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol, Self

from targets.base import Request
from targets.preflight_result import CharacterFit, two_point_fit
from targets.probe_request import ProbeAnswer

_FIT_CHARS = 128  # of the shorter prompt
_LONGER = 4  # the longer prompt has at least so many times the characters
_FIT_TOKENS = 2000  # about, of the longer prompt at most
_USUAL_CHARS = 4  # per token: the first guess
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
        self._replaced: list[asyncio.Task[MeasuredLengths]] = []
        self._fitted = asyncio.Event()
        self._n_failed = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = [*self._replaced, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def start(self) -> None:
        """Begin to measure, at the same time as the server's other work. A second call begins
        again: the server had rejected a field of the requests."""
        if self._task is not None:
            self._task.cancel()
            self._replaced.append(self._task)
        self._n_failed, self._fitted = 0, asyncio.Event()
        self._task = asyncio.create_task(self._measure(self._fitted))

    async def fitted(self) -> None:
        """Waits until the lengths are known or remain to be verified only."""
        await self._fitted.wait()

    async def result(
        self, completion: Point | None, other_work: asyncio.Task[Any]
    ) -> MeasuredLengths:
        """The lengths. The point of the preflight's completion replaces the shorter prompt of the
        line if the server rejects the longer prompt. If requests failed while the server had other
        work, they are repeated after it."""
        assert self._task is not None
        self._completion.set_result(completion)
        lengths = await self._task
        if not self._n_failed or lengths.ok:
            return lengths
        await asyncio.wait([other_work])
        return await self._measure(self._fitted)

    async def _measure(self, fitted: asyncio.Event) -> MeasuredLengths:
        """Sets `fitted` when the requests that are left verify the lengths, at the latest at the
        end."""
        try:
            if self._calibrate is not None:
                first = self._first_prompts(self._limit)
                counting = asyncio.gather(*map(self._count, first))
                fit, counts = await asyncio.gather(self._line(), counting)
                counted = list(zip(first, counts, strict=True))
                steps = self._calibrate(fit, self._limit)
                return MeasuredLengths(fit, *await self._calibrated(steps, counted, fitted))
            fit = await self._line()
        finally:
            fitted.set()
        if fit is None:
            return MeasuredLengths(None, None, "not possible: prompt lengths are estimates")
        per_token = 1 / fit.tokens_per_char
        detail = f"{per_token:.2f} characters per token, {fit.overhead_tokens:.1f} overhead"
        return MeasuredLengths(fit, True, detail)

    async def _line(self) -> CharacterFit | None:
        """The line through two prompts of different lengths, or through a longer prompt instead of
        the second if the workload's prompts are longer still. All are counted together; another is
        counted after them if the third is refused or far from the length that was needed."""
        target = max(1, min(self._max_input_tokens, _FIT_TOKENS))
        n_guessed = _USUAL_CHARS * target
        n_chars = [_FIT_CHARS, _LONGER * _FIT_CHARS]
        n_chars += [n_guessed] if n_guessed > n_chars[-1] else []
        first, longer, *longest = await asyncio.gather(
            *(self._point(self._text_of(n)) for n in n_chars)
        )
        if first is not None:
            n_needed = target * first[0] // max(1, first[1])
            if n_needed > _LONGER * _FIT_CHARS:
                guessed = longest[0] if longest else None
                if guessed is None or 2 * guessed[0] < n_needed:
                    guessed = await self._point(self._text_of(n_needed))
                longer = guessed or longer
            longer = longer or await self._point(self._text_of(2 * _FIT_CHARS))
        if longer is None:
            # Shielded, because a task that is cancelled cancels the future that it awaits.
            shorter, longer = await asyncio.shield(self._completion), first
        else:
            shorter = first
        return two_point_fit(shorter, longer)

    async def _calibrated(
        self,
        steps: CountRequests,
        counted: Sequence[tuple[ProbePrompt, int | None]],
        fitted: asyncio.Event,
    ) -> tuple[bool | None, str]:
        """Run the calibration and return its check. A prompt in `counted` is not sent again; any
        other is sent twice if the first answer has no count. `fitted` is set before the first of
        these is sent."""
        known = [prompt for prompt, tokens in counted if tokens is not None]

        async def count(prompt: ProbePrompt) -> int | None:
            for counted_prompt, tokens in counted:
                if counted_prompt == prompt and tokens is not None:
                    return tokens
            return await self._count(prompt) or await self._count(prompt)

        until_s = time.monotonic() + _CALIBRATION_S
        try:
            prompts = next(steps)
            while True:
                if any(prompt not in known for prompt in prompts):
                    fitted.set()
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
