"""Pauses: the mean that is stated, the law that is named."""

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats

from loadgen.workload.durations import DURATIONS

LAWS = [
    ("5s", 5.0, None),
    ({"kind": "uniform", "min": "1s", "max": "4s"}, 2.5, stats.uniform(1, 3)),
    ({"kind": "exponential", "mean": "10s"}, 10.0, stats.expon(scale=10)),
    (
        {"kind": "lognormal", "median": "6s", "sigma": 0.8},
        8.2628,
        stats.lognorm(s=0.8, scale=6),
    ),
]


@pytest.mark.parametrize(("spec", "mean", "law"), LAWS)
def test_a_pause_follows_its_law_and_states_its_mean(spec, mean, law):
    """Kolmogorov-Smirnov at 0.1 %, fixed seed."""
    pauses = DURATIONS.build(spec)
    drawn = pauses.draw(np.random.default_rng(5), 4000)
    assert pauses.mean == pytest.approx(mean, rel=1e-4)
    assert (drawn >= 0).all()
    if law is None:
        assert set(drawn.tolist()) == {mean}
    else:
        assert stats.kstest(drawn, law.cdf).pvalue > 1e-3
        assert law.mean() == pytest.approx(mean, rel=1e-4)


def test_a_pause_whose_least_is_above_its_most_is_refused():
    with pytest.raises(ValidationError, match="min 4s is above max 1s"):
        DURATIONS.build({"kind": "uniform", "min": "4s", "max": "1s"})
