"""Prompt text of an exact length, cheap enough to be made ahead of time for every row.

A prompt is `[shared prefix] head body`. The head is 16 characters from a hash of (prompt_seed,
salt), so no two requests of a run, and no two runs, share their first block of 16 bytes: a prefix
cache hits what the scenario declares and nothing else. The body is a slice of a text that the
scenario's kind of prompts gives. Where the tokens of single words are known (`word_text`), head and
body are such words instead, and the length is exact in tokens. Recorded prompts (a dataset) are
sent as they are, behind a head unless the salt is `none`.
"""

from __future__ import annotations

import base64
import copy
import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loadgen.workload.client_tokenizer import TokenCounter, cut_to_tokens
from loadgen.workload.texts import Messages, PromptKind, RecordedPrompt
from loadgen.workload.word_text import DIGEST_BYTES, WordCounts, WordText, framed

HEAD_CHARS = 16
CHARS_PER_TOKEN = 4.0  # the usual rule of thumb for plans, where nothing counts
_SOME_HEAD = "k4vq7mzx2w5npt3r"
_IS_BLANK = np.array([chr(code).isspace() for code in range(0x3002)])  # the last blank is U+3000
_CHARS_AT_LEAST = 8  # per token asked, before a tokenizer cuts


@dataclass(frozen=True, slots=True)
class PromptFit:
    """How many tokens a server makes of a prompt: overhead_tokens + tokens_per_char · characters.

    The overhead is what its chat template adds. A byte tokenizer has tokens_per_char 1 and is hit
    exactly; for others the fit is calibrated and the length holds on average, or, where `words` are
    known, is exact. `turn_overhead_tokens` is what the template adds to an answer and the question
    after it.
    """

    overhead_tokens: float = 0.0
    tokens_per_char: float = 1.0
    turn_overhead_tokens: float = 0.0
    words: WordCounts | None = None

    def __post_init__(self) -> None:
        assert self.overhead_tokens >= 0, f"a template of {self.overhead_tokens} tokens"
        assert self.tokens_per_char > 0, f"{self.tokens_per_char} tokens per character"

    @property
    def overhead(self) -> float:
        """Tokens of a prompt that says nothing."""
        return self.overhead_tokens if self.words is None else self.words.overhead_tokens

    @property
    def step(self) -> float:
        """Tokens of the least that can be said: a character, or a word."""
        return self.tokens_per_char if self.words is None else self.words.shortest_tokens

    def chars(self, input_tokens: int) -> int:
        """Characters of the prompt that come nearest to `input_tokens`, at least 1."""
        return max(1, round((input_tokens - self.overhead_tokens) / self.tokens_per_char))

    def is_reachable(self, input_tokens: ArrayLike) -> NDArray[np.bool_]:
        """False where even a prompt of one character (or word) has more tokens than asked for."""
        return np.asarray(np.asarray(input_tokens) >= self.overhead + self.step / 2)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """What a request says: `messages` if it has any, else `prompt` as the only one."""

    prompt: str
    messages: Messages = ()

    def as_messages(self) -> Messages:
        return self.messages or (("user", self.prompt),)


