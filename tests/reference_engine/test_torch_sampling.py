"""Sampling on the device: special requests get the CPU executor's tokens without a wait, and the
table of sampling parameters agrees with each request."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_engine.state.sequence import Request, Sampling
from tests.reference_engine.engine_kit import request
from tests.reference_engine.sampling_oracle import key

torch = pytest.importorskip("torch", reason="torch is not installed")

from reference_engine.executors.torch_memory import Arena  # noqa: E402 - only with torch
from reference_engine.executors.torch_sampling import (  # noqa: E402
    Draws,
    SamplingTable,
    SpecialOnDevice,
    SpecialSampling,
    choose_special,
    special_sampling,
)
from reference_engine.kernels import plain  # noqa: E402
from reference_engine.model.sampling import TruncatedDraws, sample_with_logprobs  # noqa: E402


def requests_of_all_kinds() -> list[Request]:
    """Truncation; nothing; a ban; log-probabilities; truncation, a ban and log-probabilities;
    penalties with min-p and with log-probabilities."""
    samplings = [Sampling(0.8, 0.9, 7, seed=3), Sampling(), Sampling(), Sampling(logprobs=True),
                 Sampling(1.2, 1.0, 3, seed=4, logprobs=True, top_logprobs=3),
                 Sampling(1.2, seed=5, min_p=0.1, presence_penalty=1.0, frequency_penalty=-0.5),
                 Sampling(repetition_penalty=1.5, logprobs=True, top_logprobs=5)]  # fmt: skip
    out = [request(f"r{i}", [1], 20, sampling=sampling) for i, sampling in enumerate(samplings)]
    for penalised in out[5:]:
        penalised.tokens += [3, 7, 3, *range(40, 50)]
    for banned in (out[2], out[4]):
        banned.stop_ids, banned.min_tokens = frozenset(range(25)), 5
    return out


def greedy_draws(n: int) -> Draws:
    return Draws(torch.zeros(n), torch.zeros(n, 2, dtype=torch.int32))


def sent(special: SpecialSampling) -> SpecialOnDevice:
    return special.put(Arena(special.size, torch.device("cpu"), False))


def test_tokens_and_log_probabilities_are_those_of_the_cpu_executor():
    requests = requests_of_all_kinds()
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(2))
    places = [3, 0, 5, 1, 4, 7, 2]  # logits come in another order than answers
    special = special_sampling(places, requests, [0, 2, 3, 4, 5, 6], 50)
    assert sorted(special.answers) == [0, 2, 3, 4, 5, 6]
    tokens, logprobs, top = choose_special(logits, greedy_draws(8), sent(special), plain.sample)
    assert logprobs is not None
    assert top is not None
    expected, expected_logprobs = sample_with_logprobs(logits[places], requests)
    assert expected_logprobs is not None
    assert tokens.tolist() == [expected[i] for i in special.answers]
    by_answer = special.all_logprobs(logprobs, top, len(requests))
    assert [x and len(x.top) for x in by_answer] == [None, None, None, 0, 3, None, 5]
    for logprob, other in zip(by_answer, expected_logprobs, strict=True):
        assert (logprob is None) == (other is None)
        if logprob is not None and other is not None:
            assert logprob.chosen == pytest.approx(other.chosen, abs=1e-6)
            assert [token for token, _ in logprob.top] == [token for token, _ in other.top]
            values = [value for _, value in logprob.top]
            assert values == pytest.approx([value for _, value in other.top], abs=1e-6)


def test_a_log_probability_is_that_of_the_model_before_bans():
    """Two tokens with odds of 3 to 1; the likelier is banned. The other's is ln 1/4, not ln 1."""
    banned = request("r", [1], 9, sampling=Sampling(logprobs=True))
    banned.stop_ids, banned.min_tokens = frozenset({0}), 3
    special = special_sampling([0], [banned], [0], 2)
    logits = torch.tensor([[math.log(3.0), 0.0]])
    tokens, logprobs, _ = choose_special(logits, greedy_draws(1), sent(special), plain.sample)
    assert logprobs is not None
    assert tokens.tolist() == [1]
    assert logprobs.tolist() == pytest.approx([math.log(0.25)])
    assert logits[0, 0] == pytest.approx(math.log(3.0))  # the step's own logits are unchanged


