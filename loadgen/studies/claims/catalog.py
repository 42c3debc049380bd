"""The claims of four texts about batching and of the papers they cite, with their measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from loadgen.errors import UsageError, nearest
from loadgen.studies.claims.claim import Claim
from loadgen.studies.claims.rows import (
    applications,
    clusters,
    continuous,
    decisions,
    kernels,
    large_model,
    memory,
    order,
    prediction,
    untestable,
)

SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "A": "动态批处理的“无人区” (no man's land of dynamic batching), essay without references",
        "B": "Continuous Batching 原理 (principles), course text after the papers of Orca and "
        "Sarathi-Serve",
        "C": "如何在流水线中处理动态batch (dynamic batches in a pipeline), note without references",
        "D": "Continuous Batching：吞吐量的飞跃 (a leap in throughput), book chapter of 2025; a "
        "reference is a placeholder",
        "P": "the paper of the system itself, where the texts give no number",
    }
)
_TOPICS: tuple[tuple[str, tuple[Claim, ...]], ...] = (
    ("Continuous batching", continuous.CONTINUOUS),
    ("Order and chunks", order.ORDER),
    ("Memory", memory.MEMORY),
    ("Decisions", decisions.DECISIONS),
    ("Kernels and parts of a GPU", kernels.KERNELS),
    ("Several replicas", clusters.CLUSTERS),
    ("Prediction and learning", prediction.PREDICTION),
    ("Applications, cost and energy", applications.APPLICATIONS),
    ("The table of 70B on four H200s", large_model.TABLE),
    ("Errata", untestable.ERRATA),
    ("Futures, and what has no test here", untestable.FUTURE),
)
CLAIMS: tuple[Claim, ...] = tuple(
    replace(claim, topic=topic) for topic, claims in _TOPICS for claim in claims
)


def chosen(keys: Sequence[str] | None) -> tuple[Claim, ...]:
    """The claims of these keys in the order of the table; all for None. Raises UsageError."""
    known = [claim.key for claim in CLAIMS]
    for key in keys or ():
        if key not in known:
            raise UsageError(f"--only {key}: unknown claim; {nearest(key, known)}")
    return tuple(claim for claim in CLAIMS if keys is None or claim.key in keys)
