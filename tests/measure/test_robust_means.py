"""A robust mean follows the undisturbed values, and costs little where nothing is disturbed."""

import numpy as np
import pytest

from loadgen.measure.statistics.robust_means import robust_fit


def fitted(design, values, n_per_group):
    found = robust_fit(design, values, n_per_group)
    assert found is not None
    return found


def two_groups(n):
    return np.repeat(np.eye(2), n, axis=0)


def test_undisturbed_values_have_nearly_their_plain_means_and_variance():
    values = np.random.default_rng(3).normal(0, 1, 4000) + np.repeat([0.0, 5.0], 2000)
    effects, variance = fitted(two_groups(2000), values, 2000)
    assert effects == pytest.approx([0.0, 5.0], abs=0.08)
    assert variance == pytest.approx(1 / 0.95, rel=0.06)  # 95 % of the information is used


def test_a_tenth_of_foreign_values_hardly_moves_a_mean():
    rng = np.random.default_rng(4)
    values = rng.normal(0, 1, 400)
    values[::10] += 30
    effects, variance = fitted(two_groups(200), values, 200)
    assert effects == pytest.approx([0.0, 0.0], abs=0.25)
    assert variance < 2  # 91 without the weights


def test_values_that_fit_exactly_have_no_noise():
    assert robust_fit(two_groups(8), np.repeat([1.0, 2.0], 8), 8) is None


def test_tests_of_small_groups_keep_their_level():
    # 2000 equal pairs of 8 values, one-sided at 5 %: 100 are expected, more than 130 have a
    # probability of 0.1 %.
    rng, n_alarms = np.random.default_rng(5), 0
    for _ in range(2000):
        effects, variance = fitted(two_groups(8), rng.normal(0, 1, 16), 8)
        n_alarms += (effects[1] - effects[0]) / np.sqrt(variance / 4) > 1.761  # t at 14 df
    assert n_alarms <= 130
