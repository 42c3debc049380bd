"""Preview: asked against generated, and the requests that a proven verdict needs."""

import io
import json

import pytest
from rich.console import Console

from loadgen.workload.planned_counts import missing_percentiles
from loadgen.workload.preview import preview
from loadgen.workload.scenario import load_scenario, scenario_from_flags
from loadgen.workload.schedule import make_schedule
from reports.preview.view import NO_SLO, arrival_rows, number_of_requests, slo_rows, tables


def previewed(**changes):
    asked = {"rate": "100/s", "input_len": 100, "output_len": 10, "duration": "200s", **changes}
    scenario = scenario_from_flags(**asked)
    return preview(scenario, make_schedule(scenario))


@pytest.mark.parametrize("name", ["quickstart", "chat_poisson", "chat_bursty", "power_law_mix"])
def test_every_shipped_scenario_previews_as_json(name):
    scenario = load_scenario(name)
    figures = json.loads(json.dumps(preview(scenario, make_schedule(scenario)), allow_nan=False))
    assert figures["scenario"] == name
    assert figures["n"] >= figures["n_measured"] > 0


def test_what_was_generated_stands_beside_what_was_asked():
    figures = previewed(
        input_len={"kind": "uniform", "min": 100, "max": 300},
        overrides=["requests.shared_prefix.tokens=50"],
    )
    arrivals = figures["arrivals"]
    assert arrivals["asked_rate_per_s"] == 100.0
    assert arrivals["generated_rate_per_s"] == pytest.approx(100, abs=2.9)  # 4 sigma
    assert arrivals["gap_cv"] == pytest.approx(1, abs=0.03)
    assert figures["input_tokens"]["asked_mean"] == 250.0
    assert figures["input_tokens"]["mean"] == pytest.approx(250, abs=2)
    assert figures["input_tokens"]["max"] == 350
    assert figures["output_tokens"] == {
        "asked_mean": 10.0,
        "mean": 10.0,
        "p50": 10,
        "p90": 10,
        "p99": 10,
        "max": 10,
    }
    assert figures["output_tokens_per_s"] == pytest.approx(1000, abs=29)
    assert figures["prefix_share"] == pytest.approx(0.2, abs=0.002)


def test_only_the_measured_window_counts_towards_a_proof():
    figures = previewed(rate="10/s", warmup="100s", duration="10s", slo=["p99(ttft) <= 1s"])
    assert figures["n_measured"] == figures["slo"][0]["n"] < 150 < figures["n"]


@pytest.mark.parametrize(
    ("promise", "n_needed"),
    [
        ("p50(ttft) <= 1s", 5),  # 0.5^5 = 3.1 %
        ("p90(ttft) <= 1s", 29),  # 0.9^29 = 4.7 %
        ("p99(ttft) <= 1s", 299),
        ("p99.9(e2e) <= 9s", 2995),
        ("attainment >= 95%", 59),
        ("error_rate <= 1%", 299),
        ("attainment >= 100%", None),  # no sample proves a certainty
        ("mean(ttft) <= 1s", None),
        ("tpot <= 50ms", None),
        ("p99(itl) <= 50ms", None),  # gaps of one request are not independent
    ],
)
def test_a_proof_at_95_percent_needs_the_zero_miss_binomial_bound(promise, n_needed):
    figures = previewed(duration="10s", slo=["ttft <= 1s", promise])["slo"][1]
    assert figures["n_needed"] == n_needed
    assert figures["is_provable"] == (None if n_needed is None else figures["n"] >= n_needed)


def test_a_proof_behind_a_queue_needs_as_many_requests_as_its_clusters():
    """P(no miss) ≤ 5 % for a chain with τ = 25: with bounds widened for what such a run does not
    show, (25 + 1)/2 times the 299 independent requests of a P99, and 40 to 90 % more."""
    figures = previewed(duration="10s", slo=["p99(ttft) <= 1s", "mean(ttft) <= 1s"])["slo"]
    assert 1.4 * 13 * 299 < figures[0]["n_needed_queued"] < 1.9 * 13 * 299
    assert figures[0]["is_provable_queued"] is False
    assert figures[1]["n_needed_queued"] is None


def test_the_minutes_a_proof_needs_follow_from_the_rate():
    figures = previewed(rate="1/s", duration="100s", slo=["p99(ttft) <= 1s"])["slo"][0]
    assert figures["is_provable"] is False
    assert figures["minutes_needed"] == pytest.approx(299 / 60, rel=0.35)


