"""SLO expressions: what they mean, and what is said about those that mean nothing."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.measure.catalog import BY_SLO_WORD
from loadgen.measure.slo import (
    Slo,
    for_each_request,
    mistaken_trees,
    parse_slo,
    ungrounded,
    with_implied,
)


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


@pytest.mark.parametrize(
    ("text", "scope", "metric", "limit"),
    [
        ("task_time <= 10m", "tree", "task_time_s", 600.0),
        ("wait_share <= 50%", "tree", "wait_share", 0.5),
        ("attainment(tree) >= 95%", "run", "tree_attainment", 0.95),
        ("attainment( tree ) >= 95%", "run", "tree_attainment", 0.95),
    ],
)
def test_trees_have_limits_and_the_run_a_share_of_them(text, scope, metric, limit) -> None:
    slo = parse_slo(text)
    assert (slo.scope, slo.metric, slo.limit, slo.aggregate) == (scope, metric, limit, None)
    assert slo.is_about_trees


def test_the_output_speed_is_the_inverse_of_the_tpot() -> None:
    slo = parse_slo("output_speed >= 40/s")
    assert (slo.text, slo.metric, slo.operator, slo.limit) == (
        "output_speed >= 40/s", "tpot_s", "<=", 0.025,
    )  # fmt: skip
    assert (slo.scope, for_each_request(slo)) == ("request", "tpot <= 25ms")
    assert not slo.is_about_trees


@pytest.mark.parametrize(
    ("texts", "has_agents", "problem"),
    [
        (["ttft <= 1s", "attainment >= 95%"], False, None),
        (["ttft <= 1s", "attainment(tree) >= 95%"], True, None),
        (["task_time <= 1m", "attainment(tree) >= 95%"], True, None),
        (["ttft <= 1s", "attainment(tree) >= 95%"], False, "which only agents have"),
        (["task_time <= 1m"], True, "add 'attainment(tree) >= 95%'"),
        (["attainment(tree) >= 95%", "p99(ttft) <= 1s"], True, "counts trees that meet every"),
    ],
)
def test_slos_about_trees_need_agents_a_share_and_a_limit(texts, has_agents, problem) -> None:
    found = mistaken_trees(map(parse_slo, texts), has_agents)
    assert (found is None) if problem is None else (problem in (found or ""))


def test_a_share_of_trees_is_a_share() -> None:
    texts = ["ttft <= 1s", "attainment(tree) >= 95%"]
    assert [slo.text for slo, _ in with_implied(list(map(parse_slo, texts)))] == texts


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
        ("p90(task_time) <= 5m", "write 'task_time <= …' and the share of trees"),
        ("attainment(trees) >= 95%", "unknown aggregate 'attainment'"),
        ("attainment(tree) <= 95%", "higher is better"),
        ("task_time_s <= 5m", "write 'task_time'"),
        ("output_speed <= 30/s", "write 'output_speed >= …'"),
        ("output_speed >= 30", "'30/s'"),
        ("p10(output_speed) >= 30/s", "'p90(tpot) <= 33ms'"),
        ("output_sped >= 30/s", "did you mean 'output_speed'"),
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
