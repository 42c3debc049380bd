"""ShareGPT: shared conversations, texts without times."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec
import numpy as np
from pydantic import Field

from loadgen.errors import TraceFileError
from loadgen.workload.traces.trace import Trace, TraceColumns, TraceFormat, build_trace

_ASKING, _ANSWERING = {"human", "user"}, {"gpt", "chatgpt", "bard", "bing", "assistant"}


class _Turn(msgspec.Struct):
    who: str = msgspec.field(name="from")
    value: str | None = None


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []  # msgspec copies it


class ShareGPT(TraceFormat):
    """ShareGPT: a JSON array of {id, conversations: [{from: human | gpt, value: text}, …]}.

    It has no times and no token counts: lengths only. Each conversation gives its first question
    and answer (as vLLM's benchmark takes them), with ⌈characters / chars_per_token⌉ tokens; 4 is
    the usual rule of thumb for English, 1 is the bundled byte tokenizer.
    """

    kind = "sharegpt"
    chars_per_token: Annotated[float, Field(gt=0, le=100)] = 4.0

    @classmethod
    def is_mine(cls, fields: Collection[str]) -> bool:
        return "conversations" in fields

    def parse(self, content: bytes, source: str) -> Trace:
        try:
            found = msgspec.json.decode(content, type=list[_Conversation])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceFileError(f"{source}: {_located(content, error)}") from None
        pairs = [pair for item in found if (pair := _first_exchange(item.conversations))]
        if not pairs:
            raise TraceFileError(f"{source}: no conversation has a question and an answer")
        n_later = sum(len(item.conversations) > 2 for item in found)
        notes = [
            f"{len(found) - len(pairs)} of {len(found)} conversations have no question with an"
            f" answer; left out. {n_later} have more turns than the first two; those are not read",
            f"token counts are characters / {self.chars_per_token:g}",
        ]
        lengths = np.ceil(np.array(pairs, np.float64) / self.chars_per_token).astype(np.int64)
        columns = TraceColumns(
            ticks=None, input_tokens=lengths[:, 0], output_tokens=lengths[:, 1], notes=notes
        )
        return build_trace(source, self.kind, columns)


def _first_exchange(turns: Sequence[_Turn]) -> tuple[int, int] | None:
    """Characters of the first question and the answer that follows it at once."""
    first = next((k for k, turn in enumerate(turns) if turn.who in _ASKING), None)
    if first is None or first + 1 >= len(turns) or turns[first + 1].who not in _ANSWERING:
        return None
    return len(turns[first].value or ""), len(turns[first + 1].value or "")


def _located(content: bytes, error: Exception) -> str:
    """A decoder's message with a line where it knows the byte."""
    text = str(error)
    _, found, place = text.partition("(byte ")
    if found and place.rstrip(")").isdecimal():
        line = content.count(b"\n", 0, int(place.rstrip(")"))) + 1
        return f"line {line}: {text}"
    return text[:1].lower() + text[1:].replace("`", "'")
