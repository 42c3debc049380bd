"""A night is one observation: what nights differ by decides, not how many runs each had."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from loadgen.studies.nightly.statistics import (
    WITH_CONTROLS,
    NightNoise,
    NightSample,
    contrast_of_nights,
    night_power,
    repeats_needed,
    smallest_found,
)

_NAMES = itertools.count()


def night(*values):
    """A night whose runs share their schedules with nobody."""
    return NightSample(np.array(values, float), tuple(f"s{next(_NAMES)}" for _ in values))


def told(levels, tonight, **options):
    """The contrast, and a noise that is there."""
    found, noise = contrast_of_nights(levels, tonight, **options)
    assert noise is not None
    return found, noise


def drawn(rng, n_runs, night_sd=0.0, shift=0.0):
    level = rng.normal(shift, night_sd)
    return night(*rng.normal(level, 1.0, n_runs))


def test_six_nights_are_judged_as_six_numbers():
    rng = np.random.default_rng(1)
    nights = [drawn(rng, 4, night_sd=3.0) for _ in range(7)]
    found, noise = told([nights[:6]], nights[6], is_robust=False)
    means = np.array([n.values.mean() for n in nights])
    # The independent oracle: one more of six equal means, as a t test of two samples.
    expected = stats.ttest_ind(means[6:], means[:6])
    assert noise.assumed_df == 0
    assert found.df == 5
    assert found.difference == pytest.approx(means[6] - means[:6].mean())
    assert found.difference / found.error == pytest.approx(expected.statistic)
    assert found.p_value() == pytest.approx(expected.pvalue)


def test_nights_that_differ_no_more_than_their_runs_are_one_noise_with_them():
    nights = [night(-1.0, 0.0, 1.0) for _ in range(6)]
    found, noise = told([nights], night(0.0, 1.0, 2.0))
    # Squares: seven nights of 2, none between them; 14 + 5 degrees of freedom.
    assert noise.night_sd == 0
    assert noise.run_sd == pytest.approx(math.sqrt(14 / 19))
    assert found.df == 19
    assert found.error == pytest.approx(math.sqrt(14 / 19 * (1 / 3 + 1 / 18)))


def test_one_night_before_lends_the_noise_of_its_runs():
    a, b = night(1.0, 3.0), night(7.0, 9.0)
    found, noise = told([[a]], b)
    # s² = 2 on two degrees of freedom; a night's level is lent the same, on as many.
    assert found.difference == pytest.approx(6)
    assert noise.run_sd == pytest.approx(math.sqrt(2))
    assert noise.night_sd == pytest.approx(math.sqrt(2))
    assert (noise.night_df, noise.assumed_df) == (2, 2)
    assert found.error == pytest.approx(math.sqrt(2 * (1 + 1) + 2 * (1 / 2 + 1 / 2)))


def test_each_night_gives_one_lent_degree_of_freedom_back():
    rng = np.random.default_rng(2)
    nights = [drawn(rng, 5) for _ in range(8)]
    lent = [told([nights[:k]], nights[7])[1].assumed_df for k in range(1, 8)]
    assert lent == [4, 3, 2, 1, 0, 0, 0]


def test_beside_controls_a_night_is_lent_what_its_mean_is_unsure_by():
    a, b = night(1.0, 3.0, 1.0, 3.0), night(7.0, 9.0, 7.0, 9.0)
    found, noise = contrast_of_nights([[a]], b, WITH_CONTROLS)
    # s² = 4/3 on six degrees of freedom, s²/4 of it in each mean; as much again between nights.
    assert noise is not None
    assert noise.run_sd == pytest.approx(math.sqrt(4 / 3))
    assert noise.night_sd == pytest.approx(math.sqrt(1 / 3))
    assert (noise.night_df, noise.assumed_df) == (6, 6)
    assert found.error == pytest.approx(math.sqrt(4 * 1 / 3))


def test_beside_controls_it_is_no_matter_into_how_many_runs_an_hour_is_cut():
    rng = np.random.default_rng(8)
    errors = {}
    for n_runs in (8, 32):  # as noisy a minute, in 8 runs or in 32 of a quarter of the length
        found = [
            contrast_of_nights(
                [[night(*rng.normal(0, math.sqrt(n_runs / 8), n_runs)) for _ in range(2)]],
                night(*rng.normal(0, math.sqrt(n_runs / 8), n_runs)),
                WITH_CONTROLS,
            )[0]
            for _ in range(400)
        ]
        errors[n_runs] = math.sqrt(np.mean([one.error**2 for one in found]))
        assert {one.df for one in found} == {8}
    assert errors[8] == pytest.approx(errors[32], rel=0.1)
    # Three means of 1/√8, one on its own and two halved, each with as much again of its night.
    assert errors[32] == pytest.approx(math.sqrt(2 / 8 * (1 + 1 / 2)), rel=0.1)


def test_equal_schedules_take_the_luck_of_the_draw_out():
    names = ("s1", "s2", "s3")
    traffic, rng = np.array([0.0, 5.0, -4.0]), np.random.default_rng(3)
    nights = [
        NightSample(traffic + k + rng.normal(0, 0.1, 3), names) for k in (0, 0, 0)
    ]  # fmt: skip
    two = NightSample(nights[2].values[:2] + 1.0, names[:2])  # one run of it could not be trusted
    found, noise = told([nights[:2]], two)
    assert found.difference == pytest.approx(1.0, abs=0.2)
    assert noise.run_sd < 0.3
    other = NightSample(two.values, ("t1", "t2"))
    assert told([nights[:2]], other)[1].run_sd > 2


def test_an_accepted_change_is_no_noise():
    rng = np.random.default_rng(4)
    before = [drawn(rng, 3) for _ in range(6)]
    after = [drawn(rng, 3, shift=50.0) for _ in range(2)]
    tonight = drawn(rng, 3, shift=50.0)
    found, noise = told([before, after], tonight)
    assert noise.run_sd < 2
    assert noise.night_sd < 2
    assert noise.night_df in (6, 6 + 18)  # alone, or with the 9 × 2 of the runs
    assert abs(found.difference) < 4


def test_without_two_runs_a_night_nothing_is_judged():
    found, noise = contrast_of_nights([[night(1.0)]], night(2.0))
    assert (found.difference, noise) == (1.0, None)
    assert not found.is_judged
    assert not contrast_of_nights([], night(1.0, 2.0))[0].is_judged
    assert not contrast_of_nights([[night(1.0, 2.0)]], night(1.0, math.nan))[0].is_judged


@given(st.integers(1, 6), st.integers(2, 5), st.floats(-5, 5))
def test_equal_nights_in_virtual_time_do_not_differ(n_nights, n_runs, level):
    names = tuple(f"s{k}" for k in range(n_runs))
    values = level + np.arange(n_runs) * 0.37
    same = NightSample(values, names)
    found, noise = told([[same] * n_nights], same)
    assert found.difference == 0
    assert (noise.run_sd, noise.night_sd) == (0, 0)


@pytest.mark.parametrize("night_sd", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("n_nights", [1, 3, 6, 14])
def test_equal_nights_are_rarely_called_different(night_sd, n_nights):
    # 400 nights, each side at 5 %: 40 are expected at most; more than 58 have a probability of
    # 0.3 %. Few nights are calibrated for nights that differ by what runs do (1.0), and careful
    # below.
    rng = np.random.default_rng(10 + n_nights)
    n_alarms = 0
    for _ in range(400):
        earlier = [drawn(rng, 3, night_sd) for _ in range(n_nights)]
        n_alarms += told([earlier], drawn(rng, 3, night_sd))[0].p_value() < 0.1
    assert n_alarms <= 58


def test_planned_repeats_find_what_they_were_planned_for():
    noise = NightNoise(run_sd=1.0, run_df=60, night_sd=0.2, night_df=13, assumed_df=0)
    n = repeats_needed(noise, [5] * 14, 1.5, 0.05)
    assert n is not None
    assert night_power(noise, n, [5] * 14, 1.5, 0.05) >= 0.9
    assert night_power(noise, n - 1, [5] * 14, 1.5, 0.05) < 0.9
    reach = smallest_found(noise, n, [5] * 14, 0.05)
    assert night_power(noise, n, [5] * 14, reach, 0.05) == pytest.approx(0.9, abs=1e-3)
    rng = np.random.default_rng(5)
    n_found = 0
    for _ in range(300):
        earlier = [drawn(rng, 5, 0.2) for _ in range(14)]
        found, _ = told([earlier], drawn(rng, n, 0.2, shift=1.5))
        n_found += found.p_value() < 0.05 and found.difference > 0
    assert n_found >= 261  # 90 % of 300 less three standard deviations


def test_repeats_are_planned_over_all_that_nights_which_are_alike_may_look_like():
    # Four measures decide (α = 10 % / 4, two-sided), 14 nights of 5 runs, a change of 1.6 standard
    # deviations of a run. A z test of a night against a night, which knows the noise, needs
    # 2 · (1.96 + 1.28)² / 1.6² = 8.2 runs. The seed is fixed; fewer than 300 of 350 are found with
    # a probability of 0.3 % where the power is 0.9.
    rng, alpha, change = np.random.default_rng(6), 0.025, 1.6
    n_found, n_told = 0, 0
    asked: list[int] = []
    for _ in range(385):
        earlier = [drawn(rng, 5) for _ in range(14)]
        _, noise = told([earlier], drawn(rng, 5))
        if not noise.alike_p > 0.05:  # they look as if they surely differed: 5 % of cases
            continue
        n = repeats_needed(noise, [5] * 14, change, alpha)
        assert n is not None
        found, _ = told([earlier], drawn(rng, n, shift=change))
        n_found += found.p_value() < alpha and found.difference > 0
        n_told += 1
        asked.append(n)
        if n_told == 350:
            break
    assert n_told == 350
    assert n_found >= 300
    assert np.median(asked) <= 1.5 * 9


def test_luck_of_the_nights_changes_no_plan_and_what_they_surely_differ_by_does():
    lucky = NightNoise(1.0, 56, 0.0, 69, 0.0, alike_p=0.9)
    unlucky = NightNoise(1.0, 56, 0.4, 13, 0.0, alike_p=0.06)
    n, same = (repeats_needed(noise, [5] * 14, 1.3, 0.025) for noise in (lucky, unlucky))
    assert n == same
    assert n is not None
    assert night_power(unlucky, n, [5] * 14, 1.3, 0.025) < 0.75
    apart = NightNoise(1.0, 56, 0.4, 13, 0.0, alike_p=0.01)
    assert repeats_needed(apart, [5] * 14, 1.3, 0.025) is None
    assert unlucky.may_be_chance
    assert not lucky.may_be_chance
    assert not apart.may_be_chance


def test_no_number_of_repeats_finds_what_nights_hide():
    noise = NightNoise(run_sd=0.1, run_df=60, night_sd=5.0, night_df=13, assumed_df=0)
    assert repeats_needed(noise, [5] * 14, 1.0, 0.05) is None
    assert repeats_needed(noise, [5] * 14, 0.0, 0.05) is None
