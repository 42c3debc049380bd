"""Tiles, and the twins of the kernels, against literal results. The kernels themselves run in
`tests/e2e/test_kernels_run.py`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")
tiles = pytest.importorskip("reference_engine.kernels.tiles")
plain = pytest.importorskip("reference_engine.kernels.plain")
kv_memory = pytest.importorskip("reference_engine.kernels.kv_memory")
kernel_cases = pytest.importorskip("tests.reference_engine.kernel_cases")


@pytest.mark.parametrize(
    ("n_rows", "n_kv", "expected"), [(1, 8, 32), (32, 8, 2), (256, 8, 1), (33, 8, 1), (1, 132, 2)]
)
def test_contexts_are_split_until_132_processors_have_two_programs_each(n_rows, n_kv, expected):
    assert tiles.splits_for(n_rows, n_kv, 132) == expected


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 500)), max_size=5),
    st.sampled_from([1, 2, 3, 4, 7, 64]),
)
def test_tiles_cover_every_position_once_at_its_place(lengths, group):
    pieces, first = [], 0
    for row, (n, start) in enumerate(lengths):
        pieces.append(tiles.PromptPiece(row, first, n, start))
        first += n
    table = tiles.cut_tiles(pieces, group)
    covered = {(row, at + i, start + i) for row, at, n, start in table.tolist() for i in range(n)}
    expected = {(p.row, p.first + i, p.start + i) for p in pieces for i in range(p.n)}
    assert covered == expected
    assert sum(table[:, 2]) == first
    assert all(1 <= n <= 64 // group for n in table[:, 2])
    ends = (table[:, 2] + table[:, 3]).tolist()
    assert ends == sorted(ends, reverse=True)


def test_attention_of_equal_keys_is_the_mean_of_the_values():
    cache = torch.zeros(3, 2, 1, 4, 16)
    cache[2, 1, 0, :, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    cache[0, 1, 0, :, 0] = torch.tensor([11.0, 99.0, 99.0, 99.0])
    tables = torch.tensor([[0, 0], [2, 0]], dtype=torch.int32)
    out = plain.decode_attention(
        torch.ones(1, 2, 16), kv_memory.Kv(cache), tables, torch.tensor([1]), torch.tensor([5]), 1
    )
    assert out[0, :, 0].tolist() == pytest.approx([4.2, 4.2])  # (1 + 2 + 3 + 4 + 11) / 5


def test_a_position_of_a_prompt_attends_to_no_later_position():
    cache = torch.zeros(1, 2, 1, 4, 16)
    cache[0, 1, 0, :, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    tile = tiles.Tiles(torch.tensor([[0, 0, 2, 1]], dtype=torch.int32))
    tables = torch.zeros(1, 1, dtype=torch.int32)
    out = plain.chunk_attention(torch.ones(2, 1, 16), kv_memory.Kv(cache), tables, tile)
    assert out[:, 0, 0].tolist() == pytest.approx([1.5, 2.0])


def test_greedy_returns_the_first_of_equal_logits_for_any_key():
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]])
    keys = torch.tensor([[1, 2], [-3, 4]], dtype=torch.int32)
    assert plain.sample(logits, torch.zeros(2), keys).tolist() == [1, 0]


def test_draws_follow_the_softmax_at_the_temperature():
    kernel_cases.check_frequencies("cpu", plain.sample)


def test_a_draw_does_not_depend_on_the_other_rows():
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(6, 50, generator=generator)
    keys = torch.randint(0, 2**31, (6, 2), generator=generator).to(torch.int32)
    hot = torch.full((6,), 0.8)
    together = plain.sample(logits, hot, keys).tolist()
    alone = [int(plain.sample(logits[i : i + 1], hot[:1], keys[i : i + 1])[0]) for i in range(6)]
    assert together == alone
    assert len(set(together)) > 1
