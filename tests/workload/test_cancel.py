"""Requests drawn to be cancelled: how many, when, and that nothing else changes with them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import ScenarioError
from loadgen.records import SCHEDULE
from loadgen.workload.preview import preview
from loadgen.workload.scenario import load_scenario
from loadgen.workload.schedule import make_plan, make_schedule


def asking(*keys):
    return load_scenario("quickstart", list(keys))


def test_a_share_is_drawn_and_cancelled_after_a_fixed_time():
    rows = make_schedule(
        asking("arrivals.rate=200/s", "requests.cancel={share: 20%, after: 1500ms}")
    )
    drawn = rows["cancel_after_s"] > 0
    assert len(rows) > 3000
    assert drawn.mean() == pytest.approx(0.2, abs=0.025)  # 4 standard deviations are 0.029
    assert set(rows["cancel_after_s"]) == {0.0, 1.5}


def test_the_instants_follow_their_distribution():
    rows = make_schedule(
        asking(
            "arrivals.rate=200/s",
            "requests.cancel={share: 100%, after: {kind: exponential, mean: 3s}}",
        )
    )
    assert (rows["cancel_after_s"] > 0).all()
    assert rows["cancel_after_s"].mean() == pytest.approx(3.0, rel=0.08)


@settings(max_examples=20)
@given(st.integers(0, 2**63 - 1), st.floats(0.01, 1.0))
def test_everything_else_stays_as_it_was(seed, share):
    plain = make_schedule(asking(f"seed={seed}"))
    cancelled = make_schedule(
        asking(f"seed={seed}", f"requests.cancel={{share: {share}, after: 1s}}")
    )
    for name in SCHEDULE.names or ():
        if name != "cancel_after_s":
            assert plain[name].tobytes() == cancelled[name].tobytes(), name
    again = make_schedule(asking(f"seed={seed}", f"requests.cancel={{share: {share}, after: 1s}}"))
    assert again.tobytes() == cancelled.tobytes()


def test_only_the_class_that_asks_for_it_is_cancelled():
    chosen = asking(
        "classes={a: {requests: {input_tokens: 5, output_tokens: 5, cancel: {share: 1, after: 1s}}}"
        ", b: {requests: {input_tokens: 5, output_tokens: 5}}}",
        "requests=null",
        "slo=[]",
    )
    rows = make_schedule(chosen)
    assert set(rows["class_id"][rows["cancel_after_s"] > 0]) == {0}
    assert set(rows["class_id"]) == {0, 1}


def test_preview_counts_them_and_proves_with_the_others_alone():
    chosen = asking("requests.cancel={share: 50%, after: 1s}", "slo=[ttft <= 1s]")
    plan = make_plan(chosen)
    figures = preview(chosen, *plan)
    promise, implied = figures["slo"]
    assert 0 < figures["n_withdrawn"] < figures["n_measured"]
    assert promise["n"] == implied["n"] == figures["n_measured"] - figures["n_withdrawn"]


def test_a_cancel_without_its_share_is_told():
    with pytest.raises(ScenarioError, match=r"requests\.cancel\.share: this key is required"):
        asking("requests.cancel={after: 1s}")
    with pytest.raises(ScenarioError, match=r"requests\.cancel\.share"):
        asking("requests.cancel={share: 0, after: 1s}")


def test_an_absurdly_short_cancel_is_still_one():
    rows = make_schedule(asking("requests.cancel={share: 100%, after: 0s}"))
    assert np.all(rows["cancel_after_s"] > 0)
