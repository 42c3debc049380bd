"""A request's own limit goes before everybody's: attainment, goodput, verdicts, live views."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.live.watched import meets_slos
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import derived, due_rows, meets
from loadgen.measure.per_request import per_request
from loadgen.measure.slo import parse_slo, slos_of_request
from loadgen.records import OWN_SLO, Status
from loadgen.studies.capacity.early_stop import EarlyStop
from loadgen.workload.scenario import load_scenario
from reports.run.frames import frames
from reports.run.verdict_section import slo_rows
from tests.runs import measured_run, replace_schedule, runs, two_classes

LIMITS_S = st.sampled_from([0.0, 0.05, 0.3, 1.0, 3.0])


def test_two_of_four_own_limits_decide_against_everybodys():
    """200 due requests with a TTFT of 50 to 200 ms, everybody's limit 1 s: 40 have 10 ms of their
    own, 20 have 10 s."""
    run = measured_run(slo=["ttft <= 1s", "attainment >= 90%"])
    own_s = np.zeros(220)
    own_s[20:60], own_s[60:80] = 0.01, 10.0
    found = summarize(replace_schedule(run, ttft_slo_s=own_s))
    assert (found.attainment.met, found.attainment.due) == (160, 200)
    assert found.goodput.requests_per_s.value == pytest.approx(8.0)
    assert found.verdict == "missed"
    each = found.slo[0]
    assert (each.text, each.n, each.n_own, each.value) == ("ttft <= 1s", 200, 60, 0.8)
    assert each.shown == "ttft <= 1s (60 of 200 by their own limit)"
    assert summarize(run).verdict == "met"


def test_a_looser_limit_of_its_own_is_kept_where_everybodys_is_not():
    run = measured_run(slo=["ttft <= 10ms"])
    found = summarize(replace_schedule(run, ttft_slo_s=np.full(220, 60.0)))
    assert (found.attainment.met, found.verdict) == (200, "met")
    assert summarize(run).attainment.met == 0


def test_promises_that_only_the_rows_make_are_judged_by_those_who_have_them():
    own_s = np.zeros(220)
    own_s[100:150] = 0.01
    found = summarize(replace_schedule(measured_run(), e2e_slo_s=own_s))
    each, share = found.slo
    assert (each.text, each.n, each.value) == ("e2e <= the request's own", 50, 0.0)
    assert (share.text, share.is_implied, share.value) == ("attainment >= 99%", True, 0.75)
    assert (found.verdict, found.exit_code) == ("missed", 1)
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert told["slo"][0]["limit"] is None
    assert "(50 of 50 by their own limit)" in str(slo_rows(found))


def test_other_promises_replace_what_the_rows_brought():
    run = replace_schedule(measured_run(), ttft_slo_s=np.full(220, 1e-6))
    assert summarize(run).attainment.met == 0
    other = summarize(run, slo=["ttft <= 10s"])
    assert (other.attainment.met, other.slo[0].n_own) == (200, 0)


def test_a_classes_promise_gives_way_too():
    run = two_classes(rag=["ttft <= 100ms"])  # every fourth is rag, at 1 s
    own_s = np.where(np.arange(220) % 8 == 3, 2.0, 0.0)
    before, after = (
        summarize(r).classes["rag"] for r in (run, replace_schedule(run, ttft_slo_s=own_s))
    )
    assert (before.attainment.met, before.attainment.due) == (0, 50)
    assert (after.attainment.met, after.slo[0].n_own) == (25, 25)


def of_rag(limit_s, every=4):
    """As many of the 50 due requests of rag, which take 1 s, with a limit of their own."""
    return np.where(np.arange(220) % every == 3, limit_s, 0.0)


def test_a_promise_to_one_class_does_not_hide_what_the_others_rows_brought():
    """chat keeps its promise; every row of rag brought 10 ms, and none is kept."""
    run = two_classes(chat=["ttft <= 10s"])
    found = summarize(replace_schedule(run, ttft_slo_s=of_rag(0.01)))
    assert (found.verdict, found.exit_code) == ("missed", 1)
    own, share = found.classes["rag"].slo
    assert (own.text, own.n, own.value) == ("ttft <= the request's own", 50, 0.0)
    assert (share.text, share.met) == ("attainment >= 99%", False)
    assert found.classes["rag"].verdict == "missed"
    assert found.classes["chat"].verdict == "met"
    assert summarize(replace_schedule(run, ttft_slo_s=of_rag(2.0))).verdict == "met"


def test_a_limit_brought_in_the_warm_up_judges_no_class():
    run = two_classes(chat=["ttft <= 10s"])
    own_s = np.zeros(220)
    own_s[3] = 0.01  # of rag
    found = summarize(replace_schedule(run, ttft_slo_s=own_s))
    assert (found.verdict, found.classes["rag"].slo) == ("met", ())


def test_a_small_class_that_misses_all_its_rows_brought_is_missed():
    """2 of 200 due requests: 99 % of all keep theirs."""
    run = two_classes(chat=["ttft <= 10s"])
    run.schedule_rows["class_id"] = np.isin(np.arange(220), [103, 107])
    own_s = np.where(run.schedule_rows["class_id"] == 1, 0.01, 0.0)
    found = summarize(replace_schedule(run, ttft_slo_s=own_s))
    assert (found.attainment.met, found.classes["rag"].attainment.met) == (198, 0)
    assert found.verdict == "missed"


@pytest.mark.parametrize(
    ("promised", "verdict"),
    [
        ({"rag": ["ttft <= 10s", "attainment >= 40%"]}, "met"),  # its own share of its own promise
        ({"rag": ["attainment >= 40%"]}, "met"),  # and of what only its rows promise
        ({"rag": ["attainment >= 60%"]}, "missed"),
        ({"slo": ["attainment >= 80%"]}, "met"),  # everybody's share: 175 of 200 keep theirs
        ({"slo": ["attainment >= 90%"]}, "missed"),
        ({}, "missed"),
    ],
)
def test_the_share_that_was_stated_is_asked_of_what_rows_brought(promised, verdict):
    """Half of rag's rows brought 10 ms, which they miss; the others keep everything."""
    run = two_classes(**{"chat": ["ttft <= 10s"], **promised})
    found = summarize(replace_schedule(run, ttft_slo_s=of_rag(0.01, every=8)))
    assert (found.attainment.met, found.classes["rag"].attainment.met) == (175, 25)
    assert found.verdict == verdict


