"""Recorded prompts from local files: JSON lines, or ShareGPT's conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from loadgen.errors import ScenarioError
from loadgen.workload.texts import Messages, PromptKind, Recorded, read_text

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

    def recorded(self) -> Sequence[Recorded]:
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

    def recorded(self) -> Sequence[Recorded]:
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

    def _questions(self, content: list[Any]) -> Iterator[Recorded]:
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
            yield Recorded((question,), max(1, counted))


def _from_line(line: str, where: str) -> Recorded:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ScenarioError(f"{where}: is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ScenarioError(f"{where}: expected an object with 'prompt' or 'messages'")
    output_tokens = values.get("output_tokens")
    if output_tokens is not None and (not isinstance(output_tokens, int) or output_tokens < 1):
        raise ScenarioError(f"{where}: output_tokens must be a positive integer")
    return Recorded(_messages(values, where), output_tokens)


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


def _some(found: list[Recorded], path: str) -> list[Recorded]:
    if not found:
        raise ScenarioError(f"prompts.path: {path}: has no prompt to send")
    return found


def _joined(recorded: Sequence[Recorded]) -> str:
    text = " ".join(" ".join(prompt.text.split()) for prompt in recorded[:10_000])
    return text[:_CORPUS_CHARS]
