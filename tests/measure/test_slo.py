"""SLO expressions: what they mean, and what is said about those that mean nothing."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.measure.catalog import BY_SLO_WORD
from loadgen.measure.slo import Slo, for_each_request, parse_slo, ungrounded


def test_a_bare_metric_is_asked_of_each_request() -> None:
    assert parse_slo(" ttft <= 500ms ") == Slo(
        "ttft <= 500ms", "request", "ttft_s", "<=", 0.5, comparison=" <= 500ms"
    )


def test_an_aggregate_is_asked_of_the_run() -> None:
    assert parse_slo("p99.9(e2e)<=10s") == Slo(
        "p99.9(e2e)<=10s", "run", "e2e_s", "<=", 10.0, "p99.9", 0.999, "<=10s"
    )
    assert parse_slo("mean(tpot) ≤ 50ms").aggregate == "mean"
    assert parse_slo("p99(itl) <= 50ms").metric == "itl_s"


@pytest.mark.parametrize(
    ("text", "metric", "limit"),
    [
        ("attainment >= 99%", "attainment", 0.99),
        ("error_rate <= 0.1%", "error_rate", 0.001),
        ("goodput >= 10/s", "goodput", 10.0),
        ("output_tokens_per_s >= 500/s", "output_tokens_per_s", 500.0),
        ("requests_per_s >= 90/min", "requests_per_s", 1.5),
    ],
)
def test_numbers_of_the_run_carry_their_own_unit(text: str, metric: str, limit: float) -> None:
    slo = parse_slo(text)
    assert (slo.scope, slo.metric, slo.limit) == ("run", metric, limit)


def test_the_view_from_the_send_instant_can_be_promised() -> None:
    assert parse_slo("ttft_from_send <= 1s").metric == "ttft_from_send_s"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("tfft <= 5ms", "did you mean 'ttft'"),
        ("TTFT <= 5ms", "did you mean 'ttft'"),
        ("P99(ttft) <= 5ms", "did you mean 'p99'"),
        ("p99 ttft <= 5ms", "did you mean 'p99(ttft)'"),
        ("TTFT_P99.9 <= 5ms", "did you mean 'p99.9(ttft)'"),
        ("throughput >= 5/s", "'requests_per_s' or 'output_tokens_per_s'"),
        ("avg(ttft) <= 1s", "did you mean 'mean'"),
        ("itl <= 50ms", "max_itl"),
        ("icl <= 50ms", "max_stall"),
        ("ttft <= 500", "'500s' or '500ms'"),
        ("goodput >= 10", "'10/s'"),
        ("attainment >= 99", "its sign"),
        ("ttft >= 500ms", "lower is better"),
        ("attainment <= 99%", "higher is better"),
        ("ttft < 500ms", "write 'ttft <= 500ms'"),
        ("ttft == 500ms", "write '<='"),
        ("ttft <= -5ms", "cannot be negative"),
        ("ttft_s <= 500ms", "write 'ttft'"),
        ("lateness_s <= 5ms", "describes the load generator"),
        ("p99(goodput) >= 5/s", "write 'goodput >= …'"),
        ("p100(ttft) <= 5s", "between p0 and p100"),
        ("p0(ttft) <= 5s", "between p0 and p100"),
        ("ttft", "write e.g. 'ttft <= 500ms'"),
        ("ttft <=", "is not a duration"),
        ("", "is not an SLO"),
    ],
)
def test_an_expression_that_cannot_be_meant_says_what_to_write(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(hint)) as problem:
        parse_slo(text)
    assert repr(text) in str(problem.value)


@given(st.text(max_size=30))
def test_any_text_is_an_slo_or_a_value_error(text: str) -> None:
    try:
        slo = parse_slo(text)
    except ValueError:
        return
    assert slo.metric in {metric.name for metric in BY_SLO_WORD.values()}


def test_a_promise_is_kept_at_its_limit_and_never_by_nan() -> None:
    assert parse_slo("ttft <= 500ms").holds(0.5)
    assert not parse_slo("ttft <= 500ms").holds(0.5000001)
    assert not parse_slo("ttft <= 500ms").holds(float("nan"))
    assert parse_slo("goodput >= 10/s").holds(10.0)


def test_a_promise_about_requests_that_kept_promises_needs_one_asked_of_each() -> None:
    attainment, p99, each = map(
        parse_slo, ("attainment >= 99%", "p99(ttft) <= 1s", "ttft <= 500ms")
    )
    assert ungrounded([p99]) is None
    assert ungrounded([attainment, each]) is None
    assert "'attainment >= 99%' counts requests" in (ungrounded([attainment, p99]) or "")
    assert ungrounded([attainment], elsewhere=[each]) is None
    assert ungrounded([attainment], elsewhere=[p99]) is not None


@pytest.mark.parametrize(
    ("text", "each"),
    [
        ("p99(ttft) <= 1s", "ttft <= 1s"),
        (" p99.9( ttft_from_send )≤1000ms ", "ttft_from_send≤1000ms"),
        ("mean(tpot)<=0.05s", "tpot<=0.05s"),
    ],
)
def test_a_limit_for_each_request_keeps_the_written_limit(text, each):
    assert for_each_request(parse_slo(text)) == each
    assert parse_slo(each).limit == parse_slo(text).limit
    assert parse_slo(each).scope == "request"
