import heapq
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.drive.dispatch import Bounds, Dispatcher
from loadgen.records import EDGES, ON_PURPOSE, SCHEDULE, Status
from loadgen.system.clock import VirtualClock


class World:
    """A timer, a server and a notebook in virtual time: each request takes `service_s[row]`."""

    def __init__(
        self, scheduled_s, service_s, *, edges=(), think_s=0.0, status=None, goes_on=(),
        cancel_after_s=0.0, **bounds
    ):  # fmt: skip
        n = len(scheduled_s)
        self.clock, self.queue, self.late_s = VirtualClock(), [], 0.0
        self.alarm: Any = None  # (instant, callback)
        self.service_s, self.status = service_s, status or {}
        self.releases, self.sent, self.outcome, self.n_finished = {}, {}, {}, 0
        schedule = np.zeros(n, SCHEDULE)
        schedule["request_id"] = np.arange(n)
        schedule["scheduled_s"] = scheduled_s
        schedule["think_s"] = think_s
        schedule["after_failure"][list(goes_on)] = True
        schedule["cancel_after_s"] = cancel_after_s
        with_delays = [(*edge, 0.0)[:3] for edge in edges]
        links = np.array(with_delays, EDGES) if edges else np.empty(0, EDGES)
        for child in links["request_id"]:
            schedule["n_parents"][child] += 1
        limits: dict[str, Any] = {
            "timeout_s": 10.0,
            "max_concurrency": 1000,
            "when_full": "drop",
            "horizon_s": 100.0,
            "drain_s": 30.0,
        } | bounds
        self.dispatcher = Dispatcher(
            schedule,
            links,
            sender=self,
            recorder=self,
            timer=self,
            bounds=Bounds(**limits),
            on_finished=self.finished,
        )

    def finished(self):
        self.n_finished += 1

    def now_s(self):
        return self.clock.now_s()

    def arm(self, at_s, callback):
        self.alarm = (at_s, callback)

    def send(self, row):
        self.sent[row] = self.now_s() + self.late_s
        heapq.heappush(self.queue, (self.now_s() + self.service_s[row], row))

    def sent_s(self, row):
        return self.sent[row]

    def abort(self, row, outcome, reason):
        self.queue = [item for item in self.queue if item[1] != row]
        heapq.heapify(self.queue)
        self.end(row, outcome, reason)

    def released(self, row, release_s):
        assert row not in self.releases, "released twice"
        self.releases[row] = release_s

    def unsent(self, row, status, reason):
        assert row not in self.outcome
        self.outcome[row] = (status, reason, self.now_s())

    def end(self, row, status, reason=""):
        assert row not in self.outcome, "ended twice"
        self.outcome[row] = (status, reason, self.now_s())
        self.dispatcher.ended(row, status, self.now_s())

    def run(self, until_s=1000.0):
        self.dispatcher.start()
        self.resume(until_s)
        return self

    def resume(self, until_s=1000.0):
        while not self.n_finished:
            alarm_s = self.alarm[0] if self.alarm else np.inf
            end_s = self.queue[0][0] if self.queue else np.inf
            if min(alarm_s, end_s) > until_s:
                self.clock.advance_to(max(until_s, self.now_s()))
                return
            if end_s <= alarm_s:
                self.clock.advance_to(max(end_s, self.now_s()))
                row = heapq.heappop(self.queue)[1]
                self.end(row, self.status.get(row, Status.ok))
            else:
                self.clock.advance_to(max(alarm_s, self.now_s()))
                callback, self.alarm = self.alarm[1], None
                callback()

    def statuses(self):
        return [self.outcome[row][0] for row in sorted(self.outcome)]


def test_rows_go_out_at_their_absolute_instants():
    world = World([0.5, 1.0, 1.0, 7.25], [2.0] * 4).run()
    assert world.sent == {0: 0.5, 1: 1.0, 2: 1.0, 3: 7.25}
    assert world.statuses() == [Status.ok] * 4
    assert world.n_finished == 1


