"""Cuts, bans and log-probabilities on the device: what the CPU's executor chooses, unwaited for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_engine.state.sequence import Request, Sampling
from tests.reference_engine.engine_kit import request

torch = pytest.importorskip("torch", reason="torch is not installed")

from reference_engine.executors.torch_memory import Arena  # noqa: E402 - only with torch
from reference_engine.executors.torch_sampling import (  # noqa: E402
    AsksOnDevice,
    Draws,
    SamplingTable,
    asks_of,
    choose,
)
from reference_engine.kernels import plain  # noqa: E402
from reference_engine.model.sampling import Cuts, key, sample_with_logprobs  # noqa: E402


def asking() -> list[Request]:
    """Cuts, nothing, a ban, log-probabilities, cuts and both."""
    hows = [Sampling(0.8, 0.9, 7, seed=3), Sampling(), Sampling(), Sampling(logprobs=True),
            Sampling(1.2, 1.0, 3, seed=4, logprobs=True)]  # fmt: skip
    out = [request(f"r{i}", [1], 20, sampling=how) for i, how in enumerate(hows)]
    for banned in (out[2], out[4]):
        banned.stop_ids, banned.min_tokens = frozenset(range(25)), 5
    return out


def no_draws(n: int) -> Draws:
    return Draws(torch.zeros(n), torch.zeros(n, 2, dtype=torch.int32))


def test_tokens_and_log_probabilities_are_those_of_the_cpu_executor():
    requests = asking()
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    places = [3, 0, 5, 1, 4]  # in another order than they are answered in
    asks = asks_of(places, requests, [0, 2, 3, 4], 50)
    assert sorted(asks.answers) == [0, 2, 3, 4]
    on_device = asks.put(Arena(asks.size, torch.device("cpu"), False))
    tokens, logprobs = choose(logits, no_draws(6), on_device, plain.sample)
    assert logprobs is not None
    expected, expected_logprobs = sample_with_logprobs(logits[places], requests)
    assert expected_logprobs is not None
    assert tokens.tolist() == [expected[i] for i in asks.answers]
    told = asks.told(logprobs.tolist(), len(requests))
    assert told == pytest.approx(expected_logprobs, abs=1e-6, nan_ok=True)
    assert [math.isnan(x) for x in told] == [True, True, True, False, False]


def test_a_log_probability_is_of_the_model_and_not_of_the_cut():
    """Two tokens, odds 3 to 1, the likelier one banned: its 1/4 is told, not 1."""
    one = request(
        "r",
        [1],
        9,
        sampling=Sampling(logprobs=True),
    )
    one.stop_ids, one.min_tokens = frozenset({0}), 3
    asks = asks_of([0], [one], [0], 2)
    on_device = asks.put(Arena(asks.size, torch.device("cpu"), False))
    logits = torch.tensor([[math.log(3.0), 0.0]])
    tokens, logprobs = choose(logits, no_draws(1), on_device, plain.sample)
    assert logprobs is not None
    assert tokens.tolist() == [1]
    assert logprobs.tolist() == pytest.approx([math.log(0.25)])
    assert logits[0, 0] == pytest.approx(math.log(3.0))  # the step's own are left as they were


def test_choosing_needs_nothing_from_the_device():
    """Tensors without any content: whatever had to read one, and so to wait for it, fails."""

    def empty(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    with pytest.raises(RuntimeError):
        empty(1).tolist()
    cuts = Cuts(empty(2), empty(2, dtype=torch.int32), empty(2), empty(2, dtype=torch.float64))
    asks = AsksOnDevice(
        empty(3, dtype=torch.int64), empty(2, 4, dtype=torch.int64), cuts, is_telling=True
    )
    draws = Draws(empty(8), empty(8, 2, dtype=torch.int32))
    tokens, logprobs = choose(empty(8, 50), draws, asks, plain.sample)
    assert tokens.shape == (3,)
    assert logprobs is not None
    assert logprobs.shape == (3,)


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
