"""Traces: the requests of a recorded service and their instants, independent of the file format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from loadgen.errors import TraceFileError
from loadgen.records import NO_PIECES, OWN_SLO, Pieces, Times
from loadgen.registry import Plugin, Registry, bare_word
from loadgen.workload.lengths import TokenCounts

NS_PER_UNIT = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
LONGEST_SLO_S = 86_400.0
Ticks = NDArray[np.int64]  # nanoseconds from any zero
Ids = NDArray[np.uint32]  # 0 = none
Order = slice | NDArray[np.intp]  # row numbers in their new order


@dataclass(frozen=True, slots=True)
class Trace:
    """n requests in order of time; every array has n entries.

    `times_s` counts from the first request; it is NaN throughout for a file without times.
    `prefix_ids` (0: none) and `prefix_tokens` are the shared text at the start of a prompt and its
    length; the ids name rows of `pieces`, by which prompts share text exactly. `session_ids` number
    conversations from 1. `class_ids` index `classes`. `slo_s` holds the limits of the rows, by
    column of the schedule (0: none). `notes` list the rows that were dropped, reordered or
    approximated.
    """

    source: str
    format: str
    times_s: Times
    input_tokens: TokenCounts
    output_tokens: TokenCounts
    prefix_ids: Ids
    prefix_tokens: NDArray[np.uint32]
    session_ids: Ids
    class_ids: NDArray[np.uint16]
    classes: tuple[str, ...] = ("default",)
    slo_s: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    pieces: Pieces = field(default_factory=lambda: NO_PIECES)

    def __len__(self) -> int:
        return len(self.input_tokens)

    @property
    def has_times(self) -> bool:
        return not np.isnan(self.times_s[0])


@dataclass(frozen=True, slots=True)
class TraceColumns:
    """The columns that a format has read, in file order; `build_trace` turns them into a Trace.

    `prefix` is (ids, tokens, pieces); `classes` is (ids, names).
    """

    ticks: Ticks | None
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    prefix: tuple[Ids, NDArray[np.uint32], Pieces] | None = None
    session_ids: Ids | None = None
    classes: tuple[NDArray[np.integer], tuple[str, ...]] | None = None
    slo_s: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    notes: Sequence[str] = ()


class TraceFormat(Plugin, ABC):
    """A file format, recognized by the names of its columns or keys."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @classmethod
    def is_mine(cls, fields: Collection[str]) -> bool:
        """Whether a file whose first record has these columns or keys has this format."""
        return False

    def own_slo_metrics(self) -> tuple[str, ...]:
        """The per-request metrics for which rows have limits, if known without reading a file."""
        return ()

    @abstractmethod
    def parse(self, content: bytes, source: str) -> Trace:
        """The trace in a file's bytes; `source` names the file in messages.

        Raises TraceFileError with `source:line: reason`.
        """


LIMIT_COLUMNS = {f"{own.removesuffix('_s')}_ms": own for own in OWN_SLO.values()}
"""Column or key of a limit in any format → column of the schedule."""

TRACES: Registry[TraceFormat] = Registry("slobench.traces", "trace format", bare_word)


def build_trace(source: str, kind: str, columns: TraceColumns) -> Trace:
    """A Trace in order of time that begins with the first kept row. Rows without input or output
    tokens are left out and counted: services record failed requests in this way, and a request of
    zero tokens cannot be sent.

    Raises TraceFileError if no row is left.
    """
    n, notes = len(columns.input_tokens), list(columns.notes)
    is_kept = (columns.input_tokens > 0) & (columns.output_tokens > 0)
    n_kept = int(np.count_nonzero(is_kept))
    if not n_kept:
        raise TraceFileError(f"{source}: none of its {n} rows has both input and output tokens")
    order: Order = slice(None)  # a complete and sorted file is not copied
    if n_kept < n:
        order = np.flatnonzero(is_kept)
        notes.append(f"{n - n_kept} of {n} rows left out: zero input or output tokens (no answer)")
    times_s = np.full(n_kept, np.nan)
    if columns.ticks is not None:
        ticks = columns.ticks[order]
        n_back = int(np.count_nonzero(ticks[1:] < ticks[:-1]))
        if n_back:
            by_time = np.argsort(ticks, kind="stable")
            order = np.arange(n)[order][by_time]
            ticks = ticks[by_time]
            notes.append(f"{n_back} rows were earlier than the row before; sorted")
        times_s = (ticks - ticks[0]) / 1e9
    no_prefix = np.zeros(n, np.uint32), np.zeros(n, np.uint32), NO_PIECES
    ids, tokens, pieces = columns.prefix or no_prefix
    class_ids, classes = columns.classes or (np.zeros(n, np.uint16), ("default",))
    sessions = columns.session_ids if columns.session_ids is not None else np.zeros(n, np.uint32)
    return Trace(
        source=source,
        format=kind,
        times_s=times_s,
        input_tokens=columns.input_tokens[order].astype(np.uint32),
        output_tokens=columns.output_tokens[order].astype(np.uint32),
        prefix_ids=ids[order],
        prefix_tokens=tokens[order],
        session_ids=sessions[order],
        class_ids=class_ids[order].astype(np.uint16, copy=False),
        classes=classes,
        slo_s={column: limits_s[order] for column, limits_s in columns.slo_s.items()},
        notes=tuple(notes),
        pieces=pieces,
    )
