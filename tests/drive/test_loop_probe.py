"""What the client sees of its own stalls and of bytes that wait in its sockets."""

import asyncio
import contextlib
import socket
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from loadgen.drive.client import Client
from loadgen.drive.loop_probe import MOST_SOCKETS, LoopProbe, ReceiveBacklog, unread_bytes
from loadgen.records import Status
from loadgen.system.timer import make_quiet_timer
from targets.dialer import Dialer
from targets.route import Route


class Alarm:
    """A timer whose alarms ring as late as the test says."""

    def __init__(self):
        self.at_s = self.due_s = 0.0
        self.callback: Any = None

    def now_s(self):
        return self.at_s

    def arm(self, at_s, callback):
        self.due_s, self.callback = at_s, callback

    def ring(self, late_s=0.0):
        self.at_s = max(self.at_s, self.due_s) + late_s
        self.callback()


def probed(lates_s, look=lambda: None):
    alarm = Alarm()
    probe = LoopProbe(alarm, look, uniform=lambda: 0.5)
    probe.start()
    for late_s in lates_s:
        alarm.ring(late_s)
    probe.stop()
    return probe.summary()


def test_lag_is_what_each_probe_was_late():
    told = probed([0.0, 0.001, 0.0, 0.002])[0]
    assert (told.n, told.max) == (4, pytest.approx(0.002))
    assert told.p50 == pytest.approx(0.0)


def test_one_long_stall_weighs_what_it_lasted():
    """Two seconds are 200 probes that did not come in time: half of them by a second and more."""
    told = probed([0.0, 2.0, 0.0])[0]
    assert told.n >= 200
    assert told.p50 > 0.5
    assert told.max == pytest.approx(2.0)


def test_a_stall_lasts_from_the_last_punctual_probe_to_the_next():
    told = probed([0.0, 0.0, 0.03, 0.0, 0.0])[1]
    assert told.over_s == 0.005
    ((from_s, until_s, lag_s),) = told.spans_s
    assert (from_s, lag_s) == (pytest.approx(0.02), pytest.approx(0.03))
    assert until_s == pytest.approx(0.06)  # due at 0.03, seen at 0.06, and at once on time again


def test_late_probes_in_a_row_are_one_stall_and_small_lags_none():
    told = probed([0.0, 0.02, 0.02, 0.008, 0.0, 0.004, 0.0])[1]
    assert len(told.spans_s) == 1
    assert told.spans_s[0][2] == pytest.approx(0.02)


def test_a_stall_that_is_not_over_ends_with_the_measuring():
    ((_, until_s, _),) = probed([0.0, 0.5])[1].spans_s
    assert until_s == pytest.approx(0.52)


@pytest.mark.parametrize("period_s", [0.005, 0.01, 0.015, 0.02])
@pytest.mark.parametrize("phase", [0.01, 0.2, 0.5, 0.9])
def test_a_server_in_lock_step_is_met_as_often_as_it_keeps_the_loop_busy(period_s, phase):
    """All tokens arrive together every `period_s`, and the loop needs 2 ms for them. At a random
    instant the loop is then busy for (2 ms − x) / period of the time for longer than x."""
    busy_s = 0.002
    alarm, n_met = Alarm(), 0
    probe = LoopProbe(alarm, uniform=Random(7).random)
    alarm.at_s = phase * period_s
    probe.start()
    for _ in range(4000):
        since_s = alarm.due_s % period_s
        late_s = busy_s - since_s if since_s < busy_s else 0.0
        n_met += late_s > 0
        alarm.ring(late_s)
    probe.stop()
    lag = probe.summary()[0]
    assert n_met / 4000 == pytest.approx(busy_s / period_s, rel=0.15)
    assert lag.p99 == pytest.approx(busy_s - 0.01 * period_s, rel=0.05)
    assert lag.p50 == 0


@given(st.lists(st.sampled_from([0.0, 0.001, 0.006, 0.05, 0.3]), max_size=60))
def test_stalls_are_apart_and_hold_every_late_probe(lates_s):
    alarm, seen = Alarm(), []
    probe = LoopProbe(alarm)
    probe.start()
    for late_s in lates_s:
        due_s = alarm.due_s
        alarm.ring(late_s)
        seen.append((due_s, alarm.at_s))
    probe.stop()
    spans = probe.summary()[1].spans_s
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    for due_s, at_s in seen:
        is_late = at_s - due_s > 0.005
        assert not is_late or any(a <= due_s + 1e-6 and at_s <= b + 1e-6 for a, b, _ in spans)


