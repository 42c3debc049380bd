"""Text of exactly so many tokens on a server whose tokenizer nobody has here.

A server's own counts told how many tokens each of some words has (`calibration`). Words behind a
blank are tokenized one by one by every tokenizer that splits at blanks first (byte-level BPE,
SentencePiece, WordPiece), so text made of such words has the sum of their tokens. An opening and a
closing word that never change stand between it and whatever a chat template puts around it.
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
    """A piece between the words that never change; it begins with a blank, or is empty."""
    return f"{OPENING}{piece} {CLOSING}"


def unframed(text: str) -> str:
    """What `framed` put between its two words."""
    return text.removeprefix(OPENING).removesuffix(CLOSING).strip()


@dataclass(frozen=True, slots=True)
class WordCounts:
    """`tokens[i]` is what ` words[i]` adds to a text; `overhead_tokens` is all else: the template,
    the opening and the closing word.
    """

    overhead_tokens: int
    words: tuple[str, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.words, "no word is known"
        assert len(self.words) == len(self.tokens), "each word has its count"
        assert min(self.tokens) > 0, f"a word without tokens: {self.tokens}"
        assert self.overhead_tokens >= 0, f"a frame of {self.overhead_tokens} tokens"

    @property
    def shortest_tokens(self) -> int:
        return min(self.tokens)


class WordText:
    """Pieces of text by the tokens they are to have; `seed` orders the words."""

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
        """Words that a digest chooses, and how many tokens they have: `n_tokens`, or the nearest
        that these words can make; at least one word. Different digests differ from the first words
        on, like 80 random bits do.
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
            left += head.pop()[1]  # so short that the head left a rest which no words make

    def _body(self, start: int, left: int) -> tuple[str, int]:
        """Words from a place of the corpus on with `left` tokens, and how many are missing."""
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
    """The words that requests begin with: the shortest in tokens, so that two prompts differ within
    their first block of a prefix cache; all, where too few are that short."""
    every = list(zip(texts, tokens, strict=True))
    shortest = [(text, n) for text, n in every if n == min(tokens)]
    return shortest if len(shortest) >= _LEAST_HEAD_WORDS else every


def _fillers(texts: list[str], tokens: tuple[int, ...]) -> list[str | None]:
    """`fillers[n]`: words of n tokens together, None where no words are. Above the square of the
    longest count every sum that can be reached is (Frobenius)."""
    fillers: list[str | None] = [""]
    for n in range(1, max(tokens) ** 2 + max(tokens)):
        found = (
            f"{fillers[n - size]}{text}"
            for text, size in zip(texts, tokens, strict=True)
            if size <= n and fillers[n - size] is not None
        )
        fillers.append(next(found, None))
    return fillers