def test_dropped_requests_are_counted_not_delayed():
    world = World([0.0, 0.1, 0.2, 5.0], [1.0] * 4, max_concurrency=1).run()
    assert world.statuses() == [Status.ok, Status.dropped, Status.dropped, Status.ok]
    assert world.sent == {0: 0.0, 3: 5.0}
    assert "max_concurrency" in world.outcome[1][1]


def test_a_row_is_cancelled_so_long_after_it_was_sent_unless_it_has_ended():
    world = World([0.0, 0.0, 1.0], [5.0, 1.0, 5.0], cancel_after_s=[2.0, 3.0, 0.0]).run()
    assert world.outcome[0] == (Status.cancelled, ON_PURPOSE, 2.0)
    assert world.statuses() == [Status.cancelled, Status.ok, Status.ok]


def test_a_cancel_counts_from_the_sending_of_a_row_that_waited():
    world = World(
        [0.0, 0.5], [4.0, 9.0], cancel_after_s=[0.0, 2.0], max_concurrency=1, when_full="wait"
    ).run()
    assert world.sent[1] == 4.0
    assert world.outcome[1] == (Status.cancelled, ON_PURPOSE, 6.0)


def test_a_cancel_counts_from_the_instant_at_which_a_late_client_really_sent():
    """Stopped for 0.3 s between being asked to send and sending."""
    world = World([0.0, 4.0], [9.0, 2.1], cancel_after_s=2.0)
    world.late_s = 0.25
    world.run()
    assert world.outcome[0] == (Status.cancelled, ON_PURPOSE, 2.25)
    assert world.outcome[1][0] is Status.ok


def test_a_cancel_frees_its_slot_and_ends_the_conversation():
    nan = float("nan")
    world = World(
        [0.0, nan, 0.1], [5.0, 1.0, 1.0], edges=[(1, 0)], cancel_after_s=[2.0, 0.0, 0.0],
        max_concurrency=1, when_full="wait",
    ).run()  # fmt: skip
    assert world.sent == {0: 0.0, 2: 2.0}
    assert world.outcome[1][:2] == (
        Status.not_released, "its parent, request 0, ended with cancelled",
    )  # fmt: skip


def test_a_timeout_that_comes_first_is_a_timeout():
    world = World([0.0], [60.0], cancel_after_s=20.0, timeout_s=10.0).run()
    assert world.statuses() == [Status.timeout]


def test_waiting_rows_keep_their_release_instant():
    world = World([0.0, 0.1, 0.2], [1.0] * 3, max_concurrency=1, when_full="wait").run()
    assert world.releases == {0: 0.0, 1: 0.1, 2: 0.2}
    assert world.sent == {0: 0.0, 1: 1.0, 2: 2.0}


def test_the_timeout_counts_from_the_release_even_while_waiting():
    world = World([0.0, 0.5], [60.0, 1.0], max_concurrency=1, when_full="wait", timeout_s=3.0).run()
    assert world.outcome[0][::2] == (Status.timeout, 3.0)
    assert world.sent[1] == 3.0
    world = World([0.0, 0.5], [3.4, 1.0], max_concurrency=1, when_full="wait", timeout_s=3.5)
    world.service_s[0] = 60.0
    assert world.run().outcome[0][2] == 3.5


def test_a_waiting_row_that_gets_a_slot_late_has_the_rest_of_its_time():
    """It was released at 0.5, so its 9.5 s end at 10."""
    world = World([0.0, 0.5], [9.0, 1.0], max_concurrency=1, when_full="wait", timeout_s=9.5).run()
    assert world.sent == {0: 0.0, 1: 9.0}
    assert world.outcome[1][::2] == (Status.ok, 10.0)
    world = World([0.0, 0.5], [9.4, 1.0], max_concurrency=1, when_full="wait", timeout_s=9.5).run()
    assert world.sent == {0: 0.0, 1: 9.4}
    assert world.outcome[1][::2] == (Status.timeout, 10.0)


def test_a_slot_that_gets_free_at_the_end_of_a_rows_time_is_too_late():
    world = World([0.0, 0.0], [9.5, 1.0], max_concurrency=1, when_full="wait", timeout_s=9.5).run()
    assert world.statuses() == [Status.ok, Status.timeout]
    assert world.sent == {0: 0.0}
    assert "no free slot" in world.outcome[1][1]