class Prompts:
    """The text of every row of one run.

    `seed` is the scenario's, `salt` the run's; with `salt: none` in the settings the run's is left
    out and every run sends the same text.
    """

    def __init__(self, kind: PromptKind, seed: int, salt: bytes) -> None:
        self._is_salted = kind.salt == "run"
        self._key = self._key_for(seed, salt)
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
        self._corpus = kind.corpus(rng)
        self._word_starts = word_starts(self._corpus)
        self._recorded = kind.recorded()
        self._tokenizer = kind.load_tokenizer()
        self._is_common_words = kind.is_common_words
        self._seed = seed
        self._prefixes: dict[tuple[int, int], str] = {}
        self._word_prefixes: dict[tuple[int, int], tuple[str, int]] = {}
        self._word_text: WordText | None = None

    def salted(self, salt: bytes) -> Prompts:
        """The same with another run's salt; what they are cut from is shared, for to make it takes
        10 ms."""
        other = copy.copy(self)
        other._key = self._key_for(self._seed, salt)
        other._prefixes, other._word_prefixes, other._word_text = {}, {}, None
        return other

    def _key_for(self, seed: int, salt: bytes) -> bytes:
        said = salt if self._is_salted else b""
        return hashlib.blake2b(seed.to_bytes(8, "little") + said, digest_size=32).digest()

    @property
    def tokenizer(self) -> TokenCounter | None:
        """What counts tokens here, if anything does; else a fit stands for it."""
        return self._tokenizer

    @property
    def is_recorded(self) -> bool:
        """Whether prompts are sent as somebody wrote them."""
        return bool(self._recorded)

    @property
    def is_common_words(self) -> bool:
        """Whether the text may be made of any common words: nothing else says its length."""
        return self._is_common_words and self._tokenizer is None

    def prompt(self, row: np.void, fit: PromptFit) -> RenderedPrompt:
        """What a schedule row that stands alone says."""
        if not self._recorded:
            return RenderedPrompt(self.render(row, fit))
        recorded = self._recorded[entry_index(int(row["prompt_seed"]), len(self._recorded))]
        messages = self._headed(recorded.messages, int(row["prompt_seed"]))
        if len(messages) == 1 and messages[0][0] == "user":
            return RenderedPrompt(messages[0][1])
        return RenderedPrompt("", messages)

    def render(self, row: np.void, fit: PromptFit) -> str:
        """The prompt of a schedule row: `fit.chars(row["input_tokens"])` characters, or, with a
        tokenizer or with words that have been counted, exactly the row's tokens less the fit's
        overhead.

        Where the whole is hardly longer than its shared prefix, the length wins: the prefix is cut
        so that one character of the request's own remains.
        """
        identity = b"prompt" + int(row["prompt_seed"]).to_bytes(8, "little")
        prefix_tokens, prefix_id = int(row["prefix_tokens"]), int(row["prefix_id"])
        if self._tokenizer is not None:
            n_tokens = max(1, int(row["input_tokens"]) - round(fit.overhead_tokens))
            lead = self._prefix(prefix_id, min(prefix_tokens, n_tokens - 1))
            return lead + self._counted(self._tokenizer, identity, n_tokens, lead)
        if fit.words is not None:
            n_tokens = max(1, int(row["input_tokens"]) - fit.words.overhead_tokens)
            return self._composed(fit.words, identity, n_tokens, prefix_id, prefix_tokens)
        n_chars = fit.chars(int(row["input_tokens"]))
        if not prefix_tokens:
            return self._text(identity, n_chars)
        prefix_chars = max(1, round(prefix_tokens / fit.tokens_per_char))
        prefix = self._prefix(prefix_id, prefix_chars)[: n_chars - 1]
        return prefix + self._text(identity, n_chars - len(prefix))

    def write(self, purpose: bytes, prompt_seed: int, n_tokens: int, fit: PromptFit) -> str:
        """Text of `n_tokens` tokens without any template: a later turn, a scripted answer."""
        identity = purpose + prompt_seed.to_bytes(8, "little")
        if self._tokenizer is not None:
            return self._counted(self._tokenizer, identity, max(1, n_tokens), "")
        if fit.words is not None:
            return framed(self._words(fit.words).piece(self._digest(identity), n_tokens)[0])
        return self._text(identity, max(1, round(n_tokens / fit.tokens_per_char)))

    def sample(self, n_chars: int) -> str:
        """`n_chars` characters of the same kind of text, for calibrating a fit."""
        return self._text(b"sample" + n_chars.to_bytes(4, "little"), n_chars)

    def _headed(self, messages: Messages, prompt_seed: int) -> Messages:
        """Recorded messages with a head of this request's own before the first of them."""
        if not self._is_salted:
            return messages
        (role, content), *others = messages
        head = self._text(b"prompt" + prompt_seed.to_bytes(8, "little"), HEAD_CHARS)
        return ((role, f"{head} {content}"), *others)

    def _composed(
        self, counts: WordCounts, identity: bytes, n_tokens: int, prefix_id: int, prefix_tokens: int
    ) -> str:
        """Words of `n_tokens` tokens, framed; they begin with a shared prefix, if any, of which all
        but the last words stay where the whole is hardly longer."""
        words = self._words(counts)
        shared, n_shared = "", 0
        if prefix_tokens and n_tokens > counts.shortest_tokens:
            key = prefix_id, min(prefix_tokens, n_tokens - counts.shortest_tokens)
            if key not in self._word_prefixes:
                digest = self._digest(b"prefix" + prefix_id.to_bytes(4, "little"))
                self._word_prefixes[key] = words.piece(digest, key[1])
            shared, n_shared = self._word_prefixes[key]
        return framed(shared + words.piece(self._digest(identity), n_tokens - n_shared)[0])

    def _words(self, counts: WordCounts) -> WordText:
        if self._word_text is None or self._word_text.counts != counts:
            self._word_text = WordText(counts, self._seed)
            self._word_prefixes = {}
        return self._word_text

    def _digest(self, identity: bytes) -> bytes:
        return hashlib.blake2b(identity, digest_size=DIGEST_BYTES, key=self._key).digest()

    def _prefix(self, prefix_id: int, size: int) -> str:
        """The first `size` characters (with a tokenizer: tokens) of a shared prefix; none for 0."""
        if size <= 0:
            return ""
        key = prefix_id, size
        if key not in self._prefixes:
            identity = b"prefix" + prefix_id.to_bytes(4, "little")
            self._prefixes[key] = (
                self._text(identity, size)
                if self._tokenizer is None
                else self._counted(self._tokenizer, identity, size, "")
            )
        return self._prefixes[key]

    def _counted(self, tokenizer: TokenCounter, identity: bytes, n_tokens: int, lead: str) -> str:
        """Text for which `lead` and it have `n_tokens` tokens together."""
        n_chars = _CHARS_AT_LEAST * n_tokens + HEAD_CHARS + 64
        while True:
            text = self._text(identity, n_chars)
            if tokenizer.count(lead + text) > n_tokens + 8:
                return cut_to_tokens(tokenizer, text, n_tokens, lead)
            n_chars *= 2

    def _text(self, identity: bytes, n_chars: int) -> str:
        digest = hashlib.blake2b(identity, digest_size=18, key=self._key).digest()
        head = base64.b32encode(digest[:10]).decode("ascii").lower()  # 80 bits in HEAD_CHARS
        start = int.from_bytes(digest[10:], "little") % len(self._word_starts)
        body = self._body(int(self._word_starts[start]), n_chars - HEAD_CHARS - 2)
        # a full stop, because templates strip trailing blanks and the length would be off by one
        return f"{head} {body}"[: n_chars - 1] + "." if n_chars > HEAD_CHARS else head[:n_chars]

    def _body(self, start: int, n_chars: int) -> str:
        """A slice of the corpus, read around its end as often as needed."""
        text = self._corpus[start : start + max(0, n_chars)]
        while len(text) < n_chars:
            text += f" {self._corpus}"[: n_chars - len(text)]
        return text


def word_starts(text: str) -> NDArray[np.intp]:
    """Where the words of a text begin: what is not blank and has a blank or nothing before it."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    is_blank = _IS_BLANK[np.minimum(codes, len(_IS_BLANK) - 1)]
    return np.flatnonzero(~is_blank & np.r_[True, is_blank[:-1]])


def entry_index(prompt_seed: int, n_entries: int) -> int:
    """Which of a dataset's prompts a row sends."""
    return prompt_seed % n_entries


def planned_tokens(
    recorded: RecordedPrompt, kind: PromptKind, tokenizer: TokenCounter | None
) -> int:
    """Tokens of a recorded prompt with a head like that of every request and without a template:
    counted if something counts, else four characters each."""
    head = f"{_SOME_HEAD} " if kind.salt == "run" else ""
    texts = [head, *(content for _, content in recorded.messages)]
    if tokenizer is None:
        return max(1, round(sum(map(len, texts)) / CHARS_PER_TOKEN))
    return max(1, sum(tokenizer.count(text) for text in texts if text))
