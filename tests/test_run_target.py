"""What a preflight is made from, against NumPy's own functions, which it does without."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loadgen.records import SCHEDULE
from loadgen.run import target


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