def test_a_waiting_row_that_never_gets_a_slot_times_out():
    world = World([0.0, 0.0, 1.0], [9.9, 9.9, 1.0], max_concurrency=1, when_full="wait").run()
    assert world.outcome[1][::2] == (Status.timeout, 10.0)
    assert world.outcome[2][0] is Status.ok


def test_rows_that_time_out_together_are_not_handed_each_others_slot():
    world = World(
        [0.0, 0.0, 0.0, 3.0], [60.0, 60.0, 60.0, 1.0], max_concurrency=1, when_full="wait",
        timeout_s=2.0,
    ).run()  # fmt: skip
    assert world.statuses() == [Status.timeout, Status.timeout, Status.timeout, Status.ok]
    assert set(world.sent) == {0, 3}
    assert "no free slot" in world.outcome[2][1]


def test_a_child_is_released_after_its_last_parent_and_its_think_time():
    nan = float("nan")
    world = World(
        [0.0, 0.0, nan], [1.0, 4.0, 1.0], edges=[(2, 0), (2, 1)], think_s=[0, 0, 2.5]
    ).run()
    assert world.releases[2] == 6.5
    assert world.statuses() == [Status.ok] * 3


def test_the_delay_of_an_edge_counts_from_the_end_of_its_parent():
    """Row 2 waits 0.5 s after row 0 (ends at 5 s) and 6 s after row 1 (ends at 1 s), then 0.25 s
    of its own; row 3 waits for row 2 alone."""
    world = World(
        [0.0, 0.0, np.nan, np.nan], [5.0, 1.0, 1.0, 1.0],
        edges=[(2, 0, 0.5), (2, 1, 6.0), (3, 2)], think_s=[0, 0, 0.25, 0],
    ).run()  # fmt: skip
    assert world.releases == {0: 0.0, 1: 0.0, 2: 7.25, 3: 8.25}


def test_a_user_goes_on_a_delay_after_a_failure():
    world = World(
        [0.0, np.nan], [2.0, 1.0], edges=[(1, 0, 1.5)], goes_on=[1], status={0: Status.timeout}
    ).run()
    assert world.releases[1] == 3.5


def test_a_failed_parent_leaves_its_descendants_unreleased_with_the_cause():
    nan = float("nan")
    world = World(
        [0.0, nan, nan], [1.0] * 3, edges=[(1, 0), (2, 1)], status={0: Status.http_error}
    ).run()
    assert world.statuses() == [Status.http_error, Status.not_released, Status.not_released]
    assert "request 0" in world.outcome[1][1]
    assert "request 1" in world.outcome[2][1]


def test_a_follow_up_due_exactly_at_the_end_of_the_window_is_not_released():
    """Both parents end at 4.0 s: a follow-up may be released before 5.0 s, not at it."""
    nan = float("nan")
    world = World(
        [0.0, 0.0, nan, nan],
        [4.0, 4.0, 0.5, 0.5],
        edges=[(2, 0), (3, 1)],
        think_s=[0.0, 0.0, 0.875, 1.0],
        horizon_s=5.0,
    ).run()
    assert world.releases == {0: 0.0, 1: 0.0, 2: 4.875}
    assert world.statuses() == [Status.ok, Status.ok, Status.ok, Status.not_released]


def test_nothing_hangs_past_the_drain():
    world = World([1.0, 2.0], [500.0, 1.0], horizon_s=5.0, drain_s=3.0, timeout_s=400.0).run()
    assert world.outcome[0][::2] == (Status.cancelled, 8.0)
    assert world.n_finished == 1


def test_stopping_releases_nothing_more_and_drains_what_is_in_flight():
    world = World([1.0, 2.0, 50.0], [1.0, 8.0, 1.0], timeout_s=60.0)
    world.run(until_s=2.5)
    world.dispatcher.stop("interrupted", drain_s=4.0)
    world.resume()
    assert world.statuses() == [Status.ok, Status.cancelled, Status.not_released]
    assert world.outcome[1][2] == 6.5
    assert world.outcome[2][1] == "interrupted"


