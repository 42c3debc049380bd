"""Waits predicted from departures."""

from __future__ import annotations

import pytest

from reference_engine.metrics.metrics import DepartureRate


def test_a_steady_rate_gives_the_wait():
    departures = DepartureRate()
    for i in range(1, 2001):
        departures.add(i * 0.1)
    assert departures.wait_s(40, 200.0) == pytest.approx(4.0, rel=0.01)


def test_a_few_departures_are_not_taken_for_a_long_history():
    departures = DepartureRate()
    for i in range(6):
        departures.add(100.0 + i)
    assert departures.wait_s(10, 105.0) == pytest.approx(10.0, rel=0.1)


def test_without_history_nothing_is_said():
    departures = DepartureRate()
    assert departures.wait_s(3, 1.0) is None
    departures.add(1.0)
    assert departures.wait_s(3, 2.0) is None
