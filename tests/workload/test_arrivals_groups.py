"""Groups, sums and closed loops."""

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats

from loadgen.workload.arrivals import ARRIVALS
from loadgen.workload.durations import DURATIONS


def times(spec, horizon_s, seed):
    return ARRIVALS.build(spec).times(np.random.Generator(np.random.PCG64(seed)), horizon_s)


SIZES = {"kind": "power_law", "alpha": 1.5, "min": 1, "max": 20}
BATCH = {"kind": "batch", "rate": "12/s", "size": SIZES}


def test_groups_come_at_poisson_instants_with_sizes_of_the_asked_law():
    instants, sizes = np.unique(times(BATCH, 20_000.0, 71), return_counts=True)
    shares = np.arange(1, 21) ** -1.5
    shares /= shares.sum()
    mean_size = np.arange(1, 21) @ shares
    expected = stats.expon(scale=mean_size / 12)
    assert stats.kstest(np.diff(instants), expected.cdf).pvalue > 0.01
    counts = np.bincount(sizes, minlength=21)[1:]
    assert stats.chisquare(counts, shares * len(sizes)).pvalue > 0.01


def test_the_rate_of_groups_counts_requests():
    instants = times(BATCH, 20_000.0, 72)
    sizes = np.arange(1, 21)
    shares = sizes**-1.5 / np.sum(sizes**-1.5)
    dispersion = sizes**2 @ shares / (sizes @ shares)  # E[S²]/E[S], over every window
    assert len(instants) == pytest.approx(240_000, abs=4 * np.sqrt(dispersion * 240_000))
    counts, _ = np.histogram(instants, 20_000, (0.0, 20_000.0))
    # relative standard deviation of var/mean with this kurtosis: 1.1 %, four of them
    assert counts.var() / counts.mean() == pytest.approx(dispersion, rel=0.045)


def test_groups_at_equal_gaps_have_the_rate_and_the_sizes():
    """4 requests on average at 8/s: a group every half second."""
    sizes = {"kind": "empirical", "values": [2, 6]}
    spec = {"kind": "batch", "rate": "8/s", "size": sizes, "instants": "constant"}
    instants, counts = np.unique(times(spec, 1000.0, 74), return_counts=True)
    assert len(instants) == 2000
    assert np.diff(instants) == pytest.approx(np.full(1999, 0.5))
    assert set(counts.tolist()) == {2, 6}
    assert counts.mean() == pytest.approx(4, abs=4 * 2 / np.sqrt(2000))


def test_a_burst_is_there_at_once():
    burst = ARRIVALS.build({"kind": "burst", "requests": 500})
    instants = burst.times(np.random.Generator(np.random.PCG64(1)), 60.0)
    assert instants.tolist() == [0.0] * 500
    assert burst.mean_rate_per_s(60.0) == pytest.approx(500 / 60)


def test_a_sum_has_every_arrival_of_its_parts():
    # constants of 2/s and 3/s: 5 000 in 1000 s, each at its own phase
    parts = [{"kind": "constant", "rate": "2/s"}, {"kind": "constant", "rate": "3/s"}]
    instants = times({"kind": "sum", "of": parts}, 1000.0, 73)
    assert len(instants) == 5000
    # whatever the phases, every third of a second has one of the faster and two thirds of the other
    phases = np.unique(np.round(instants % 1.0, 6))
    assert len(phases) == 5


def test_the_parts_of_a_sum_are_independent():
    # equal parts from one seed would be equal streams: pairs of arrivals at the same instants
    part = {"kind": "poisson", "rate": "10/s"}
    instants = times({"kind": "sum", "of": [part, part]}, 5000.0, 74)
    assert len(np.unique(instants)) == len(instants)
    assert stats.kstest(np.diff(instants), stats.expon(scale=1 / 20).cdf).pvalue > 0.01


def test_variances_of_counts_add_up_in_a_sum():
    parts = [{"kind": "gamma", "rate": "20/s", "cv": 2.0}, {"kind": "constant", "rate": "30/s"}]
    counts, _ = np.histogram(times({"kind": "sum", "of": parts}, 20_000.0, 75), 1000, (0, 20_000.0))
    # long windows: (4 · 20 + 0 · 30)/50; relative standard deviation sqrt(2/1000) = 4.5 %
    assert counts.var() / counts.mean() == pytest.approx(1.6, rel=0.18)


def test_sums_nest():
    inner = {"kind": "sum", "of": [{"kind": "poisson", "rate": "1/s"}]}
    process = ARRIVALS.build({"kind": "sum", "of": [inner, {"kind": "burst", "requests": 10}]})
    assert process.mean_rate_per_s(5.0) == 3.0


USERS = {"kind": "users", "users": 40, "think": {"kind": "exponential", "mean": "2s"}}


def test_users_without_a_ramp_are_there_from_the_start():
    process = ARRIVALS.build(USERS)
    instants = process.times(np.random.Generator(np.random.PCG64(76)), 60.0)
    assert instants.tolist() == [0.0] * 40
    assert process.mean_rate_per_s(60.0) is None  # it is the server that decides
    assert process.pause() == DURATIONS.build({"kind": "exponential", "mean": "2s"})


def test_users_join_evenly_over_the_ramp():
    instants = times(USERS | {"ramp_up": "20s"}, 60.0, 77)
    joined, _ = np.histogram(instants, 40, (0.0, 20.0))
    assert joined.tolist() == [1] * 40
    assert np.ptp(instants % 0.5) > 0.3  # but on no lattice


def test_users_who_would_join_after_the_window_stay_away():
    assert len(times(USERS | {"ramp_up": "20s"}, 5.0, 78)) == 10


def test_a_bare_think_time_is_a_fixed_one():
    pause = ARRIVALS.build(USERS | {"think": "500ms"}).pause()
    assert pause == DURATIONS.build({"kind": "fixed", "duration": "500ms"})


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"kind": "sum", "of": []}, "is empty; name at least one"),
        (
            {"kind": "sum", "of": [{"kind": "poisson", "rate": "1/s"}, USERS]},
            r"of\.1 \(users\) is a closed loop .* a class of its own",
        ),
        ({**BATCH, "size": {"kind": "joint", "pairs": [[1, 2]]}}, "joint draws pairs"),
        ({"kind": "burst", "requests": 0}, "greater than or equal to 1"),
        ({**USERS, "users": 0}, "greater than or equal to 1"),
        ({**USERS, "think": 2}, "a duration needs its unit: write '2s' or '2ms', not 2"),
    ],
)
def test_groups_that_cannot_be_meant_are_refused(spec, said):
    with pytest.raises(ValidationError, match=said):
        ARRIVALS.build(spec)


def test_a_mistake_inside_a_sum_is_told_at_its_place():
    parts = [{"kind": "poisson", "rate": "1/s"}, {"kind": "gamma", "rate": "1/s", "cv": -1}]
    with pytest.raises(ValidationError) as caught:
        ARRIVALS.build({"kind": "sum", "of": parts})
    assert [error["loc"] for error in caught.value.errors()] == [("of", 1, "cv")]