def test_stopping_sends_nobody_who_waits_for_a_slot():
    world = World([1.0] * 3, [3.0] * 3, max_concurrency=1, when_full="wait", timeout_s=60.0)
    world.run(until_s=2.0)
    world.dispatcher.stop("the interrupt", drain_s=10.0)
    world.resume()
    assert world.statuses() == [Status.ok, Status.cancelled, Status.cancelled]
    assert set(world.sent) == {0}
    assert world.outcome[2][1:] == ("no free slot before the interrupt", 2.0)


def test_a_second_stop_shortens_the_drain():
    world = World([1.0], [50.0], timeout_s=60.0)
    world.run(until_s=2.0)
    world.dispatcher.stop("interrupted", drain_s=20.0)
    world.dispatcher.stop("interrupted again", drain_s=0.0)
    world.resume()
    assert world.outcome[0][0] is Status.cancelled
    assert world.n_finished == 1


@st.composite
def worlds(draw):
    n = draw(st.integers(1, 25))
    instants = st.floats(0, 20, allow_nan=False).map(lambda s: round(s, 3))
    scheduled = [draw(instants) for _ in range(n)]
    edges = []
    for child in range(1, n):
        parents = draw(st.sets(st.integers(0, child - 1), max_size=2))
        if parents and draw(st.booleans()):
            edges += [(child, parent) for parent in sorted(parents)]
            scheduled[child] = float("nan")
    return World(
        scheduled,
        [draw(st.floats(0.01, 30)) for _ in range(n)],
        edges=edges,
        think_s=draw(st.floats(0, 5)),
        status=dict.fromkeys(draw(st.sets(st.integers(0, n - 1), max_size=3)), Status.stream_error),
        max_concurrency=draw(st.integers(1, 6)),
        when_full=draw(st.sampled_from(["drop", "wait"])),
        horizon_s=20.0,
        drain_s=draw(st.floats(0, 10)),
        timeout_s=draw(st.floats(0.5, 20)),
    )


@given(worlds(), st.floats(0, 40) | st.none())
def test_every_row_is_accounted_for_exactly_once(world, stop_at_s):
    n = len(world.service_s)
    if stop_at_s is None:
        world.run()
    else:
        world.run(until_s=stop_at_s)
        if not world.n_finished:
            world.dispatcher.stop("stopped", drain_s=1.0)
        world.resume()
    assert sorted(world.outcome) == list(range(n))
    assert world.n_finished == 1
    assert set(world.sent) <= set(world.releases)
    for row, (status, _, _) in world.outcome.items():
        assert (status in (Status.not_released,)) <= (row not in world.releases)
    assert world.clock.now_s() <= 20.0 + 10.0 + 1e-6


def test_a_row_is_never_sent_before_its_release():
    rng = np.random.default_rng(5)
    scheduled = np.sort(rng.uniform(0, 20, 200)).tolist()
    world = World(scheduled, rng.exponential(1.0, 200).tolist()).run()
    assert all(world.sent[row] == pytest.approx(scheduled[row], abs=1e-12) for row in world.sent)


def test_a_user_goes_on_after_a_failure():
    world = World(
        [0.0, np.nan, np.nan],
        [1.0] * 3,
        edges=[(1, 0), (2, 1)],
        think_s=0.5,
        status={0: Status.http_error},
        goes_on=[1, 2],
    ).run()
    assert world.statuses() == [Status.http_error, Status.ok, Status.ok]
    assert world.releases == {0: 0.0, 1: 1.5, 2: 3.0}


def test_a_user_goes_on_after_a_chain_that_broke():
    """0 fails, so 1 never leaves; 2 begins again from the instant at which that was clear."""
    world = World(
        [0.0, np.nan, np.nan],
        [1.0] * 3,
        edges=[(1, 0), (2, 1)],
        think_s=0.5,
        status={0: Status.stream_error},
        goes_on=[2],
    ).run()
    assert world.statuses() == [Status.stream_error, Status.not_released, Status.ok]
    assert world.releases == {0: 0.0, 2: 1.5}


