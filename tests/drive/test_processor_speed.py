"""How fast the processor ran, from the same work timed again and again."""

import pytest

from loadgen.drive.loop_probe import ProcessorSpeed


def seen(took_us, stalls=(), instants_s=None):
    """Looks every 10 ms where nothing else is said."""
    works = iter(took_us)
    speed = ProcessorSpeed(lambda: next(works) * 1e-6)
    for now_s in instants_s or [number * 0.01 for number in range(len(took_us))]:
        speed.sample(now_s)
    return speed.summary(stalls)


def test_looks_that_take_three_times_as_long_are_slow_time():
    told = seen([1.0] * 50 + [12.0, 10.0, 11.0, 3.1, 2.9] + [1.0] * 50)
    assert told["looks"] == 105
    assert told["usual_s"] == pytest.approx(1e-6)
    assert told["slow_s"] == pytest.approx(0.04)
    assert told["slow_speed"] == pytest.approx(1 / 10.5)


def test_an_even_speed_is_none():
    told = seen([1.0, 1.9, 1.1, 2.9])
    assert (told["slow_s"], told["slow_in_stalls_s"], told["slow_speed"]) == (0.0, 0.0, None)


@pytest.mark.parametrize(("took_us", "slow_s"), [([1, 1, 9, 1, 1], 0.02), ([1, 9, 9, 1, 1], 0.51)])
def test_of_a_long_gap_all_is_slow_where_both_its_ends_are(took_us, slow_s):
    told = seen(took_us, instants_s=[0.0, 0.01, 0.51, 0.52, 0.53])
    assert told["slow_s"] == pytest.approx(slow_s)


def test_slow_time_in_stalls_is_what_both_share():
    """Slow from 50 to 100 ms; stalled for 10 ms of it, and at other times."""
    took_us = [1.0] * 6 + [9.0] * 5 + [1.0] * 30
    stalls = [[0.0, 0.02, 0.1], [0.045, 0.055, 0.1], [0.095, 0.2, 0.1], [0.3, 0.31, 0.1]]
    told = seen(took_us, stalls=stalls)
    assert told["slow_s"] == pytest.approx(0.05)
    assert told["slow_in_stalls_s"] == pytest.approx(0.01)


def test_one_stall_may_hold_several_slow_phases():
    took_us = [1.0, 9.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0]
    assert seen(took_us, stalls=[[0.0, 1.0, 0.1]])["slow_in_stalls_s"] == pytest.approx(0.02)


def test_two_looks_say_nothing():
    assert seen([1.0, 9.0]) is None
    assert seen([]) is None


def test_the_work_is_timed_where_nothing_else_is_given():
    speed = ProcessorSpeed()
    for number in range(3):
        speed.sample(number * 0.01)
    told = speed.summary()
    assert told is not None
    assert 0 < told["usual_s"] < 1e-3
