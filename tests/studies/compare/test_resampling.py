"""Resampling holds its level where rows of a run are alike; all seeds fixed."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.studies.compare.resampling import (
    paired_draws,
    sign_flip_p,
    stretches,
)


def mean(values):
    return float(values.mean())


@given(st.integers(0, 500), st.integers(1, 60))
def test_stretches_hold_every_row_once_and_are_of_alike_length(n, n_blocks):
    found = stretches(n, n_blocks)
    assert [k for block in found for k in range(block.start, block.stop)] == list(range(n))
    sizes = [block.stop - block.start for block in found]
    assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("differences", [[0.3, -0.1, 0.5, 0.2, 0.4], [1.0], [2.0, 2.0, 2.0]])
def test_few_pairs_are_permuted_exactly(differences):
    values = np.array(differences)
    patterns = list(product((1, -1), repeat=len(values)))
    extreme = [abs(np.dot(p, values)) >= abs(values.sum()) - 1e-9 for p in patterns]
    p = sign_flip_p(values, np.random.default_rng(1))
    assert p == pytest.approx(sum(extreme) / len(patterns))


def test_the_permutation_test_holds_its_level_and_finds_what_is_there():
    # 400 tests at 5 %: more than 32 false alarms have a probability of 0.5 %.
    rng = np.random.default_rng(5)
    alarms = sum(sign_flip_p(rng.standard_t(3, 40), rng, 400) < 0.05 for _ in range(400))
    assert alarms <= 32
    assert sign_flip_p(rng.normal(1, 1, 40), rng) < 0.001


def test_paired_draws_cancel_what_both_sides_share():
    rng = np.random.default_rng(3)
    shared = rng.lognormal(0, 1, 300)
    draws = paired_draws(shared, shared * 1.05, lambda v: float(np.log(v).mean()), rng, 30, 200)
    assert draws == pytest.approx(np.log(1.05))
