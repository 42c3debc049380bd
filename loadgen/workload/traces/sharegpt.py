"""ShareGPT: shared conversations, with texts and without times."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec
import numpy as np
from pydantic import Field

from loadgen.errors import TraceFileError
from loadgen.workload.traces.json_lines import read_records
from loadgen.workload.traces.trace import Trace, TraceColumns, TraceFormat, build_trace

_USER, _ASSISTANT = {"human", "user"}, {"gpt", "chatgpt", "bard", "bing", "assistant"}


class _Turn(msgspec.Struct):
    sender: str | None = msgspec.field(name="from", default=None)
    role: str | None = None
    value: str | None = None
    content: str | None = None

    @property
    def is_question(self) -> bool:
        return (self.sender or self.role) in _USER

    @property
    def is_answer(self) -> bool:
        return (self.sender or self.role) in _ASSISTANT

    @property
    def n_chars(self) -> int:
        return len(self.value or self.content or "")


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []  # msgspec copies it
    conversation: list[_Turn] = []

    @property
    def turns(self) -> list[_Turn]:
        return self.conversations or self.conversation


class ShareGPT(TraceFormat):
    """ShareGPT: a JSON array, or a line each, of {id, conversations: [{from: human | gpt, value:
    text}, …]}; WildChat and LMSYS-Chat: the same of {conversation: [{role, content}, …]}.

    It has no times and no token counts. Each conversation contributes its first question and
    answer (as in vLLM's benchmark), with ⌈characters / chars_per_token⌉ tokens; 4 is the usual rule
    of thumb for English, 1 corresponds to the bundled byte tokenizer.
    """

    kind = "sharegpt"
    chars_per_token: Annotated[float, Field(gt=0, le=100)] = 4.0

    @classmethod
    def is_mine(cls, fields: Collection[str]) -> bool:
        return bool({"conversations", "conversation"} & {*fields})

    def parse(self, content: bytes, source: str) -> Trace:
        conversations = _conversations(content, source)
        pairs = [pair for c in conversations if (pair := _first_exchange(c.turns))]
        if not pairs:
            raise TraceFileError(f"{source}: no conversation has a question and an answer")
        n, n_longer = len(conversations), sum(len(c.turns) > 2 for c in conversations)
        notes = [
            f"{n - len(pairs)} of {n} conversations have no question with an"
            f" answer; left out. {n_longer} have more turns than the first two; those are not read",
            f"token counts are characters / {self.chars_per_token:g}",
        ]
        lengths = np.ceil(np.array(pairs, np.float64) / self.chars_per_token).astype(np.int64)
        columns = TraceColumns(
            ticks=None, input_tokens=lengths[:, 0], output_tokens=lengths[:, 1], notes=notes
        )
        return build_trace(source, self.kind, columns)


def _conversations(content: bytes, source: str) -> list[_Conversation]:
    if content.lstrip()[:1] == b"{":
        batches = read_records(content, source, _Conversation)
        return [conversation for batch in batches for conversation in batch]
    try:
        return msgspec.json.decode(content, type=list[_Conversation])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TraceFileError(f"{source}: {_located(content, error)}") from None


def _first_exchange(turns: Sequence[_Turn]) -> tuple[int, int] | None:
    """Characters of the first question and of the answer directly after it; None without them."""
    first = next((k for k, turn in enumerate(turns) if turn.is_question), None)
    if first is None or first + 1 >= len(turns) or not turns[first + 1].is_answer:
        return None
    return turns[first].n_chars, turns[first + 1].n_chars


def _located(content: bytes, error: Exception) -> str:
    """A decoder's message, with the line if the message names the byte."""
    text = str(error)
    place = text.partition("(byte ")[2]
    if place.rstrip(")").isdecimal():
        line = content.count(b"\n", 0, int(place.rstrip(")"))) + 1
        return f"line {line}: {text}"
    return text[:1].lower() + text[1:].replace("`", "'")
