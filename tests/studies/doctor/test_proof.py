"""Proofs: each rate for which there is time, and the highest rate below the first failure."""

import pytest

from loadgen.studies.doctor.rates import prove, proven_rate
from tests.studies.doctor.test_rates import trial

RATES = (20.0, 100.0, 400.0)


class Machine:
    """Answers trials as scripted, (rate: errors in order), and has time for so many."""

    def __init__(self, errors_s, n_trials=99):
        self.errors_s, self.n_left, self.asked = errors_s, n_trials, []

    def measure(self, rate_per_s):
        self.asked.append(rate_per_s)
        self.n_left -= 1
        return trial(rate_per_s, self.errors_s[rate_per_s].pop(0))

    def prove(self):
        return prove(RATES, self.measure, lambda: self.n_left > 0)


def test_where_all_hold_each_rate_is_tried_once():
    machine = Machine({rate: [0.0] for rate in RATES})
    assert [t.holds for t in machine.prove()] == [True] * 3
    assert machine.asked == [20, 100, 400]


def test_a_rate_that_fails_does_not_end_the_proof_and_is_tried_again():
    machine = Machine({20.0: [1.0, 0.0], 100.0: [0.0], 400.0: [1.0, 1.0]})
    found = machine.prove()
    assert machine.asked == [20, 100, 400, 20, 400]
    assert [(t.rate_per_s, t.holds) for t in found] == [(20, True), (100, True), (400, False)]


@pytest.mark.parametrize(("n", "asked"), [(0, [20]), (1, [20]), (2, [20, 100]),
                                          (4, [20, 100, 400, 20])])  # fmt: skip
def test_without_time_it_stops_but_for_the_lowest_rate(n, asked):
    machine = Machine({rate: [1.0, 1.0] for rate in RATES}, n)
    machine.prove()
    assert machine.asked == asked


@pytest.mark.parametrize(
    ("tried", "proven"),
    [
        ([(20, True), (100, True), (400, True)], 400),
        ([(20, True), (100, False), (400, True)], 20),
        ([(20, False), (100, True)], None),
        ([], None),
    ],
)
def test_the_proven_rate_is_below_the_first_rate_that_fails(tried, proven):
    assert proven_rate(tried) == proven
