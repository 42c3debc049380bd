"""The batch-service queue: values of policies and the optimum, against published and independent
numbers. Times are in milliseconds, rates per millisecond, energies in millijoules."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from reference_engine.smdp.batch_queue import BatchQueue, Objective, UnstableQueueError

LATENCY = Objective()
B_MAX = 32
# GoogLeNet on a Tesla P4 (arXiv 2301.12865).
AFFINE = [0.3051 * b + 1.0524 for b in range(1, B_MAX + 1)]
ENERGY = [19.899 * b + 19.603 for b in range(1, B_MAX + 1)]
BUCKET = [1, 2, 4, 4, *[8] * 4, *[16] * 8, *[32] * 16]  # the next power of two
STAIRCASE = [0.3051 * b + 1.0524 for b in BUCKET]


def affine(load: float) -> BatchQueue:
    """A load of 1 is that which full batches serve."""
    return BatchQueue(load * B_MAX / AFFINE[-1], AFFINE, ENERGY)


def staircase(load: float) -> BatchQueue:
    return BatchQueue(load * B_MAX / STAIRCASE[-1], STAIRCASE)


def round_down(queue: BatchQueue) -> np.ndarray:
    """As many as the largest power of two that waits."""
    sizes = [0, *(min(B_MAX, 1 << (s.bit_length() - 1)) for s in range(1, queue.n_states))]
    return np.array(sizes)


def simulated(queue: BatchQueue, policy: np.ndarray, n_batches: int, most: float, seed: int):
    """(mean response, power, mean excess over `most` in the system) of individual requests."""
    rng = np.random.default_rng(seed)
    came = np.cumsum(rng.exponential(1 / queue.rate_per_s, 40 * n_batches))
    now, energy, n_served, n_came, left = 0.0, 0.0, 0, 0, []
    for _ in range(n_batches):
        n_came = int(np.searchsorted(came, now, side="right"))
        while not (size := policy[min(n_came - n_served, queue.n_states - 1)]):
            now, n_came = came[n_came], n_came + 1
        now += queue.service_s[size - 1]
        energy += queue.energy_j[size - 1]
        left += [now] * int(size)
        n_served += size
    came = came[came <= now]
    times = np.r_[came, left]
    order = np.argsort(times, kind="stable")
    inside = np.cumsum(np.r_[np.ones(len(came)), -np.ones(len(left))][order])
    excess = np.maximum(inside - most, 0)[:-1] @ np.diff(times[order]) / now
    return np.mean(np.array(left) - came[:n_served]), energy / now, excess


# --- values of policies


@pytest.mark.parametrize(
    ("rate", "service", "mean"), [(0.5, 1.0, 1.5), (0.7, 1.0, 2.166667), (0.08, 10.0, 30.0)]
)
def test_batches_of_one_are_the_m_d_1_queue(rate, service, mean):
    queue = BatchQueue(rate, [service])
    assert queue.evaluate(queue.greedy(), LATENCY).latency_s == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize(
    ("load", "mean"),
    [(0.1, 3.1459), (0.3, 4.2248), (0.5, 5.9019), (0.7, 9.8176), (0.9, 29.4084)],
)
def test_batches_without_limit_are_inoues_queue(load, mean):
    """Inoue (arXiv 1912.06322): from a load of 0.5 on, the values are those of its bound, too."""
    alpha, fixed = 0.1438, 1.8874
    service = [alpha * b + fixed for b in range(1, 801)]
    queue = BatchQueue(load / alpha, service, n_states=1600)
    value = queue.evaluate(queue.greedy(), LATENCY)
    assert round(value.latency_s, 4) == mean
    assert value.overflow < 1e-12


@pytest.mark.parametrize(
    ("load", "limit", "mean", "power"),
    [
        *[(0.1, 1, 1.67, 11.3), (0.1, 2, 3.40, 8.8), (0.1, 8, 15.32, 6.6)],
        *[(0.3, 1, 2.40, 28.3), (0.3, 2, 2.69, 25.2), (0.3, 4, 4.06, 21.9)],
        *[(0.5, 1, 3.32, 39.2), (0.5, 2, 3.35, 38.2), (0.5, 4, 3.88, 35.7), (0.5, 8, 6.00, 33.0)],
        *[(0.7, 1, 4.95, 48.0), (0.7, 4, 5.06, 47.3), (0.7, 8, 6.09, 45.6)],
        *[(0.9, 1, 9.69, 56.5), (0.9, 8, 9.82, 56.3), (0.9, 16, 11.32, 55.6)],
    ],
)
def test_latency_and_power_of_control_limits(load, limit, mean, power):
    queue = affine(load)
    value = queue.evaluate(queue.control_limit(limit), LATENCY)
    assert (round(value.latency_s, 2), round(value.power_w, 1)) == (mean, power)


@pytest.mark.parametrize("limit", [1, 6])
def test_values_are_those_of_simulated_requests(limit):
    """Within four standard errors over 20 seeds: a false alarm in about 1 of 500 seeds."""
    queue, slo = affine(0.7), 5.0
    policy = queue.control_limit(limit)
    value = queue.evaluate(policy, Objective(late=2.0, slo_s=slo))
    most = queue.rate_per_s * slo
    seeds = np.array([simulated(queue, policy, 4000, most, seed) for seed in range(20)])
    error = 4 * seeds.std(axis=0, ddof=1) / 20**0.5
    expected = [value.latency_s, value.power_w, value.late_s * queue.rate_per_s]
    assert value.late_s > 0.5
    assert (np.abs(seeds.mean(axis=0) - expected) < error).all()
    assert (error < 0.07 * np.array(expected)).all()
    assert value.cost == pytest.approx(value.latency_s + 2 * value.late_s)


def test_a_policy_serves_requests_that_wait_and_never_waits_in_the_last_state():
    queue = affine(0.5)
    policy = queue.greedy()
    for state, batch in ((3, 4), (queue.n_states - 1, 0)):
        wrong = policy.copy()
        wrong[state] = batch
        with pytest.raises(ValueError, match="policy"):
            queue.evaluate(wrong, LATENCY)


def test_more_arrivals_than_the_best_batches_serve_have_no_value():
    with pytest.raises(UnstableQueueError, match=r"3\.1 arrivals .* 3 can be served"):
        BatchQueue(3.1, [1.0, 1.0, 1.0, 2.0])


# --- the optimum


@pytest.mark.parametrize(
    ("load", "best", "greedy"),
    [
        (0.1, 1.6687, 1.6687),
        (0.3, 2.3998, 2.3998),
        (0.5, 3.3167, 3.3167),
        (0.7, 4.9531, 4.9536),
        (0.9, 9.6944, 9.6945),
    ],
)
def test_with_affine_service_greedy_has_the_least_latency(load, best, greedy):
    queue = affine(load)
    assert round(queue.solve(LATENCY).value.cost, 4) == best
    assert round(queue.evaluate(queue.greedy(), LATENCY).cost, 4) == greedy


@pytest.mark.parametrize(
    ("load", "weight", "greedy", "limit", "best"),
    [
        (0.3, 0.5, 16.545, 3, 14.892),
        (0.3, 1.6, 47.664, 6, 38.608),
        (0.5, 1.6, 66.054, 8, 58.780),
        (0.7, 1.6, 81.818, 10, 78.818),
        (0.9, 1.6, 100.064, 10, 99.878),
    ],
)
def test_with_power_the_optimum_is_worth_the_best_control_limit(load, weight, greedy, limit, best):
    queue, objective = affine(load), Objective(power=weight)
    found, value = queue.best_control_limit(objective)
    assert (found, round(value.cost, 3)) == (limit, best)
    assert round(queue.solve(objective).value.cost, 3) == best
    assert round(queue.evaluate(queue.greedy(), objective).cost, 3) == greedy


@pytest.mark.parametrize(
    ("load", "greedy", "rounded", "best"),
    [
        (0.3, 2.612, 2.528, 2.528),
        (0.5, 4.674, 3.712, 3.693),
        (0.7, 13.182, 5.796, 5.703),
        (0.9, 16.999, 11.734, 11.616),
    ],
)
def test_with_padded_batches_the_optimum_is_better_than_any_control_limit(
    load, greedy, rounded, best
):
    queue = staircase(load)
    solution = queue.solve(LATENCY)
    assert round(solution.value.cost, 3) == best
    assert round(queue.evaluate(round_down(queue), LATENCY).cost, 3) == rounded
    assert round(queue.evaluate(queue.greedy(), LATENCY).cost, 3) == greedy
    assert queue.best_control_limit(LATENCY)[1].cost > 0.998 * greedy


def test_the_optimum_serves_up_to_the_edge_of_a_bucket():
    solution = staircase(0.5).solve(LATENCY)
    assert solution.policy[[3, 6, 10, 12]].tolist() == [2, 4, 8, 8]


@pytest.mark.parametrize("power", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("late", [0.0, 20.0])
def test_no_policy_is_better_than_the_solution(power, late):
    """All 54 policies of a queue of four, with batches of two."""
    queue = BatchQueue(0.6, [1.0, 1.3], [2.0, 2.5], n_states=6)
    objective = Objective(power=power, late=late, slo_s=2.5)
    choices = product([0], [0, 1], *[[0, 1, 2]] * 3, [2])
    costs = [queue.evaluate(np.array(choice), objective).cost for choice in choices]
    solution = queue.solve(objective)
    assert len(costs) == 54
    assert solution.value.cost == pytest.approx(min(costs), rel=1e-9)
    assert (solution.action_gap >= 0).all()


def test_a_dearer_joule_waits_for_larger_batches():
    queue = affine(0.3)
    first = [
        int(np.flatnonzero(queue.solve(Objective(power=weight)).policy)[0])
        for weight in (0.0, 0.1, 0.4, 1.6, 6.4)
    ]
    assert first == sorted(first)
    assert first[0] == 1
    assert first[-1] > 6


def test_the_value_does_not_depend_on_the_truncation():
    enough = affine(0.7)
    longer = BatchQueue(enough.rate_per_s, AFFINE, ENERGY, n_states=2 * enough.n_states)
    objective = Objective(power=0.5)
    short, long = enough.solve(objective).value, longer.solve(objective).value
    assert short.cost == pytest.approx(long.cost, rel=1e-8)
    assert short.overflow < 1e-9


def test_the_abstract_cost_replaces_the_queues_that_are_cut_off():
    """40 states in place of 178: 0.1 % from the true 9.6944, and 0.6 % without that cost."""
    queue = BatchQueue(affine(0.9).rate_per_s, AFFINE, n_states=40)
    value = queue.solve(LATENCY).value
    assert value.overflow > 0.002
    assert value.latency_s == pytest.approx(9.6944, rel=1e-3)