def test_the_tightest_limit_of_its_own_sets_how_late_the_client_may_be():
    run = measured_run(slo=["ttft <= 10s"])
    run.request_rows["sent_s"] += 0.1  # 2 % of 10 s is 200 ms, of 1 s it is 20 ms
    loose, tight = (
        next(c for c in summarize(r).validity.checks if c.name == "lateness").ok
        for r in (run, replace_schedule(run, ttft_slo_s=np.full(220, 1.0)))
    )
    assert (loose, tight) == (True, False)


def oracle(run, row, slos):
    """One request judged by hand."""
    request, planned = run.request_rows[row], run.schedule_rows[row]
    if request["status"] != Status.ok or math.isnan(request["first_token_s"]):
        return False
    columns = per_request(run)
    values = {metric: float(columns.column(metric)[row]) for metric in OWN_SLO}
    for metric, column in OWN_SLO.items():
        stated = [slo.limit for slo in slos if slo.metric == metric]
        asked = [float(planned[column])] if planned[column] > 0 else stated
        for limit in asked:
            if math.isnan(values[metric]):
                if metric != "tpot_s":
                    return False
            elif values[metric] > limit:
                return False
    return True


@given(runs(), st.data())
@settings(deadline=None, max_examples=60)
def test_any_run_agrees_with_a_loop_over_its_requests(run, data):
    n = len(run.schedule_rows)
    own = {
        c: np.array(data.draw(st.lists(LIMITS_S, min_size=n, max_size=n))) for c in OWN_SLO.values()
    }
    run = replace_schedule(run, **own)
    texts = data.draw(
        st.lists(st.sampled_from(["ttft <= 500ms", "tpot <= 100ms", "e2e <= 2s"]), unique=True)
    )
    slos = [parse_slo(text) for text in texts]
    met = meets(per_request(run), slos)
    assert met.tolist() == [oracle(run, row, slos) for row in range(n)]


def test_without_any_nothing_changes():
    run = measured_run(slo=["ttft <= 120ms"], n_failed=3)
    same = replace_schedule(run, ttft_slo_s=np.zeros(220))
    assert summarize(run) == summarize(same)
    assert derived(run)["slo_met"].tolist() == derived(same)["slo_met"].tolist()
    assert per_request(run).own_slo_s == {}


def test_the_page_draws_no_line_for_limits_that_differ_by_request():
    run = replace_schedule(measured_run(slo=["tpot <= 1s"]), ttft_slo_s=np.full(220, 1.0))
    limits = frames(run, summarize(run), per_request(run)).limits
    assert limits["ttft_s"] == []
    assert [one["limit"] for one in limits["tpot_s"]] == [1.0]


def glimpse(own, ttft_s=0.2):
    return {
        "class_id": 0, "status": Status.ok, "ttft_s": ttft_s, "lateness_s": 0.0, "tpot_s": None,
        "e2e_s": 0.2, "close_s": 0.2, "max_stall_s": None, "duration_s": 0.2, "n_events": 1,
        "own_slo_s": own,
    }  # fmt: skip


def test_live_views_and_early_ends_see_them():
    asked = [parse_slo("ttft <= 100ms"), parse_slo("p99(ttft) <= 1ms")]
    assert [one.limit for one in slos_of_request(asked, {"ttft_s": 0.5, "e2e_s": 0.0})] == [0.5]
    assert [one.limit for one in slos_of_request(asked, {"e2e_s": 2.0})] == [0.1, 2.0]
    assert not meets_slos(glimpse(None), slos_of_request(asked, {}))
    assert meets_slos(glimpse((0.5, 0.0, 0.0)), slos_of_request(asked, {}))
    assert not meets_slos(glimpse((0.5, 0.0, 0.1)), slos_of_request(asked, {}))
    assert meets_slos(glimpse((0.5, 0.1, 0.0)), [])  # one token: no TPOT to miss
    scenario = load_scenario("capacity_search", ["phases.warmup=1s", "phases.measure=40s"])
    early = EarlyStop(scenario, 0.9, 3.0)
    for second in range(1, 40):
        early.note(second + 0.5, [glimpse((0.1, 0.0, 0.0))] * 20)
        early.reason(second + 0.5, in_flight=0)
    assert early.grade == "saturated"  # everybody's limit, 500 ms, would be kept


def test_only_requests_that_were_due_are_judged():
    run = replace_schedule(measured_run(), ttft_slo_s=np.where(np.arange(220) < 20, 1e-6, 5.0))
    assert due_rows(run).sum() == 200
    assert summarize(run).attainment.met == 200
