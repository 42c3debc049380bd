"""What a page advises follows from what the run found."""

import pytest

from loadgen.measure.aggregate import summarize
from reports.run.verdict_section import banner, is_inconclusive, next_steps
from tests.runs import measured_run, starved, two_classes, with_manifest, with_shard

CHAT, URL = "scenarios/chat.yaml", "--target http://h"


def told(run, scenario=CHAT, target=URL, **options):
    return [
        (s.text, s.command)
        for s in next_steps(summarize(run, **options), scenario, target, "runs/chat-1")
    ]


def test_a_client_that_was_the_limit_is_sent_to_the_doctor():
    [(text, command)] = told(starved(measured_run(slo=["ttft <= 1s"])))
    assert "was the limit: use more workers (--workers), or lower the rate." in text
    assert command == "slobench doctor"


def test_a_client_whose_cores_others_kept_busy_is_sent_there_too():
    taken = {"allowed": [0], "online": 4, "own_s": 0.5, "idle_s": 0.0, "programs_s": 9.99}
    run = starved(measured_run(slo=["ttft <= 1s"]))
    [(text, command)] = told(with_shard(run, cpu_share=0.02, cores={**taken, "total_s": 10.0}))
    assert "stop the other programs" in text
    assert "--workers" not in text
    assert command == "slobench doctor"


def test_a_run_without_a_promise_can_be_judged_without_measuring_again():
    [(_, command)] = told(measured_run())
    assert command == "slobench rescore runs/chat-1 --slo 'p99(ttft) <= 500ms'"


def test_a_kept_promise_leads_to_how_much_more_and_an_unproven_one_to_how_much_longer():
    [(proof, _), (more, command)] = told(measured_run(slo=["p99(ttft) <= 300ms"]))
    assert proof.startswith("Measure for 1m")
    assert "about 299 requests are needed, which take 29.9 s" in proof  # ln 0.05 / ln 0.99, at 10/s
    assert more == "Find how much more load meets the SLO:"
    assert command == "slobench capacity scenarios/chat.yaml --target http://h"


def test_failures_come_before_anything_else():
    assert told(measured_run(slo=["ttft <= 1s"], n_failed=40))[0][0].startswith(
        "40 of 200 requests failed"
    )


def test_flags_alone_name_no_scenario_to_search_with():
    assert not [c for _, c in told(measured_run(slo=["p50(ttft) <= 1ms"]), "", "") if c]


@pytest.mark.parametrize("run", [
    measured_run(slo=["p99(ttft) <= 300ms"]),
    two_classes(chat=["p99(ttft) <= 300ms"], rag=["p50(ttft) <= 2s"]),
])  # fmt: skip
def test_what_the_samples_leave_open_is_inconclusive(run):
    summary = summarize(run, confidence=0.95)
    assert is_inconclusive(summary)
    assert banner(summary).word == "INCONCLUSIVE"
    cut = with_manifest(run, ended="interrupted")
    assert banner(summarize(cut, confidence=0.95)).word == "NO VERDICT"
