"""Sources of prompt text: common words, a text file, or recorded prompts."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import ConfigDict, Field

from loadgen.errors import ScenarioError
from loadgen.registry import Plugin, Registry, bare_word
from loadgen.whole_file import read_regular
from loadgen.workload.client_tokenizer import TokenCounter, load_tokenizer
from loadgen.workload.vocabulary import WORDS

CORPUS_WORDS = 60_000
_CORPUS_CHARS = 1_000_000
_MOST_BYTES = 2 << 30
_ROLES = {"human": "user", "user": "user"}
_ROLES |= dict.fromkeys(("gpt", "chatgpt", "assistant"), "assistant")
Messages = tuple[tuple[str, str], ...]  # (role, content)


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """A prompt of a dataset: its messages, and the length of its answer if the file states it."""

    messages: Messages
    output_tokens: int | None = None


class PromptKind(Plugin, ABC):
    """A source of text.

    `salt`: with `run` every run sends different text, so that a second run misses the first run's
    prefix cache; with `none` every run sends the same text. `tokenizer`: count tokens on the
    client, with `bytes` or the tokenizer of a local model directory, instead of by a fit to the
    server's own counts.
    """

    model_config = ConfigDict(strict=True)
    salt: Literal["run", "none"] = "run"
    tokenizer: Annotated[str, Field(min_length=1)] | None = None

    @property
    def is_common_words(self) -> bool:
        """Whether other common words may replace the text."""
        return False

    @property
    def gives_lengths(self) -> bool:
        """Whether the prompts have lengths of their own, so that `requests` may leave them out."""
        return False

    @abstractmethod
    def corpus(self, rng: np.random.Generator) -> str:
        """A long text; prompts are slices of it."""

    def recorded(self) -> Sequence[RecordedPrompt]:
        """The prompts to send unchanged; empty for kinds whose prompts are slices of the corpus."""
        return ()

    def load_tokenizer(self) -> TokenCounter | None:
        return None if self.tokenizer is None else load_tokenizer(self.tokenizer)


PROMPTS: Registry[PromptKind] = Registry("slobench.prompts", "source of prompts", bare_word)


class Synthetic(PromptKind):
    """Common English words in random order: in every tokenizer's vocabulary and in no cache."""

    kind = "synthetic"

    @property
    def is_common_words(self) -> bool:
        return True

    def corpus(self, rng: np.random.Generator) -> str:
        return " ".join(map(WORDS.__getitem__, rng.integers(0, len(WORDS), CORPUS_WORDS).tolist()))


class TextFile(PromptKind):
    """Slices of a local text file in your own language and style; white space becomes a single
    blank."""

    kind = "text"
    path: str

    def corpus(self, rng: np.random.Generator) -> str:
        label = f"prompts.path: {self.path}"
        text = re.sub(r"\s+", " ", read_text(self.path, label)).strip()
        if len(text) < 100:
            raise ScenarioError(f"{label}: only {len(text)} characters of text")
        return text


class RecordedPrompts(PromptKind):
    """Base of the kinds that send the prompts of a file."""

    path: str

    @property
    def gives_lengths(self) -> bool:
        return True

    @abstractmethod
    def _prompts(self, content: str, label: str) -> Iterator[RecordedPrompt]:
        """The prompts in a file's text; `label` names the file in messages."""

    def recorded(self) -> Sequence[RecordedPrompt]:
        label = f"prompts.path: {self.path}"
        prompts = list(self._prompts(read_text(self.path, label), label))
        if not prompts:
            raise ScenarioError(f"{label}: has no prompt to send")
        return prompts

    def corpus(self, rng: np.random.Generator) -> str:
        prompts = (" ".join(text for _, text in p.messages) for p in self.recorded()[:10_000])
        return " ".join(" ".join(prompt.split()) for prompt in prompts)[:_CORPUS_CHARS]


class Dataset(RecordedPrompts):
    """A prompt per line of JSON: `prompt` (text) or `messages` ([{role, content}]), and optionally
    `output_tokens`, the length of its answer. Each request sends a prompt drawn at random; with
    `salt: run` it begins with 16 random characters."""

    kind = "dataset"

    def _prompts(self, content: str, label: str) -> Iterator[RecordedPrompt]:
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                yield _from_line(line, f"{label}:{number}")


class ShareGPTPrompts(RecordedPrompts):
    """The first question of every ShareGPT conversation that has an answer: a JSON list of
    {conversations: [{from, value}, …]}. The answer's length is counted with `tokenizer`; without
    it, `answer_chars_per_token` characters are 1 token."""

    kind = "sharegpt"
    answer_chars_per_token: Annotated[float, Field(gt=0)] = 4.0

    def _prompts(self, content: str, label: str) -> Iterator[RecordedPrompt]:
        try:
            conversations = json.loads(content)
        except ValueError as error:
            raise ScenarioError(f"{label}: is not JSON: {error}") from None
        if not isinstance(conversations, list):
            raise ScenarioError(f"{label}: expected a list of conversations")
        tokenizer = self.load_tokenizer()
        for conversation in conversations:
            turns = conversation.get("conversations") if isinstance(conversation, dict) else None
            if not isinstance(turns, list) or len(turns) < 2:
                continue
            (asker, question), (answerer, answer) = (_turn(turn) for turn in turns[:2])
            if (asker, answerer) != ("user", "assistant") or not (question and answer):
                continue
            n = len(answer) / self.answer_chars_per_token
            n_tokens = round(n) if tokenizer is None else tokenizer.count(answer)
            yield RecordedPrompt((("user", question),), max(1, n_tokens))


def _from_line(line: str, where: str) -> RecordedPrompt:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ScenarioError(f"{where}: is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ScenarioError(f"{where}: expected an object with 'prompt' or 'messages'")
    output_tokens = values.get("output_tokens")
    if output_tokens is not None and (not isinstance(output_tokens, int) or output_tokens < 1):
        raise ScenarioError(f"{where}: output_tokens must be a positive integer")
    return RecordedPrompt(_messages(values, where), output_tokens)


def _messages(values: Mapping[str, object], where: str) -> Messages:
    prompt, messages = values.get("prompt"), values.get("messages")
    if isinstance(prompt, str) and prompt and messages is None:
        return (("user", prompt),)
    if isinstance(messages, list) and messages and prompt is None:
        pairs = [(m.get("role"), m.get("content")) for m in messages if isinstance(m, dict)]
        is_text = all(isinstance(r, str) and isinstance(c, str) for r, c in pairs)
        if is_text and len(pairs) == len(messages):
            return tuple((str(role), str(content)) for role, content in pairs)
    raise ScenarioError(
        f"{where}: expected either 'prompt' (text) or 'messages' (a list of {{role, content}})"
    )


def _turn(turn: object) -> tuple[str, str]:
    """(role, text) of a ShareGPT turn; the text is empty if there is none but white space."""
    if not isinstance(turn, dict):
        return "", ""
    role, text = _ROLES.get(str(turn.get("from")), ""), turn.get("value")
    return role, text if isinstance(text, str) and text.strip() else ""


def read_text(path: str, label: str, error: type[Exception] = ScenarioError) -> str:
    """A UTF-8 file's text. Raises `error` with the label if the file cannot be read."""
    try:
        return read_regular(Path(path), _MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as invalid:
        line = invalid.object.count(b"\n", 0, invalid.start) + 1
        raise error(f"{label}:{line}: is not UTF-8 text ({invalid.reason})") from None
    except OSError as failure:
        raise error(f"{label}: cannot be read: {failure.strerror}") from None
