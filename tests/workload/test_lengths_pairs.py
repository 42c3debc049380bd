"""Input and output lengths together: observed pairs, and the Gaussian copula."""

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats

from loadgen.errors import ScenarioError
from loadgen.workload.lengths import LENGTHS
from loadgen.workload.pairs import correlated
from loadgen.workload.requests import Requests


def requests(inputs, outputs, correlation=0.0):
    return Requests(input_tokens=inputs, output_tokens=outputs, correlation=correlation)


def drawn(asked, n, seed, output_seed=0):
    return asked.draw_lengths(generator(seed), generator(output_seed), n)


LOGNORMAL = LENGTHS.build({"kind": "lognormal", "median": 2000, "sigma": 0.8, "max": 100_000})
POWER_LAW = LENGTHS.build({"kind": "power_law", "alpha": 0.8, "min": 50, "max": 50_000})
JOINT = LENGTHS.build({"kind": "joint", "pairs": [[10, 900], [20, 30], [10, 900], [4000, 5]]})


def generator(seed):
    return np.random.Generator(np.random.PCG64(seed))


def test_equal_pairs_are_equal_kinds():
    first, second = (LENGTHS.build({"kind": "joint", "pairs": [[1, 2], [3, 4]]}) for _ in range(2))
    assert first == second


def test_pairs_stay_together():
    inputs, outputs = drawn(requests(JOINT, None), 40_000, 91)
    pairs, counts = np.unique(np.stack([inputs, outputs]), axis=1, return_counts=True)
    assert pairs.T.tolist() == [[10, 900], [20, 30], [4000, 5]]
    assert stats.chisquare(counts, [20_000, 10_000, 10_000]).pvalue > 0.01
    assert inputs.dtype == outputs.dtype == np.uint32
    assert requests(JOINT, None).mean_lengths == pytest.approx((4040 / 4, 1835 / 4))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "input_tokens,output_tokens,weight\n10,900,2\n20,30,1\n4000,5,1\n"),
        ("a.csv", "output_tokens,input_tokens\n900,10\n30,20\n900,10\n5,4000\n"),
        ("a.csv", "10,900\n20,30\n10,900\n4000,5\n"),
        ("a.json", "[[10, 900], [20, 30], [10, 900], [4000, 5]]"),
        ("a.json", '{"values": [[10, 900], [20, 30], [4000, 5]], "weights": [2, 1, 1]}'),
    ],
)
def test_pairs_from_a_file_are_those_of_a_list(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    joint = LENGTHS.build({"kind": "joint", "path": str(path)})
    assert requests(joint, None).mean_lengths == pytest.approx((1010, 458.75))
    support = np.arange(10, 4001)
    assert joint.cdf(support) == pytest.approx(JOINT.cdf(support), abs=1e-15)


@pytest.mark.parametrize("rho", [-1.0, -0.6, 0.3, 0.9, 1.0])
def test_the_copula_has_the_asked_correlation(rho):
    n = 100_000
    inputs, outputs = drawn(requests(LOGNORMAL, POWER_LAW, rho), n, 92)
    # Kendall's τ of a Gaussian copula is (2/π) asin ρ; its standard error is below 2/(3·sqrt(n))
    # times 1.5 for any ρ. Ties (both laws have thousands of values) cost less than 0.01.
    tau = stats.kendalltau(inputs, outputs).statistic
    assert tau == pytest.approx(2 / np.pi * np.arcsin(rho), abs=4 / np.sqrt(n) + 0.01)
    # normal scores of the ranks recover ρ itself: Fisher's interval, z' = atanh ρ ± 4/sqrt(n)
    scores = [stats.norm.ppf((stats.rankdata(x) - 0.5) / n) for x in (inputs, outputs)]
    estimate = np.corrcoef(*scores)[0, 1]
    allowed = 4 * (1 - rho**2) / np.sqrt(n) + 0.003
    assert estimate == pytest.approx(rho, abs=allowed)


def test_a_correlation_leaves_each_law_as_it_is():
    inputs, outputs = correlated(LOGNORMAL, POWER_LAW, 0.7, generator(93), 100_000)
    for drawn, law in ((inputs, LOGNORMAL), (outputs, POWER_LAW)):
        edges = law.ppf(np.linspace(0.05, 0.95, 19)).astype(np.int64)
        shares = np.diff(np.concatenate([[0.0], law.cdf(edges), [1.0]]))
        counts = np.bincount(np.searchsorted(edges, drawn), minlength=20)
        assert stats.chisquare(counts, shares * len(drawn)).pvalue > 0.01


def test_a_longer_schedule_keeps_the_earlier_pairs():
    short = correlated(LOGNORMAL, POWER_LAW, 0.7, generator(94), 100)
    long = correlated(LOGNORMAL, POWER_LAW, 0.7, generator(94), 200)
    assert np.array_equal(short[0], long[0][:100])
    assert np.array_equal(short[1], long[1][:100])


def test_independent_lengths_come_from_a_stream_each():
    inputs, outputs = drawn(requests(LOGNORMAL, POWER_LAW), 50, 1, output_seed=2)
    assert np.array_equal(inputs, LOGNORMAL.draw(generator(1), 50))
    assert np.array_equal(outputs, POWER_LAW.draw(generator(2), 50))
    assert requests(LOGNORMAL, None).mean_lengths == (LOGNORMAL.mean, None)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((LOGNORMAL, JOINT), "belongs at requests.input_tokens, with output_tokens"),
        ((JOINT, POWER_LAW), "output_tokens and correlation left out"),
        ((JOINT, None, 0.5), "output_tokens and correlation left out"),
        ((LOGNORMAL, None, 0.5), "correlation ties input_tokens to output_tokens; name both"),
    ],
)
def test_lengths_that_are_stated_twice_are_rejected(lengths, message):
    with pytest.raises(ValidationError, match=message):
        requests(*lengths)


def test_pairs_cannot_stand_for_one_length():
    with pytest.raises(ScenarioError, match="for one length alone use kind: empirical"):
        JOINT.draw(generator(1), 5)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"kind": "joint"}, "give either path"),
        ({"kind": "joint", "pairs": []}, "is empty; name at least one"),
        ({"kind": "joint", "pairs": [[1, 2, 3]]}, "at most 2 items"),
        ({"kind": "joint", "pairs": [[1, 0]]}, "greater than or equal to 1"),
        ({"kind": "joint", "path": "nowhere.json"}, "nowhere.json: cannot be read"),
    ],
)
def test_pairs_that_cannot_be_meant_are_refused(spec, said):
    with pytest.raises(ValidationError, match=said):
        LENGTHS.build(spec)
