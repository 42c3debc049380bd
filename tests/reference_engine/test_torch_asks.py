"""Cuts, bans and log-probabilities on the device: what the CPU's executor chooses, unwaited for."""

from __future__ import annotations

import math

import pytest

from reference_engine.state.sequence import Request, Sampling
from tests.reference_engine.engine_kit import request

torch = pytest.importorskip("torch", reason="torch is not installed")

from reference_engine.executors.torch_arena import Arena  # noqa: E402 - only with torch
from reference_engine.executors.torch_sampling_requests import AsksOnDevice, asks_of, choose  # noqa: E402
from reference_engine.executors.torch_step import Draws  # noqa: E402
from reference_engine.kernels import plain  # noqa: E402
from reference_engine.model.sampling import Cuts, sample_with_logprobs  # noqa: E402


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
