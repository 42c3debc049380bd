"""Macro-states: the states of an engine's queue, batch and memory, in 1 080 boxes.

    short prompts waiting × long prompts × running × KV memory × slack of the most urgent
    6                     × 3            × 5       × 4         × 3

Five levels, each found by bisection, make a mixed-radix index into a table. The boxes do not
overlap and leave nothing out, so every state of an engine has exactly one entry. They are not a
Markov chain, because the states in a box differ: the gain of a solved table must be measured.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from enum import StrEnum
from typing import NamedTuple

_QUEUE_EDGES = (0, 2, 8, 16, 32)
_RUNNING_EDGES = (0, 8, 32, 128)
_KV_EDGES = (0.5, 0.8, 0.95)

FEATURES: dict[str, tuple[str, ...]] = {
    "queue": ("0", "1-2", "3-8", "9-16", "17-32", "33+"),
    "long": ("none", "queued", "at_head"),
    "running": ("0", "1-8", "9-32", "33-128", "129+"),
    "kv": ("<50%", "50-80%", "80-95%", "95%+"),
    "slack": ("ok", "tight", "late"),
}
"""The levels of each feature, the most significant feature first."""

N_STATES = 6 * 3 * 5 * 4 * 3


class Action(StrEnum):
    """Actions of a step in addition to decoding, in the order of their numbers in a table."""

    decode_only = "decode_only"
    prefill_short = "prefill_short"
    prefill_fcfs = "prefill_fcfs"
    prefill_big = "prefill_big"
    wait = "wait"


class MacroState(NamedTuple):
    """The level of each feature, as a position in `FEATURES`."""

    queue: int
    long: int
    running: int
    kv: int
    slack: int

    @property
    def number(self) -> int:
        """The index of the state in a table, 0 to `N_STATES` - 1."""
        queue, long, running, kv, slack = self
        return (((queue * 3 + long) * 5 + running) * 4 + kv) * 3 + slack

    def words(self) -> dict[str, str]:
        """The names of the levels, by feature."""
        return {name: levels[at] for (name, levels), at in zip(FEATURES.items(), self, strict=True)}


def state_of(
    n_short: int, n_long: int, is_long_at_head: bool, n_running: int, kv_pressure: float, slack: int
) -> MacroState:
    """The macro-state of an engine with `n_short` short and `n_long` long prompts waiting.
    `kv_pressure` is the share of KV blocks in use and `slack` a position in `FEATURES["slack"]`."""
    return MacroState(
        bisect_left(_QUEUE_EDGES, n_short),
        2 if is_long_at_head else min(n_long, 1),
        bisect_left(_RUNNING_EDGES, n_running),
        bisect_right(_KV_EDGES, kv_pressure),
        slack,
    )
