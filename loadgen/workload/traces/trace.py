"""A trace: what a recorded service was asked and when, whatever file it came from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from loadgen.errors import TraceFileError
from loadgen.records import Times
from loadgen.registry import Plugin, Registry
from loadgen.workload.lengths import TokenCounts

Ticks = NDArray[np.int64]  # nanoseconds from any zero
Ids = NDArray[np.uint32]  # 0 = none
MAX_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class Trace:
    """n requests in order of time; every array has n entries.

    `times_s` counts from the first request, and is NaN throughout where the file has no times.
    `prefix_ids` and `prefix_tokens` say which text a prompt begins with and how much of it: two
    rows of one id share the smaller of their two prefixes. `session_ids` number conversations from
    1. `parents` is the row that a row answers, −1 for none. `class_ids` index `classes`. `notes`
    say what was dropped, reordered or approximated, and how much of it.
    """

    source: str
    format: str
    times_s: Times
    input_tokens: TokenCounts
    output_tokens: TokenCounts
    prefix_ids: Ids
    prefix_tokens: NDArray[np.uint32]
    session_ids: Ids
    parents: NDArray[np.int64]
    class_ids: NDArray[np.uint16]
    classes: tuple[str, ...] = ("default",)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.input_tokens)

    @property
    def has_times(self) -> bool:
        return not np.isnan(self.times_s[0])


@dataclass(frozen=True, slots=True)
class Columns:
    """What a format reads, in file order and unchecked; `build_trace` makes a Trace of it.

    `prefix` is (ids, tokens); `classes` is (ids, names).
    """

    ticks: Ticks | None
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    prefix: tuple[Ids, NDArray[np.uint32]] | None = None
    session_ids: Ids | None = None
    parents: NDArray[np.int64] | None = None
    classes: tuple[NDArray[np.int64], tuple[str, ...]] | None = None
    notes: Sequence[str] = ()


class TraceFormat(Plugin, ABC):
    """A file format, known by the names of its columns or keys."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @classmethod
    def is_mine(cls, fields: Collection[str]) -> bool:
        """Whether a file whose first record has these columns or keys is of this format."""
        return False

    @abstractmethod
    def parse(self, content: bytes, source: str) -> Trace:
        """The trace in a file's bytes; `source` is what messages call the file.

        Raises TraceFileError with `source:line: reason`.
        """


def _bare_name(spec: object) -> dict[str, object] | None:
    return {"kind": spec} if isinstance(spec, str) else None


TRACES: Registry[TraceFormat] = Registry("slobench.traces", "trace format", _bare_name)


def build_trace(source: str, kind: str, columns: Columns) -> Trace:
    """A Trace in order of time, from the first kept row on; rows without input or output tokens are
    left out and counted (recorded services log failed requests so, and a request of zero tokens
    cannot be sent).

    Raises TraceFileError where no row is left.
    """
    n, notes = len(columns.input_tokens), list(columns.notes)
    is_kept = (columns.input_tokens > 0) & (columns.output_tokens > 0)
    order = np.flatnonzero(is_kept)
    if not order.size:
        raise TraceFileError(f"{source}: none of its {n} rows has both input and output tokens")
    if order.size < n:
        dropped = n - order.size
        notes.append(f"{dropped} of {n} rows left out: zero input or output tokens (no answer)")
    times_s = np.full(order.size, np.nan)
    if columns.ticks is not None:
        ticks = columns.ticks[order]
        is_back = np.diff(ticks) < 0
        if np.any(is_back):
            order = order[np.argsort(ticks, kind="stable")]
            ticks = columns.ticks[order]
            notes.append(f"{int(is_back.sum())} rows were earlier than the row before; sorted")
        times_s = (ticks - ticks[0]) / 1e9
    ids, tokens = columns.prefix or (np.zeros(n, np.uint32), np.zeros(n, np.uint32))
    class_ids, classes = columns.classes or (np.zeros(n, np.int64), ("default",))
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
        parents=_moved(columns.parents, order, n),
        class_ids=class_ids[order].astype(np.uint16),
        classes=classes,
        notes=tuple(notes),
    )


def _moved(parents: NDArray[np.int64] | None, order: NDArray[np.intp], n: int) -> NDArray[np.int64]:
    """Row numbers of parents after rows moved or went; a parent that went is none."""
    if parents is None:
        return np.full(order.size, -1, np.int64)
    place = np.full(n + 1, -1, np.int64)  # the last entry is where −1 looks
    place[order] = np.arange(order.size)
    return place[parents[order]]
