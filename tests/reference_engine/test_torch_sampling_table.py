"""How requests choose their tokens, looked at once, asked of arrays: as each would say itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_engine.state.sequence import Sampling
from tests.reference_engine.engine_kit import request

pytest.importorskip("torch", reason="torch is not installed")

from reference_engine.executors.torch_sampling_table import SamplingTable
from reference_engine.model.sampling import key


def at(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_who_asks_for_more_than_a_temperature():
    """Bans end with min_tokens; nobody asks at temperature 0 for what only draws can have."""
    hows = [Sampling(), Sampling(0.8), Sampling(0.8, top_p=0.9), Sampling(0.0, top_k=5),
            Sampling(logprobs=True), Sampling()]  # fmt: skip
    table = SamplingTable(8)
    for row, how in enumerate(hows):
        stops = {"min_tokens": 4, "stop_ids": {7}} if row == 5 else {"min_tokens": 4}
        table.seat(row, request(f"r{row}", [1, 2], 20, sampling=how, **stops))
    rows = at(5, 4, 3, 2, 1, 0)
    assert table.asking(rows, at(3, 3, 3, 3, 3, 3)) == [0, 1, 3]
    assert table.asking(rows, at(4, 4, 4, 4, 4, 4)) == [1, 3]
    assert table.asking(at(0, 1, 3), at(0, 0, 0)) == []


def test_a_row_is_of_whoever_was_seated_last():
    table = SamplingTable(1)
    table.seat(0, request("a", [1], 9, sampling=Sampling(logprobs=True)))
    assert table.asking(at(0), at(0)) == [0]
    table.seat(0, request("b", [1, 2, 3], 9))
    assert table.asking(at(0), at(0)) == []
    assert table.n_outputs(at(0), at(2)).tolist() == [0]  # the prompt's last token at position 2


@given(
    st.lists(
        st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 2**20), st.sampled_from([0, 0.5])),
        min_size=1,
        max_size=9,
    )
)
def test_keys_are_those_of_the_hash_and_zero_for_the_greedy(rows):
    table = SamplingTable(len(rows))
    for row, (seed, _, temperature) in enumerate(rows):
        table.seat(row, request("r", [1], 2**21, sampling=Sampling(temperature, seed=seed)))
    out = np.full((3, len(rows)), 77, np.int32)
    table.draws(np.arange(len(rows), dtype=np.int32), at(*(n for _, n, _ in rows)), out)
    for (seed, n_output, temperature), (bits, low, high) in zip(rows, out.T.tolist(), strict=True):
        expected = key(seed, n_output) if temperature else 0
        assert (high % 2**32) * 2**32 + low % 2**32 == expected
        assert bits == (0x3F000000 if temperature else 0)  # 0.5 in IEEE 754
