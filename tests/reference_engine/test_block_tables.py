"""Block tables: they follow the blocks of requests, and a copy follows their changes."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reference_engine.executors.block_tables import BlockTables
from tests.reference_engine.engine_kit import request


@given(st.integers(0, 2**32 - 1))
def test_the_changes_keep_a_copy_equal_to_the_blocks_of_every_request(seed):
    """Requests come, grow, lose their blocks, return with other blocks and leave, in any order. The
    copy gets the changes alone, as the device does."""
    draw = random.Random(seed)
    tables = BlockTables(n_rows=4, width=6, scratch=99)
    copy = tables.array.copy()
    pool = [request(f"r{i}", [1], 4) for i in range(9)]
    for _ in range(40):
        present = draw.sample(pool, draw.randint(1, 4))
        for req in present:
            if not req.blocks or draw.random() < 0.2:
                req.blocks = [draw.randrange(90) for _ in range(draw.randint(1, 6))]
            elif len(req.blocks) < 6 and draw.random() < 0.5:
                req.blocks.append(draw.randrange(90))
        rows = tables.rows(present)
        at, values = tables.changes()
        copy.reshape(-1)[at] = values
        assert len(set(rows)) == len(rows)
        for req, row in zip(present, rows, strict=True):
            assert copy[row, : len(req.blocks)].tolist() == req.blocks
        assert (copy[tables.scratch_row] == 99).all()
        leaving = draw.choice(pool)
        leaving.blocks = []


def test_an_unchanged_step_sends_nothing_and_a_new_block_sends_a_single_number():
    tables = BlockTables(2, 8, 0)
    req = request("a", [1], 4)
    req.blocks = [5, 7]
    (row,) = tables.rows([req])
    assert tables.changes()[0].tolist() == [row * 8, row * 8 + 1]
    assert tables.rows([req]) == [row]
    assert len(tables.changes()[0]) == 0
    req.blocks.append(3)
    tables.rows([req])
    at, values = tables.changes()
    assert (at.tolist(), values.tolist()) == ([row * 8 + 2], [3])
    assert values.dtype == np.int32


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 500))
def test_filler_rows_share_no_block_while_they_read_at_most_half_of_all(n, n_rows, n_blocks):
    n = min(n, n_rows)
    width = n_blocks // (2 * n)
    tables = BlockTables(n_rows, max(width, 1), n_blocks)
    read = [tables.array[row, :width].tolist() for row in tables.filler_rows(n)]
    blocks = [block for row in read for block in row]
    assert len(set(blocks)) == len(blocks) == n * width
    assert all(0 <= block < n_blocks for block in blocks)


def test_filler_rows_beyond_their_number_are_shared():
    tables = BlockTables(2, 3, 6)
    rows = tables.filler_rows(4)
    assert tables.array[rows].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
