"""The tokens of prompts that an unlimited prefix cache has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loadgen.records import FIRST_PIECE, Pieces, Schedule


def ideal_hits(schedule: Schedule, pieces: Pieces) -> NDArray[np.int64]:
    """The leading tokens of each prompt that an earlier row begins with, too, int64 [n]: those in
    an unlimited prefix cache. Counts shared prefixes and pieces, not the conversation of a session.
    """
    after, tokens = pieces["after"].tolist(), pieces["tokens"].tolist()
    ends = list[int]()
    for before, n in zip(after, tokens, strict=True):  # pieces stand behind those they follow
        ends.append(n + (ends[before - FIRST_PIECE] if before else 0))
    is_seen, longest = bytearray(len(ends)), dict[int, int]()
    hits = np.zeros(len(schedule), np.int64)
    columns = schedule["prefix_id"].tolist(), schedule["prefix_tokens"].tolist()
    for row, (prefix_id, n_shared) in enumerate(zip(*columns, strict=True)):
        number, at = prefix_id - FIRST_PIECE, 0
        if not 0 <= number < len(ends):
            at = longest.get(prefix_id, 0)
            longest[prefix_id] = max(at, n_shared)
        else:
            while number >= 0 and not is_seen[number]:
                is_seen[number] = 1
                number = after[number] - FIRST_PIECE
            at = ends[number] if number >= 0 else 0
        hits[row] = min(at, n_shared)
    return hits
