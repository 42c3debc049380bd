"""Sampling: truncation holds, frequencies are right, and only the seed and the position matter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from reference_engine.state.sequence import Request, Sampling
from tests.reference_engine.engine_kit import request
from tests.reference_engine.sampling_oracle import uniform

torch = pytest.importorskip("torch", reason="torch is not installed")
sampling = pytest.importorskip("reference_engine.model.sampling")


def draw(logits: list[float], parameters: Sampling, n: int = 1, **fields: Any) -> list[int]:
    """`n` tokens of one request's successive positions, all from the same logits."""
    requests: list[Request] = []
    for position in range(n):
        req = request("r", [0], 10_000, sampling=parameters, **fields)
        req.tokens += [0] * position
        requests.append(req)
    tokens: list[int] = sampling.sample(torch.tensor([logits] * n), requests)
    return tokens


def test_uniform_numbers_are_those_of_the_hash():
    seeds, positions = [0, 7, 2**63 + 5, 2**64 - 1], [0, 3, 1000, 2**31 - 1]
    numbers = sampling.uniforms(np.array(seeds, np.uint64), np.array(positions, np.int32))
    assert numbers.tolist() == list(map(uniform, seeds, positions))


def test_a_request_draws_with_the_number_of_its_seed_and_output_position():
    """The low 64 bits of a seed count."""
    requests = [request("r", [0], 9, sampling=Sampling(1.0, seed=s)) for s in (-3, 2**70 + 5)]
    requests[1].tokens += [0, 0]
    expected = [uniform(2**64 - 3, 0), uniform(5, 2)]
    assert sampling.uniforms_of(requests).tolist() == expected


def test_temperature_zero_is_the_largest_logit():
    assert draw([0.1, 3.0, -1.0, 2.9], Sampling()) == [1]


@pytest.mark.parametrize("parameters", [Sampling(1.0, top_k=1), Sampling(2.0, top_p=1e-9)])
def test_the_strictest_truncation_is_greedy(parameters):
    assert set(draw([0.1, 3.0, -1.0, 2.9], parameters, 200)) == {1}


def test_frequencies_are_the_softmax():
    """χ² with 3 degrees of freedom: 16.27 is exceeded once in 1 000 seeds."""
    n, logits = 8000, [0.0, 1.0, 2.0, 0.5]
    tokens = draw(logits, Sampling(1.0, seed=4), n)
    total = sum(math.exp(x) for x in logits)
    expected = [n * math.exp(x) / total for x in logits]
    chi2 = sum((tokens.count(i) - e) ** 2 / e for i, e in enumerate(expected))
    assert chi2 < 16.27


def test_a_high_temperature_flattens():
    tokens = draw([0.0, 2.0], Sampling(2.0, seed=1), 4000)
    assert tokens.count(1) / 4000 == pytest.approx(1 / (1 + math.exp(-1)), abs=0.03)


def test_top_k_and_top_p_keep_the_likeliest_tokens():
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert set(draw(logits, Sampling(1.0, top_k=2), 500)) == {1, 3}
    # 0.4 + 0.3 < 0.75, so the token that crosses it stays in.
    assert set(draw(logits, Sampling(1.0, top_p=0.75), 500)) == {1, 2, 3}


def test_a_token_depends_on_seed_and_position_only():
    a, b = Sampling(1.0, seed=1), Sampling(1.0, top_k=5, seed=2)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    first, second = request("a", [0], 9, sampling=a), request("b", [0], 9, sampling=b)
    greedy = request("g", [0], 9)
    alone = sampling.sample(logits[:1].clone(), [first])
    together = sampling.sample(logits[[1, 0, 2]].clone(), [second, first, greedy])
    assert together[1:2] == alone
    assert together[2] == int(logits[2].argmax())


def test_the_last_bits_of_logits_do_not_change_the_drawn_tokens():
    """Sixteen tokens are equally likely but for rounding, which another batch may reverse. A draw
    in the order of probabilities would then return another token."""
    tilt = [1e-6 * i for i in range(16)]
    rows = [[*side, *[-9.0] * 16] for side in (tilt, tilt[::-1])]
    rising, falling = (draw(row, Sampling(1.0, top_k=16, seed=5), 200) for row in rows)
    assert rising == falling
    assert set(rising) == set(range(16))


def test_stop_ids_are_not_drawn_before_the_minimum():
    assert draw([0.0, 9.0], Sampling(), min_tokens=1, stop_ids=[1]) == [0]
    assert draw([0.0, 9.0], Sampling(), min_tokens=0, stop_ids=[1]) == [1]
    assert set(draw([0.0, 9.0], Sampling(1.0), 1, min_tokens=1, stop_ids=[1])) == {0}


def test_uniform_numbers_fill_the_unit_interval():
    """Kolmogorov-Smirnov on 10 000 numbers: 1.95/√n is exceeded once in 1 000 seeds."""
    seeds, positions = np.full(10_000, 7, np.uint64), np.arange(10_000, dtype=np.int32)
    numbers = sorted(sampling.uniforms(seeds, positions).tolist())
    distance = max(abs(x - i / 10_000) for i, x in enumerate(numbers))
    assert 0 <= numbers[0] < numbers[-1] < 1
    assert distance < 0.0195


