"""Requests in flight, and users that think, over the measured window."""

from dataclasses import replace

import numpy as np
import pytest

from loadgen.measure.attainment import MeasuredWindow
from loadgen.measure.in_flight import in_flight
from loadgen.records import CHUNKS, EDGES, Run, Status, empty_requests
from tests.runs import MANIFEST, changed, schedule_rows, traffic


def run_of(spans, is_closed_loop=True, unreleased=()):
    """Rows of (user, released, done); each waits for the row of its user before it."""
    spans = sorted([*spans, *((user, np.nan, np.nan) for user in unreleased)], key=lambda s: s[0])
    schedule = schedule_rows(np.full(len(spans), np.nan))
    users = np.array([user for user, _, _ in spans])
    schedule["session_id"] = users
    schedule["n_parents"] = np.r_[False, np.diff(users) == 0]
    rows = empty_requests(schedule)
    for k, (_, released_s, done_s) in enumerate(spans):
        rows["released_s"][k] = rows["sent_s"][k] = released_s
        rows["done_s"][k] = done_s
        rows["status"][k] = Status.not_released if np.isnan(released_s) else Status.ok
    manifest = changed(MANIFEST, classes={"default": traffic(is_closed_loop=is_closed_loop)})
    return Run(manifest, schedule, rows, np.empty(0, CHUNKS), np.empty(0, EDGES))


WINDOW = MeasuredWindow(10.0, 20.0)


def test_requests_in_flight_and_thinking_users_add_up_to_the_users():
    """User 0 is busy for 4 s of the window, user 1 for 7 s, and at most both at once."""
    run = run_of([(0, 8.0, 11.0), (0, 14.0, 17.0), (1, 9.0, 16.0), (1, 19.0, 25.0)])
    found = in_flight(run, WINDOW)
    assert found.mean == pytest.approx(1.1)
    assert found.thinking == pytest.approx(0.9)
    assert found.max == 2


def test_a_user_that_has_not_joined_does_not_think():
    run = run_of([(0, 8.0, 11.0), (0, 12.0, 30.0), (1, 15.0, 16.0), (1, 18.0, 25.0)])
    assert in_flight(run, WINDOW).thinking == pytest.approx(0.1 + 0.2)


def test_a_session_ends_with_its_last_answer():
    spans = [(0, 8.0, 11.0), (0, 14.0, 17.0)]
    assert in_flight(run_of(spans, is_closed_loop=False), WINDOW).thinking == pytest.approx(0.3)
    unfinished = run_of(spans, is_closed_loop=False, unreleased=(0,))
    assert in_flight(unfinished, WINDOW).thinking == pytest.approx(0.6)


def test_a_user_with_several_requests_at_once_is_busy_once():
    run = run_of([(0, 8.0, 13.0), (0, 9.0, 12.0), (0, 12.5, 15.0)])
    found = in_flight(run, WINDOW)
    assert found.mean == pytest.approx(0.75)
    assert found.thinking == pytest.approx(0.5)
    assert found.max == 2


def test_an_answer_and_the_next_request_are_not_in_flight_at_once():
    assert in_flight(run_of([(0, 8.0, 12.0), (0, 12.0, 25.0)]), WINDOW).max == 1


def test_requests_that_wait_for_none_have_no_thinking_users():
    run = run_of([(0, 12.0, 14.0), (1, 13.0, 16.0)], is_closed_loop=False)
    found = in_flight(run, WINDOW)
    assert found.mean == pytest.approx(0.5)
    assert (found.max, found.thinking) == (2, None)


def test_a_request_that_never_ended_stays_in_flight():
    run = run_of([(0, 8.0, 11.0), (0, 12.0, np.nan)])
    assert in_flight(run, WINDOW).mean == pytest.approx(0.9)
    assert in_flight(run, WINDOW).thinking == pytest.approx(0.1)


def test_an_empty_window_has_no_mean():
    found = in_flight(replace(run_of([(0, 8.0, 11.0)])), MeasuredWindow(5.0, 5.0))
    assert np.isnan(found.mean)
