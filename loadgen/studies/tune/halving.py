"""Successive halving with paired seeds: which candidates are measured with how many seeds. Pure.

All candidates are measured with few seeds, the better half with twice as many, and so on; the
finalists with all. A seed gives every candidate the same requests, so that one is compared with
another without the luck of the draw.

Source: Jamieson & Talwalkar, Non-stochastic best arm identification, AISTATS 2016.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2

FINALISTS = 3
_FIRST_BITS = 3


@dataclass(frozen=True, slots=True)
class Round:
    """`n_candidates` are measured with the first `n_seeds` seeds."""

    n_candidates: int
    n_seeds: int


def rounds(n_candidates: int, n_seeds: int) -> list[Round]:
    """The rounds of a search; the last has `FINALISTS` candidates (or all, if there are fewer) and
    all seeds. The first round has at least a seed, and at most an eighth of them, so that 12 or
    more candidates with 8 seeds or a multiple of them take at most 40 % of the runs."""
    assert n_candidates > 0, "nothing to search"
    n_halvings = max(0, ceil(log2(n_candidates / FINALISTS)))
    found: list[Round] = []
    n_left, n_first = n_candidates, max(1, n_seeds >> max(n_halvings, _FIRST_BITS))
    for k in range(n_halvings):
        found.append(Round(n_left, min(n_first << k, n_seeds)))
        n_left = max(FINALISTS, ceil(n_left / 2))
    return [*found, Round(n_left, n_seeds)]


def n_runs(search: Sequence[Round]) -> int:
    """The runs of a search: a candidate keeps its runs of the rounds before."""
    total = before = 0
    for each in search:
        total += each.n_candidates * (each.n_seeds - before)
        before = each.n_seeds
    return total


def survivors(scores: Mapping[str, Sequence[float]], n_kept: int) -> list[str]:
    """The candidates with the highest mean score, the best first; of equal candidates the first.

    All scores are over the same seeds.
    """
    assert len({len(values) for values in scores.values()}) == 1, "candidates with the same seeds"
    ranked = sorted(scores, key=lambda name: -sum(scores[name]))
    return ranked[:n_kept]


def paired(ours: Sequence[float], other: Sequence[float]) -> Iterator[float]:
    """Differences seed by seed, over the seeds that both have."""
    return (a - b for a, b in zip(ours, other, strict=False))
