"""Sources of prompt text."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field

from loadgen.errors import ScenarioError
from loadgen.registry import Plugin, Registry
from loadgen.workload.client_tokenizer import TokenCounter, load_tokenizer
from loadgen.workload.vocabulary import WORDS

CORPUS_WORDS = 60_000
Messages = tuple[tuple[str, str], ...]  # (role, content)


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
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

    def recorded(self) -> Sequence[RecordedPrompt]:
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


_CORPUS_CHARS = 1_000_000
_SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant"}


class Dataset(PromptKind):
    """One prompt per line of JSON: `prompt` (text) or `messages` ([{role, content}]), and
    `output_tokens` where the answer's length is known. Each request sends one of them, drawn at
    random; with `salt: run`, 16 characters of its own in front."""

    kind = "dataset"
    path: str

    @property
    def gives_lengths(self) -> bool:
        return True

    def recorded(self) -> Sequence[RecordedPrompt]:
        lines = read_text(self.path, "prompts.path").splitlines()
        found = [
            _from_line(line, f"prompts.path: {self.path}:{number}")
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
        return _some(found, self.path)

    def corpus(self, rng: np.random.Generator) -> str:
        return _joined(self.recorded())


class ShareGPTPrompts(PromptKind):
    """The first question of every ShareGPT conversation that has an answer: a JSON list of
    {conversations: [{from, value}, …]}. The answer's length is `answer_chars_per_token` characters
    a token, or counted with `tokenizer`."""

    kind = "sharegpt"
    path: str
    answer_chars_per_token: Annotated[float, Field(gt=0)] = 4.0

    @property
    def gives_lengths(self) -> bool:
        return True

    def recorded(self) -> Sequence[RecordedPrompt]:
        where = f"prompts.path: {self.path}"
        try:
            content = json.loads(read_text(self.path, "prompts.path"))
        except ValueError as error:
            raise ScenarioError(f"{where}: is not JSON: {error}") from None
        if not isinstance(content, list):
            raise ScenarioError(f"{where}: expected a list of conversations")
        return _some(list(self._questions(content)), self.path)

    def corpus(self, rng: np.random.Generator) -> str:
        return _joined(self.recorded())

    def _questions(self, content: list[Any]) -> Iterator[RecordedPrompt]:
        tokenizer = self.load_tokenizer()
        for conversation in content:
            turns = conversation.get("conversations") if isinstance(conversation, dict) else None
            if not isinstance(turns, list) or len(turns) < 2:
                continue
            question, answer = (_turn(turn) for turn in turns[:2])
            if question[0] != "user" or answer[0] != "assistant":
                continue
            if not question[1].strip() or not answer[1].strip():
                continue
            n = len(answer[1]) / self.answer_chars_per_token
            counted = round(n) if tokenizer is None else tokenizer.count(answer[1])
            yield RecordedPrompt((question,), max(1, counted))


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


def _messages(values: dict[str, Any], where: str) -> Messages:
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
    if not isinstance(turn, dict):
        return "", ""
    speaker, value = turn.get("from"), turn.get("value")
    return _SPEAKERS.get(str(speaker), str(speaker)), value if isinstance(value, str) else ""


def _some(found: list[RecordedPrompt], path: str) -> list[RecordedPrompt]:
    if not found:
        raise ScenarioError(f"prompts.path: {path}: has no prompt to send")
    return found


def _joined(recorded: Sequence[RecordedPrompt]) -> str:
    text = " ".join(" ".join(prompt.text.split()) for prompt in recorded[:10_000])
    return text[:_CORPUS_CHARS]
