"""Overload is told from noise and from a start-up transient."""

import numpy as np
import pytest

from loadgen.measure.attainment import due_rows, measured_window
from loadgen.measure.load import load_through, mean_in_flight
from loadgen.measure.per_request import per_request
from loadgen.records import Run
from tests.runs import measured_run, with_manifest


def queue_run(load: float, seed: int, window_s: float = 120.0, warmup_s: float = 10.0) -> Run:
    """One server, exponential service of mean 0.1 s, Poisson arrivals at `load` of its capacity."""
    rng = np.random.default_rng(seed)
    n = int(10.0 * load * (window_s + warmup_s))
    run = measured_run(n, manifest={"window": {"warmup_s": warmup_s, "measure_s": window_s}})
    arrival_s = np.cumsum(rng.exponential(0.1 / load, n))
    service_s = rng.exponential(0.1, n)
    end_s = np.empty(n)
    free_s = 0.0
    for k in range(n):
        end_s[k] = free_s = max(free_s, arrival_s[k]) + service_s[k]
    run.schedule_rows["scheduled_s"] = run.request_rows["released_s"] = arrival_s
    run.schedule_rows["phase"] = arrival_s >= warmup_s
    run.request_rows["sent_s"] = arrival_s
    run.request_rows["first_token_s"] = end_s - service_s + 0.01
    run.request_rows["done_s"] = end_s
    return run


def is_growing(run: Run) -> bool:
    load = load_through(run, per_request(run), due_rows(run), measured_window(run))
    return load is not None and load.is_growing


def test_a_queue_above_capacity_is_found_and_one_below_seldom_suspected() -> None:
    """At 70 % load false alarms stay below 2 of 60 seeds; at 130 % all of 20 are found."""
    assert sum(is_growing(queue_run(0.7, seed)) for seed in range(60)) <= 2
    assert all(is_growing(queue_run(1.3, seed)) for seed in range(20))


def test_filling_up_without_getting_slower_is_not_overload() -> None:
    """Answers as long as the window: more and more are in flight, none waits longer."""
    run = measured_run()
    run.request_rows["done_s"] += 30.0
    window = measured_window(run)
    load = load_through(run, per_request(run), due_rows(run), window)
    assert load is not None
    assert load.in_flight[3] > load.in_flight[0] + 100
    assert not load.is_growing


def test_too_few_requests_say_nothing() -> None:
    assert not is_growing(measured_run(50))


def test_in_flight_is_the_time_between_release_and_end_shared_over_each_bin() -> None:
    """0 to 1.5 s, 1 s to never, 2 to 2.5 s."""
    run = measured_run(3)
    run.request_rows["released_s"], run.request_rows["done_s"] = [0.0, 1.0, 2.0], [1.5, np.nan, 2.5]
    means = mean_in_flight(run, np.array([-1.0, 0.0, 1.0, 2.0, 4.0, 8.0]))
    assert means == pytest.approx([0.0, 1.0, 1.5, 1.25, 1.0])


@pytest.mark.parametrize("warmup_s", [2.0, 0.0])
def test_an_empty_window_has_no_load(warmup_s: float) -> None:
    run = measured_run(100)
    window = {"warmup_s": warmup_s, "measure_s": 0.0, "drain_s": 1.0}
    assert not is_growing(with_manifest(run, window=window))
