"""The drawn times of steps have the distribution and the memory that they are drawn from."""

import numpy as np
import pytest

from loadgen.studies.calibrate.variation_fit import variation_of
from reference_engine.state.step_variation import StepVariation, VaryingSteps

SPELLS = StepVariation((0.2, 0.9, 1.0), (0.5, 1.0, 1.9), 0.6, 32.0, 0.01, (0.003, 0.005))


def drawn(variation, costs_s, number=0):
    """The seconds of steps that are executed one after another."""
    varying, seconds = VaryingSteps(variation, number), []
    for cost_s in costs_s:
        varying.pass_by(1)
        seconds += varying.varied([cost_s])
    return np.array(seconds)


def test_ratios_and_pauses_have_their_shares():
    cost_s = 0.001
    seconds = drawn(SPELLS, [cost_s] * 100_000)
    # A pausing step is longer than any ratio makes it.
    is_pausing = seconds > 2 * cost_s
    assert is_pausing.mean() == pytest.approx(0.01, abs=0.002)
    assert set(np.round(seconds[~is_pausing], 9)) == {0.0005, 0.001, 0.0019}
    for ratio, share in ((0.5, 0.2), (1.0, 0.7), (1.9, 0.1)):
        assert np.isclose(seconds, ratio * cost_s).mean() == pytest.approx(0.99 * share, abs=0.02)
    pauses = {round(float(s), 6) for s in seconds[is_pausing]}
    assert pauses == {0.0035, 0.004, 0.0049, 0.0055, 0.006, 0.0069}


def test_a_pause_does_not_grow_with_the_step():
    short, long = (drawn(SPELLS, [cost_s] * 20_000) for cost_s in (0.001, 1.0))
    ratio = (long - short) / (1.0 - 0.001)
    assert set(np.round(ratio, 9)) == {0.5, 1.0, 1.9}


def test_slow_steps_come_in_spells():
    """The share of slow steps (r = 1.9) after a slow step k steps ago: of normal scores with the
    correlation 0.6 exp(-k / 32), both in their upper tenth."""
    from scipy.stats import multivariate_normal, norm

    is_slow = np.isclose(drawn(SPELLS, [1.0] * 400_000) % 1, 0.9, atol=0.01)
    for k in (1, 16, 128):
        r = 0.6 * np.exp(-k / 32)
        q = norm.ppf(0.9)
        both = 1 - 0.9 - 0.9 + multivariate_normal.cdf([q, q], cov=[[1, r], [r, 1]])
        assert (is_slow[:-k] & is_slow[k:]).mean() == pytest.approx(both, rel=0.12)


def test_steps_ahead_are_those_that_are_executed_later():
    costs_s = [0.001 * (1 + k % 3) for k in range(9000)]
    one_by_one = drawn(SPELLS, costs_s)
    varying, seconds, at = VaryingSteps(SPELLS), [], 0
    while at < len(costs_s):  # 7 steps at once, then the present one once more
        varying.pass_by(1)
        ahead = varying.varied(costs_s[at : at + 7])
        varying.pass_by(len(ahead) - 2)
        varying.pass_by(1)
        assert varying.varied([costs_s[at + len(ahead) - 1]]) == ahead[-1:]
        seconds += ahead
        at += len(ahead)
    assert seconds == one_by_one.tolist()
    assert drawn(SPELLS, costs_s, number=1).tolist() != seconds


def test_a_variation_is_recovered_from_its_steps():
    costs_s = np.tile([0.001, 0.004], 30_000)
    found = variation_of(drawn(SPELLS, costs_s.tolist()), costs_s)
    assert found.up_to == (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 1.0)
    # The lowest fifth takes 0.5, the upper tenth 1.9 times; a hundredth are pauses (2 times).
    assert found.ratio[0] == pytest.approx(0.5)
    assert found.ratio[2:4] == pytest.approx((1.0, 1.0), abs=0.01)
    assert found.ratio[5:] == pytest.approx((1.9, 1.9, 1.95), abs=0.03)
    assert found.lasting == pytest.approx(0.5, abs=0.12)  # ties of ratios weaken it
    assert found.memory == pytest.approx(32, rel=0.45)
    # Pauses of 3 and 5 ms, less what the ratio of 2 covers of them; few on steps of 4 ms remain.
    assert found.pausing == pytest.approx(0.009, abs=0.003)
    assert 0.0005 < found.pause_s[0] < 0.003 < found.pause_s[-1] < 0.005


def test_equal_steps_have_no_variation():
    found = variation_of(np.full(200, 0.002), np.full(200, 0.002))
    assert set(found.ratio) == {1.0}
    assert (found.pausing, found.pause_s) == (0.0, ())


def test_few_steps_have_fewer_shares():
    found = variation_of(np.linspace(0.001, 0.0012, 40), np.full(40, 0.001))
    assert found.up_to == (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
    assert found.ratio[0] == pytest.approx((1.0 + 1 + 0.2 / 39) / 2)
