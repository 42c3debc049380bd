"""Canaries: a few greedy requests whose answers are recorded while the server is idle and requested
again under load, to find a server that answers quickly and wrongly.

The answers come through the client of the preflight, not through the load-generating processes, so
that no figure of the run contains them.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from loadgen.manifest.sections import CanarySection
from targets.base import Adapter, Request
from targets.endpoint import Endpoint
from targets.http_session import HttpSession
from targets.preflight_result import PreflightCheck
from targets.probe_request import ProbeAnswer, send_probe

PROMPTS = (
    "Count from one to thirty in words, separated by commas.",
    "List the twelve months of the year in order, and the number of days of each.",
    "List the planets of the solar system from the sun outwards, a sentence about each.",
    "Write the alphabet in capital letters, a letter and a word that begins with it per line.",
    "Write the multiplication table of seven, from seven times one to seven times twelve.",
    "Explain in plain words how a bicycle stays upright while it moves.",
    "Name the seven days of the week in English, French and German.",
    "Write a function in Python that returns the largest number of a list, with comments.",
)
"""Prompts whose greedy answers hardly depend on rounding: most of their tokens have no rival."""
OUTPUT_TOKENS = 32
IDLE_WAVES = 4
MOST_PER_S = 5.0
_EARLY_WORDS = 4
_LEAST_LOOP = 24  # characters
_LOOPS = 4
_SHOWN_CHARS = 60
_LAST_S = 5.0  # for canaries in flight at the end of the run

Kind = Literal["same", "late", "early", "shorter", "repeating", "empty", "failed"]
KINDS: tuple[Kind, ...] = ("same", "late", "early", "shorter", "repeating", "empty", "failed")
"""Kinds of answers against the answer at idle: the same text; another text from a later or from an
early word on (of the first four); its beginning only; a text that ends in a loop; no text; no
usable answer."""


def kind_of(answer: str, at_idle: str) -> Kind:
    """The kind of an answer to a prompt that was answered `at_idle`."""
    if not answer.strip():
        return "empty"
    if answer == at_idle:
        return "same"
    if is_repeating(answer) and not is_repeating(at_idle):
        return "repeating"
    if at_idle.startswith(answer):
        return "shorter"
    words, words_at_idle = (text.split()[:_EARLY_WORDS] for text in (answer, at_idle))
    return "early" if words != words_at_idle else "late"


def is_repeating(text: str) -> bool:
    """Whether a text ends in a piece that is repeated four times or more, over 24 characters or
    more."""
    n = len(text)
    for period in range(1, n // _LOOPS + 1):
        length = max(_LEAST_LOOP, _LOOPS * period)
        if length <= n and text[n - length + period :] == text[n - length : n - period]:
            return True
    return False


@dataclass(frozen=True)
class Canaries:
    """The answers at idle to `PROMPTS`, each requested alone, and the kinds of the answers in the
    waves that followed, all prompts at once: the noise floor. `share` of the requests of the run
    are canaries."""

    endpoint: Endpoint
    adapter: Adapter
    timeout_s: float
    share: float
    answers: tuple[str, ...]
    idle: Counter[Kind]

    def check(self) -> PreflightCheck:
        """The line of the preflight."""
        n, n_same = sum(self.idle.values()), self.idle["same"]
        detail = f"{len(self.answers)} greedy answers recorded; {n_same} of {n} repeats are equal"
        if not all(answer.strip() for answer in self.answers):
            return PreflightCheck("canary", False, f"{detail}, and some are empty")
        return PreflightCheck("canary", True if n_same == n else None, detail)


async def record_idle(
    endpoint: Endpoint, adapter: Adapter, share: float, timeout_s: float
) -> Canaries:
    """Requests each prompt alone, then all at once in several waves. A prompt without a usable
    answer has an empty one."""
    adapter = _greedy(adapter)
    idle = Counter[Kind]()
    async with HttpSession(endpoint.route) as session:

        async def answer(prompt: str) -> ProbeAnswer:
            request = Request(prompt, OUTPUT_TOKENS)
            return await send_probe(session, endpoint, adapter, request, timeout_s)

        answers = [_text(await answer(prompt)) or "" for prompt in PROMPTS]
        for _ in range(IDLE_WAVES):
            wave = await asyncio.gather(*map(answer, PROMPTS))
            idle.update(
                _kind(repeat, at_idle) for repeat, at_idle in zip(wave, answers, strict=True)
            )
    return Canaries(endpoint, adapter, timeout_s, share, tuple(answers), idle)


class CanarySender:
    """Sends canaries during a run, in a thread with an event loop of its own."""

    def __init__(self, canaries: Canaries) -> None:
        self._canaries = canaries
        self._kinds = Counter[Kind]()
        self._example: tuple[str, str] = ("", "")
        self._n_sent = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_over = asyncio.Event()
        self._is_up = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="canaries", daemon=True
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: HttpSession | None = None

    def start(self) -> None:
        self._thread.start()
        self._is_up.wait()

    def catch_up(self, n_released: int, now_s: float) -> None:
        """Sends the canaries that are due after so many requests of the run, at most
        `MOST_PER_S` of its time."""
        n_due = int(min(self._canaries.share * n_released, MOST_PER_S * max(0.0, now_s)))
        if self._loop is not None and n_due > self._n_sent:
            first, self._n_sent = self._n_sent, n_due
            self._loop.call_soon_threadsafe(self._send, first, n_due)

    def stop(self) -> CanarySection:
        """Waits briefly for answers under way, and returns the counts; a canary that is still
        without its answer is not counted."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._is_over.set)
            self._thread.join()
            self._loop = None
        canaries = self._canaries
        return CanarySection(
            share=canaries.share,
            prompts=len(canaries.answers),
            idle=_counts(canaries.idle),
            loaded=_counts(self._kinds),
            at_idle=self._example[0],
            under_load=self._example[1],
        )

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with HttpSession(self._canaries.endpoint.route) as self._session:
            self._is_up.set()
            await self._is_over.wait()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_LAST_S)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, first: int, after: int) -> None:
        for number in range(first, after):
            task = asyncio.create_task(self._one(number % len(PROMPTS)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _one(self, place: int) -> None:
        canaries = self._canaries
        assert self._session is not None, "canaries are sent while the loop serves"
        request = Request(PROMPTS[place], OUTPUT_TOKENS)
        answer = await send_probe(
            self._session, canaries.endpoint, canaries.adapter, request, canaries.timeout_s
        )
        kind = _kind(answer, canaries.answers[place])
        self._kinds[kind] += 1
        if kind not in ("same", "failed") and not any(self._example):
            texts = (canaries.answers[place], _text(answer) or "")
            at_idle, under_load = (_excerpt(canaries.endpoint.redact(text)) for text in texts)
            self._example = (at_idle, under_load)


def _greedy(adapter: Adapter) -> Adapter:
    """The adapter with temperature 0 also where the target or the scenario states another."""
    if "temperature" not in adapter.extra_body:
        return adapter
    body = {**adapter.extra_body, "temperature": 0}
    return adapter.model_copy(update={"extra_body": body})


def _text(answer: ProbeAnswer) -> str | None:
    """The text of an answer, reasoning included; None of a failed request."""
    if answer.problem is not None:
        return None
    return "".join(delta.text for delta in answer.deltas)


def _kind(answer: ProbeAnswer, at_idle: str) -> Kind:
    text = _text(answer)
    return "failed" if text is None else kind_of(text, at_idle)


def _counts(kinds: Counter[Kind]) -> dict[str, int]:
    return {kind: kinds[kind] for kind in KINDS if kinds[kind]}


def _excerpt(text: str) -> str:
    """The beginning of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else f"{line[: _SHOWN_CHARS - 1]}…"
