"""Prompt text of exact length, cheap enough to write ahead of time for every row.

A prompt is `[shared prefix] head body`; a prefix of pieces (`pieces`) is such texts, one after the
other. The head is 16 characters from a hash of (prompt_seed,
salt), so no two requests of a run, and no two runs, share their first block of 16 bytes: a prefix
cache hits only the prefixes that the scenario declares. The body is a slice of the corpus of the
scenario's kind of prompts. If the token counts of single words are available (`word_text`), head
and body are such words, and the length is exact in tokens. Recorded prompts (a dataset) are sent
unchanged, after a head unless the salt is `none`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loadgen.manifest.json_section import JsonObject
from loadgen.records import NO_PIECES, Pieces
from loadgen.workload.client_tokenizer import TokenCounter, cut_to_tokens
from loadgen.workload.dataset_forms import Messages, RecordedPrompt
from loadgen.workload.pieces import PieceTree, Span
from loadgen.workload.texts import PromptKind
from loadgen.workload.word_text import DIGEST_BYTES, WordCounts, WordText, framed

HEAD_CHARS = 16
CHARS_PER_TOKEN = 4.0  # the usual rule of thumb, for plans without a tokenizer
_BASE32 = "abcdefghijklmnopqrstuvwxyz234567"
_PAIRS = [first + second for first in _BASE32 for second in _BASE32]  # by 10 bits
_SAMPLE_HEAD = "k4vq7mzx2w5npt3r"
_IS_BLANK = np.array([chr(code).isspace() for code in range(0x3002)])  # the last blank is U+3000
_CHARS_PER_CUT_TOKEN = 8  # of the text that a tokenizer cuts
_LEAD_CHARS = 256  # of the text before a piece that a tokenizer counts again
_MOST_PATHS = 64


@dataclass(frozen=True, slots=True)
class PromptFit:
    """The number of tokens of a prompt on a server: overhead_tokens + tokens_per_char · characters.

    The overhead is the server's chat template. With a byte tokenizer (tokens_per_char 1) lengths
    are exact. For other tokenizers the fit is calibrated and lengths hold on average; with `words`
    they are exact. `turn_overhead_tokens` is the template's share of an answer and the question
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
        """Tokens of an empty prompt."""
        return self.overhead_tokens if self.words is None else self.words.overhead_tokens

    @property
    def step(self) -> float:
        """Tokens of the shortest text: a character, or a word."""
        return self.tokens_per_char if self.words is None else self.words.shortest_tokens

    def chars(self, input_tokens: int) -> int:
        """The number of characters nearest to `input_tokens`, at least 1."""
        return max(1, round((input_tokens - self.overhead_tokens) / self.tokens_per_char))

    def is_reachable(self, input_tokens: ArrayLike) -> NDArray[np.bool_]:
        """False where even a prompt of a single character (or word) has more than
        `input_tokens`."""
        return np.asarray(np.asarray(input_tokens) >= self.overhead + self.step / 2)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The text of a request: `messages` or, if there are none, `prompt` as a single message.
    `fields` are sent as recorded (`RecordedPrompt.fields`)."""

    prompt: str
    messages: Messages = ()
    fields: JsonObject = field(default_factory=dict, hash=False)

    def as_messages(self) -> Messages:
        return self.messages or (("user", self.prompt),)


class Prompts:
    """The text of every row of a run.

    `seed` is the scenario's, `salt` the run's. With `salt: none` in the scenario the run's salt is
    not used, and every run sends the same text.
    """

    def __init__(
        self, kind: PromptKind, seed: int, salt: bytes, pieces: Pieces = NO_PIECES
    ) -> None:
        self._is_salted = kind.salt == "run"
        self._key = self._key_for(seed, salt)
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
        self._corpus = kind.corpus(rng)
        self._word_starts = word_starts(self._corpus)
        self._recorded = in_sending_order(kind.recorded(), seed)
        self._tokenizer = kind.load_tokenizer()
        self._is_common_words = kind.is_common_words
        self._seed = seed
        self._prefixes: dict[tuple[int, int], str] = {}
        self._word_prefixes: dict[tuple[int, int], tuple[str, int]] = {}
        self._word_text: WordText | None = None
        self._tree = PieceTree(pieces)
        self._paths = PathTexts()

    def salted(self, salt: bytes, pieces: Pieces = NO_PIECES) -> Prompts:
        """The prompts of a run with another salt and its pieces; the copy shares the corpus, which
        takes 10 ms to build."""
        other = copy.copy(self)
        other._key = self._key_for(self._seed, salt)
        other._prefixes, other._word_prefixes, other._word_text = {}, {}, None
        other._tree, other._paths = PieceTree(pieces), PathTexts()
        return other

    def _key_for(self, seed: int, salt: bytes) -> bytes:
        content = seed.to_bytes(8, "little") + (salt if self._is_salted else b"")
        return hashlib.blake2b(content, digest_size=32).digest()

    @property
    def tokenizer(self) -> TokenCounter | None:
        """The tokenizer on the client; None if lengths follow a fit instead."""
        return self._tokenizer

    @property
    def is_recorded(self) -> bool:
        """Whether the prompts come from a file and are sent unchanged."""
        return bool(self._recorded)

    @property
    def n_repeated(self) -> int | None:
        """The number of different recorded prompts, if they are sent without a salt; None for
        prompts of which each is new."""
        if self._is_salted or not self._recorded:
            return None
        return len({(prompt.messages, repr(prompt.fields)) for prompt in self._recorded})

    @property
    def is_common_words(self) -> bool:
        """Whether any common words may replace the text, because no tokenizer sets its length."""
        return self._is_common_words and self._tokenizer is None

    def prompt(self, row: np.void, fit: PromptFit) -> RenderedPrompt:
        """The text of a schedule row that continues no conversation."""
        if not self._recorded:
            return RenderedPrompt(self.render(row, fit))
        recorded = self._recorded[int(row["request_id"]) % len(self._recorded)]
        messages, fields = self._headed(recorded, int(row["prompt_seed"]))
        if len(messages) == 1 and messages[0][0] == "user":
            return RenderedPrompt(messages[0][1], (), fields)
        return RenderedPrompt("", messages, fields)

    def place(self, row: np.void) -> str:
        """`file:line` of the recorded prompt that a row sends; "" for other prompts."""
        if not self._recorded:
            return ""
        return self._recorded[int(row["request_id"]) % len(self._recorded)].place

    @property
    def needs_chat(self) -> str:
        """`file:line` of the first recorded prompt that only the chat API can carry; "" for
        none."""
        return next((prompt.place for prompt in self._recorded if prompt.needs_chat), "")

    def render(self, row: np.void, fit: PromptFit) -> str:
        """The prompt of a schedule row: `fit.chars(row["input_tokens"])` characters or, with a
        tokenizer or counted words, exactly the row's tokens less the fit's overhead.

        A prompt that is hardly longer than its shared prefix keeps its length: the prefix is cut so
        that 1 character of the request's own text remains.
        """
        identity = b"prompt" + int(row["prompt_seed"]).to_bytes(8, "little")
        prefix_tokens, prefix_id = int(row["prefix_tokens"]), int(row["prefix_id"])
        if prefix_id in self._tree:
            spans = self._tree.path(prefix_id, prefix_tokens)
            return self._pieced(spans, identity, int(row["input_tokens"]), fit)
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

    def _pieced(
        self, spans: Sequence[Span], identity: bytes, input_tokens: int, fit: PromptFit
    ) -> str:
        """A prompt that begins with the texts of a path."""
        if self._tokenizer is not None:
            n_tokens, least = input_tokens - round(fit.overhead_tokens), 1
        elif fit.words is not None:
            least = fit.words.shortest_tokens
            n_tokens = input_tokens - fit.words.overhead_tokens
        else:
            n_tokens, least = fit.chars(input_tokens), 1  # in characters
            spans = [
                Span(piece, *(round(at / fit.tokens_per_char) for at in ends))
                for piece, *ends in spans
            ]
        shared, n_shared = self._paths.text(self._cut(spans, n_tokens - least), self._span, fit)
        n_own = max(least, n_tokens - n_shared)
        if self._tokenizer is not None:
            return shared + self._counted_after(self._tokenizer, identity, n_own, shared)
        if fit.words is not None:
            return framed(shared + self._words(fit.words).piece(self._digest(identity), n_own)[0])
        return shared + self._text(identity, n_own)

    @staticmethod
    def _cut(spans: Sequence[Span], end: int) -> list[Span]:
        return [span._replace(end=min(span.end, end)) for span in spans if span.start < end]

    def _span(self, span: Span, before: str, fit: PromptFit) -> tuple[str, int]:
        """The text of a span behind `before`, and its size (tokens; characters with a fit)."""
        identity, size = b"piece" + span.prefix_id.to_bytes(4, "little"), span.end - span.start
        if self._tokenizer is not None:
            return self._counted_after(self._tokenizer, identity, size, before), size
        if fit.words is not None:
            return self._words(fit.words).piece(self._digest(identity), size)
        return self._slice(identity, size), size

    def _counted_after(
        self, tokenizer: TokenCounter, identity: bytes, n_tokens: int, before: str
    ) -> str:
        """Text of `n_tokens` tokens behind a long text, of which only the end is counted again."""
        lead = before[-_LEAD_CHARS:]
        lead = lead[lead.find(" ") + 1 :]  # tokenizers split at blanks first
        return self._counted(tokenizer, identity, tokenizer.count(lead) + n_tokens, lead)

    def write(self, purpose: bytes, prompt_seed: int, n_tokens: int, fit: PromptFit) -> str:
        """Text of `n_tokens` tokens without a template, for a later turn or a scripted answer."""
        identity = purpose + prompt_seed.to_bytes(8, "little")
        if self._tokenizer is not None:
            return self._counted(self._tokenizer, identity, max(1, n_tokens), "")
        if fit.words is not None:
            return framed(self._words(fit.words).piece(self._digest(identity), n_tokens)[0])
        return self._text(identity, max(1, round(n_tokens / fit.tokens_per_char)))

    def sample(self, n_chars: int) -> str:
        """`n_chars` characters of the same kind of text, to calibrate a fit."""
        return self._text(b"sample" + n_chars.to_bytes(4, "little"), n_chars)

    def _headed(self, recorded: RecordedPrompt, prompt_seed: int) -> tuple[Messages, JsonObject]:
        """Recorded messages and fields with this request's head in front of the first message."""
        if not self._is_salted:
            return recorded.messages, recorded.fields
        (role, content), *others = recorded.messages
        head = self._text(b"prompt" + prompt_seed.to_bytes(8, "little"), HEAD_CHARS)
        messages = ((role, f"{head} {content}"), *others)
        fields = recorded.fields
        if "messages" in fields:
            first, *rest = fields["messages"]
            fields = {**fields, "messages": [_with_head(first, head), *rest]}
        return messages, fields

    def _composed(
        self, counts: WordCounts, identity: bytes, n_tokens: int, prefix_id: int, prefix_tokens: int
    ) -> str:
        """Framed words of `n_tokens` tokens, beginning with the shared prefix, if any. The last
        words of the prefix are dropped if the prompt is hardly longer."""
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
        """The first `size` characters (with a tokenizer: tokens) of a shared prefix."""
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
        """Text that has `n_tokens` tokens together with `lead` in front of it."""
        n_chars = _CHARS_PER_CUT_TOKEN * n_tokens + HEAD_CHARS + 64
        while True:
            text = self._text(identity, n_chars)
            if tokenizer.count(lead + text) > n_tokens + 8:
                return cut_to_tokens(tokenizer, text, n_tokens, lead)
            n_chars *= 2

    def _text(self, identity: bytes, n_chars: int) -> str:
        if n_chars <= HEAD_CHARS:
            return self._slice(identity, n_chars)
        # ends with a full stop: templates strip a trailing blank, and a token would be missing
        return self._slice(identity, n_chars - 1) + "."

    def _slice(self, identity: bytes, n_chars: int) -> str:
        """The first `n_chars` characters of a head and a body."""
        digest = hashlib.blake2b(identity, digest_size=18, key=self._key).digest()
        head = _head_text(digest[:10])
        start = int.from_bytes(digest[10:], "little") % len(self._word_starts)
        body = self._body(int(self._word_starts[start]), n_chars - HEAD_CHARS - 1)
        return f"{head} {body}"[:n_chars]

    def _body(self, start: int, n_chars: int) -> str:
        """A slice of the corpus, which is repeated as often as needed."""
        text = self._corpus[start : start + max(0, n_chars)]
        while len(text) < n_chars:
            text += f" {self._corpus}"[: n_chars - len(text)]
        return text


