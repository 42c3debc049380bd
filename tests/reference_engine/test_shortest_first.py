"""The mode `sjf` on one sequence slot as an M/G/1 queue, against closed forms."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from shortest_first import (
    closed_forms,
    controlled,
    fcfs_response_s,
    jobs,
    response_s,
)


def test_the_closed_forms_are_those_of_known_queues():
    """Of one size every order is that of arrival: M/D/1 with load 1/2 waits for half a service. Of
    the sizes 1 and 3 in equal shares at a load of 1/2 (1/4 arrivals a second; half the load is
    0.125 and 0.375): shortest first waits 0.625 / 0.875 and 0.625 / (0.875 · 0.5)."""
    assert closed_forms((2.0,), (1.0,), 0.5) == pytest.approx((3.0, 3.0, 3.0))
    fcfs_s, sjf_s, srpt_s = closed_forms((1.0, 3.0), (0.5, 0.5), 0.5)
    assert fcfs_s == pytest.approx(2 + 0.625 / 0.5)
    assert sjf_s == pytest.approx(2 + (0.625 / 0.875 + 0.625 / 0.4375) / 2)
    short_s = 1 + 0.25 * (0.5 + 0.5) / 2 / 0.875
    long_s = 1 + 2 / 0.875 + 0.25 * 5 / 2 / (0.875 * 0.5)
    assert srpt_s == pytest.approx((short_s + long_s) / 2)
    assert srpt_s < sjf_s < fcfs_s


def served_shortest_first(work, preempt):
    """Mean response time of one server in steps of 1 s that takes the least work left after every
    step, or only after every job."""
    left = [length for _, length in work]
    now_s, total_s, n_arrived, current = 0.0, 0.0, 0, None
    present: set[int] = set()
    while n_arrived < len(work) or present:
        if not present:
            now_s = max(now_s, work[n_arrived][0])
        while n_arrived < len(work) and work[n_arrived][0] <= now_s:
            present.add(n_arrived)
            n_arrived += 1
        if current is None or preempt:
            current = min(present, key=lambda k: (left[k], k != current, k))
        left[current] -= 1
        now_s += 1.0
        if not left[current]:
            total_s += now_s - work[current][0]
            present.remove(current)
            current = None
    return total_s / len(work)


@pytest.mark.parametrize("preempt", [False, True])
def test_one_slot_serves_the_least_work_first(preempt):
    """The same mean as an independent recursion on 300 arrivals. Equal work left may be served in
    any order, which changes no mean."""
    work = jobs(np.random.default_rng(3), 300)
    expected_s = served_shortest_first(work, preempt)
    assert response_s(work, preempt=preempt) == pytest.approx(expected_s, rel=1e-9)
    assert expected_s < 0.9 * fcfs_response_s(work)


def test_a_control_with_a_known_mean_removes_what_the_arrivals_deviate():
    controls = [10.0, 12.0, 14.0]  # 2 above their expected mean of 10
    assert controlled([21.0, 25.0, 29.0], controls, 10.0) == pytest.approx(21.0)


def test_the_committed_benchmark_is_within_two_per_cent():
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "shortest_first.json"
    result = json.loads(path.read_text())
    forms = closed_forms(result["sizes"], result["shares"], result["load"])
    assert result["seeds"] >= 10
    for at, name in ((1, "sjf"), (2, "srpt")):
        row = result["modes"][name]
        assert row["closed_form_s"] == pytest.approx(forms[at], abs=1e-3)
        assert row["simulated_s"] == pytest.approx(forms[at], rel=0.02)
