"""The whole endings of runs as they stand on the terminal: known answers, reviewed as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from loadgen.measure.aggregate import summarize
from loadgen.records import Run, Status
from reports.ending import text
from reports.run.ending import ending
from tests.runs import changed, cut_off, measured_run, starved, traffic, two_classes, with_manifest

COMMAND = ("slobench", "run", "chat.yaml", "--target", "sim")
LIMITS = ["ttft <= 1s", "tpot <= 200ms", "attainment >= 95%"]


def rejected(run: Run, n: int) -> Run:
    """The run whose last requests failed with status 429."""
    run.request_rows["http_status"][-n:] = 429
    return run


ENDINGS: list[tuple[str, Run, Mapping[str, Any], str]] = [
    (
        "met, proven",
        measured_run(1100, rate_per_s=50.0, slo=LIMITS),
        {},
        """\
MET with 95 % confidence: 1 000 of 1 000 requests met TTFT ≤ 1 s and TPOT ≤ 200 ms
  ✓ ttft <= 1s         100 % of requests; p95 of the answers 136 ms, 14 % of the limit
  ✓ tpot <= 200ms      100 % of requests; p95 of the answers 11 ms, 5.5 % of the limit
  ✓ attainment >= 95%  100 % of requests, 1 000 of 1 000
  traffic    requested 50/s, sent 50/s: 1 000 of 1 000 requests; 1 000 output tokens/s; none failed
  certainty  with 95 % confidence, the share within the limits is at least 99.7 %
  next       find how much more load meets the SLO: slobench capacity chat.yaml --target sim
""",
    ),
    (
        "met, clear of the limit",
        measured_run(84, ttft_s=0.02, slo=LIMITS),
        {},
        """\
MET, clear of the limit: 64 of 64 requests met TTFT ≤ 1 s and TPOT ≤ 200 ms
  ✓ ttft <= 1s         100 % of requests; p95 of the answers 26.2 ms, 2.6 % of the limit
  ✓ tpot <= 200ms      100 % of requests; p95 of the answers 10.9 ms, 5.5 % of the limit
  ✓ attainment >= 95%  100 % of requests, 64 of 64
  traffic    requested 3.2/s, sent 3.2/s: 64 of 64 requests; 64.5 output tokens/s; none failed
  certainty  the slowest of 64 took 29.8 ms, 34 times below 1 s; only a kind of slowness absent from
             the run could change this
  next       find how much more load meets the SLO: slobench capacity chat.yaml --target sim
""",
    ),
    (
        "met in this run",
        measured_run(44, rate_per_s=2.0, slo=["ttft <= 200ms", "attainment >= 95%"]),
        {},
        """\
MET in this run: 40 of 40 requests met TTFT ≤ 200 ms
  ✓ ttft <= 200ms      100 % of requests; p95 of the answers 119 ms, 60 % of the limit
  ✓ attainment >= 95%  100 % of requests, 40 of 40
  traffic    requested 2/s, sent 2/s: 40 of 40 requests; 40 output tokens/s; none failed
  certainty  in this run only: 95 % confidence needs about 59 requests, 29.5 s at this rate
  next       measure for 1m (--duration 1m) to reach 95 % confidence
""",
    ),
    (
        "met by the default share",
        measured_run(44, rate_per_s=2.0, slo=["ttft <= 200ms"]),
        {},
        """\
MET: 40 of 40 requests met TTFT ≤ 200 ms
  ✓ ttft <= 200ms                100 % of requests; slowest 131 ms, 65 % of the limit
  ✓ attainment >= 99% (default)  100 % of requests, 40 of 40
  traffic    requested 2/s, sent 2/s: 40 of 40 requests; 40 output tokens/s; none failed
  certainty  in this run only: 40 requests do not prove 99 %, a default (--slo 'attainment >= 95%')
  next       find how much more load meets the SLO: slobench capacity chat.yaml --target sim
""",
    ),
    (
        "missed",
        measured_run(slo=["p50(ttft) <= 50ms", "error_rate <= 1%"]),
        {},
        """\
MISSED with 95 % confidence: p50(ttft) <= 50ms at 97.7 ms
  ✗ p50(ttft) <= 50ms  97.7 ms, 195 % of the limit
  ✓ error_rate <= 1%   0 %
  why        The slowest requests mostly waited for the first token
  traffic    requested 10/s, sent 10/s: 200 of 200 requests; 200 output tokens/s; none failed
  certainty  with 95 % confidence, p50(ttft) is at least 96 ms
  next       find how much load meets the SLO:
             slobench capacity chat.yaml --slo 'ttft <= 50ms' --attainment 50% --target sim
""",
    ),
    (
        "missed by failures",
        rejected(measured_run(n_failed=60, slo=["ttft <= 1s", "attainment >= 95%"]), 20),
        {},
        """\
