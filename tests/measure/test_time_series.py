"""The steady window starts where the warm-up ends, and nowhere where there is none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from loadgen.measure.statistics.time_series import mser5


@given(hnp.arrays(np.float64, st.integers(50, 120), elements=st.floats(0, 9).map(lambda x: x // 1)))
def test_the_cut_minimises_the_standard_error_of_the_rest(values):
    batches = values[: len(values) // 5 * 5].reshape(-1, 5).mean(axis=1)
    rests = [batches[d:] for d in range(len(batches) - 5)]
    errors = [rest.var() / len(rest) for rest in rests]
    found = mser5(values)
    assert found.cut % 5 == 0
    assert errors[found.cut // 5] == pytest.approx(min(errors), abs=1e-9)
    assert found.is_found is (found.cut // 5 < len(batches) / 2)


def test_a_warm_up_is_cut_off():
    rng = np.random.default_rng(2)
    warming = np.r_[np.linspace(3, 1, 60), np.ones(300)] + rng.normal(0, 0.1, 360)
    assert 40 <= mser5(warming).cut <= 75
    assert mser5(warming).is_found


def test_a_steady_run_is_hardly_cut_and_a_growing_one_never_settles():
    rng = np.random.default_rng(4)
    cuts = [mser5(rng.exponential(1, 400)).cut for _ in range(50)]
    assert np.median(cuts) <= 40
    assert not mser5(np.arange(400.0) ** 2).is_found


def test_too_few_values_are_not_cut():
    assert mser5(np.arange(49.0)).cut == 0
