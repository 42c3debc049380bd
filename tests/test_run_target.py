"""What a preflight is made from, against NumPy's own functions, which it does without."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.records import SCHEDULE
from loadgen.run import target
from loadgen.run.known_preflights import KnownPreflight
from loadgen.workload.prompts import PromptFit


@given(st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.0]), min_size=1, max_size=9))
def test_the_temperature_of_a_preflight_is_the_median(temperatures):
    schedule = np.zeros(len(temperatures), SCHEDULE)
    schedule["temperature"] = temperatures
    assert target._temperature(schedule) == round(float(np.median(schedule["temperature"])), 6)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=12))
def test_the_different_lengths_are_those_of_numpy(numbers):
    values = np.array(numbers + numbers[:3], np.uint64)
    found = target._distinct(values)
    assert found.dtype == values.dtype
    assert found.tobytes() == np.unique(values).tobytes()


@pytest.mark.parametrize(("at_s", "age_s"), [(990.0, 10.0), (1000.0, 0.0), (1001.0, math.inf)])
def test_a_preflight_with_a_time_in_the_future_is_infinitely_old(monkeypatch, at_s, age_s):
    monkeypatch.setattr("loadgen.run.known_preflights.time.time", lambda: 1000.0)
    known = KnownPreflight(at_s, {}, {}, PromptFit(0, 0.25, 0), (), ())
    assert known.age_s == age_s