MISSED: attainment >= 95% at 70 %
  ✗ attainment >= 95%  70 % of requests, 140 of 200
    ttft <= 1s         70 % of requests; p95 of the answers 129 ms, 13 % of the limit
  why        The server, or a gateway in front of it, refused a part of the load: 40 of 200 requests
             were refused with HTTP 503: "overloaded"
  traffic    requested 10/s, sent 10/s: 200 of 200 requests; 141 output tokens/s; 60 failed (40 HTTP
             503, 20 HTTP 429)
  certainty  in this run only: 95 % confidence needs about 1 297 requests, 2.17 min at this rate
  next       find how much load meets the SLO: slobench capacity chat.yaml --target sim
""",
    ),
    (
        "overloaded",
        cut_off(measured_run(220, ttft_s=8.0, slo=["p50(ttft) <= 1s"]), slice(120, None)),
        {},
        """\
MISSED by far: p50(ttft) <= 1s: half of the requests took longer than 12.5 s
  ✗ p50(ttft) <= 1s  12.5 s, 1 253 % of the limit
  why        Overloaded: 100 of 200 requests had not finished 10 s after the last was sent
  traffic    requested 10/s, sent 10/s: 200 of 200 requests; 119 output tokens/s; 100 unfinished
  certainty  misses in each quarter of the run: a longer run would miss, too
  next       find how much load meets the SLO:
             slobench capacity chat.yaml --slo 'ttft <= 1s' --attainment 50% --target sim
""",
    ),
    (
        "goodput above the offered rate",
        measured_run(slo=["output_tokens_per_s >= 100/s", "goodput >= 50/s"]),
        {},
        """\
MISSED with 95 % confidence: goodput >= 50/s at 10/s
  ✗ goodput >= 50/s               10/s, 20 % of the limit; cannot be kept at this rate: only 10/s
                                  was offered
  ✓ output_tokens_per_s >= 100/s  200/s, 200 % of the limit
  traffic    requested 10/s, sent 10/s: 200 of 200 requests; 200 output tokens/s; none failed
  certainty  with 95 % confidence, the goodput is at most 10/s
  next       offer more than 50/s (--rate, arrivals.rate)
""",
    ),
    (
        "invalid",
        starved(measured_run(slo=["p50(ttft) <= 1s"])),
        {},
        """\
INVALID, no verdict: the measurement cannot be trusted
    p50(ttft) <= 1s  97.7 ms, 9.8 % of the limit; + up to 9 s instrument error
  why        The load generator's own delays can change the verdict: p50(ttft) <= 1s: met at 97.7 ms
             + up to 9 s instrument error, which reaches the limit. Cause: a worker used 99 % of a
             core, so its own CPU was full. Remedy: use more workers (--workers), or lower the rate.
  traffic    requested 10/s, sent 10/s: 200 of 200 requests; 200 output tokens/s; none failed
             + 2 more notes: --full
  next       to check how much load this machine can measure accurately: slobench doctor
""",
    ),
    (
        "too few requests for the percentile",
        measured_run(44, rate_per_s=2.0, slo=["p99(ttft) <= 1s"]),
        {},
        """\
NO VERDICT: 40 requests are too few for p99(ttft) <= 1s, which needs at least 100
  ? p99(ttft) <= 1s  40 of the 100 requests that it needs
  traffic    requested 2/s, sent 2/s: 40 of 40 requests; 40 output tokens/s; none failed
  next       measure for at least 60s (--duration 60s)
""",
    ),
    (
        "no SLO",
        measured_run(),
        {},
        """\
NO VERDICT: no SLO was given, so there is nothing to meet or miss
    TTFT  p50 97.7 ms, p90 123 ms, p99 146 ms
    TPOT  p50 10.2 ms, p90 10.8 ms, p99 11.4 ms
    E2E   p50 292 ms, p90 321 ms, p99 340 ms
  traffic    requested 10/s, sent 10/s: 200 of 200 requests; 200 output tokens/s; none failed
  next       state an SLO (--slo 'p99(ttft) <= 500ms'); to check this run against it without
             measuring again: slobench rescore runs/x --slo 'p99(ttft) <= 500ms'
""",
    ),
    (
        "less certain than required",
        measured_run(slo=["p99(ttft) <= 300ms"]),
        {"confidence": 0.95},
        """\
INCONCLUSIVE: not certain enough: 95 % confidence needs about 299 requests, 29.9 s at this rate
  ✓ p99(ttft) <= 300ms  146 ms, 49 % of the limit
  traffic    requested 10/s, sent 10/s: 200 of 200 requests; 200 output tokens/s; none failed
  next       measure for 1m (--duration 1m) to reach 95 % confidence
""",
    ),
    (
        "interrupted",
        with_manifest(
            measured_run(n_failed=3, slo=["ttft <= 1s"]),
            ended="interrupted",
            end_reason="you stopped the run (Ctrl-C)",
        ),
        {},
        """\
NO VERDICT: the run was interrupted: you stopped the run (Ctrl-C)
    ttft <= 1s                   98.5 % of requests; p99 of the answers 149 ms, 15 % of the limit
  ✗ attainment >= 99% (default)  98.5 % of requests, 197 of 200
  traffic    requested 10/s, sent 10/s: 200 of 200 requests; 198 output tokens/s; 3 failed (HTTP
             503)
  next       measure again, to the end
