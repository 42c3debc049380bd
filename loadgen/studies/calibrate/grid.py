"""The runs with which an idle server is measured: every kind of step over its sizes."""

from __future__ import annotations

from dataclasses import dataclass

_SHORTEST = 16
_CONTEXT = 128
MOST_ANSWER = 192
"""Tokens of the longest answer."""
_MOST_CONTEXT = 1 << 17  # tokens of KV of all requests of a run with long prompts
_CACHED_SHARE = 0.75  # of the prompts of the runs with a cached prefix
CACHED = "cached"


@dataclass(frozen=True)
class Load:
    """A closed loop of `n_users` that sends `n_requests`, each with a prompt and an answer of the
    length (tokens), or between the two lengths, and with `shared` tokens of prompt in common."""

    name: str
    n_users: int
    prompt: int | tuple[int, int]
    answer: int | tuple[int, int]
    n_requests: int
    shared: int = 0


def loads(max_input: int, max_batch: int) -> list[Load]:
    """Prompts alone in every octave up to `max_input` tokens, decodes of every batch up to
    `max_batch` with short and with long contexts, prompts between decodes, and cached prompts.
    All but the last come twice, the second time in reverse order: a server that slows down
    meanwhile differs between the two."""
    lengths = [max_input]
    while lengths[-1] > 2 * _SHORTEST:
        lengths.append(max(_SHORTEST, lengths[-1] // 2))
    if lengths[-1] > _SHORTEST:
        lengths.append(_SHORTEST)
    short = min(_CONTEXT, max_input)
    n_long = max(1, min(max_batch, _MOST_CONTEXT // max_input))
    planned = [Load(f"prompt_{n}", 1, n, 3, _n_prompts(n)) for n in reversed(lengths)]
    # A batch whose answers end one after the other passes through all sizes below.
    batches = [n for n in (1, 4, 16, 64, 256) if n < max_batch] + [max_batch]
    planned += [
        Load(f"decode_{n}", n, short, (MOST_ANSWER // 8, MOST_ANSWER), max(2, 2 * n))
        for n in batches
    ]
    planned += [
        Load(f"decode_{n}_long", n, max_input, (MOST_ANSWER // 8, MOST_ANSWER), max(2, n))
        for n in sorted({1, n_long})
    ]
    planned.append(
        Load(
            *("mixed", max_batch, (_SHORTEST, max(_SHORTEST, max_input // 4))),
            *((8, MOST_ANSWER // 2), 4 * max_batch),
        )
    )
    planned.append(
        Load(
            "mixed_long",
            min(max_batch, n_long + 1),
            max_input,
            (8, MOST_ANSWER // 2),
            2 * n_long + 4,
        )
    )
    again = [
        Load(f"{load.name}_again", *(getattr(load, name) for name in _REPEATED))
        for load in reversed(planned)
    ]
    cached = int(max_input * _CACHED_SHARE)
    with_prefix = Load(CACHED, 1, max_input - cached, 3, _n_prompts(max_input), cached)
    return [*planned, *again, *([with_prefix] if cached else [])]


_REPEATED = ("n_users", "prompt", "answer", "n_requests")


def _n_prompts(n_tokens: int) -> int:
    return 24 if n_tokens <= 4096 else 12
