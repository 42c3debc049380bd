"""Where prompt text comes from: common words, somebody's text, or recorded prompts."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import ConfigDict, Field

from loadgen.errors import ScenarioError
from loadgen.registry import Plugin, Registry
from loadgen.workload.client_tokenizer import TokenCounter, load_tokenizer
from loadgen.workload.vocabulary import WORDS

CORPUS_WORDS = 60_000
Messages = tuple[tuple[str, str], ...]  # (role, content)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A prompt of a dataset: its messages, and what its file says of its lengths."""

    messages: Messages
    output_tokens: int | None = None

    @property
    def text(self) -> str:
        return "\n".join(content for _, content in self.messages)


class PromptKind(Plugin, ABC):
    """A source of text.

    `salt`: `run` gives every run other text, so that a second one misses the first one's prefix
    cache; `none` does not. `tokenizer`: count tokens here, with `bytes` or the tokenizer of a local
    model directory, instead of by a fit to the server's own counts.
    """

    model_config = ConfigDict(strict=True)
    salt: Literal["run", "none"] = "run"
    tokenizer: Annotated[str, Field(min_length=1)] | None = None

    @property
    def is_common_words(self) -> bool:
        """Whether any other common words would do as well as these."""
        return False

    @property
    def gives_lengths(self) -> bool:
        """Whether the text comes with lengths of its own."""
        return False

    @abstractmethod
    def corpus(self, rng: np.random.Generator) -> str:
        """A long text to cut slices from."""

    def recorded(self) -> Sequence[Recorded]:
        """The prompts to send as they are; empty where prompts are cut from the corpus."""
        return ()

    def load_tokenizer(self) -> TokenCounter | None:
        return None if self.tokenizer is None else load_tokenizer(self.tokenizer)


def _bare_word(spec: object) -> dict[str, object] | None:
    return {"kind": spec} if isinstance(spec, str) else None


PROMPTS: Registry[PromptKind] = Registry("slobench.prompts", "source of prompts", _bare_word)


class Synthetic(PromptKind):
    """Common English words in random order: every tokenizer knows them, no cache has seen them."""

    kind = "synthetic"

    @property
    def is_common_words(self) -> bool:
        return True

    def corpus(self, rng: np.random.Generator) -> str:
        return " ".join(map(WORDS.__getitem__, rng.integers(0, len(WORDS), CORPUS_WORDS).tolist()))


class TextFile(PromptKind):
    """Slices of a local text file, runs of blanks as one: somebody's own language and style."""

    kind = "text"
    path: str

    def corpus(self, rng: np.random.Generator) -> str:
        text = re.sub(r"\s+", " ", read_text(self.path, "prompts.path")).strip()
        if len(text) < 100:
            raise ScenarioError(f"prompts.path: {self.path}: only {len(text)} characters of text")
        return text


def read_text(path: str, key: str) -> str:
    """A file's text. Raises ScenarioError naming the key when it cannot be read as UTF-8."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ScenarioError(f"{key}: {path}:{line}: is not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise ScenarioError(f"{key}: {path}: cannot be read: {error.strerror}") from None
