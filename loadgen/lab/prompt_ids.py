"""Token ids for simulated prompts: equal where the scenario shares text, unique elsewhere.

A simulated model reads no tokens; only the prefix cache compares them. A shared prefix is a single
id repeated and the rest of a prompt is the row's own id, so the cache hits are those of the
rendered texts.
"""

from __future__ import annotations

from collections import Counter

from loadgen.workload.dialogue import Context, conversation_parents
from loadgen.workload.schedule import Plan

_PREFIXES = 1 << 30  # first id of shared prefixes; smaller ids are a model's output
_OWN, _SCRIPTED = 1 << 31, 3 << 30  # first ids of rows' own text, and of scripted answers


class PromptIds:
    """The prompts of a plan's rows; a later turn begins with the conversation so far."""

    def __init__(self, plan: Plan) -> None:
        self._schedule = plan.schedule
        self._parent = conversation_parents(plan.schedule, plan.edges)
        self._is_real = self._schedule["context"] == Context.real
        self._n_waiting = Counter(self._parent.values())  # later turns without a prompt yet, by row
        self._conversations: dict[int, list[int]] = {}

    @property
    def is_sharing(self) -> bool:
        """Whether any two prompts can share tokens."""
        return bool(self._parent) or bool((self._schedule["prefix_tokens"] > 0).any())

    def of(self, row: int) -> list[int]:
        """`input_tokens` ids, at least one. Call once per row."""
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
            self._conversations[row] = prompt
        return prompt

    def answered(self, row: int, tokens: list[int]) -> None:
        """Stores a row's actual prompt and answer if a later turn repeats them."""
        if self._n_waiting[row]:
            self._conversations[row] = list(tokens)

    def _before(self, parent: int, is_real: bool) -> list[int]:
        """The conversation up to the end of a turn, with the actual or the scripted answer."""
        n_answer = int(self._schedule["output_tokens"][parent])
        n_prompt = max(1, int(self._schedule["input_tokens"][parent]))
        tokens = self._conversations.get(parent)
        if tokens is None:  # dropped before it was sent
            tokens = self.of(parent)
        self._n_waiting[parent] -= 1
        if not self._n_waiting[parent]:
            self._conversations.pop(parent, None)
        if is_real and len(tokens) > n_prompt:
            return tokens
        scripted = _SCRIPTED + int(self._schedule["request_id"][parent])
        return tokens[:n_prompt] + [scripted] * n_answer