class PathTexts:
    """The texts of the paths written last, so that a prompt which extends another writes only what
    it adds."""

    def __init__(self) -> None:
        self._texts: dict[Span, tuple[str, int]] = {}
        self._fit: PromptFit | None = None

    def text(
        self,
        spans: Sequence[Span],
        write: Callable[[Span, str, PromptFit], tuple[str, int]],
        fit: PromptFit,
    ) -> tuple[str, int]:
        """The text of a path, and its size. `write` returns the text of a span behind another text,
        of which it gets the end, and its size."""
        if fit is not self._fit:
            self._texts, self._fit = {}, fit
        n_known = len(spans)
        while n_known and spans[n_known - 1] not in self._texts:
            n_known -= 1
        text, size = self._texts[spans[n_known - 1]] if n_known else ("", 0)
        parts = [text]
        for span in spans[n_known:]:
            added, n = write(span, parts[-1], fit)
            parts.append(added)
            size += n
        text = text if len(parts) == 1 else "".join(parts)
        if spans:
            self._texts.pop(spans[-1], None)  # now the latest
            self._texts[spans[-1]] = text, size
            if len(self._texts) > _MOST_PATHS:
                del self._texts[next(iter(self._texts))]
        return text, size


def _with_head(message: JsonObject, head: str) -> JsonObject:
    """A message of the chat API with a head before its text, or as a further part of its parts."""
    content = message["content"]
    if isinstance(content, list):
        return {**message, "content": [{"type": "text", "text": head}, *content]}
    return {**message, "content": f"{head} {content}" if content else head}


