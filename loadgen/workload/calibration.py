"""How many tokens a server makes of what we send, learned from a few of its own counts.

`Calibration.steps` yields what to ask, several questions where none waits for another's answer, is
sent the prompt tokens the server counted for each, and ends with one line about what came of it;
`fit` is then what prompts are made with. No sockets here: a
preflight does the asking.

First choice are words whose tokens are known one by one (`word_text`). A text that holds 32 common
words once tells whether each is one token: no word has less, so a sum of 32 says it of all. It is
asked of short words and of long ones apart, which tells a tokenizer from an estimate by characters.
Where words have more, four words that stand in a text 1, 4, 16 and 64 times are read off one count:
its digits in base 4 are their tokens less one, since three letters and a blank are four tokens at
most.
Two prompts of the schedule's shortest and longest length then show whether the sum holds; where it
does not, lengths follow the line from characters to tokens and hold on average.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

import numpy as np

from loadgen.records import Schedule
from loadgen.workload.dialogue import Context
from loadgen.workload.prompts import PromptFit, Prompts, RenderedPrompt
from loadgen.workload.vocabulary import COMMON, WORDS
from loadgen.workload.word_text import WordCounts, framed, unframed

Questions = tuple[RenderedPrompt, ...]  # that may be asked at once
Counts = tuple[int | None, ...]
Steps = Generator[Questions, Counts, tuple[bool | None, str]]
Learning = Generator[Questions, Counts, WordCounts | str]

TOKENS_PER_CHAR = 0.25  # the usual rule of thumb, for servers that do not count for us
_GROUP = 64
_MORE = 192
_BASE, _DIGITS = 4, 4  # tokens of a short word; words counted at once
_SHORT_CHARS = _BASE - 1
_SHORT_PROBES = 5
_LEAST_LIMIT_TOKENS = 512
_TURN_TOKENS = 24


class Calibration:
    """What is known of one server's way to count, for one schedule. `prompts` have a salt of their
    own, so that nothing asked here is in a prefix cache when the run begins.
    """

    def __init__(self, prompts: Prompts, schedule: Schedule) -> None:
        self._prompts, self._schedule = prompts, schedule
        self._sampled: list[str] = []
        self._n_asked = 0
        self.fit = PromptFit(0.0, TOKENS_PER_CHAR)
        self.off_tokens: int | None = None  # the largest error seen; None if none was looked for

    def sample(self, n_chars: int) -> str:
        """Text of the workload's own kind, for the line from characters to tokens."""
        self._sampled.append(self._prompts.sample(n_chars))
        return self._sampled[-1]

    def early_prompts(self, limit_tokens: int) -> Questions:
        """What `steps` will ask first if the line does not make it needless: a server that makes a
        token of each character is asked this for nothing."""
        if self._prompts.is_recorded or not self._prompts.is_common_words:
            return ()
        if limit_tokens < _LEAST_LIMIT_TOKENS:
            return ()
        return tuple(_holding(words) for words in _groups())

    def steps(self, line: tuple[float, float] | None, limit_tokens: int) -> Steps:
        """`line`: overhead tokens and tokens per character as the samples gave them, None if they
        did not. No question is longer than about `limit_tokens`. Ends with (good, in words)."""
        if line is None:
            return None, "not possible: prompt lengths are estimates"
        self._n_asked = max(2, len(self._sampled) - 1)  # the first was the preflight's completion
        self.fit, why = self._linear(*line), ""
        if self._prompts.is_recorded:
            return None, f"{_in_words(self.fit)}; recorded prompts are sent as they are"
        if self._prompts.is_common_words and self.fit.tokens_per_char != 1.0:
            learned = yield from self._learn(limit_tokens)
            if isinstance(learned, WordCounts):
                linear, self.fit = self.fit, replace(self.fit, words=learned)
                yield from self._learn_turn()
                checked = yield from self._check(limit_tokens)
                if checked is not None and self.off_tokens is not None and self.off_tokens <= 1:
                    return True, self._exact(checked)
                why = f"; counts of words do not add up ({checked or 'no count came'})"
                self.fit = linear
            else:
                why = f"; {learned}"
        yield from self._learn_turn()
        checked = yield from self._check(limit_tokens, is_again=bool(why))
        if checked is None:
            return None, _in_words(self.fit) + why
        if self.off_tokens is not None and self.off_tokens <= 1:
            return True, self._exact(checked)
        return None, f"{_in_words(self.fit)}: lengths hold on average ({checked}){why}"

    def _exact(self, checked: str) -> str:
        return (
            f"prompt lengths exact to ≤ 1 token (calibrated on {self._n_asked} requests; {checked})"
        )

    def _linear(self, overhead_tokens: float, tokens_per_char: float) -> PromptFit:
        """The line as it is; with a local tokenizer, the overhead is the server's count of a
        sample that the line goes through, less our own."""
        tokenizer = self._prompts.tokenizer
        if tokenizer is not None and self._sampled:
            sample = self._sampled[:2][-1]
            stated = overhead_tokens + tokens_per_char * len(sample)
            overhead_tokens = stated - tokenizer.count(sample)
        return PromptFit(max(0.0, overhead_tokens), tokens_per_char)

    def _ask(self, *asked: RenderedPrompt) -> Generator[Questions, Counts, Counts]:
        self._n_asked += len(asked)
        return (yield asked)

    def _count(self, *texts: Sequence[str]) -> Generator[Questions, Counts, Counts]:
        """The tokens of prompts of these words each."""
        return (yield from self._ask(*map(_holding, texts)))

    def _learn(self, limit_tokens: int) -> Learning:
        """Words with their tokens, or why there are none."""
        if limit_tokens < _LEAST_LIMIT_TOKENS:
            return "the context is too short to count words in"
        nothing, short, group = _groups()
        long = group[len(short) :]
        overhead, of_short, of_both = yield from self._count(nothing, short, group)
        if overhead is None or of_short is None or of_both is None:
            return "the server stopped counting"
        extra_short = of_short - overhead - len(short)
        extra_long = of_both - of_short - len(long)
        if min(extra_short, extra_long) < 0:  # where it counts characters, short words tell
            return "the server counts less than a token for a word"
        singles = (*(short if not extra_short else ()), *(long if not extra_long else ()))
        if len(singles) == _GROUP:
            singles = (*singles, *(yield from self._more_singles(overhead)))
        if singles:
            return WordCounts(overhead, singles, (1,) * len(singles))
        return (yield from self._short_words(overhead))

    def _more_singles(self, overhead: int) -> Generator[Questions, Counts, tuple[str, ...]]:
        """More words of one token each, if many together are: variety."""
        words = tuple(sorted(set(WORDS) - set(COMMON), key=lambda word: (len(word), word))[:_MORE])
        (total,) = yield from self._count(words)
        return words if total == overhead + len(words) else ()

    def _short_words(self, overhead: int) -> Learning:
        """A few short words one by one, several with each question."""
        short = [word for word in COMMON if len(word) <= _SHORT_CHARS]
        n_probes = _SHORT_PROBES - self._has_turns()
        known: dict[str, int] = {}
        groups = [short[at : at + _DIGITS] for at in range(0, n_probes * _DIGITS, _DIGITS)]
        texts = [
            [word for place, word in enumerate(group) for _ in range(_BASE**place)]
            for group in groups
        ]
        totals = yield from self._count(*texts)
        for asked, repeated, total in zip(groups, texts, totals, strict=True):
            if total is None:
                return "the server stopped counting"
            rest = total - overhead - len(repeated)
            if not 0 <= rest < _BASE**_DIGITS:
                return "counts of repeated words do not add up"
            for word in asked:
                rest, digit = divmod(rest, _BASE)
                known[word] = digit + 1
        return WordCounts(overhead, tuple(known), tuple(known.values()))

    def _has_turns(self) -> bool:
        return bool(self._schedule["context"].any())

    def _learn_turn(self) -> Generator[Questions, Counts, None]:
        """What the template adds to an answer and the next question, if anybody asks a second
        time."""
        if not self._has_turns():
            return
        row = self._row(4 * _TURN_TOKENS + round(self.fit.overhead))
        first = self._prompts.render(row, self.fit)
        answer, question = (
            self._prompts.write(purpose, 0, _TURN_TOKENS, self.fit)
            for purpose in (b"answer", b"turn")
        )
        if self.fit.words is not None and (self._schedule["context"] == Context.real).any():
            answer = unframed(answer)  # the server's own answers have no frame
        said = (("user", first), ("assistant", answer), ("user", question))
        (total,) = yield from self._ask(RenderedPrompt("", said))
        if total is not None:
            added = total - int(row["input_tokens"]) - 2 * _TURN_TOKENS
            self.fit = replace(self.fit, turn_overhead_tokens=float(max(0, added)))

    def _check(
        self, limit_tokens: int, is_again: bool = False
    ) -> Generator[Questions, Counts, str | None]:
        """Ask the shortest and the longest prompt of the schedule, `is_again` the longest alone;
        how it went, None if no count came. Prompts that have to be longer than asked are not looked
        at."""
        asked = self._schedule["input_tokens"]
        stands_alone = self._schedule["context"] == Context.none
        (fits,) = np.nonzero(stands_alone & self.fit.is_reachable(asked))
        if not len(fits):
            return None
        shortest, longest = fits[np.argmin(asked[fits])], fits[np.argmax(asked[fits])]
        prompts: dict[int, RenderedPrompt] = {}  # by planned tokens
        for place in (longest,) if is_again else (shortest, longest):
            row = self._schedule[place].copy()
            row["input_tokens"] = planned = min(int(row["input_tokens"]), limit_tokens)
            if planned not in prompts:
                prompts[planned] = RenderedPrompt(self._prompts.render(_apart(row), self.fit))
        totals = yield from self._ask(*prompts.values())
        off, lengths = 0, [str(planned) for planned in prompts]
        for planned, total in zip(prompts, totals, strict=True):
            if total is None:
                return None
            off = max(off, abs(total - planned))
        self.off_tokens = off
        return f"at {' and '.join(lengths)} tokens off by {'up to ' if off else ''}{off}"

    def _row(self, input_tokens: int) -> np.void:
        row: np.void = np.zeros(1, self._schedule.dtype)[0]
        row["input_tokens"] = input_tokens
        return row


def _groups() -> tuple[tuple[str, ...], ...]:
    """No words, short ones, and the same with as many long ones behind them."""
    group = tuple(sorted(COMMON[:_GROUP], key=len))
    return (), group[: _GROUP // 2], group


def _holding(words: Sequence[str]) -> RenderedPrompt:
    """A prompt of these words."""
    return RenderedPrompt(framed("".join(f" {word}" for word in words)))


def _apart(row: np.void) -> np.void:
    """A row of the same lengths whose text no request of the run shares, also without a salt."""
    row["prompt_seed"] ^= np.uint64(1 << 63)
    if row["prefix_tokens"]:
        row["prefix_id"] ^= np.uint32(1 << 31)
    return row


def _in_words(fit: PromptFit) -> str:
    per_token = 1 / fit.tokens_per_char
    return f"{per_token:.2f} characters per token, {fit.overhead_tokens:.1f} overhead"
