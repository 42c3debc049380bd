"""Which sizes graphs are kept for, how much memory KV gets, and the table that follows requests."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import UsageError
from reference_engine.executors.block_tables import BlockTables
from reference_engine.executors.graph_sizes import blocks_that_fit, bucket_of, buckets
from tests.reference_engine.engine_kit import request


def test_buckets_are_fine_where_steps_are_short():
    assert buckets(1) == (1,)
    assert buckets(40) == (1, 2, 4, 8, 16, 32, 40)
    assert buckets(256)[-3:] == (224, 240, 256)
    assert buckets(400)[-4:] == (256, 320, 384, 400)


@given(st.integers(1, 600), st.integers(1, 700))
def test_a_step_goes_to_the_smallest_bucket_that_holds_it(max_rows, n_rows):
    sizes = buckets(max_rows)
    assert list(sizes) == sorted(set(sizes))
    found = bucket_of(n_rows, sizes)
    if n_rows > max_rows:
        assert found is None
    else:
        assert found == next(size for size in sizes if size >= n_rows)
        assert found - n_rows < max(16, 64 * (n_rows > 256))


def test_what_is_left_of_the_share_is_kv():
    # 140 GB · 0.9 = 126 GB, less 16 + 4 + 2 GB: 104 GB of 2 MB blocks.
    assert blocks_that_fit(140 * 10**9, 20 * 10**9, 0.9, 2 * 10**9, 2 * 10**6) == 52_000


def test_no_room_is_an_error_with_the_sizes():
    with pytest.raises(UsageError, match=r"0\.5 of 24\.0 GB .* 16\.0 GB of weights"):
        blocks_that_fit(24 * 10**9, 16 * 10**9, 0.5, 2 * 10**9, 2 * 10**6)


@given(st.integers(0, 2**32 - 1))
def test_the_changes_alone_keep_a_copy_equal_to_every_requests_blocks(seed):
    """Requests come, grow, lose their blocks, come back with others and go, in any order; the copy
    is only ever told of changes, as the device is."""
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
        gone = draw.choice(pool)
        gone.blocks = []


def test_a_step_without_news_sends_nothing_and_a_new_block_sends_one_number():
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
def test_rows_for_nobody_share_no_block_while_they_read_half_of_all_at_most(n, n_rows, n_blocks):
    n = min(n, n_rows)
    width = n_blocks // (2 * n)
    tables = BlockTables(n_rows, max(width, 1), n_blocks)
    read = [tables.array[row, :width].tolist() for row in tables.filler_rows(n)]
    blocks = [block for row in read for block in row]
    assert len(set(blocks)) == len(blocks) == n * width
    assert all(0 <= block < n_blocks for block in blocks)


def test_more_rows_for_nobody_than_there_are_share_theirs():
    tables = BlockTables(2, 3, 6)
    rows = tables.filler_rows(4)
    assert tables.array[rows].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
