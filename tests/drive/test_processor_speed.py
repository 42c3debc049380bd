"""How fast the processor ran, from the same work timed again and again."""

import pytest

from loadgen.drive.processor_speed import ProcessorSpeed


def seen(took_us, every_s=0.01):
    works = iter(took_us)
    speed = ProcessorSpeed(lambda: next(works) * 1e-6)
    for number in range(len(took_us)):
        speed.look(number * every_s)
    return speed.summary()


def test_looks_that_take_three_times_as_long_are_slow_time():
    told = seen([1.0] * 50 + [12.0, 10.0, 11.0, 3.1, 2.9] + [1.0] * 50)
    assert told["looks"] == 105
    assert told["usual_s"] == pytest.approx(1e-6)
    assert told["slow_s"] == pytest.approx(0.04)
    assert told["slow_speed"] == pytest.approx(1 / 10.5)


def test_an_even_speed_is_none():
    told = seen([1.0, 1.9, 1.1, 2.9])
    assert (told["slow_s"], told["slow_speed"]) == (0.0, None)


def test_a_slow_look_after_a_stall_stands_for_all_of_it():
    works = iter([1e-6, 1e-6, 9e-6, 1e-6])
    speed = ProcessorSpeed(lambda: next(works))
    for now_s in (0.0, 0.01, 0.51, 0.52):
        speed.look(now_s)
    told = speed.summary()
    assert told is not None
    assert told["slow_s"] == pytest.approx(0.5)


def test_one_look_says_nothing():
    assert seen([1.0]) is None
    assert seen([]) is None


def test_the_work_is_timed_where_nothing_else_is_given():
    speed = ProcessorSpeed()
    speed.look(0.0)
    speed.look(0.01)
    told = speed.summary()
    assert told is not None
    assert 0 < told["usual_s"] < 1e-3
