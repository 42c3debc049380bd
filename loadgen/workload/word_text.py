"""Text with an exact number of tokens for a server whose tokenizer the client does not have.

The server's own counts give the number of tokens of some words (`calibration`). Tokenizers that
split at blanks first (byte-level BPE, SentencePiece, WordPiece) tokenize each word after a blank
separately, so a text of such words has the sum of their tokens. A constant opening and closing word
separate the text from the server's chat template.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

OPENING, CLOSING = "Text:", "end."
DIGEST_BYTES = 24
_HEAD_BITS = 80
_LEAST_HEAD_WORDS = 16
_CORPUS_WORDS = 20_000


def framed(piece: str) -> str:
    """A piece between the opening and the closing word; a piece is empty or begins with a blank."""
    return f"{OPENING}{piece} {CLOSING}"


def unframed(text: str) -> str:
    """The text between the two words of `framed`, without blanks around it."""
    return text.removeprefix(OPENING).removesuffix(CLOSING).strip()


@dataclass(frozen=True, slots=True)
class WordCounts:
    """`tokens[i]` is the number of tokens that ` words[i]` adds to a text; `overhead_tokens` are
    those of the template and of the opening and closing word.
    """

    overhead_tokens: int
    words: tuple[str, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.words, "no words"
        assert len(self.words) == len(self.tokens), "each word has its count"
        assert min(self.tokens) > 0, f"a word without tokens: {self.tokens}"
        assert self.overhead_tokens >= 0, f"a frame of {self.overhead_tokens} tokens"

    @property
    def shortest_tokens(self) -> int:
        return min(self.tokens)


class WordText:
    """Pieces of text with given numbers of tokens; `seed` determines the order of the words."""

    def __init__(self, counts: WordCounts, seed: int) -> None:
        self.counts = counts
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 0x7E47])))
        order = rng.integers(0, len(counts.words), _CORPUS_WORDS)
        texts = [f" {word}" for word in counts.words]
        lengths, tokens = np.array([len(t) for t in texts]), np.array(counts.tokens)
        self._corpus = "".join(texts[i] for i in order.tolist())
        self._chars = np.concatenate([[0], np.cumsum(lengths[order])])
        self._tokens = np.concatenate([[0], np.cumsum(tokens[order])])
        self._fillers = _fillers(texts, counts.tokens)
        self._head = _head_words(texts, counts.tokens)
        self._n_head = math.ceil(_HEAD_BITS / math.log2(max(2, len(self._head))))

    def piece(self, digest: bytes, n_tokens: int) -> tuple[str, int]:
        """(words chosen by a digest, their tokens): `n_tokens` tokens, or the nearest number that
        these words can form; at least one word. The first words hold 80 bits of the digest, so
        different digests give different beginnings.
        """
        assert len(digest) == DIGEST_BYTES, f"a digest of {len(digest)} bytes"
        if n_tokens < self.counts.shortest_tokens:
            shortest = self.counts.tokens.index(self.counts.shortest_tokens)
            return f" {self.counts.words[shortest]}", self.counts.shortest_tokens
        number, left = int.from_bytes(digest, "little"), n_tokens
        head = []
        for _ in range(self._n_head):
            number, chosen = divmod(number, len(self._head))
            if self._head[chosen][1] > left:
                break
            head.append(self._head[chosen])
            left -= head[-1][1]
        while True:
            body, missing = self._body(number % _CORPUS_WORDS, left)
            if not missing or not head or left >= len(self._fillers):
                return "".join(text for text, _ in head) + body, n_tokens - missing
            left += head.pop()[1]  # no words have exactly the rest: shorten the head

    def _body(self, start: int, left: int) -> tuple[str, int]:
        """(words of the corpus from `start` on with `left` tokens, number of missing tokens)."""
        parts = []
        while left >= (room := int(self._tokens[-1] - self._tokens[start])):
            parts.append(self._corpus[self._chars[start] :])
            left, start = left - room, 0
        target = int(self._tokens[start]) + left
        end = int(np.searchsorted(self._tokens, target, side="right")) - 1
        last = end
        while (rest := target - int(self._tokens[last])) < len(self._fillers):
            filler = self._fillers[rest]
            if filler is not None:
                return "".join([*parts, self._slice(start, last), filler]), 0
            if last == start:
                break
            last -= 1
        return "".join([*parts, self._slice(start, end)]), target - int(self._tokens[end])

    def _slice(self, start: int, end: int) -> str:
        return self._corpus[self._chars[start] : self._chars[end]]


def _head_words(texts: list[str], tokens: tuple[int, ...]) -> list[tuple[str, int]]:
    """The words of the heads: those with the fewest tokens, so that two prompts differ within the
    first block of a prefix cache; all words if there are too few of those."""
    every = list(zip(texts, tokens, strict=True))
    shortest = [(text, n) for text, n in every if n == min(tokens)]
    return shortest if len(shortest) >= _LEAST_HEAD_WORDS else every


def _fillers(texts: list[str], tokens: tuple[int, ...]) -> list[str | None]:
    """`fillers[n]`: words with n tokens in total, None if there are none. Above the square of the
    largest count every reachable sum can be formed (Frobenius)."""
    fillers: list[str | None] = [""]
    for n in range(1, max(tokens) ** 2 + max(tokens)):
        candidates = (
            f"{fillers[n - size]}{text}"
            for text, size in zip(texts, tokens, strict=True)
            if size <= n and fillers[n - size] is not None
        )
        fillers.append(next(candidates, None))
    return fillers
