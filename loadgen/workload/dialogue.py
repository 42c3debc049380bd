"""What each row says: a prompt of its own, or everything said before and one question more.

A turn continues the conversation of its parent: the parent's messages, an answer to them, and a new
question of input − (parent's input + parent's output) tokens, the template's share of it included.
The answer is a scripted text of the parent's planned output length, or what the server really said,
and then the turn cannot be written before its parent has ended.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from loadgen.records import Edges, Schedule
from loadgen.workload.prompts import PromptFit, Prompts, RenderedPrompt
from loadgen.workload.texts import Messages


class Context(IntEnum):
    """What a row's prompt holds besides its own words."""

    none = 0
    scripted = 1
    real = 2


class Dialogue:
    """The words of every row of a schedule (or of one load generator's part of it), by row index.

    Keeps the messages of a turn until the next one is written, and nothing else.
    """

    def __init__(self, schedule: Schedule, edges: Edges, prompts: Prompts, fit: PromptFit) -> None:
        self._schedule, self._prompts, self._fit = schedule, prompts, fit
        self._parent = conversation_parents(schedule, edges)
        is_real = (schedule["context"] == Context.real).tolist()
        self._waits_for = {row: parent for row, parent in self._parent.items() if is_real[row]}
        self._has_next = np.zeros(len(schedule), bool)
        self._has_next[list(self._parent.values())] = True
        self._said: dict[int, Messages] = {}

    def waits_for(self, row: int) -> int | None:
        """The row whose real answer this one needs; None where it can be written ahead."""
        return self._waits_for.get(row)

    def prompt(self, row: int, answer: str | None = None) -> RenderedPrompt:
        """The words of a row. `answer` is what the server said to its parent, for rows that wait
        for it."""
        parent = self._parent.get(row)
        if parent is None:
            asked = self._prompts.prompt(self._schedule[row], self._fit)
        else:
            asked = RenderedPrompt("", self._continued(row, parent, answer))
        if self._has_next[row]:
            self._said[row] = asked.as_messages()
        return asked

    def _continued(self, row: int, parent: int, answer: str | None) -> Messages:
        before = self._said.pop(parent, None)
        if before is None:
            before = self.prompt(parent).as_messages()  # scripted: written again from the plan
            self._said.pop(parent, None)
        plan, spoken = self._schedule, int(self._schedule["output_tokens"][parent])
        if answer is None:
            seed = int(plan["prompt_seed"][parent])
            answer = self._prompts.write(b"answer", seed, spoken, self._fit)
        new = int(plan["input_tokens"][row]) - int(plan["input_tokens"][parent]) - spoken
        new -= round(self._fit.turn_overhead_tokens)
        question = self._prompts.write(b"turn", int(plan["prompt_seed"][row]), new, self._fit)
        return (*before, ("assistant", answer), ("user", question))


def conversation_parents(schedule: Schedule, edges: Edges) -> dict[int, int]:
    """Row → the row whose conversation it continues, as indices into `schedule`."""
    continues = schedule["context"] != Context.none
    ids = schedule["request_id"]
    child = np.searchsorted(ids, edges["request_id"])
    parent = np.searchsorted(ids, edges["after"])
    chosen = continues[child]
    return dict(zip(child[chosen].tolist(), parent[chosen].tolist(), strict=True))
