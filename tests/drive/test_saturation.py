"""The stop rule for overrun servers: quiet on stable queues, quick on overrun ones.

Queues are simulated, M/M/c with known load; the oracle is queueing theory, not the rule.
"""

import heapq

import numpy as np
import pytest

from loadgen.run.stop_rules import Saturation

RATE = 10.0


def queue(load, servers, seed, minutes, service="exponential"):
    """(arrival, start, end) of every request of an M/M/c queue with load λ/(cμ), seconds."""
    rng, until_s = np.random.default_rng(seed), 60.0 * minutes
    arrived_s = np.cumsum(rng.exponential(1 / RATE, int(RATE * until_s * 1.2) + 50))
    arrived_s = arrived_s[arrived_s < until_s]
    mean_s = load * servers / RATE
    needed_s = rng.exponential(mean_s, len(arrived_s))
    free_s, began_s = [0.0] * servers, np.empty(len(arrived_s))
    for row, at_s in enumerate(arrived_s.tolist()):
        began_s[row] = max(at_s, heapq.heappop(free_s))
        heapq.heappush(free_s, began_s[row] + needed_s[row])
    return arrived_s, began_s, began_s + needed_s


def stopped_at(rule, arrived_s, began_s, ended_s, beat_s=1.0):
    """When the rule stops the run and what it says; the first token comes 50 ms after a start."""
    order = np.argsort(ended_s)
    done_s, ttft_s = ended_s[order], (began_s - arrived_s + 0.05)[order]
    took_s = (ended_s - arrived_s)[order]
    seen = 0
    for now_s in np.arange(beat_s, arrived_s[-1], beat_s).tolist():
        n_released = int(np.searchsorted(arrived_s, now_s))
        n_ended = int(np.searchsorted(done_s, now_s))
        news = slice(seen, n_ended)
        why = rule.reason(now_s, n_released, n_ended, ttft_s[news].tolist(), took_s[news].tolist())
        if why is not None:
            return now_s, why
        seen = n_ended
    return None


@pytest.mark.parametrize(("load", "servers"), [(0.8, 8), (0.9, 8), (0.9, 1), (0.95, 8)])
def test_a_stable_queue_is_left_alone(load, servers):
    """12 runs of 10 minutes each; none was stopped in 40 longer ones when the rule was made."""
    for seed in range(12):
        found = stopped_at(Saturation(20.0), *queue(load, servers, seed, minutes=10))
        assert found is None, (seed, found)


@pytest.mark.parametrize(
    ("load", "servers", "median_s", "latest_s"),
    [(4.0, 8, 21, 25), (2.0, 8, 21, 45), (1.5, 8, 45, 90), (1.25, 8, 120, 200)],
)
def test_an_overrun_queue_is_noticed(load, servers, median_s, latest_s):
    found = [
        stopped_at(Saturation(20.0), *queue(load, servers, seed, minutes=6)) for seed in range(9)
    ]
    stops_s = [400.0 if f is None else f[0] for f in found]
    assert min(stops_s) >= 20.0
    assert np.median(stops_s) <= median_s
    assert max(stops_s) <= latest_s


def test_it_says_what_piled_up():
    found = stopped_at(Saturation(20.0), *queue(3.0, 8, 1, minutes=2))
    assert found is not None
    assert found[1].endswith("(stop_when.saturated 20 s)")
    assert "are unfinished" in found[1]
    assert "median TTFT" in found[1]


def test_an_empty_system_that_fills_up_is_no_overload():
    """Unlimited servers and answers of 30 s on average: what is in flight grows to 300 in the
    first minute, and every request is served at once."""
    for seed in range(6):
        found = stopped_at(Saturation(20.0), *queue(0.01, 30_000, seed, minutes=8))
        assert found is None, (seed, found)


def test_dropping_a_third_is_noticed_although_ttft_stays():
    """As with `when_full: drop` at the cap: no queue shows in TTFT, yet a third never ends."""
    rule, why, now_s = Saturation(20.0), None, 0.0
    while why is None and now_s < 300:
        now_s += 1.0
        n_ended = int(max(0.0, now_s - 2.0) * RATE * 2 / 3)
        why = rule.reason(now_s, int(now_s * RATE), n_ended, [0.05] * 6, [2.0] * 6)
    assert 22.0 <= now_s <= 50.0


def test_a_burst_that_is_worked_off_is_no_overload():
    """200 requests at once, of which 10/s are served: 20 s of queue, growing at no time."""
    rule = Saturation(20.0)
    for now_s in range(1, 120):
        served = min(10 * now_s, 200)
        assert rule.reason(now_s, 200, served, [now_s * 1.0] * 10, [now_s * 1.0] * 10) is None
