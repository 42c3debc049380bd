"""Token ids for simulated prompts: equal where the scenario shares text, unique elsewhere.

A simulated model reads no tokens; only the prefix cache compares them. A shared text is a single
id repeated and the rest of a prompt is the row's own id, so the cache hits are those of the
rendered texts.

Keys of KV blocks come with the prompts, so that no engine hashes their tokens. Two blocks have
equal keys where their hashes would be equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from loadgen.records import FIRST_PIECE
from loadgen.workload.dialogue import Context, conversation_parents
from loadgen.workload.pieces import PieceTree, Span
from loadgen.workload.schedule import Plan
from reference_engine.state.run_keys import RunKeys, run_digest
from reference_engine.state.sequence import Request

_PREFIXES = 1 << 30  # first id of shared prefixes; smaller ids are a model's output
_PIECES = 3 << 29  # first id of pieces
_OWN, _SCRIPTED = 1 << 31, 3 << 30  # first ids of rows' own text, and of scripted answers


class TextTokens(list[int]):
    """Token ids, and the texts that they are the tokens of: the place of the first token of each
    text, and its number. Prompts with equal numbers of a text agree up to its end in both."""

    __slots__ = ("texts",)

    def __init__(self, tokens: Iterable[int], texts: Sequence[tuple[int, int]]) -> None:
        super().__init__(tokens)
        self.texts = texts


class Prompt(NamedTuple):
    """Token ids, and the keys of the first full blocks of them (`Request.chain`)."""

    tokens: list[int]
    chain: list[bytes] | RunKeys


class PromptIds:
    """The prompts of a plan's rows; a later turn begins with the conversation so far. With
    `block_tokens`, the size of KV blocks, prompts have keys of their blocks."""

    def __init__(self, plan: Plan, block_tokens: int | None = None) -> None:
        self._schedule, self._block_tokens = plan.schedule, block_tokens
        self._parent = conversation_parents(plan.schedule, plan.edges)
        self._is_real = self._schedule["context"] >= Context.real
        self._n_waiting = Counter(self._parent.values())  # later turns without a prompt yet, by row
        self._conversations: dict[int, Prompt] = {}
        self._tree = PieceTree(plan.pieces)

    @property
    def is_sharing(self) -> bool:
        """Whether any two prompts can share tokens."""
        return bool(self._parent) or bool((self._schedule["prefix_tokens"] > 0).any())

    def of(self, row: int) -> Prompt:
        """`input_tokens` ids, at least one. Call once per row."""
        planned = self._schedule[row]
        n_tokens, parent = max(1, int(planned["input_tokens"])), self._parent.get(row)
        own = _OWN + int(planned["request_id"])
        if parent is None:
            n_prefix = min(int(planned["prefix_tokens"]), n_tokens - 1)
            spans = self._tree.path(int(planned["prefix_id"]), n_prefix)
            before = TextTokens((), [(start, self._text_id(text)) for text, start, _ in spans])
            for (_, number), (_, start, end) in zip(before.texts, spans, strict=True):
                before += [number] * (end - start)
            chain = self._keys(row, spans, n_tokens, own)
        else:
            before, chain = self._before(parent, bool(self._is_real[row]))
            if planned["tenant_id"] != self._schedule["tenant_id"][parent]:
                chain = []
        tokens = TextTokens(before, [*before.texts, (len(before), own)])
        tokens += [own] * max(1, n_tokens - len(before))
        prompt = Prompt(tokens, chain)
        if self._n_waiting[row]:
            self._conversations[row] = prompt
        return prompt

    def answered(self, row: int, request: Request) -> None:
        """Stores a row's actual prompt and answer if a later turn repeats them."""
        if self._n_waiting[row]:
            tokens = TextTokens(request.tokens, _texts(request.tokens))
            self._conversations[row] = Prompt(tokens, request.chain[:])

    def _text_id(self, prefix_id: int) -> int:
        return (
            _PIECES + prefix_id - FIRST_PIECE if prefix_id in self._tree else _PREFIXES + prefix_id
        )

    def _keys(
        self, row: int, spans: Sequence[Span], n_tokens: int, own: int
    ) -> list[bytes] | RunKeys:
        """The keys of all full blocks of a prompt of shared texts and own text. A block in which a
        text begins is the first block of that text."""
        size = self._block_tokens
        if size is None:
            return []
        before = b"%d" % int(self._schedule["tenant_id"][row])
        starts, digests = list[int](), list[bytes]()
        for text, start, _ in spans:
            before = run_digest(before, self._text_id(text))
            starts.append(start // size)
            digests.append(before)
        n_prefix = spans[-1].end if spans else 0
        return RunKeys(
            [*starts, n_prefix // size], [*digests, run_digest(before, own)], n_tokens // size
        )

    def _before(self, parent: int, is_real: bool) -> tuple[TextTokens, list[bytes] | RunKeys]:
        """The conversation up to the end of a turn, with the actual or the scripted answer, and
        its keys."""
        n_answer = int(self._schedule["output_tokens"][parent])
        n_prompt = max(1, int(self._schedule["input_tokens"][parent]))
        prompt = self._conversations.get(parent)
        if prompt is None:  # dropped before it was sent
            prompt = self.of(parent)
        self._n_waiting[parent] -= 1
        if not self._n_waiting[parent]:
            self._conversations.pop(parent, None)
        size = self._block_tokens
        if is_real and len(prompt.tokens) > n_prompt:
            n_full = 0 if size is None else len(prompt.tokens) // size
            return TextTokens(prompt.tokens, _texts(prompt.tokens)), prompt.chain[:n_full]
        scripted = _SCRIPTED + int(self._schedule["request_id"][parent])
        n_full = 0 if size is None else n_prompt // size
        texts = [text for text in _texts(prompt.tokens) if text[0] < n_prompt]
        tokens = TextTokens(prompt.tokens[:n_prompt], [*texts, (n_prompt, scripted)])
        tokens += [scripted] * n_answer
        return tokens, prompt.chain[:n_full]


def _texts(tokens: list[int]) -> Sequence[tuple[int, int]]:
    return tokens.texts if isinstance(tokens, TextTokens) else ()
