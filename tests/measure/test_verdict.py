"""Results of single SLOs, with literal expected values."""

import numpy as np
import pytest

from loadgen.measure.slo import parse_slo
from loadgen.measure.statistics.population import Population
from loadgen.measure.verdict import (
    Shares,
    decide,
    mean_result,
    percentile_result,
    run_metric_result,
    sentence,
)


def test_the_samples_that_a_mean_needs_grow_with_the_square_of_the_interval():
    """1 to 5 s: mean 3 s, upper bound 3 + 2.132 · √(2.5 / 5) s; 5 · (1.507 / 0.5)² = 45.4."""
    result = mean_result(parse_slo("mean(ttft) <= 3.5s"), Population(np.arange(1.0, 6.0)), 0.95)
    assert (result.met, result.proven, result.n_needed) == (True, False, 46)


@pytest.mark.parametrize(
    ("slo", "n", "note"),
    [
        ("p99(ttft) <= 1s", 3, "3 samples have no P99, which needs at least 100"),
        ("p99(ttft) <= 1s", 99, "99 samples have no P99, which needs at least 100"),
        ("p99.9(ttft) <= 1s", 999, "999 samples have no P99.9, which needs at least 1\u202f000"),
        ("p50(ttft) <= 1s", 1, "1 sample has no P50, which needs at least 2"),
        ("p90(ttft) <= 1us", 9, "9 samples have no P90, which needs at least 10"),
    ],
)
def test_a_percentile_that_so_few_samples_do_not_have_has_no_verdict(slo, n, note):
    parsed = parse_slo(slo)
    result = percentile_result(parsed, Population(np.full(n, 0.1)), 0.95)
    assert (result.met, result.proven, result.note) == (None, None, note)
    assert sentence(result, 0.95) == f"{slo}: {note}"
    verdict = decide([result], (), "", 0.95, False, n_ok=n)
    assert verdict == ("no_verdict", 3, (f"{slo}: {note}.",))
    assert result.n_needed is not None
    enough = percentile_result(parsed, Population(np.full(result.n_needed, 0.1)), 0.95)
    assert enough.met is not None


def test_failures_count_towards_the_samples_of_a_percentile():
    population = Population(np.full(60, 0.1), n_infinite=40)
    assert percentile_result(parse_slo("p99(ttft) <= 1s"), population, 0.95).met is False


def test_a_goodput_above_the_offered_rate_is_not_the_fault_of_the_server():
    """45 requests in 60 s, all of them kept: 0.75/s, and 5/s cannot be reached."""
    shares, slo = Shares(due=45, met=45, failed=0, length_s=60.0), parse_slo("goodput >= 5/s")
    result = run_metric_result(slo, shares, lambda _: 0.75, 0.95)
    assert (result.value, result.met) == (0.75, False)
    assert sentence(result, 0.95) == (
        "goodput >= 5/s: missed at 0.75/s; it cannot be kept at this rate: only 0.75/s was offered"
    )
    reachable = run_metric_result(parse_slo("goodput >= 0.75/s"), shares, lambda _: 0.75, 0.95)
    assert (reachable.met, reachable.note) == (True, "")


def test_too_few_successful_requests_give_no_verdict():
    met = run_metric_result(
        parse_slo("error_rate <= 1%"), Shares(due=45, met=45, failed=0, length_s=60.0), float, 0.95
    )
    reason = "45 requests were successful, fewer than the 46 that --min-requests asks for."
    assert decide([met], (), "", 0.95, False, 45, 46) == ("no_verdict", 3, (reason,))
    assert decide([met], (), "overloaded", 0.95, False, 45, 46) == ("no_verdict", 3, (reason,))
    assert decide([], (), "", 0.95, False, 45, 46) == ("no_verdict", 3, (reason,))
    assert decide([met], (), "", 0.95, False, 45, 45)[0] == "met"
    assert decide([met], ("cut short",), "", 0.95, False, 45, 46)[2] == ("cut short",)


def test_a_run_without_a_successful_request_never_meets_its_slos():
    met = run_metric_result(
        parse_slo("error_rate <= 1%"), Shares(due=45, met=0, failed=0, length_s=60.0), float, 0.95
    )
    verdict = decide([met], (), "", 0.95, False, n_ok=0)
    assert verdict == ("no_verdict", 3, ("No request was successful.",))
