"""ShareGPT: shared conversations, with texts and without times."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec
import numpy as np
from pydantic import Field

from loadgen.errors import TraceFileError
from loadgen.workload.traces.trace import Trace, TraceColumns, TraceFormat, build_trace

_USER, _ASSISTANT = {"human", "user"}, {"gpt", "chatgpt", "bard", "bing", "assistant"}


class _Turn(msgspec.Struct):
    role: str = msgspec.field(name="from")
    value: str | None = None


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []  # msgspec copies it


class ShareGPT(TraceFormat):
    """ShareGPT: a JSON array of {id, conversations: [{from: human | gpt, value: text}, …]}.

    It has no times and no token counts. Each conversation contributes its first question and
    answer (as in vLLM's benchmark), with ⌈characters / chars_per_token⌉ tokens; 4 is the usual rule
    of thumb for English, 1 corresponds to the bundled byte tokenizer.
    """

    kind = "sharegpt"
    chars_per_token: Annotated[float, Field(gt=0, le=100)] = 4.0

    @classmethod
    def is_mine(cls, fields: Collection[str]) -> bool:
        return "conversations" in fields

    def parse(self, content: bytes, source: str) -> Trace:
        try:
            conversations = msgspec.json.decode(content, type=list[_Conversation])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceFileError(f"{source}: {_located(content, error)}") from None
        pairs = [pair for c in conversations if (pair := _first_exchange(c.conversations))]
        if not pairs:
            raise TraceFileError(f"{source}: no conversation has a question and an answer")
        n, n_longer = len(conversations), sum(len(c.conversations) > 2 for c in conversations)
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


def _first_exchange(turns: Sequence[_Turn]) -> tuple[int, int] | None:
    """Characters of the first question and of the answer directly after it; None without them."""
    first = next((k for k, turn in enumerate(turns) if turn.role in _USER), None)
    if first is None or first + 1 >= len(turns) or turns[first + 1].role not in _ASSISTANT:
        return None
    return len(turns[first].value or ""), len(turns[first + 1].value or "")


def _located(content: bytes, error: Exception) -> str:
    """A decoder's message, with the line if the message names the byte."""
    text = str(error)
    place = text.partition("(byte ")[2]
    if place.rstrip(")").isdecimal():
        line = content.count(b"\n", 0, int(place.rstrip(")"))) + 1
        return f"line {line}: {text}"
    return text[:1].lower() + text[1:].replace("`", "'")