def test_logprobs_are_those_of_the_whole_distribution_under_truncation_and_bans():
    logits = [0.0, math.log(2.0), math.log(5.0)]  # probabilities 1/8, 2/8, 5/8
    truncated = Sampling(0.3, top_k=2, seed=5, logprobs=True)
    requests = [
        request("truncated", [0], 9, sampling=truncated),
        request("without", [0], 9),
        request("banned", [0], 9, sampling=Sampling(logprobs=True), min_tokens=1, stop_ids=[2]),
    ]
    tokens, logprobs = sampling.sample_with_logprobs(torch.tensor([logits] * 3), requests)
    assert tokens == sampling.sample(torch.tensor([logits] * 3), requests)
    shares = [1 / 8, 2 / 8, 5 / 8]
    assert math.exp(logprobs[0].chosen) == pytest.approx(shares[tokens[0]])
    assert logprobs[1] is None
    assert tokens[2] == 1
    assert math.exp(logprobs[2].chosen) == pytest.approx(2 / 8)
    assert logprobs[2].top == ()


def test_the_top_log_probabilities_are_of_the_model_and_as_many_as_requested():
    """A ban and penalties change the token, not the log-probabilities."""
    logits = [0.0, math.log(2.0), math.log(5.0)]
    changed = Sampling(logprobs=True, top_logprobs=2, presence_penalty=2.0, repetition_penalty=9.0)
    requests = [
        request("changed", [1], 9, sampling=changed, min_tokens=1, stop_ids=[2]),
        request("all", [1], 9, sampling=Sampling(logprobs=True, top_logprobs=20)),
        request("none", [1], 9, sampling=Sampling(logprobs=True)),
    ]
    tokens, logprobs = sampling.sample_with_logprobs(torch.tensor([logits] * 3), requests)
    assert tokens == [1, 2, 2]
    tops = [{token: round(math.exp(x), 6) for token, x in part.top} for part in logprobs]
    assert tops == [{2: 0.625, 1: 0.25}, {2: 0.625, 1: 0.25, 0: 0.125}, {}]
    assert [round(math.exp(part.chosen), 6) for part in logprobs] == [0.25, 0.625, 0.625]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, [2.0, -2.0, 1.0, 0.5]),
        ({"presence_penalty": 0.25}, [2.0, -2.25, 0.75, 0.5]),
        ({"frequency_penalty": 0.25}, [2.0, -2.5, 0.75, 0.5]),
        ({"presence_penalty": -1.0, "frequency_penalty": 0.25}, [2.0, -1.5, 1.75, 0.5]),
        # Of prompt (0) and output (1, 2): a positive logit is halved, a negative one doubled.
        ({"repetition_penalty": 2.0}, [1.0, -4.0, 0.5, 0.5]),
        ({"repetition_penalty": 2.0, "presence_penalty": 0.25}, [1.0, -4.25, 0.25, 0.5]),
    ],
)
def test_penalties_change_the_logits_of_tokens_that_occurred(parameters, expected):
    """Token 0 is in the prompt, token 1 twice and token 2 once in the output, token 3 nowhere."""
    penalised = request("r", [0], 9, sampling=Sampling(**parameters))
    penalised.tokens += [1, 2, 1]
    other = request("other", [0], 9)
    other.tokens += [1, 1, 1]
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]] * 2)
    penalties = sampling.penalties_of([other, penalised])
    sampling.penalise(logits, *penalties.tensors())
    assert logits[1].tolist() == expected
    assert logits[0].tolist() == [2.0, -2.0, 1.0, 0.5]


def test_a_presence_penalty_changes_the_greedy_token():
    penalised = request("r", [0], 9, sampling=Sampling(presence_penalty=2.0))
    assert sampling.sample(torch.tensor([[1.0, 2.0]]), [penalised]) == [1]
    penalised.tokens.append(1)
    assert sampling.sample(torch.tensor([[1.0, 2.0]]), [penalised]) == [0]


def test_min_p_keeps_tokens_of_a_share_of_the_most_likely_token():
    """0.2 is half of 0.4 and stays in; temperature is applied first, as in vLLM: squared, 0.09 is
    56 % of 0.16 and 0.04 is 25 %."""
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert set(draw(logits, Sampling(1.0, min_p=0.499), 500)) == {1, 2, 3}
    assert set(draw(logits, Sampling(1.0, min_p=0.51), 500)) == {1, 3}
    assert set(draw(logits, Sampling(0.5, min_p=0.499), 500)) == {1, 3}
    assert set(draw(logits, Sampling(1.0, min_p=1.0), 200)) == {1}
    assert set(draw(logits, Sampling(1.0, min_p=0.0), 500)) == {0, 1, 2, 3}
    assert set(draw(logits, Sampling(1.0, top_k=2, min_p=0.1), 500)) == {1, 3}


def test_there_are_no_logprobs_unless_a_request_has_them_on():
    _, logprobs = sampling.sample_with_logprobs(torch.zeros(1, 4), [request("r", [0], 9)])
    assert logprobs is None
