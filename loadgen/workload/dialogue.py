"""The messages of each row: a prompt of its own, or a conversation so far plus a new question.

A turn continues the conversation of its parent: the parent's messages, an answer, and a new
question of input − (parent's input + parent's output) tokens, including the template's share. The
answer is a scripted text of the parent's planned output length, or the server's real answer (with
or without its reasoning); in that case the turn cannot be written before its parent has ended.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from loadgen.records import REASONING, Edges, Schedule
from loadgen.workload.dataset_forms import Messages
from loadgen.workload.prompts import PromptFit, Prompts, RenderedPrompt


class Context(IntEnum):
    """The answers in a row's prompt: none (a single request or first turn), scripted, real, or real
    with their reasoning. From `real` on they are the server's."""

    none = 0
    scripted = 1
    real = 2
    reasoned = 3


class GrowingSchedule:
    """The rows of a schedule by number, to which rows can be added."""

    def __init__(self, schedule: Schedule) -> None:
        self._first, self._added = schedule, list[np.void]()

    def __getitem__(self, row: int) -> np.void:
        n = len(self._first)
        found: np.void = self._first[row] if row < n else self._added[row - n]
        return found

    def add_rows(self, rows: Schedule) -> None:
        self._added.extend(rows)


class Dialogue:
    """The messages of every row of a schedule (or of a shard's part of it), by row index.

    Stores the messages of a turn until its next turn is written, and no others.
    """

    def __init__(self, schedule: Schedule, edges: Edges, prompts: Prompts, fit: PromptFit) -> None:
        self._schedule, self._prompts, self._fit = GrowingSchedule(schedule), prompts, fit
        self._parent = conversation_parents(schedule, edges)
        is_real = (schedule["context"] >= Context.real).tolist()
        self._waits_for = {row: parent for row, parent in self._parent.items() if is_real[row]}
        self._has_next = bytearray(len(schedule))
        np.frombuffer(self._has_next, bool)[list(self._parent.values())] = True
        self._messages: dict[int, Messages] = {}

    def add_rows(self, rows: Schedule, edges: Edges) -> None:
        """Adds rows after the last; a conversation does not leave them."""
        n = len(self._has_next)
        self._schedule.add_rows(rows)
        self._has_next += bytes(len(rows))
        inner = edges[np.isin(edges["after"], rows["request_id"])]
        for child, parent in conversation_parents(rows, inner).items():
            self._parent[n + child], self._has_next[n + parent] = n + parent, 1
            if rows["context"][child] >= Context.real:
                self._waits_for[n + child] = n + parent

    def waits_for(self, row: int) -> int | None:
        """The row whose real answer is needed; None for a row that can be written ahead."""
        return self._waits_for.get(row)

    def prompt(self, row: int, answer: str | None = None, reasoning: str = "") -> RenderedPrompt:
        """The messages of a row. `answer` and `reasoning` are the server's to its parent, for rows
        that wait for them."""
        parent = self._parent.get(row)
        if parent is None:
            prompt = self._prompts.prompt(self._schedule[row], self._fit)
        else:
            prompt = RenderedPrompt("", self._continued(row, parent, answer, reasoning))
        if self._has_next[row]:
            self._messages[row] = prompt.as_messages()
        return prompt

    def _continued(self, row: int, parent: int, answer: str | None, reasoning: str) -> Messages:
        before = self._messages.pop(parent, None)
        if before is None:
            before = self.prompt(parent).as_messages()  # scripted: the same text from the plan
            self._messages.pop(parent, None)
        turn, earlier = self._schedule[row], self._schedule[parent]
        answer_tokens = int(earlier["output_tokens"])
        if answer is None:
            seed, n_tokens = int(earlier["prompt_seed"]), answer_tokens
            if turn["context"] == Context.reasoned:  # of the preflight, before any answer
                n_tokens -= n_tokens // 2
                reasoning = self._prompts.write(b"reasoning", seed, n_tokens, self._fit)
            answer = self._prompts.write(b"answer", seed, n_tokens, self._fit)
        new = int(turn["input_tokens"]) - int(earlier["input_tokens"]) - answer_tokens
        new -= round(self._fit.turn_overhead_tokens)
        question = self._prompts.write(b"turn", int(turn["prompt_seed"]), new, self._fit)
        thoughts = ((REASONING, reasoning),) if turn["context"] == Context.reasoned else ()
        kept = thoughts if reasoning else ()
        return (*before, *kept, ("assistant", answer), ("user", question))


def conversation_parents(schedule: Schedule, edges: Edges) -> dict[int, int]:
    """Row → the row whose conversation it continues, as indices into `schedule`."""
    ids = schedule["request_id"]
    child = np.searchsorted(ids, edges["request_id"])
    parent = np.searchsorted(ids, edges["after"])
    is_turn = (schedule["context"] != Context.none)[child]
    return dict(zip(child[is_turn].tolist(), parent[is_turn].tolist(), strict=True))
