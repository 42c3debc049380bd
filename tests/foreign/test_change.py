"""The number of requests that show a change."""

import numpy as np
import pytest

from loadgen.foreign.change import requests_needed, shown_change
from tests.runs import measured_run


def test_independent_values_need_what_the_t_test_needs():
    values = np.random.default_rng(5).normal(100.0, 34.0, 20_000)
    # R: power.t.test(delta=0.1, sd=0.34, power=0.9) has n = 243.9; the normal quantiles give 243
    assert requests_needed(values, 0.1) == pytest.approx(243, rel=0.05)
    assert requests_needed(values, 0.2) == pytest.approx(61, rel=0.05)


def test_two_runs_of_the_needed_size_find_the_change_nine_times_in_ten():
    rng = np.random.default_rng(11)
    n = requests_needed(rng.normal(100.0, 34.0, 20_000), 0.1)
    assert n is not None
    a = rng.normal(100.0, 34.0, (4000, n))
    b = rng.normal(110.0, 34.0, (4000, n))
    errors = np.sqrt((a.var(axis=1, ddof=1) + b.var(axis=1, ddof=1)) / n)
    found = (b.mean(axis=1) - a.mean(axis=1)) / errors > 1.96
    assert found.mean() == pytest.approx(0.9, abs=0.02)


def test_neighbours_that_resemble_each_other_need_more():
    rng = np.random.default_rng(3)
    noise, memory = rng.normal(0.0, 1.0, 5000), np.empty(5000)
    memory[0] = noise[0]
    for k in range(1, 5000):  # an AR(1) of 0.8: τ = (1 + 0.8) / (1 − 0.8) = 9
        memory[k] = 0.8 * memory[k - 1] + 0.6 * noise[k]
    plain, dependent = (requests_needed(100 + 20 * each, 0.1) for each in (noise, memory))
    assert plain is not None
    assert dependent == pytest.approx(9 * plain, rel=0.3)


def test_too_few_values_need_no_known_number():
    assert requests_needed(np.array([1.0, 2.0]), 0.1) is None
    assert requests_needed(np.zeros(10), 0.1) is None


def test_the_sentence_has_n_and_the_number_needed():
    run = measured_run(n_requests=40)  # the last 20 are due
    found = shown_change(run, 0.01)
    assert found.n == 20
    assert found.text.startswith("n = 20 cannot show a 1 % change of the mean TTFT; you need ")
    assert shown_change(run, 2.0).text == (
        "n = 20 can show a 200 % change of the mean TTFT; that needs 3"
    )