CLASSES = """\
schema: 1
name: two
seed: 3
arrivals: {kind: constant, rate: 10/s}
phases: {measure: 30s}
slo: ["error_rate <= 1%"]
classes:
  chat:
    weight: 2
    requests: {input_tokens: 100, output_tokens: 10}
    slo: ["ttft <= 1s", "p99(ttft) <= 2s"]
  rag:
    weight: 1
    requests: {input_tokens: 1000, output_tokens: 10}
    slo: ["p90(e2e) <= 9s"]
"""


def test_the_slos_of_classes_stand_with_the_requests_that_they_need(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(CLASSES)
    scenario = load_scenario(path)
    schedule = make_schedule(scenario)
    n_chat = int((schedule["class_id"] == 0).sum())
    facts = preview(scenario, schedule)
    rows = slo_rows(facts)
    chat, rag = f"{n_chat} (too few)", f"{300 - n_chat} (enough without a queue)"
    assert [(text, needed, window) for text, needed, _, window, _ in rows] == [
        ("error_rate <= 1%", "299", "300 (enough without a queue)"),
        ("chat: ttft <= 1s", "–", "counted in attainment"),
        ("chat: p99(ttft) <= 2s", "299", chat),
        ("chat: attainment >= 99% (default)", "299", chat),
        ("rag: p90(e2e) <= 9s", "29", rag),
    ]
    least, most = map(float, rows[2][4].split(" to "))  # of 30 s, with n_chat requests in them
    assert least == pytest.approx(299 * 0.5 / n_chat, rel=1e-3)
    assert most == pytest.approx(int(rows[2][2]) * 0.5 / n_chat, rel=1e-3)


def test_a_scenario_with_slos_in_classes_only_has_a_table():
    scenario = load_scenario("mixed_classes", {"slo": []})
    figures = preview(scenario, make_schedule(scenario))
    assert figures["slo"] == []
    out = io.StringIO()
    Console(file=out, width=140, color_system=None).print(tables(figures))
    assert NO_SLO not in out.getvalue()
    assert "requests needed for certainty" in out.getvalue()


CLOSED = """\
schema: 1
name: users
arrivals: {kind: users, users: 4, think: 100ms}
requests: {input_tokens: 100, output_tokens: 10}
phases: {measure: 20s}
slo: ["p99(ttft) <= 1s"]
"""


def test_a_closed_loop_has_no_rate_and_no_known_number_of_requests(tmp_path):
    path = tmp_path / "users.yaml"
    path.write_text(CLOSED)
    scenario = load_scenario(path)
    figures = preview(scenario, make_schedule(scenario))
    assert figures["arrivals"]["asked_rate_per_s"] is None
    assert figures["arrivals"]["generated_rate_per_s"] is None
    assert figures["output_tokens_per_s"] is None
    assert arrival_rows(figures["arrivals"])[0] == ("rate per s", "n/a", "n/a")
    assert slo_rows(figures) == [("p99(ttft) <= 1s", "299", "6514", "n/a: closed loop", "")]
    assert number_of_requests(figures).endswith("in 20 s: a closed loop")
    assert number_of_requests(previewed(duration="1s")).endswith("of them in the measured window")


def missing(**changes):
    given = {"rate": "4/s", "input_len": 100, "output_len": 10, "duration": "20s", **changes}
    given = {name: value for name, value in given.items() if value is not None}
    scenario = scenario_from_flags(**given)
    return missing_percentiles(scenario, make_schedule(scenario))


def test_a_plan_that_cannot_have_a_percentile_names_the_flag_that_would_do():
    """20 s · (100 + 2 √100) / 79 requests, in steps of 5 s."""
    assert missing(slo=["p99(ttft) <= 1s", "p95(ttft) <= 1s"]) == [
        "p99(ttft) <= 1s cannot be judged: this plan sends 79 requests, and a P99 needs at least "
        "100; add --duration 35s, or state the SLO about p95"
    ]
    assert missing(slo=["p99(ttft) <= 1s"], duration="35s") == []
    assert missing(slo=["p99(itl) <= 1s", "ttft <= 1s", "mean(ttft) <= 1s"]) == []


def test_a_plan_of_a_number_of_requests_names_that_number():
    (text,) = missing(slo=["p99.9(ttft) <= 1s"], duration=None, num_prompts=500)
    assert text.endswith("at least 1000; add --num-prompts 1000, or state the SLO about p99")


def test_a_closed_loop_has_no_known_number_of_requests():
    assert missing(slo=["p99(ttft) <= 1s"], rate=None, concurrency=1) == []


def test_the_percentiles_of_a_class_need_requests_of_that_class():
    scenario = load_scenario(
        "mixed_classes", ["phases.measure=30s", "classes.completion.slo=[p99.9(e2e) <= 1s]"]
    )
    texts = missing_percentiles(scenario, make_schedule(scenario))
    assert [text.split(" cannot")[0] for text in texts] == ["completion: p99.9(e2e) <= 1s"]
