"""What a page advises follows from what the run found."""

from dataclasses import replace

import numpy as np
import pytest

from loadgen.measure.aggregate import summarize
from reports.run.tables import tiles
from reports.run.verdict_section import (
    banner,
    headline,
    is_inconclusive,
    missed_cause,
    next_steps,
    slo_rows,
)
from tests.runs import measured_run, starved, two_classes, with_manifest, with_shard

URL = ("--target", "http://h")


def told(run, *command, **options):
    command = ("slobench", "run", *(command or ("chat.yaml", *URL)))
    source = "scenarios/chat.yaml" if command[2] == "chat.yaml" else ""
    run = with_manifest(run, command=command, scenario={"source": source})
    summary = summarize(run, **options)
    return [(s.text, s.command) for s in next_steps(summary, "runs/chat-1")]


def search(*args, **options):
    return [command for _, command in told(*args, **options) if "slobench capacity" in command]


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
    assert command == (
        "slobench capacity scenarios/chat.yaml --slo 'ttft <= 300ms' --attainment 99% "
        "--target http://h"
    )


def test_an_unproven_slo_of_a_class_needs_requests_of_that_class():
    """50 of the 200 requests in 20 s are rag: 59 of them take 59 / 2.5 s."""
    [(proof, _), _] = told(two_classes(chat=["p50(ttft) <= 1s"], rag=["p95(ttft) <= 3s"]))
    assert "about 59 requests of rag are needed, which take 23.6 s" in proof


def test_failures_come_before_anything_else():
    assert told(measured_run(slo=["ttft <= 1s"], n_failed=40))[0][0] == (
        "See the section “How requests failed” of the page first: 40 of 200 requests failed."
    )


FLAGS = ("--rate", "40/s", "--input-len=2000", "--output-len", "200", "--duration", "30s")


def test_the_search_has_the_flags_of_the_run():
    run = measured_run(slo=["ttft <= 10ms", "attainment >= 90%"])
    slos = ("--slo", "ttft <= 10ms", "--slo=attainment >= 90%")
    assert search(run, *FLAGS, *slos, "--target", "sim", "--engine", "shape=8b", "--force") == [
        "slobench capacity --rate 40/s --input-len 2000 --output-len 200 --duration 30s "
        "--slo 'ttft <= 10ms' --slo 'attainment >= 90%' --target sim --engine shape=8b"
    ]
    assert search(run, "chat.yaml", "--set", "seed=3", *URL, "--seed", "4") == [
        "slobench capacity scenarios/chat.yaml --set seed=3 --seed 4 --target http://h"
    ]


def test_a_search_needs_a_limit_for_each_request():
    """Percentiles become limits, and the highest the attainment; a mean and a gap cannot."""
    slo = ["p50(ttft) <= 1ms", "p90(tpot)<=2s", "mean(e2e) <= 1s", "p99(itl) <= 1s"]
    assert search(measured_run(slo=slo), *FLAGS) == [
        "slobench capacity --rate 40/s --input-len 2000 --output-len 200 --duration 30s "
        "--slo 'ttft <= 1ms' --slo 'tpot<=2s' --attainment 90%"
    ]
    assert search(measured_run(slo=["mean(e2e) <= 1ms"]), *FLAGS) == []


def test_other_slos_than_those_of_the_run_are_searched_with():
    run = measured_run(slo=["ttft <= 10s"])
    assert search(run, "chat.yaml", "--slo", "ttft <= 10s", *URL, slo=["ttft <= 10ms"]) == [
        "slobench capacity scenarios/chat.yaml --slo 'ttft <= 10ms' --target http://h"
    ]


def test_a_run_of_another_verb_names_no_search():
    run = with_manifest(measured_run(slo=["ttft <= 1ms"]), command=("slobench", "sweep", "x.yaml"))
    assert summarize(run).capacity_command == ""
    run = with_manifest(run, command=())
    assert summarize(run).capacity_command == ""


def test_a_simulated_run_is_searched_on_the_simulated_engine():
    flags = ("simulate", "chat.yaml", "--trace", "t.csv", "--slo", "ttft <= 1s")
    run = with_manifest(measured_run(slo=["ttft <= 1s"]), command=("slobench", *flags))
    run = with_manifest(run, scenario={"source": "chat.yaml"})
    assert summarize(run).capacity_command == (
        "slobench capacity chat.yaml --trace t.csv --slo 'ttft <= 1s' --target sim"
    )
    run = with_manifest(run, command=("slobench", *flags, "--mode", "static"))
    assert summarize(run).capacity_command == ""