def test_a_probe_on_a_real_loop_sees_it_blocked():
    """Half a second of one callback; the probe is a reader of the loop like any socket."""

    async def blocked():
        over, timer = asyncio.Event(), make_quiet_timer(asyncio.get_running_loop())
        n_looks = [0]

        def look():
            n_looks[0] += 1
            if n_looks[0] == 3:
                block()
            elif n_looks[0] == 6:
                over.set()

        def block():
            until_s = timer.now_s() + 0.5
            while timer.now_s() < until_s:
                pass

        probe = LoopProbe(timer, look)
        timer.epoch_ns = 0
        probe.start()
        await over.wait()
        probe.stop()
        timer.close()
        return probe.summary()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        told = runner.run(blocked())
    longest = max(told[1].spans_s, key=lambda span: span[2])
    assert longest[2] > 0.4
    assert longest[1] - longest[0] > 0.4
    assert told[0].n > 40


# Bytes in the sockets


def test_unread_bytes_are_those_the_kernel_holds():
    one, other = socket.socketpair()
    with one, other:
        assert unread_bytes(one.fileno()) == 0
        other.sendall(b"x" * 5000)
        assert unread_bytes(one.fileno()) == 5000
        one.recv(4096)
        assert unread_bytes(one.fileno()) == 904
    assert unread_bytes(one.fileno()) == 0


def test_the_mean_wait_is_the_mean_number_waiting_over_the_reads_per_second():
    """Of 40 connections 4 can be looked at and 1 waits, every other time: 5 wait on average."""
    pairs = [socket.socketpair() for _ in range(4)]
    descriptors = [pair[0].fileno() for pair in pairs]
    backlog = ReceiveBacklog(lambda most: (40, descriptors))
    for turn in range(10):
        if turn % 2:
            pairs[2][1].sendall(b"data: x\n\n")
        backlog.sample()
        if turn % 2:
            pairs[2][0].recv(100)
    told = backlog.summary(n_reads=20_000, window_s=10.0)
    for pair in pairs:
        for end in pair:
            end.close()
    assert told is not None
    assert told.to_json() == {
        "looks": 40,
        "waiting": 5,
        "bytes_max": 9,
        "reads": 20_000,
        "wait_mean_s": pytest.approx(5 / 2000),
    }


def test_without_a_connection_in_flight_nothing_is_claimed():
    backlog = ReceiveBacklog(lambda most: (0, ()))
    backlog.sample()
    assert backlog.summary(n_reads=10, window_s=1.0) is None


def test_a_client_names_the_sockets_of_its_requests_in_turn():
    """Forty in flight, sixteen of them at a time: everyone has its turn, the idle have none."""

    async def scenario():
        begun, n_begun, tasks = asyncio.Event(), [0], list[Any]()

        async def hang(reader, writer):
            tasks.append(asyncio.current_task())
            with contextlib.suppress(EOFError):  # five connections are never asked anything
                await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n")
            n_begun[0] += 1
            if n_begun[0] == 40:
                begun.set()
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()

        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        loop, port = asyncio.get_running_loop(), server.sockets[0].getsockname()[1]
        client = Client(
            loop, Dialer(loop, Route("127.0.0.1", port)), looks_like_token=lambda body: False
        )
        assert client.in_flight(MOST_SOCKETS) == (0, [])
        await client.open(45)
        for row in range(40):
            client.send(row, b"POST / HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(begun.wait(), 10)
        seen = set()
        for _ in range(3):  # 40 over 16: every third of them
            n, descriptors = client.in_flight(MOST_SOCKETS)
            assert n == 40
            assert len(descriptors) <= MOST_SOCKETS
            seen |= set(descriptors)
        client.on_end = lambda exchange: None
        for row in range(40):
            client.abort(row, Status.cancelled, "over")
        await client.close()
        server.close()
        await asyncio.gather(*tasks)
        return len(seen)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(scenario()) == 40
