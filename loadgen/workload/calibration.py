"""Calibration of prompt lengths: the tokens that a server counts for our text, from a few requests.

`Calibration.steps` yields batches of independent prompts, is sent the server's token count of each,
and returns a line about the result; `fit` is the fit for writing prompts. No sockets here: the
preflight sends the requests.

Words with known token counts are preferred (`word_text`). A text of 32 common words shows whether
each word is 1 token: no word has fewer, so a sum of 32 means 1 token each. Short and long words are
tested apart, which tells a tokenizer from an estimate by characters. If words have more tokens, a
text in which four words occur 1, 4, 16 and 64 times gives the tokens of each from a single count:
its digits in base 4 are their tokens minus 1, because three letters and a blank are at most four
tokens. Two prompts of the schedule's shortest and longest length then verify the sum. If it is
wrong, lengths follow a line from characters to tokens and hold on average.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

import numpy as np

from loadgen.records import Schedule
from loadgen.workload.dialogue import Context
from loadgen.workload.pieces import OTHER_TEXT
from loadgen.workload.prompts import PromptFit, Prompts, RenderedPrompt
from loadgen.workload.vocabulary import COMMON, WORDS
from loadgen.workload.word_text import WordCounts, framed, unframed

Batch = tuple[RenderedPrompt, ...]  # prompts that may be sent at once
Counts = tuple[int | None, ...]  # prompt tokens of each, as counted by the server
Steps = Generator[Batch, Counts, tuple[bool | None, str]]
WordSteps = Generator[Batch, Counts, WordCounts | str]

TOKENS_PER_CHAR = 0.25  # the usual rule of thumb, for servers that report no counts
_GROUP = 64
_MORE = 192
_BASE, _DIGITS = 4, 4  # tokens of a short word; words counted at once
_SHORT_CHARS = _BASE - 1
_SHORT_TEXTS = 5
_MIN_LIMIT_TOKENS = 512
_TURN_TOKENS = 24
_NO_COUNT = "the server stopped counting"


class Calibration:
    """The calibration of a server for a schedule.

    `prompts` must have a salt of their own, so that no prompt of the calibration is in a prefix
    cache when the run begins.
    """

    def __init__(self, prompts: Prompts, schedule: Schedule) -> None:
        self._prompts, self._schedule = prompts, schedule
        self._samples: list[str] = []
        self._n_requests = 0
        self.fit = PromptFit(0.0, TOKENS_PER_CHAR)
        self.off_tokens: int | None = None  # the largest error measured; None if none was measured

    def sample(self, n_chars: int) -> str:
        """Text of the workload's own kind, for the line from characters to tokens."""
        self._samples.append(self._prompts.sample(n_chars))
        return self._samples[-1]

    def early_prompts(self, limit_tokens: int) -> Batch:
        """The prompts of `steps` that count words of 1 token, which may be sent before the line is
        known. For a server with 1 token per character they are superfluous."""
        if self._prompts.is_recorded or not self._prompts.is_common_words:
            return ()
        if limit_tokens < _MIN_LIMIT_TOKENS:
            return ()
        return tuple(_prompt_of(words) for words in (*_groups(), _more_words()))

    def steps(self, line: tuple[float, float] | None, limit_tokens: int) -> Steps:
        """The batches to send; returns (whether lengths are exact, message).

        `line` is (overhead tokens, tokens per character) from the samples, None if unknown. No
        prompt is longer than about `limit_tokens`. The first value returned is None if lengths are
        estimates.
        """
        if line is None:
            return None, "not possible: prompt lengths are estimates"
        self._n_requests = max(2, len(self._samples) - 1)  # the first was the test completion
        self.fit, reason = self._linear(*line), ""
        if self._prompts.is_recorded:
            return None, f"{_describe(self.fit)}; recorded prompts are sent unchanged"
        if self._prompts.is_common_words and self.fit.tokens_per_char != 1.0:
            words = yield from self._count_words(limit_tokens)
            if isinstance(words, WordCounts):
                linear, self.fit = self.fit, replace(self.fit, words=words)
                yield from self._measure_turn()
                errors = yield from self._verify(limit_tokens)
                if errors is not None and self.off_tokens is not None and self.off_tokens <= 1:
                    return True, self._exact(errors)
                reason = f"; counts of words do not add up ({errors or 'no count arrived'})"
                self.fit = linear
            else:
                reason = f"; {words}"
        yield from self._measure_turn()
        errors = yield from self._verify(limit_tokens, is_repeated=bool(reason))
        if errors is None:
            return None, _describe(self.fit) + reason
        if self.off_tokens is not None and self.off_tokens <= 1:
            return True, self._exact(errors)
        return None, f"{_describe(self.fit)}: lengths hold on average ({errors}){reason}"

    def _exact(self, errors: str) -> str:
        return (
            f"prompt lengths exact to ≤ 1 token (calibrated on {self._n_requests} requests;"
            f" {errors})"
        )

    def _linear(self, overhead_tokens: float, tokens_per_char: float) -> PromptFit:
        """The fit of the line. With a local tokenizer, the overhead is the server's count of a
        sample on the line minus the tokenizer's own count."""
        tokenizer = self._prompts.tokenizer
        if tokenizer is not None and self._samples:
            sample = self._samples[:2][-1]
            n_tokens = overhead_tokens + tokens_per_char * len(sample)
            overhead_tokens = n_tokens - tokenizer.count(sample)
        return PromptFit(max(0.0, overhead_tokens), tokens_per_char)

    def _send(self, *prompts: RenderedPrompt) -> Generator[Batch, Counts, Counts]:
        self._n_requests += len(prompts)
        return (yield prompts)

    def _count(self, *texts: Sequence[str]) -> Generator[Batch, Counts, Counts]:
        """The tokens of a prompt for each list of words."""
        return (yield from self._send(*map(_prompt_of, texts)))

    def _count_words(self, limit_tokens: int) -> WordSteps:
        """Words with their tokens, or the reason why there are none."""
        if limit_tokens < _MIN_LIMIT_TOKENS:
            return "the context is too short to count words in"
        empty, short, group = _groups()
        long = group[len(short) :]
        overhead, of_short, of_both = yield from self._count(empty, short, group)
        if overhead is None or of_short is None or of_both is None:
            return _NO_COUNT
        extra_short = of_short - overhead - len(short)
        extra_long = of_both - of_short - len(long)
        if min(extra_short, extra_long) < 0:  # short words reveal an estimate by characters
            return "the server counts less than a token for a word"
        singles = (*(short if not extra_short else ()), *(long if not extra_long else ()))
        if len(singles) == _GROUP:
            singles = (*singles, *(yield from self._more_singles(overhead)))
        if singles:
            return WordCounts(overhead, singles, (1,) * len(singles))
        return (yield from self._short_words(overhead))

    def _more_singles(self, overhead: int) -> Generator[Batch, Counts, tuple[str, ...]]:
        """More words of 1 token each, for variety; none if not all of them are single tokens."""
        words = _more_words()
        (total,) = yield from self._count(words)
        return words if total == overhead + len(words) else ()

    def _short_words(self, overhead: int) -> WordSteps:
        """The tokens of a few short words, several per prompt."""
        short = [word for word in COMMON if len(word) <= _SHORT_CHARS]
        n_texts = _SHORT_TEXTS - self._has_turns()
        tokens: dict[str, int] = {}
        groups = [short[at : at + _DIGITS] for at in range(0, n_texts * _DIGITS, _DIGITS)]
        texts = [
            [word for place, word in enumerate(group) for _ in range(_BASE**place)]
            for group in groups
        ]
        totals = yield from self._count(*texts)
        for group, text, total in zip(groups, texts, totals, strict=True):
            if total is None:
                return _NO_COUNT
            rest = total - overhead - len(text)
            if not 0 <= rest < _BASE**_DIGITS:
                return "counts of repeated words do not add up"
            for word in group:
                rest, digit = divmod(rest, _BASE)
                tokens[word] = digit + 1
        return WordCounts(overhead, tuple(tokens), tuple(tokens.values()))

    def _has_turns(self) -> bool:
        return bool(self._schedule["context"].any())

    def _measure_turn(self) -> Generator[Batch, Counts, None]:
        """Set the template's tokens of an answer and the next question, if the schedule has
        conversations."""
        if not self._has_turns():
            return
        row = np.zeros(1, self._schedule.dtype)[0]
        row["input_tokens"] = 4 * _TURN_TOKENS + round(self.fit.overhead)
        first = self._prompts.render(row, self.fit)
        answer, question = (
            self._prompts.write(purpose, 0, _TURN_TOKENS, self.fit)
            for purpose in (b"answer", b"turn")
        )
        if self.fit.words is not None and (self._schedule["context"] >= Context.real).any():
            answer = unframed(answer)  # the server's own answers have no frame
        messages = (("user", first), ("assistant", answer), ("user", question))
        (total,) = yield from self._send(RenderedPrompt("", messages))
        if total is not None:
            added = total - int(row["input_tokens"]) - 2 * _TURN_TOKENS
            self.fit = replace(self.fit, turn_overhead_tokens=float(max(0, added)))

    def _verify(
        self, limit_tokens: int, is_repeated: bool = False
    ) -> Generator[Batch, Counts, str | None]:
        """Send the shortest and the longest prompt of the schedule (`is_repeated`: the longest
        alone) and describe the errors; None if a count is missing. Prompts that cannot be as short
        as planned are not tested."""
        lengths = self._schedule["input_tokens"]
        is_single = self._schedule["context"] == Context.none
        (candidates,) = np.nonzero(is_single & self.fit.is_reachable(lengths))
        if not len(candidates):
            return None
        shortest = candidates[np.argmin(lengths[candidates])]
        longest = candidates[np.argmax(lengths[candidates])]
        prompts: dict[int, RenderedPrompt] = {}  # by planned tokens
        for place in (longest,) if is_repeated else (shortest, longest):
            row = self._schedule[place].copy()
            row["input_tokens"] = planned = min(int(row["input_tokens"]), limit_tokens)
            if planned not in prompts:
                prompts[planned] = RenderedPrompt(self._prompts.render(_unshared(row), self.fit))
        totals = yield from self._send(*prompts.values())
        off = 0
        for planned, total in zip(prompts, totals, strict=True):
            if total is None:
                return None
            off = max(off, abs(total - planned))
        self.off_tokens = off
        at = " and ".join(map(str, prompts))
        return f"at {at} tokens off by {'up to ' if off else ''}{off}"


def _groups() -> tuple[tuple[str, ...], ...]:
    """No words; short words; the short words and as many long words."""
    group = tuple(sorted(COMMON[:_GROUP], key=len))
    return (), group[: _GROUP // 2], group


def _more_words() -> tuple[str, ...]:
    """Words beyond the common words, shorter words first."""
    return tuple(sorted(set(WORDS) - set(COMMON), key=lambda word: (len(word), word))[:_MORE])


def _prompt_of(words: Sequence[str]) -> RenderedPrompt:
    return RenderedPrompt(framed("".join(f" {word}" for word in words)))


def _unshared(row: np.void) -> np.void:
    """The row with a text that no request of the run has, even without a salt."""
    row["prompt_seed"] ^= np.uint64(1 << 63)
    if row["prefix_tokens"]:
        row["prefix_id"] ^= np.uint32(OTHER_TEXT)
    return row


def _describe(fit: PromptFit) -> str:
    per_token = 1 / fit.tokens_per_char
    return f"{per_token:.2f} characters per token, {fit.overhead_tokens:.1f} overhead"