def test_the_slowest_requests_explain_only_what_the_missed_slo_limits():
    def cause(*slo):
        found = missed_cause(summarize(measured_run(slo=slo)))
        return found and (found.reason, found.remedy)

    assert cause("p50(tpot) <= 1ms") is None
    assert cause("p50(ttft) <= 50ms", "p50(tpot) <= 1ms") == (
        "The slowest requests mostly waited for the first token",
        "shorten prompts, or speed up or split prefills",
    )
    run = measured_run(slo=["p50(ttft) <= 50ms"])
    rows = run.request_rows
    rows["last_token_s"] += np.linspace(0, 5, len(rows))  # long answers: E2E without TTFT
    by_ttft = missed_cause(summarize(run))
    assert by_ttft is None or "decoded" not in by_ttft.reason
    by_e2e = missed_cause(summarize(run, ["p50(e2e) <= 50ms"]))
    assert by_e2e is not None
    assert by_e2e.reason == "The slowest requests mostly decoded"
    assert by_e2e.step.text == (
        "The slowest requests mostly decoded: shorten answers, or run fewer of them at once."
    )
    assert by_e2e.step.short == "Shorten answers, or run fewer of them at once"


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


def test_an_slo_without_enough_samples_beside_an_open_slo_is_not_inconclusive():
    """200 due requests leave a P99 near its limit open, and have no P99.9."""
    run = measured_run(slo=["p99(ttft) <= 300ms", "p99.9(ttft) <= 300ms"])
    summary = summarize(run, confidence=0.95)
    assert summary.reason_kinds == ("unproven", "too_few_samples")
    assert not is_inconclusive(summary)


def test_too_few_requests_for_a_percentile_lead_to_a_longer_run():
    """40 due requests in 20 s at 2/s: P99 needs 100, so 50 s."""
    run = measured_run(44, rate_per_s=2.0, slo=["p99(ttft) <= 1s"])
    assert told(run) == [("Measure for at least 60s (--duration 60s).", "")]
    assert banner(summarize(run)).word == "NO VERDICT"
    [row] = slo_rows(summarize(run))
    assert (row[4].text, row[4].small) == (
        "? no verdict", "40 samples have no P99, which needs at least 100",
    )  # fmt: skip
    assert (row[5].text, row[5].small) == ("–", "needs n ≈ 100")


def test_too_few_successful_requests_lead_to_a_longer_run():
    run = measured_run(slo=["ttft <= 1s"])
    assert told(run, min_requests=300) == [("Measure for at least 34s (--duration 34s).", "")]


def test_a_goodput_out_of_reach_does_not_blame_the_server():
    run = measured_run(slo=["ttft <= 1s", "goodput >= 50/s"])
    assert told(run, *FLAGS) == [
        (
            "Offer more than 50/s (--rate, arrivals.rate): goodput cannot exceed the offered rate.",
            "",
        )
    ]
    assert banner(summarize(run)).reasons == (
        "goodput >= 50/s: missed at 10/s; it cannot be kept at this rate: only 10/s was offered.",
    )


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (  # 0.05 ** (1 / 200) = 98.51 %
            measured_run(slo=["ttft <= 1s", "tpot <= 200ms", "attainment >= 95%"]),
            "200 of 200 requests met TTFT ≤ 1 s and TPOT ≤ 200 ms (target 95 %;"
            " at least 98.5 % with 95 % confidence).",
        ),
        (measured_run(), ""),
        (starved(measured_run(slo=["ttft <= 1s"])), ""),
        (measured_run(0, slo=["ttft <= 1s"]), ""),
    ],
    ids=["limits of requests", "no SLO", "invalid", "empty"],
)
def test_the_headline_counts_the_requests_that_met_the_limits(run, sentence):
    assert headline(summarize(run)) == sentence


def test_the_headline_shows_a_percentile_with_its_limit():
    found = summarize(measured_run(slo=["p50(ttft) <= 10ms"]))
    value = f"{1e3 * found.metrics['ttft_s'].percentiles['p50'].value:.3g} ms"
    assert headline(found) == f"p50 TTFT {value} (limit 10 ms)."


def test_the_headline_does_not_name_limits_that_differ_between_classes():
    run = two_classes(chat=["ttft <= 1s"], rag=["ttft <= 2s"])
    assert headline(summarize(run)).startswith("200 of 200 requests met all their limits (at least")


@pytest.mark.parametrize(
    ("slo", "n_failed", "small"),
    [
        (["p99(ttft) <= 500ms", "ttft <= 9s"], 0, "limit 500 ms, headroom 80.2 %"),
        (["ttft <= 50ms"], 0, "limit 50 ms, exceeded by 98 %"),
        (["ttft <= 1s"], 5, "limit 1 s, exceeded: ∞ with unanswered requests"),
        ([], 0, "no limit in the SLOs"),
    ],
)
def test_a_card_shows_a_latency_against_its_limit(slo, n_failed, small):
    run = measured_run(slo=slo, n_failed=n_failed)
    rows = run.request_rows
    rows["first_token_s"] = rows["released_s"] + 0.099
    (name, cell), *_ = tiles(summarize(run))
    assert (name, cell.small) == ("p99 TTFT", small)


def test_a_card_of_an_invalid_run_claims_no_headroom():
    found = summarize(measured_run(slo=["ttft <= 9s"]))
    invalid = replace(found, validity=replace(found.validity, trusted=False))
    (_, cell), *_ = tiles(invalid)
    assert cell.small == "limit 9 s"