def _head_text(bits: bytes) -> str:
    """10 bytes as HEAD_CHARS lowercase characters of Base32 (RFC 4648 section 6); a third of the
    time of `base64.b32encode`."""
    number, pairs = int.from_bytes(bits, "big"), _PAIRS
    return (
        f"{pairs[number >> 70]}{pairs[number >> 60 & 1023]}{pairs[number >> 50 & 1023]}"
        f"{pairs[number >> 40 & 1023]}{pairs[number >> 30 & 1023]}{pairs[number >> 20 & 1023]}"
        f"{pairs[number >> 10 & 1023]}{pairs[number & 1023]}"
    )


def word_starts(text: str) -> NDArray[np.intp]:
    """The positions of the first characters of words: not blank, after a blank or at the start."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    is_blank = _IS_BLANK[np.minimum(codes, len(_IS_BLANK) - 1)]
    return np.flatnonzero(~is_blank & np.r_[True, is_blank[:-1]])


def in_sending_order(recorded: Sequence[RecordedPrompt], seed: int) -> list[RecordedPrompt]:
    """Recorded prompts in an order drawn from the seed. Request k sends prompt k mod n of them:
    every prompt once, then every prompt again."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(recorded))
    return [recorded[k] for k in order.tolist()]


def planned_tokens(
    recorded: RecordedPrompt, kind: PromptKind, tokenizer: TokenCounter | None
) -> int:
    """Tokens of a recorded prompt with a head and without a template: counted by the tokenizer, if
    any, else at four characters per token."""
    head = f"{_SAMPLE_HEAD} " if kind.salt == "run" else ""
    texts = [head, *(content for _, content in recorded.messages)]
    if tokenizer is None:
        return max(1, round(sum(map(len, texts)) / CHARS_PER_TOKEN))
    return max(1, sum(tokenizer.count(text) for text in texts if text))