def test_the_choice_reads_nothing_from_the_device():
    """On tensors without content, a read, and so a wait for the device, raises."""

    def empty(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    with pytest.raises(RuntimeError):
        empty(1).tolist()
    truncated = TruncatedDraws(
        empty(2), empty(2, dtype=torch.int32), empty(2), empty(2), empty(2, dtype=torch.float64)
    )
    places = empty(5, dtype=torch.int32)
    special = SpecialOnDevice(
        empty(3, dtype=torch.int64),
        empty(2, 4, dtype=torch.int64),
        (places, places, empty(5), empty(5)),
        truncated,
        n_top=4,
    )
    draws = Draws(empty(8), empty(8, 2, dtype=torch.int32))
    tokens, logprobs, top = choose_special(empty(8, 50), draws, special, plain.sample)
    assert tokens.shape == (3,)
    assert logprobs is not None
    assert logprobs.shape == (3,)
    assert top is not None
    assert (top.ids.shape, top.logprobs.shape) == ((3, 4), (3, 4))


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_special_requests_need_more_than_a_temperature():
    """Bans end with min_tokens; at temperature 0 there is no draw that could be truncated."""
    samplings = [Sampling(), Sampling(0.8), Sampling(0.8, top_p=0.9), Sampling(0.0, top_k=5),
                 Sampling(logprobs=True), Sampling(), Sampling(0.8, min_p=0.1),
                 Sampling(frequency_penalty=-0.1)]  # fmt: skip
    table = SamplingTable(8)
    for row, sampling in enumerate(samplings):
        stops = {"min_tokens": 4, "stop_ids": {7}} if row == 5 else {"min_tokens": 4}
        table.assign(row, request(f"r{row}", [1, 2], 20, sampling=sampling, **stops))
    rows = ints(5, 4, 3, 2, 1, 0)
    assert table.special(rows, ints(3, 3, 3, 3, 3, 3)) == [0, 1, 3]
    assert table.special(rows, ints(4, 4, 4, 4, 4, 4)) == [1, 3]
    assert table.special(ints(0, 1, 3), ints(0, 0, 0)) == []
    assert table.special(ints(6, 1, 7), ints(9, 9, 9)) == [0, 2]


def test_a_row_belongs_to_the_request_that_was_assigned_last():
    table = SamplingTable(1)
    table.assign(0, request("a", [1], 9, sampling=Sampling(logprobs=True)))
    assert table.special(ints(0), ints(0)) == [0]
    table.assign(0, request("b", [1, 2, 3], 9))
    assert table.special(ints(0), ints(0)) == []
    assert table.n_outputs(ints(0), ints(2)).tolist() == [0]  # the prompt's last token is at 2


@given(
    st.lists(
        st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 2**20), st.sampled_from([0, 0.5])),
        min_size=1,
        max_size=9,
    )
)
def test_keys_are_those_of_the_hash_and_zero_for_greedy_requests(rows):
    table = SamplingTable(len(rows))
    for row, (seed, _, temperature) in enumerate(rows):
        table.assign(row, request("r", [1], 2**21, sampling=Sampling(temperature, seed=seed)))
    out = np.full((3, len(rows)), 77, np.int32)
    table.write_draws(np.arange(len(rows), dtype=np.int32), ints(*(n for _, n, _ in rows)), out)
    for (seed, n_output, temperature), (bits, low, high) in zip(rows, out.T.tolist(), strict=True):
        expected = key(seed, n_output) if temperature else 0
        assert (high % 2**32) * 2**32 + low % 2**32 == expected
        assert bits == (0x3F000000 if temperature else 0)  # 0.5 in IEEE 754
