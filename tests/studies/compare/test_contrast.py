"""Differences between runs: held against scipy's tests, and against what they promise to find."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as oracle

from loadgen.measure.measures import measure
from loadgen.studies.compare.contrast import (
    Noise,
    contrast,
    holm,
    noise_of,
    power,
    runs_needed,
    smallest_effect,
)
from loadgen.studies.compare.judgement import Options, decide, judge

sides = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=9).filter(
    lambda v: len(set(v)) > 1
)


@given(sides, sides)
def test_unpaired_sides_agree_with_scipys_t_test(a, b):
    ours = contrast(np.array(a), np.array(b))
    theirs = oracle.ttest_ind(b, a, equal_var=len(a) == len(b))
    assert ours.p_value() == pytest.approx(theirs.pvalue, rel=1e-6, abs=1e-12)
    ends, known = ours.interval(0.9), theirs.confidence_interval(0.9)
    assert (ends.low, ends.high) == pytest.approx((known.low, known.high), rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=3, max_size=8))
def test_pairs_agree_with_scipys_paired_t_test(pairs):
    a, b = np.round(np.array(pairs).T, 2)
    if len(set(np.round(b - a, 6))) == 1:
        return
    names = [f"schedule {k}" for k in range(len(a))]
    ours = contrast(a, b, (names, names))
    assert ours.p_value() == pytest.approx(oracle.ttest_rel(b, a).pvalue, rel=1e-6, abs=1e-12)


def test_equivalence_is_the_worse_of_two_one_sided_tests():
    a, b = np.array([1.0, 1.1, 0.9, 1.05]), np.array([1.02, 1.08, 0.95, 1.1])
    below = oracle.ttest_ind(b + 0.3, a, alternative="greater").pvalue
    above = oracle.ttest_ind(b - 0.2, a, alternative="less").pvalue
    assert contrast(a, b).equivalence_p(-0.3, 0.2) == pytest.approx(max(below, above))


def test_one_run_a_side_has_a_difference_but_no_error_unless_noise_is_known():
    one, two = np.array([1.0]), np.array([1.5])
    lonely = contrast(one, two)
    assert lonely.difference == 0.5
    assert math.isnan(lonely.p_value())
    assert lonely.interval(0.95).low is None
    judged = contrast(one, two, known=Noise(0.1, 8))
    t = 0.5 / (0.1 * math.sqrt(2))
    assert judged.p_value() == pytest.approx(2 * oracle.t.sf(t, 8))


def test_identical_runs_do_not_differ():
    same = contrast(np.ones(3), np.ones(3))
    assert (same.p_value(), same.equivalence_p(-0.01, 0.01)) == (1.0, 0.0)


def test_a_side_with_a_zero_has_no_ratio():
    """A TPOT of 0, as of answers that arrive whole, is −∞ as a logarithm."""
    zero, other = np.full(3, -np.inf), np.log([4.0, 4.1, 4.2])
    blocks = ((1, 2, 3), (1, 2, 3))
    for found in (contrast(other, zero), contrast(zero, other, blocks), contrast(zero, zero)):
        assert not found.is_judged
        assert math.isnan(found.difference)


def test_noise_is_what_runs_of_one_block_differ_by():
    values = np.array([1.0, 2.0, 11.0, 12.0])
    found = noise_of(values, ["x", "x", "y", "y"])
    assert found is not None
    assert found.sd == pytest.approx(math.sqrt(0.5))
    assert found.df == 2
    assert noise_of(values, ["w", "x", "y", "z"]) is None


def test_holm_on_the_textbook_example():
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})


def test_holm_leaves_out_what_could_never_differ():
    assert holm({"a": 0.03, "b": 1.0}) == {"a": 0.03, "b": 1.0}


def test_power_with_known_noise_is_the_noncentral_t():
    ours = power(Noise(1.0, 1e9), 1.0, 17, 0.05)
    theirs = oracle.nct.sf(oracle.t.ppf(0.975, 32), 32, 1 / math.sqrt(2 / 17))
    assert ours == pytest.approx(theirs, abs=1e-3)
    needed = runs_needed(Noise(1.0, 1e9), 1.0, 0.05, target_power=0.8)
    assert needed in (16, 17)  # Cohen's table: d = 1


@given(st.floats(0.01, 0.5), st.integers(3, 60), st.floats(0.01, 0.2))
def test_the_recommended_runs_are_the_fewest_that_suffice(sd, df, effect):
    noise = Noise(sd, df)
    n = runs_needed(noise, effect, 0.05, most=2000)
    if n is None:
        return
    assert power(noise, effect, n, 0.05) >= 0.9
    assert n == 4 or power(noise, effect, n - 1, 0.05) < 0.9


def test_the_smallest_effect_is_the_one_that_needs_as_many_runs():
    effect = smallest_effect(Noise(0.03, 9), 8, 0.05)
    assert runs_needed(Noise(0.03, 9), effect, 0.05) == 8
    assert runs_needed(Noise(0.001, 9), effect, 0.05) == 4  # two would do


@pytest.mark.parametrize(
    ("change", "p", "verdict"),
    [
        (0.3, 0.04, "worse"),
        (0.3, 0.06, "inconclusive"),
        (-0.3, 0.04, "inconclusive"),
        (-0.3, 0.009, "better"),
        (-0.3, 0.011, "inconclusive"),
    ],
)
def test_better_needs_a_fifth_of_the_p_value_that_worse_needs(change, p, verdict):
    values = np.array([1.0, 1.1, 0.9]), np.array([1.0, 1.1, 0.9])
    _, row = judge(measure("mean(ttft)"), values, None, Options())
    row = replace(row, is_gated=True, change=change, p=p, p_same=1.0)
    assert decide([row], 0.95)[0].verdict == verdict
