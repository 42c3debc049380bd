"""The preview page: every request is in its figures, and the page needs nothing but a browser."""

import html
import json
import re
from itertools import pairwise

import numpy as np
import pytest
import vl_convert
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from loadgen.errors import UsageError
from loadgen.workload.preview import preview
from loadgen.workload.scenario import Scenario, load_scenario
from loadgen.workload.schedule import make_plan
from reports.page import embedded, policy, write_page
from reports.preview.charts import MAX_TICKS, figures, length_bins, rate_curve, strip_s
from reports.preview.page import render
from tests.workload.weka_files import fanned_out, written


@pytest.fixture(scope="module")
def cache_dir(page_cache):
    return page_cache


@pytest.fixture(scope="module")
def planned():
    scenario = load_scenario("mixed_classes")
    plan = make_plan(scenario)
    return scenario, plan, preview(scenario, *plan)


@given(hnp.arrays(np.uint32, st.integers(1, 200), elements=st.integers(1, 200_000)))
def test_every_length_is_in_exactly_one_bin(tokens):
    bins = length_bins(tokens)
    assert sum(b["n"] for b in bins) == len(tokens)
    assert all(a["high"] == b["low"] for a, b in pairwise(bins))
    for b in bins:
        assert b["n"] == np.count_nonzero((tokens >= b["low"]) & (tokens < b["high"]))


@given(st.floats(0.01, 1e6))
def test_the_raster_has_at_most_twenty_rows(horizon_s):
    assert 0 < horizon_s / strip_s(horizon_s) <= 20 * (1 + 1e-12)


def test_the_rate_curve_holds_every_arrival():
    times_s = np.array([0.0, 0.5, 1.0, 9.9])
    (area, warmup, mean) = rate_curve(times_s, 2.0, 10.0)["layer"]
    bins = area["data"]["values"]
    assert bins == [{"from_s": 0.0, "rate": 0.4}, {"from_s": 10.0, "rate": 0.4}]
    assert warmup["data"]["values"] == [{"from_s": 0.0, "to_s": 2.0}]
    assert mean["data"]["values"] == [{"mean": 0.4}]


def test_ticks_stand_at_their_instants(planned):
    scenario, plan, _ = planned
    spec = figures(plan.schedule, scenario.names().classes, 30.0, 330.0)["raster"]
    ticks = spec["data"]["values"]
    starts = np.sort(plan.schedule["scheduled_s"][plan.schedule["n_parents"] == 0])
    drawn = np.array([tick["row"] + tick["within"] for tick in ticks])
    assert drawn == pytest.approx(starts[:MAX_TICKS], abs=1e-5)
    assert {tick["class"] for tick in ticks} == set(scenario.names().classes)


def test_the_raster_says_when_it_leaves_arrivals_out(cache_dir):
    scenario = load_scenario("chat_bursty", {"arrivals.rate": "40/s"})
    plan = make_plan(scenario)
    assert len(plan.schedule) > MAX_TICKS
    spec = figures(plan.schedule, ("default",), 30.0, 330.0)["raster"]
    assert len(spec["data"]["values"]) == MAX_TICKS
    text = render(preview(scenario, *plan), plan.schedule, ("default",), "", cache_dir)
    assert "The first 4000 arrivals." in text


@pytest.mark.parametrize("name", ["raster", "rate", "length-input", "length-output"])
def test_every_figure_is_valid_vega_lite(planned, name):
    scenario, plan, _ = planned
    spec = figures(plan.schedule, scenario.names().classes, 30.0, 330.0)[name]
    svg = vl_convert.vegalite_to_svg({**spec, "width": 400})
    assert "<svg" in svg
    assert "NaN" not in svg


def test_the_page_is_self_contained_and_runs_only_its_own_scripts(planned, cache_dir):
    scenario, plan, facts = planned
    text = render(facts, plan.schedule, scenario.names().classes, scenario.to_yaml(), cache_dir)
    (specs,) = re.findall(r'id="figures">(.*?)</script>', text)
    assert set(json.loads(specs)) == set(re.findall(r'class="chart" id="([^"]+)"', text))
    head = text[: text.index("<script")]
    assert not re.findall(r'(?:src|href)="', text[: text.index('id="figures"')])
    assert "default-src 'none'" in html.unescape(head)
    assert text.count("sha256-") == 2
    assert facts["schedule_sha256"][:12] in head


def test_what_a_scenario_says_cannot_become_code(planned, cache_dir):
    _, plan, facts = planned
    hostile = "</pre></script><script>alert(1)</script>"
    text = render(
        {**facts, "scenario": hostile}, plan.schedule, (hostile, "b", "c"), hostile, cache_dir
    )
    assert "<script>alert" not in text
    assert "</script><script>alert" not in embedded({"a": hostile})
    assert policy(["x"]) != policy(["y"])


def test_the_page_shows_a_corpus_of_agents(tmp_path, cache_dir):
    corpus = written(tmp_path / "agents.json", fanned_out())
    values = {
        "name": "agents",
        "arrivals": {"kind": "burst", "requests": 2},
        "agents": {"path": str(corpus)},
        "phases": {"warmup": "0s", "measure": "60s"},
    }
    scenario = Scenario.model_validate(values)
    plan = make_plan(scenario)
    page = render(preview(scenario, *plan), plan.schedule, ("default",), "", cache_dir)
    assert "1 trees, 6 requests, 3 chains, at most 1 below another" in page
    assert "ideal prefix-cache hit rate: 54.65% as recorded, 54.65% in this plan" in page
    assert "<td>261</td>" in page  # the longest context


def test_a_page_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        write_page(tmp_path / "no" / "page.html", "")
