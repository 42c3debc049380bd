"""Prompt text of an exact length, cheap enough to be made ahead of time for every row.

A prompt is `[shared prefix] head body`. The head is 16 characters from a hash of (prompt_seed,
salt), so no two requests of a run, and no two runs, share their first block of 16 bytes: a prefix
cache hits what the scenario declares and nothing else. The body is a slice of a text built once
from common words.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loadgen.workload.scenario import PromptSettings
from loadgen.workload.vocabulary import WORDS

HEAD_CHARS = 16
CORPUS_WORDS = 60_000


@dataclass(frozen=True, slots=True)
class PromptFit:
    """How many tokens a server makes of a prompt: overhead_tokens + tokens_per_char · characters.

    The overhead is what its chat template adds. A byte tokenizer has tokens_per_char 1 and is hit
    exactly; for others the fit is calibrated and the length holds on average.
    """

    overhead_tokens: float = 0.0
    tokens_per_char: float = 1.0

    def __post_init__(self) -> None:
        assert self.overhead_tokens >= 0, f"a template of {self.overhead_tokens} tokens"
        assert self.tokens_per_char > 0, f"{self.tokens_per_char} tokens per character"

    def chars(self, input_tokens: int) -> int:
        """Characters of the prompt that come nearest to `input_tokens`, at least 1."""
        return max(1, round((input_tokens - self.overhead_tokens) / self.tokens_per_char))

    def is_reachable(self, input_tokens: ArrayLike) -> NDArray[np.bool_]:
        """False where even a prompt of one character has more tokens than asked for."""
        shortest_tokens = self.overhead_tokens + self.tokens_per_char
        return np.asarray(np.asarray(input_tokens) >= shortest_tokens - self.tokens_per_char / 2)


class Prompts:
    """The text of every row of one run.

    `seed` is the scenario's, `salt` the run's; with `salt: none` in the settings the run's is left
    out and every run sends the same text.
    """

    def __init__(self, settings: PromptSettings, seed: int, salt: bytes) -> None:
        said = salt if settings.salt == "run" else b""
        self._key = hashlib.blake2b(seed.to_bytes(8, "little") + said, digest_size=32).digest()
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
        words = [WORDS[i] for i in rng.integers(0, len(WORDS), CORPUS_WORDS)]
        self._corpus = " ".join(words)
        lengths = np.array([len(word) + 1 for word in words])
        self._word_starts: list[int] = (np.cumsum(lengths) - lengths).tolist()
        self._prefixes: dict[tuple[int, int], str] = {}

    def render(self, row: np.void, fit: PromptFit) -> str:
        """The prompt of a schedule row: ASCII, `fit.chars(row["input_tokens"])` characters.

        Where the whole is hardly longer than its shared prefix, the length wins: the prefix is cut
        so that one character of the request's own remains.
        """
        n_chars = fit.chars(int(row["input_tokens"]))
        own = int(row["prompt_seed"]).to_bytes(8, "little")
        if not row["prefix_tokens"]:
            return self._text(b"prompt" + own, n_chars)
        prefix_chars = max(1, round(int(row["prefix_tokens"]) / fit.tokens_per_char))
        prefix = self._prefix(int(row["prefix_id"]), prefix_chars)[: n_chars - 1]
        return prefix + self._text(b"prompt" + own, n_chars - len(prefix))

    def sample(self, n_chars: int) -> str:
        """`n_chars` characters of the same kind of text, for calibrating a fit."""
        return self._text(b"sample" + n_chars.to_bytes(4, "little"), n_chars)

    def _prefix(self, prefix_id: int, n_chars: int) -> str:
        key = prefix_id, n_chars
        if key not in self._prefixes:
            self._prefixes[key] = self._text(b"prefix" + prefix_id.to_bytes(4, "little"), n_chars)
        return self._prefixes[key]

    def _text(self, identity: bytes, n_chars: int) -> str:
        digest = hashlib.blake2b(identity, digest_size=18, key=self._key).digest()
        head = base64.b32encode(digest[:10]).decode("ascii").lower()  # 80 bits in HEAD_CHARS
        start = int.from_bytes(digest[10:], "little") % len(self._word_starts)
        body = self._body(self._word_starts[start], n_chars - HEAD_CHARS - 2)
        # a full stop, because templates strip trailing blanks and the length would be off by one
        return f"{head} {body}"[: n_chars - 1] + "." if n_chars > HEAD_CHARS else head[:n_chars]

    def _body(self, start: int, n_chars: int) -> str:
        """A slice of the corpus, read around its end as often as needed."""
        text = self._corpus[start : start + max(0, n_chars)]
        while len(text) < n_chars:
            text += f" {self._corpus}"[: n_chars - len(text)]
        return text
