"""Sums over groups of neighbours are those of a loop, wherever the blocks are cut."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loadgen.measure.statistics.population import BLOCK, group_sums


@given(st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=9), max_size=12))
def test_each_group_is_summed(groups):
    values = np.array([value for group in groups for value in group], np.uint16)
    starts = np.cumsum([0, *map(len, groups)])[:-1].astype(np.intp)
    found = group_sums(starts, len(values), lambda part: values[part])
    assert found.tolist() == [sum(group) for group in groups]


def test_blocks_are_cut_between_groups_and_a_large_group_is_whole():
    sizes = np.array([3, BLOCK - 1, 2, 2 * BLOCK, 1, BLOCK // 2, BLOCK // 2 + 1, 5])
    starts = (np.cumsum(sizes) - sizes).astype(np.intp)
    n = int(sizes.sum())
    parts = []

    def ones(part):
        parts.append((part.start, part.stop))
        return np.ones(part.stop - part.start, np.int8)

    assert group_sums(starts, n, ones).tolist() == sizes.tolist()
    assert [stop for _, stop in parts[:-1]] == [start for start, _ in parts[1:]]
    assert (parts[0][0], parts[-1][1]) == (0, n)
    edges = {*starts.tolist(), n}
    assert all(start in edges and stop in edges for start, stop in parts)
    assert all(stop - start <= BLOCK or stop - start == 2 * BLOCK for start, stop in parts)
