"""Tiles, and the twins of the kernels, against literal results. The kernels themselves run in
`tests/e2e/test_kernels_run.py`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")
tiles = pytest.importorskip("reference_engine.kernels.tiles")
plain = pytest.importorskip("reference_engine.kernels.plain")
kv_memory = pytest.importorskip("reference_engine.kernels.kv_memory")
kernel_cases = pytest.importorskip("tests.reference_engine.kernel_cases")


@pytest.mark.parametrize(("n_kv", "expected"), [(8, 33), (2, 132), (132, 2), (100, 3)])
def test_132_processors_have_two_decoding_programs_each(n_kv, expected):
    assert tiles.n_decode_programs(n_kv, 132) == expected


def test_a_gpu_has_the_choice_of_a_word_of_its_name():
    tall = tiles.Tuning(chunk_rows=128)
    table = {"H100": tall, "H200": tiles.Tuning(decode_keys=32)}
    assert tiles.tuning_of("NVIDIA H100 80GB HBM3", table) is tall
    assert tiles.tuning_of("NVIDIA H1000", table) == tiles.tuning_of("", table) == tiles.Tuning()
    assert set(tiles.TUNINGS) <= {"H100", "H200"}


def test_tiles_have_the_rows_of_the_choice():
    piece = [tiles.PromptPiece(0, 0, 70, 0)]
    assert tiles.cut_tiles(piece, 4).tolist() == [
        [0, 64, 6, 64], [0, 48, 16, 48], [0, 32, 16, 32], [0, 16, 16, 16], [0, 0, 16, 0]
    ]  # fmt: skip
    assert tiles.cut_tiles(piece, 4, 128).tolist() == [
        [0, 64, 6, 64], [0, 32, 32, 32], [0, 0, 32, 0]
    ]  # fmt: skip


def used_items(work) -> list[list[int]]:
    items: list[list[int]] = work.items[: int(work.bounds[-1])].tolist()
    return items


def loads(work) -> list[int]:
    """The keys of each program."""
    sizes = [end - begin for _, begin, end, _ in used_items(work)]
    bounds = work.bounds.tolist()
    return [sum(sizes[begin:end]) for begin, end in itertools.pairwise(bounds)]


LENGTHS = st.lists(st.one_of(st.integers(1, 200), st.integers(1, 40_000)), min_size=1, max_size=64)


@given(LENGTHS, st.integers(1, 140))
def test_work_items_cover_each_key_once_at_the_places_that_are_joined(contexts, n_programs):
    work = tiles.planned(contexts, n_programs)
    items = used_items(work)
    assert len(items) <= len(work.items)
    by_sequence: dict[int, list[tuple[int, int, int]]] = {i: [] for i in range(len(contexts))}
    for sequence, begin, end, place in items:
        assert begin % 64 == 0
        assert begin < end
        by_sequence[sequence].append((begin, end, place))
    for sequence, parts in by_sequence.items():
        begins, ends, places = zip(*parts, strict=True)
        assert (begins[0], ends[-1]) == (0, contexts[sequence])
        assert begins[1:] == ends[:-1]
        first, n = work.joins[sequence].tolist()
        assert n == len(parts)
        assert list(places) == ([-1] if n == 1 else list(range(first, first + n)))
    joined = [place for *_, place in items if place >= 0]
    assert len(set(joined)) == len(joined)
    assert max(joined, default=0) < len(work.items)


@given(LENGTHS, st.integers(1, 140))
def test_a_program_has_at_most_its_share_of_all_keys_and_no_item_is_left_out(contexts, n_programs):
    """In units of 64 keys: a context's last keys may be fewer."""
    work = tiles.planned(contexts, n_programs)
    units = sum(-(-context // 64) for context in contexts)
    assert max(loads(work)) <= 64 * -(-units // n_programs)
    assert sum(loads(work)) == sum(contexts)
    assert int(work.bounds[0]) == 0


@pytest.mark.parametrize(
    ("contexts", "least"),
    [([32_768, *[1024] * 63], 0.95), ([1024] * 32, 0.95), ([8192] * 32, 0.95),
     ([1024] * 256, 0.95), ([8192], 0.95), ([*[16_384] * 4, *[512] * 28], 0.95)],
)  # fmt: skip
def test_a_long_context_takes_no_longer_than_its_share(contexts, least):
    """Keys per program on average, as a share of the largest number, for 8 KV heads on 132
    multiprocessors. If the long context were not divided, the first case would have 0.09."""
    keys = loads(tiles.planned(contexts, 33))
    assert sum(keys) / 33 / max(keys) >= least


@given(st.data(), LENGTHS, st.integers(1, 40))
def test_kept_work_covers_grown_contexts_and_is_divided_again_when_they_change(
    data, contexts, n_programs
):
    kept, n_rows = tiles.KeptWork(), len(contexts)
    out = np.zeros(tiles.work_size(n_rows, n_programs), np.int32)
    kept.write(np.array(contexts, np.int32), n_programs, out)
    growth = st.one_of(st.integers(0, 63), st.sampled_from([-1, 64, 9000]))
    for _ in range(3):
        contexts = [max(1, context + data.draw(growth)) for context in contexts]
        kept.write(np.array(contexts, np.int32), n_programs, out)
        work = tiles.DecodeWork.of(torch.from_numpy(out), n_rows, n_programs)
        covered = [0] * n_rows
        for sequence, begin, end, _ in sorted(used_items(work)):
            assert begin == covered[sequence] < end
            covered[sequence] = end
        assert covered == contexts
        units = sum(-(-context // 64) for context in contexts)
        assert max(loads(work)) <= 64 * (-(-units // n_programs) + n_rows)


def test_kept_work_of_another_array_is_divided():
    kept, contexts = tiles.KeptWork(), np.array([100, 200], np.int32)
    first, second = (np.zeros(tiles.work_size(2, 3), np.int32) for _ in range(2))
    kept.write(contexts, 3, first)
    kept.write(contexts, 3, second)
    assert first.tolist() == second.tolist()
    assert first.any()


def test_work_of_no_sequences_has_no_items():
    assert used_items(tiles.planned([], 4)) == []


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
