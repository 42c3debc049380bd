"""Division of attention into programs: prompts into tiles, contexts of decodes into work items.

The plan of decodes is that of FlashInfer (arXiv 2501.01005 §3.3): a fixed number of programs shares
all contexts, each with an equal number of keys, and the partial results of a context are joined
afterwards. A long context among short ones then takes no longer than its share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

TILE_ROWS = 64
"""Query rows of a tile, a power of two. Query heads that share a KV head are separate rows."""


class Tuning(NamedTuple):
    """Sizes of the attention kernels: keys per pass, passes whose loads are in flight, and warps
    per program; the decoding programs of a multiprocessor; and the query rows of a tile.
    `dequantise` multiplies 8-bit keys and values by their scales before the products instead of the
    products, which are fewer. The defaults were chosen by the compiled code, without a GPU."""

    decode_keys: int = 64
    decode_stages: int = 3
    decode_warps: int = 4
    chunk_keys: int = 64
    chunk_stages: int = 2
    chunk_warps: int = 4
    decode_programs: int = 2
    chunk_rows: int = TILE_ROWS
    dequantise: bool = False


DEFAULT_TUNING = Tuning()
TUNINGS: Mapping[str, Tuning] = {
    "H200": Tuning(decode_keys=32, decode_stages=5, decode_programs=4, dequantise=True),
}
"""The choice for a GPU, by a word of its name (`H100`). The GPU suite's part `sweep` prints an
entry; each is in `benchmarks/results/gpu-….json`."""


def tuning_of(gpu_name: str, table: Mapping[str, Tuning] = TUNINGS) -> Tuning:
    """The choice for a GPU by its full name; DEFAULT_TUNING for others."""
    words = gpu_name.upper().split()
    return next((tuning for word, tuning in table.items() if word in words), DEFAULT_TUNING)


class PromptPiece(NamedTuple):
    """`n` positions of a prompt, from position `start` on. `first` is the index of the first in the
    flat step, `row` the row of the block tables that lists the blocks."""

    row: int
    first: int
    n: int
    start: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """`table` [N, 4] int32: row, first, n, start of each tile, as in `PromptPiece`."""

    table: torch.Tensor

    def __len__(self) -> int:
        return len(self.table)


def tile_tokens(group: int, rows: int = TILE_ROWS) -> int:
    """Positions per tile of `rows` with `group` query heads per KV head."""
    assert 1 <= group <= rows, f"{group} query heads per KV head, at most {rows}"
    return rows // group


def cut_tiles(
    pieces: Sequence[PromptPiece], group: int, rows: int = TILE_ROWS
) -> NDArray[np.int32]:
    """The tiles of all pieces, [N, 4] int32, each of at most `rows` query rows. Tiles with the
    longest context come first: started last, they would run alone at the end."""
    size = tile_tokens(group, rows)
    parts = []
    for row, first, n, start in pieces:
        offsets = np.arange(0, n, size, dtype=np.int32)
        sizes = np.minimum(n - offsets, size)
        parts.append(
            np.stack((np.full_like(offsets, row), first + offsets, sizes, start + offsets), 1)
        )
    if not parts:
        return np.empty((0, 4), np.int32)
    tiles = np.concatenate(parts).astype(np.int32)
    ends = tiles[:, 2] + tiles[:, 3]
    return np.ascontiguousarray(tiles[np.argsort(-ends, kind="stable")])


UNIT_KEYS = 64
"""Contexts are divided at multiples of so many keys."""
_ALIGNED = 16  # numbers; the parts of a plan begin at addresses that are multiples of 64 bytes
_ITEM = 4  # numbers of an item


class DecodeWork(NamedTuple):
    """The division of the contexts of S decoding sequences, int32 on the device.

    Item i of `items` [N, 4] is (sequence, begin, end, place of its partial result; −1 if it is the
    whole context). Program p of each KV head works on items `bounds[p]` to `bounds[p + 1]`, of
    `n_programs`. `joins` [S, 2] is (first place, number of items) of each sequence.
    """

    bounds: torch.Tensor
    joins: torch.Tensor
    items: torch.Tensor
    n_programs: int

    @classmethod
    def of(cls, numbers: torch.Tensor, n_rows: int, n_programs: int) -> DecodeWork:
        """Views of the `numbers` that `write_work` wrote."""
        at, end = _parts_of_work(n_rows, n_programs)
        joins = numbers[at : at + 2 * n_rows].view(n_rows, 2)
        return cls(numbers[: n_programs + 1], joins, numbers[end:].view(-1, _ITEM), n_programs)


def _parts_of_work(n_rows: int, n_programs: int) -> tuple[int, int]:
    """Where the joins and the items begin, after the bounds."""
    joins_at = _up(n_programs + 1, _ALIGNED)
    return joins_at, joins_at + _up(2 * n_rows, _ALIGNED)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def n_decode_programs(
    n_kv_heads: int, n_processors: int, per_processor: int = DEFAULT_TUNING.decode_programs
) -> int:
    """Programs per KV head with which every multiprocessor has `per_processor` of all heads."""
    return -(-per_processor * n_processors // n_kv_heads)


def work_size(n_rows: int, n_programs: int) -> int:
    """Numbers that the work of `n_rows` sequences takes, whatever their contexts: each sequence has
    an item, and each program adds at most one by cutting a sequence."""
    return _parts_of_work(n_rows, n_programs)[1] + _ITEM * (n_rows + n_programs)


def write_work(contexts: NDArray[np.int32], n_programs: int, out: NDArray[np.int32]) -> None:
    """Write the work of sequences with `contexts` [S] ≥ 1 to `out` [`work_size`], for
    `DecodeWork.of`: all contexts one after another, in units of UNIT_KEYS, cut into `n_programs`
    equal parts and at the ends of contexts."""
    n_rows = len(contexts)
    joins_at, items_at = _parts_of_work(n_rows, n_programs)
    if not n_rows:
        out[: n_programs + 1] = 0
        return
    ends = (-(-contexts // UNIT_KEYS)).cumsum()  # of the contexts, in units
    starts = np.concatenate(([0], ends[:-1]))
    share = -(-int(ends[-1]) // n_programs)
    cuts = np.unique(np.concatenate((starts, np.arange(share, ends[-1], share))))
    n_items = len(cuts)
    out[: n_programs + 1] = cuts.searchsorted(np.arange(n_programs + 1) * share)
    firsts = cuts.searchsorted(starts)
    counts = np.diff(firsts, append=n_items)
    joins = out[joins_at : joins_at + 2 * n_rows].reshape(n_rows, 2)
    joins[:, 0], joins[:, 1] = firsts, counts
    sequences = np.repeat(np.arange(n_rows), counts)
    items = out[items_at : items_at + _ITEM * n_items].reshape(n_items, _ITEM)
    begins = (cuts - starts[sequences]) * UNIT_KEYS
    items[:, 0], items[:, 1] = sequences, begins
    item_ends = items[:, 2]
    item_ends[:-1] = begins[1:]
    item_ends[firsts + counts - 1] = contexts  # the last of each sequence
    items[:, 3] = np.where(counts[sequences] > 1, np.arange(n_items), -1)


class KeptWork:
    """Work that is kept from step to step. While contexts grow by less than UNIT_KEYS since they
    were divided, only the ends of their last items change: a division takes 90 µs for 256
    sequences, new ends 10 µs."""

    def __init__(self) -> None:
        self._divided = np.empty(0, np.int32)  # the contexts
        self._out: NDArray[np.int32] | None = None
        self._last_ends = np.empty(0, np.int64)  # indices into `_out`

    def write(self, contexts: NDArray[np.int32], n_programs: int, out: NDArray[np.int32]) -> None:
        """As `write_work`; `out` is the array of the call before if nothing else wrote to it."""
        if out is self._out and len(contexts) == len(self._divided):
            growth = contexts - self._divided
            if growth.min() >= 0 and growth.max() < UNIT_KEYS:
                out[self._last_ends] = contexts
                return
        write_work(contexts, n_programs, out)
        joins_at, items_at = _parts_of_work(len(contexts), n_programs)
        joins = out[joins_at : joins_at + 2 * len(contexts)].reshape(-1, 2).astype(np.int64)
        self._last_ends = items_at + _ITEM * (joins.sum(1) - 1) + 2
        self._divided, self._out = contexts.copy(), out


def planned(
    contexts: Sequence[int] | NDArray[np.int32],
    n_programs: int,
    device: torch.device | str = "cpu",
) -> DecodeWork:
    """The work of sequences with `contexts`, in memory of its own."""
    lengths = np.asarray(contexts, np.int32)
    numbers = np.zeros(work_size(len(lengths), n_programs), np.int32)
    write_work(lengths, n_programs, numbers)
    return DecodeWork.of(torch.from_numpy(numbers).to(device), len(lengths), n_programs)