""",
    ),
    (
        "closed loop",
        with_manifest(
            measured_run(slo=["p50(ttft) <= 1s"]), classes={"default": traffic(is_closed_loop=True)}
        ),
        {},
        """\
MET in this run: p50(ttft) <= 1s at 97.7 ms
  ✓ p50(ttft) <= 1s  97.7 ms, 9.8 % of the limit
  traffic    sent 10/s, closed loop: 200 of 200 requests; 200 output tokens/s; none failed
  certainty  in this run only: the run is too short for 95 % confidence
  note       Mostly start-up: the 220 users begin together, and too few requests followed their
             first answers; a closed loop of 220 users needs about 4 400 requests.
  next       find how much more load meets the SLO:
             slobench capacity chat.yaml --slo 'ttft <= 1s' --attainment 50% --target sim
""",
    ),
    (
        "classes",
        two_classes(
            chat=["ttft <= 500ms"],
            rag=["ttft <= 500ms", "p50(e2e) <= 10s"],
            slo=["error_rate <= 5%"],
        ),
        {},
        """\
MISSED with 95 % confidence: rag: attainment >= 99% at 0 %
  ✗ rag: attainment >= 99% (default)   0 % of requests, 0 of 50
  ✓ error_rate <= 5%                   0 %
  ✓ chat: ttft <= 500ms                100 % of requests; p99 of the answers 146 ms, 29 % of the
                                       limit
  ✓ chat: attainment >= 99% (default)  100 % of requests, 150 of 150
  + 2 more SLOs: --full
  why        The slowest requests mostly waited for the first token
  traffic    requested 10/s, sent 10/s: 200 of 200 requests; 200 output tokens/s; none failed
  certainty  with 95 % confidence, the share within the limits is at most 5.82 %
  note       50 of 200 answers came in one piece (a single event or read), so that they have no TPOT
             and no ITL; SLOs on them leave these answers out.
  next       find how much load meets the SLO: slobench capacity chat.yaml --target sim
""",
    ),
    (
        "all failed",
        measured_run(n_failed=220),
        {},
        """\
NO VERDICT: the server, or a gateway in front of it, did not serve yet: 200 of 200 requests were
  refused with HTTP 503: "overloaded"
  traffic    requested 10/s, sent 10/s: 200 of 200 requests; 0 output tokens/s; 200 failed (HTTP
             503)
  next       --wait-ready 5m waits until a server that is still loading answers
""",
    ),
    (
        "nothing due",
        measured_run(0, slo=["ttft <= 1s"]),
        {},
        """\
NO VERDICT: no request was due in the measured window
  ? attainment >= 99%  no value, because there are no samples
    ttft <= 1s         no request was due
  traffic    no request was due in the measured window
  next       measure for longer (--duration), or with a shorter warm-up (--warmup)
""",
    ),
    (
        "other SLOs than those of the run",
        measured_run(slo=["ttft <= 1s"]),
        {"slo": ["p50(ttft) <= 50ms"]},
        """\
MISSED with 95 % confidence: p50(ttft) <= 50ms at 97.7 ms
  ✗ p50(ttft) <= 50ms  97.7 ms, 195 % of the limit
  why        The slowest requests mostly waited for the first token
  traffic    requested 10/s, sent 10/s: 200 of 200 requests; 200 output tokens/s; none failed
  certainty  with 95 % confidence, p50(ttft) is at least 96 ms
  judged     Made under: ttft <= 1s. Judged here by other SLOs: p50(ttft) <= 50ms.
  next       find how much load meets the SLO:
             slobench capacity chat.yaml --slo 'ttft <= 50ms' --attainment 50% --target sim
""",
    ),
]


@pytest.mark.parametrize(
    ("run", "options", "lines"),
    [each[1:] for each in ENDINGS],
    ids=[each[0] for each in ENDINGS],
)
def test_a_run_ends_with_these_lines(run: Run, options: Mapping[str, Any], lines: str) -> None:
    scenario = changed(run.manifest.scenario, source="chat.yaml")
    named = with_manifest(run, command=COMMAND, scenario=scenario)
    summary = summarize(named, **options)
    assert text(ending(summary, "runs/x")) + "\n" == lines


def test_a_run_of_short_answers_leads_to_the_section_of_failures() -> None:
    """No load makes short answers whole, so that no capacity is advised."""
    run = measured_run(slo=["ttft <= 500ms"])
    run.request_rows["status"][100:200] = Status.truncated
    step = ending(summarize(run), "runs/x").next
    assert step is not None
    assert step.text == "See the section “How requests failed” of the page first"


def test_a_run_that_is_mostly_start_up_leads_to_more_requests() -> None:
    traffic_ = {"default": traffic(is_closed_loop=True)}
    run = with_manifest(measured_run(slo=["p99(ttft) <= 101ms"]), classes=traffic_)
    step = ending(summarize(run), "runs/x").next
    assert step is not None
    assert step.text == "Measure about 4 400 requests (--num-prompts 4400)."
