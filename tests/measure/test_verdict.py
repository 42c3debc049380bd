"""Results of single SLOs, with literal expected values."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.measure.slo import parse_slo
from loadgen.measure.slo_result import (
    Bound,
    Misses,
    Shares,
    max_result,
    mean_result,
    percentile_result,
    request_slo_result,
    run_metric_result,
)
from loadgen.measure.statistics.dependence import Dependence
from loadgen.measure.statistics.population import Population, of_requests
from loadgen.measure.verdict import (
    Decision,
    Reason,
    decide,
    sentence,
)


def share_result(text, met, due, failed=None):
    shares = Shares(due, met, due - met if failed is None else failed, length_s=10.0)
    return run_metric_result(parse_slo(text), shares, lambda metric: math.nan, 0.95)


def bound_of(result):
    return result.bound.side, result.bound.value


def test_the_samples_that_a_mean_needs_grow_with_the_square_of_the_interval():
    """1 to 5 s: mean 3 s, upper bound 3 + 2.132 · √(2.5 / 5) s; 5 · (1.507 / 0.5)² = 45.4."""
    result = mean_result(parse_slo("mean(ttft) <= 3.5s"), Population(np.arange(1.0, 6.0)), 0.95)
    assert (result.met, result.proven, result.n_needed) == (True, False, 46)


@given(
    st.integers(20, 400), st.sampled_from([50, 90, 95]), st.floats(0.2, 3.0), st.floats(0, 0.97),
    st.integers(0, 99),
)  # fmt: skip
def test_a_percentile_is_proven_at_the_limit_and_its_bounds_agree(n, percent, limit, memory, seed):
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=n)
    for k in range(1, n):
        noise[k] = memory * noise[k - 1] + math.sqrt(1 - memory**2) * noise[k]
    result = percentile_result(
        parse_slo(f"p{percent}(ttft) <= {limit}s"), of_requests(np.exp(noise)), 0.95
    )
    if result.met:
        assert result.proven is (result.high is not None and result.high <= limit)
    else:
        assert result.proven is (result.low is not None and result.low > limit)
    assert (result.n_needed is None) or not result.proven


def test_the_memory_at_the_limit_counts_and_not_that_at_the_percentile_of_the_run():
    """A burst of 8 slow answers among 400: the P90 and its bound lie among fast answers with hardly
    any memory, but the 2 % beyond the limit are a single event."""
    values = np.random.default_rng(6).uniform(0.04, 0.06, 400)
    values[200:208] = 1.0
    population = of_requests(values)
    at_the_percentile = population.percentile_bounds(0.9, 0.95).high
    assert at_the_percentile is not None
    assert at_the_percentile < 0.06
    result = percentile_result(parse_slo("p90(ttft) <= 500ms"), population, 0.95)
    assert (result.met, result.proven, result.high) == (True, False, None)


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
    assert result.note_kind == "too_few_samples"
    assert sentence(result, 0.95) == f"{slo}: {note}"
    reason = Reason("too_few_samples", f"{slo}: {note}.")
    decision = decide([result], (), None, 0.95, None, n_ok=n)
    assert decision == Decision("no_verdict", 3, (reason,))
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
    assert result.note_kind == "above_offered_rate"
    assert sentence(result, 0.95) == (
        "goodput >= 5/s: missed at 0.75/s; it cannot be kept at this rate: only 0.75/s was offered"
    )
    reachable = run_metric_result(parse_slo("goodput >= 0.75/s"), shares, lambda _: 0.75, 0.95)
    assert (reachable.met, reachable.note) == (True, "")


def test_a_draw_below_the_requested_rate_proves_nothing_about_goodput():
    """6/s requested, 4.6/s drawn, all successful: a longer run offers more."""
    shares = Shares(due=23, met=23, failed=0, length_s=5.0, requested_per_s=6.0)
    result = run_metric_result(parse_slo("goodput >= 5/s"), shares, lambda _: 4.6, 0.95)
    assert (result.met, result.proven, result.note) == (False, False, "")


def test_too_few_successful_requests_give_no_verdict():
    met = run_metric_result(
        parse_slo("error_rate <= 1%"), Shares(due=45, met=45, failed=0, length_s=60.0), float, 0.95
    )
    text = "45 requests were successful, fewer than the 46 that --min-requests requires."
    none = Decision("no_verdict", 3, (Reason("too_few_successful", text),))
    cut_short = Reason("ended_early", "cut short")
    assert decide([met], (), None, 0.95, None, 45, 46) == none
    assert decide([met], (), Reason("overloaded", "grows"), 0.95, None, 45, 46) == none
    assert decide([], (), None, 0.95, None, 45, 46) == none
    assert decide([met], (), None, 0.95, None, 45, 45).verdict == "met"
    assert decide([met], (cut_short,), None, 0.95, None, 45, 46).reasons == (cut_short,)


def test_a_run_without_a_successful_request_never_meets_its_slos():
    met = run_metric_result(
        parse_slo("error_rate <= 1%"), Shares(due=45, met=0, failed=0, length_s=60.0), float, 0.95
    )
    reason = Reason("none_successful", "No request was successful.")
    assert decide([met], (), None, 0.95, None, n_ok=0) == Decision("no_verdict", 3, (reason,))
    assert decide([], (), None, 0.95, None, n_ok=0) == Decision("no_verdict", 3, (reason,))


def test_each_reason_has_its_kind():
    """99 of 99 prove 95 %, not 99 %: 0.05^(1/99) = 97.0 %; 80 of 99 miss 90 % with proof."""
    met, close = (
        share_result("attainment >= 95%", 99, 99),
        share_result("attainment >= 99%", 99, 99),
    )
    missed = share_result("attainment >= 90%", 80, 99)
    few = percentile_result(parse_slo("p99(ttft) <= 1s"), Population(np.full(3, 0.1)), 0.95)
    nothing = mean_result(parse_slo("mean(ttft) <= 1s"), Population(np.empty(0)), 0.95)

    def kinds(*results, overload="", required="proven"):
        breakdown = Reason("overloaded", overload) if overload else None
        decision = decide(results, (), breakdown, 0.95, required, n_ok=99)
        return decision.verdict, [reason.kind for reason in decision.reasons]

    assert kinds(met) == ("met", ["met"])
    assert kinds(met, close) == ("no_verdict", ["unproven"])
    assert kinds(met, close, required=None) == ("met", ["met", "met"])
    assert kinds(close, few, nothing) == ("no_verdict", ["unproven", "too_few_samples", "no_value"])
    assert kinds(close, missed) == ("missed", ["missed"])
    assert kinds(met, overload="grows") == ("missed", ["overloaded"])
    assert kinds(missed, overload="grows") == ("missed", ["overloaded", "missed"])
    assert kinds() == ("no_verdict", ["no_slo"])


def test_the_bound_of_a_met_share_is_its_lower_end():
    """62 of 62: 0.05^(1/62) = 0.9528."""
    result = share_result("attainment >= 95%", 62, 62)
    assert bound_of(result) == ("at_least", pytest.approx(0.9528, abs=5e-5))
    assert sentence(result, 0.95) == (
        "attainment >= 95%: met at 100 %, n = 62; at least 95.3 % with 95 % confidence"
    )


def test_the_bound_of_a_missed_share_is_its_upper_end():
    """0 of 62: 1 - 0.05^(1/62) = 0.0472."""
    assert bound_of(share_result("attainment >= 95%", 0, 62)) == (
        "at_most",
        pytest.approx(0.0472, abs=5e-5),
    )
    assert bound_of(share_result("error_rate <= 1%", 62, 62, failed=62)) == (
        "at_least",
        pytest.approx(0.9528, abs=5e-5),
    )


def test_a_limit_on_each_request_has_the_lower_bound_of_its_share():
    slo = parse_slo("ttft <= 1s")
    assert bound_of(request_slo_result(slo, 62, 62, 0.95, Dependence(62))) == (
        "at_least",
        pytest.approx(0.9528, abs=5e-5),
    )
    assert request_slo_result(slo, 0, 0, 0.95, Dependence(0)).bound is None


def test_a_bound_that_the_samples_cannot_give_is_open():
    result = percentile_result(parse_slo("p99(ttft) <= 1s"), Population(np.full(120, 0.5)), 0.95)
    assert result.bound == Bound("at_most", None)
    assert result.bound.text("s") == "open"
    assert result.bound.at_level("s", 0.95) == "no bound at 95 % confidence: too few samples"


def test_failures_are_the_bound_where_they_decide():
    result = max_result(parse_slo("max(ttft) <= 1s"), Population(np.full(9, 0.5), n_infinite=1))
    assert result.bound == Bound("at_least", math.inf)
    assert result.bound.text("s") == "failures"


def test_a_throughput_has_no_bound():
    assert share_result("output_tokens_per_s >= 1/s", 5, 5).bound is None


@given(st.integers(0, 400), st.integers(1, 400), st.sampled_from(["90%", "95%", "99%"]))
def test_a_proven_share_and_its_bound_agree(met, due, limit):
    met = min(met, due)
    result = share_result(f"attainment >= {limit}", met, due)
    assert result.bound is not None
    assert result.bound.value is not None
    is_on_the_same_side = (result.bound.value >= result.limit) is result.met
    assert result.proven is is_on_the_same_side
    assert (result.bound.side == "at_least") is result.met


@given(st.integers(10, 400), st.integers(0, 20), st.floats(0.05, 0.95))
def test_a_proven_percentile_and_its_bound_agree(n, n_failed, limit_s):
    values = np.linspace(0.0, 1.0, n)
    slo = parse_slo(f"p90(ttft) <= {limit_s:.3f}s")
    result = percentile_result(slo, Population(values, n_failed), 0.95)
    bound = result.bound
    assert bound is not None
    is_decisive = bound.value is not None and slo.holds(bound.value) is result.met
    assert bool(result.proven) is is_decisive


def test_failures_are_bounded_by_their_own_memory():
    """20 of 1 000 failed: at most 3.07 % at 97.5 % (Clopper and Pearson); 0 late: at most 0.37 %.
    Together they hardly miss 96.5 %; by the memory of the latencies nothing is proven."""
    together = Shares(1000, 980, 20, 10.0, meeting=Dependence(1000, 20.0))
    independent = Dependence(1000)
    split = replace(together, misses=Misses(20, 0, answering=independent, lateness=independent))
    result = run_metric_result(parse_slo("attainment >= 95%"), split, lambda metric: 0.0, 0.95)
    assert result.low == pytest.approx(1 - 0.030713 - 0.003682, abs=2e-5)
    assert (result.value, result.met, result.proven) == (0.98, True, True)
    joint = run_metric_result(parse_slo("attainment >= 95%"), together, lambda metric: 0.0, 0.95)
    assert not joint.proven


def test_late_answers_keep_the_memory_of_the_latencies():
    """0 late of 1 000 with τ 60, and 20 failures: the late answers alone are unbounded."""
    misses = Misses(20, 0, answering=Dependence(1000), lateness=Dependence(1000, 60.0))
    shares = Shares(1000, 980, 20, 10.0, meeting=Dependence(1000, 60.0), misses=misses)
    result = run_metric_result(parse_slo("attainment >= 95%"), shares, lambda metric: 0.0, 0.95)
    assert (result.low, result.proven) == (None, False)


def test_independent_requests_keep_the_bound_of_all_misses_together():
    """20 failures and 20 late of 1 000: 40 misses have an upper bound of 5.16 %, not 6.14 %."""
    independent = Dependence(1000)
    misses = Misses(20, 20, answering=independent, lateness=independent)
    shares = Shares(1000, 960, 20, 10.0, meeting=independent, misses=misses)
    result = run_metric_result(parse_slo("attainment >= 90%"), shares, lambda metric: 0.0, 0.95)
    assert result.low == pytest.approx(0.94842, abs=2e-4)


def test_a_result_that_takes_more_than_an_hour_to_prove_is_too_close():
    result = share_result("attainment >= 95%", met=191, due=200)
    near = replace(result, seconds_needed=3601.0)
    assert (result.certainty, near.certainty) == ("in_run", "too_close")
    assert sentence(near, 0.95) == (
        "attainment >= 95%: met at 95.5 %, n = 200; 95 % confidence takes more than an hour at "
        "this rate: try another rate"
    )
