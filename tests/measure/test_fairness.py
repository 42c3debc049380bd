"""Tenants side by side, and how evenly they fared."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.measure.aggregate import summarize
from loadgen.measure.fairness import jain_index
from loadgen.records import Names
from tests.runs import measured_run, traffic, with_manifest

some = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=20).filter(lambda xs: max(xs) > 1e-3)


def test_the_index_of_known_shares():
    assert jain_index([5.0, 5.0, 5.0, 5.0]) == 1.0
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain_index([1.0, 3.0]) == pytest.approx(0.8)  # 16 / (2 · 10)
    assert np.isnan(jain_index([0.0, 0.0]))


@given(some, st.floats(0.5, 1e3))
def test_the_index_lies_between_all_for_one_and_alike_and_has_no_unit(xs, scale):
    index = jain_index(xs)
    assert 1 / len(xs) - 1e-9 <= index <= 1 + 1e-9
    assert jain_index([scale * x for x in xs]) == pytest.approx(index)


def of_two_tenants(n_failed=0):
    """220 requests at 10/s, 20 of them warm-up; every fourth is b's."""
    run = measured_run(slo=["ttft <= 500ms"], n_failed=n_failed)
    run.schedule_rows["tenant_id"][np.arange(220) % 4 == 3] = 1
    names = Names(tenants=("a", "b", "silent"), errors=run.names.errors, remotes=run.names.remotes)
    return replace(run, names=names)


def test_a_tenant_without_a_per_request_limit_has_no_attainment():
    run = of_two_tenants()
    classes = {"chat": traffic("ttft <= 500ms"), "rag": traffic()}
    run.schedule_rows["class_id"] = run.schedule_rows["tenant_id"]
    names = replace(run.names, classes=("chat", "rag"))
    found = summarize(replace(with_manifest(run, slo=[], classes=classes), names=names)).fairness
    assert found is not None
    a, b = found.tenants.values()
    assert (a.attainment, a.met) == (1.0, 150)
    assert np.isnan(b.attainment)
    assert (b.met, b.attainment_low, b.attainment_high) == (None, None, None)


def test_each_tenant_has_its_rows_and_silent_ones_none():
    run = of_two_tenants()
    run.schedule_rows["input_tokens"], run.schedule_rows["output_tokens"] = 30, 10
    run.request_rows["input_tokens"], run.request_rows["output_tokens"] = 30, 10
    found = summarize(run).fairness
    assert found is not None
    assert list(found.tenants) == ["a", "b"]
    a, b = found.tenants.values()
    assert (a.due, b.due) == (150, 50)
    assert a.served_tokens_per_s == pytest.approx(150 * 40 / 20)
    assert b.asked_tokens_per_s == pytest.approx(50 * 40 / 20)
    assert found.jain_of_served == pytest.approx(0.8)  # 3 : 1
    assert found.jain_of_share == pytest.approx(1.0)


def test_failures_are_asked_for_and_not_served():
    run = of_two_tenants()
    run.schedule_rows["input_tokens"], run.schedule_rows["output_tokens"] = 30, 10
    run.request_rows["input_tokens"], run.request_rows["output_tokens"] = 30, 10
    rows = np.flatnonzero(run.schedule_rows["tenant_id"] == 1)[5:]  # the first five warm up
    run.request_rows["status"][rows[:25]] = 1
    b = summarize(run).fairness.tenants["b"]  # type: ignore[union-attr]  # there are two
    assert (b.due, b.ok, b.met) == (50, 25, 25)
    assert b.attainment == 0.5
    assert b.served_tokens_per_s == pytest.approx(b.asked_tokens_per_s / 2)


def test_one_tenant_is_no_question_of_fairness():
    assert summarize(measured_run()).fairness is None