def test_a_user_goes_on_after_a_dropped_request():
    world = World(
        [0.0, 0.2, np.nan],
        [1.0] * 3,
        edges=[(2, 1)],
        think_s=[0, 0, 2.0],
        goes_on=[2],
        max_concurrency=1,
    ).run()
    assert world.statuses() == [Status.ok, Status.dropped, Status.ok]
    assert world.releases[2] == pytest.approx(2.2)


def test_a_user_does_not_go_on_after_the_window():
    """1 would leave after the window, so what follows it must not leave inside of it."""
    world = World(
        [0.0, np.nan, np.nan],
        [1.0] * 3,
        edges=[(1, 0), (2, 1)],
        think_s=[0.0, 50.0, 1.0],
        goes_on=[2],
        horizon_s=10.0,
    ).run()
    assert world.statuses() == [Status.ok, Status.not_released, Status.not_released]


def test_a_user_with_thousands_of_rows_to_go_is_accounted_for_when_the_window_ends():
    n = 5000
    world = World(
        [0.0] + [np.nan] * (n - 1),
        [1.0] * n,
        edges=[(k + 1, k) for k in range(n - 1)],
        horizon_s=3.5,
    ).run()
    assert sorted(world.sent) == [0, 1, 2, 3]
    assert world.statuses()[4:] == [Status.not_released] * (n - 4)
    assert world.n_finished == 1


def test_releasing_ends_with_the_last_counted_request():
    world = World(
        [0.0, 1.0, 2.0, 3.0, 4.0], [5.0] * 5, warmup_s=1.0, n_measured=2, drain_s=30.0
    ).run()
    assert world.releases == {0: 0.0, 1: 1.0, 2: 2.0}  # the warm-up does not count
    assert world.statuses() == [Status.ok] * 3 + [Status.not_released] * 2
    assert world.outcome[3][1] == "the run's 2 measured requests were sent before"
    assert world.n_finished == 1
    assert world.now_s() == 7.0  # no drain after the last answer


def test_a_user_who_is_answered_after_the_last_counted_request_sends_no_more():
    edges = [(1, 0), (2, 1), (3, 2)]
    world = World([0.0, *[np.nan] * 3], [1.0] * 4, edges=edges, n_measured=2).run()
    assert world.releases == {0: 0.0, 1: 1.0}
    assert world.statuses() == [*[Status.ok] * 2, *[Status.not_released] * 2]


def test_a_counted_request_that_waits_for_a_slot_is_still_sent():
    world = World(
        [0.0, 0.1, 0.2], [2.0] * 3, n_measured=2, max_concurrency=1, when_full="wait"
    ).run()
    assert world.sent == {0: 0.0, 1: 2.0}
    assert world.statuses() == [Status.ok, Status.ok, Status.not_released]


def waiting_world():
    world = World([0.0, 0.1, 0.2], [2.0] * 3, max_concurrency=1, when_full="wait")
    world.dispatcher.start()
    world.resume(until_s=0.15)
    return world


def test_when_other_workers_complete_the_number_the_released_rows_are_still_sent():
    world = waiting_world()
    world.dispatcher.stop("60 requests were released", 30.0, sends_waiting=True)
    world.resume()
    assert world.sent == {0: 0.0, 1: 2.0}
    assert world.statuses() == [Status.ok, Status.ok, Status.not_released]


def test_an_interrupt_after_the_end_of_the_window_sends_no_waiting_row():
    world = waiting_world()
    world.dispatcher.stop("60 requests were released", 30.0, sends_waiting=True)
    world.dispatcher.stop("Ctrl-C", 10.0)
    world.resume()
    assert world.sent == {0: 0.0}
    assert world.outcome[1][:2] == (Status.cancelled, "no free slot before Ctrl-C")


def test_the_drain_begins_with_the_last_counted_request():
    world = World([0.0, 1.0, 2.0], [1.0, 50.0, 1.0], n_measured=2, timeout_s=90.0).run()
    assert world.outcome[1] == (
        Status.cancelled,
        "still running when the drain after the run's end ended",
        31.0,
    )
