"""Token ids for prompts that nobody reads: equal where the scenario shares text, unique elsewhere.

A simulated model looks at no token; only the prefix cache does, and it asks which are equal. A
shared prefix is one id repeated, everything else the row's own, so the hits are those that the
rendered texts would have.
"""

from __future__ import annotations

from collections import Counter

from loadgen.workload.dialogue import Context, conversation_parents
from loadgen.workload.schedule import Plan

_PREFIXES = 1 << 30  # below it: tokens that a model may answer; from here on, shared prefixes
_OWN, _SCRIPTED = 1 << 31, 3 << 30  # rows' own words; answers written for them in advance


class PromptIds:
    """The prompt of every row of a plan; a later turn begins with all that was said before."""

    def __init__(self, plan: Plan) -> None:
        self._schedule = plan.schedule
        self._parent = conversation_parents(plan.schedule, plan.edges)
        self._is_real = self._schedule["context"] == Context.real
        self._n_waiting = Counter(self._parent.values())  # turns still to be written after each row
        self._said: dict[int, list[int]] = {}

    @property
    def is_sharing(self) -> bool:
        """Whether any two prompts can have a token in common."""
        return bool(self._parent) or bool((self._schedule["prefix_tokens"] > 0).any())

    def of(self, row: int) -> list[int]:
        """`input_tokens` ids, at least one; each row is asked for once."""
        planned = self._schedule[row]
        n_tokens, parent = max(1, int(planned["input_tokens"])), self._parent.get(row)
        if parent is None:
            n_prefix = min(int(planned["prefix_tokens"]), n_tokens - 1)
            before = [_PREFIXES + int(planned["prefix_id"])] * n_prefix
        else:
            before = self._before(parent, bool(self._is_real[row]))
        n_own = max(1, n_tokens - len(before))
        prompt = before + [_OWN + int(planned["request_id"])] * n_own
        if self._n_waiting[row]:
            self._said[row] = prompt
        return prompt

    def answered(self, row: int, tokens: list[int]) -> None:
        """What was really said in a row, prompt and answer, where a later turn may repeat it."""
        if self._n_waiting[row]:
            self._said[row] = list(tokens)

    def _before(self, parent: int, is_real: bool) -> list[int]:
        """All that was said up to the end of a turn; its answer as it was, or as it was written."""
        n_spoken = int(self._schedule["output_tokens"][parent])
        n_prompt = max(1, int(self._schedule["input_tokens"][parent]))
        said = self._said.get(parent)
        if said is None:  # dropped before it was sent
            said = self.of(parent)
        self._n_waiting[parent] -= 1
        if not self._n_waiting[parent]:
            self._said.pop(parent, None)
        if is_real and len(said) > n_prompt:
            return said
        scripted = _SCRIPTED + int(self._schedule["request_id"][parent])
        return said[:n_prompt] + [scripted] * n_spoken
