"""The tables of the terminal (`--full`): at most 100 columns, understandable without colour."""

import io
import math

import pytest
from rich.console import Console

from loadgen.measure.aggregate import summarize
from loadgen.measure.statistics.percentiles import Percentile
from loadgen.records import Run
from reports.ending import rendered
from reports.run.console import table
from reports.run.ending import ending
from reports.run.tables import duration_with_interval
from tests.runs import measured_run, starved, traffic, two_classes, with_manifest, with_shard

SLO = [
    "ttft <= 150ms",
    "tpot <= 15ms",
    "attainment >= 95%",
    "p99(ttft_from_send) <= 300ms",
    "p99.9(itl) <= 20ms",
    "error_rate <= 0.1%",
    "goodput_output_tokens_per_s >= 10/s",
]


def printed(run: Run, width: int = 100, confidence: float | None = None) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, color_system=None)
    summary = summarize(run, confidence=confidence)
    console.print(rendered(ending(summary, "runs/x"), width), soft_wrap=True)
    console.print(table(summary))
    return out.getvalue()


@pytest.mark.parametrize(
    "run",
    [
        measured_run(slo=SLO),
        measured_run(slo=SLO, n_failed=9),
        measured_run(slo=SLO, ttft_s=100.0),
        measured_run(slo=SLO, n_failed=220),
        measured_run(0, slo=SLO),
        measured_run(),
        two_classes(chat=["ttft <= 500ms"], rag=["ttft <= 500ms"], n_failed=3),
    ],
)
def test_no_line_is_longer_than_100_columns(run: Run) -> None:
    assert max(len(line) for line in printed(run).splitlines()) <= 100


def test_the_verdict_is_a_word_and_its_reasons_follow() -> None:
    lines = printed(measured_run(slo=["p50(ttft) <= 50ms"])).splitlines()
    assert lines[0] == "MISSED with 95 % confidence: p50(ttft) <= 50ms at 97.7 ms"
    assert lines[1] == "  ✗ p50(ttft) <= 50ms  97.7 ms, 195 % of the limit"


def test_what_is_proven_of_a_class_makes_the_verdict_sure() -> None:
    lines = printed(two_classes(chat=["p50(ttft) <= 50ms"], rag=["ttft <= 500ms"])).splitlines()
    assert lines[0].startswith("MISSED with 95 % confidence: chat: p50(ttft) <= 50ms at ")


def test_verdict_promises_latencies_and_notes_come_in_that_order() -> None:
    run = measured_run(slo=["p50(ttft) <= 50ms"])
    lines = printed(run).splitlines()
    order = ("MISSED", "SLO", "latency", "  goodput", "note: ")
    places = [next(i for i, line in enumerate(lines) if line.startswith(o)) for o in order]
    assert places == sorted(places)
    assert places[0] == 0


def test_an_invalid_run_says_so_in_words() -> None:
    text = printed(starved(measured_run(slo=SLO)))
    assert text.splitlines()[0] == "INVALID, no verdict: the measurement cannot be trusted"
    flat = " ".join(text.split())
    assert "Cause: a worker used 99 % of a core, so its own CPU was full." in flat
    assert "Remedy: use more workers (--workers), or lower the rate." in flat
    assert "✓" not in text
    assert "run INVALID" in text


def test_the_instrument_error_stands_beside_the_value_that_it_may_be_part_of() -> None:
    lag = {"n": 2000, "p50": 0.0, "p99": 0.019, "max": 0.019}
    text = printed(with_shard(measured_run(slo=["p50(ttft) <= 1s"]), loop_lag_s=lag))
    lines = text.splitlines()
    assert lines[0] == "MET with 95 % confidence: p50(ttft) <= 1s at 97.7 ms"
    assert "97.7 ms, 9.8 % of the limit; + up to 19.2 ms instrument error" in lines[1]


def test_percentiles_come_with_interval_n_and_mark() -> None:
    text = printed(measured_run())
    line = next(line for line in text.splitlines() if line.startswith("TTFT "))
    assert " 200 " in line
    assert "97.7 ms [95.8, 100]" in line
    assert "146 ms* [≥ 136]" in line


def test_without_a_per_request_limit_there_is_no_attainment() -> None:
    assert "attainment n/a: no per-request limit" in printed(measured_run(slo=["p50(ttft) <= 1s"]))
    limited = printed(measured_run(slo=["ttft <= 1s"]))
    assert "attainment 100 % (200 of 200 due; at least 98.5 % with 95 % confidence)" in limited
    classes = printed(two_classes(chat=["ttft <= 500ms"])).splitlines()
    assert next(x for x in classes if x.startswith("rag ")).split()[3] == "n/a"


def test_the_slos_of_classes_stand_in_the_table_with_their_bounds() -> None:
    """150 of 150: 0.05^(1/150) = 98.02 %. With seed 7 latencies rise with the load by chance."""
    chat, rag, whole = ["ttft <= 500ms"], ["p50(ttft) <= 500ms"], ["error_rate <= 5%"]
    run = two_classes(chat, rag, whole, seed=8)
    lines = [" ".join(line.split()) for line in printed(run).splitlines()]
    start = next(k for k, line in enumerate(lines) if line.startswith("SLO "))
    table = " ".join(lines[start : start + 10])
    assert "error_rate <= 5% 0 % at most 1.49 % 200 ✓ met yes" in table
    assert "chat: ttft <= 500ms 100 % of requests at least 98 % 150" in table
    assert "chat: attainment >= 100 % at least 98 % 150 ✓ met no, needs n ≈ 299" in table
    assert "rag: p50(ttft) <= 1 s at least 1 s 50 ✗ missed yes" in table


def test_the_three_rates_stand_in_a_line() -> None:
    open_loop = with_manifest(measured_run(), requested_rate_per_s=10.5)
    assert "  rate requested 10.5/s, offered 10/s, achieved 10/s\n" in printed(open_loop)
    closed = with_manifest(measured_run(), classes={"default": traffic(is_closed_loop=True)})
    assert (
        "  rate requested n/a, offered n/a, achieved 10/s"
        " (closed loop: the server's speed sets the rate)\n"
    ) in printed(closed)


def test_failures_have_their_own_line() -> None:
    assert "unanswered as ∞" in printed(measured_run(n_failed=3))
    assert "unanswered as ∞" not in printed(measured_run())


def test_words_in_brackets_are_text_not_markup() -> None:
    run = with_manifest(measured_run(slo=SLO), ended="stopped", end_reason="[red]over[/red] 50 %")
    assert "[red]over[/red] 50 %" in printed(run)


def test_a_verdict_by_proof_only_says_what_is_missing() -> None:
    run = measured_run(n_failed=1, slo=["attainment >= 99%"])
    assert "INCONCLUSIVE" in printed(run, confidence=0.95)
    assert ": 95 % confidence needs about" in printed(run, confidence=0.95)


def test_each_class_has_a_line_with_its_own_numbers_and_verdict() -> None:
    text = printed(two_classes(chat=["ttft <= 500ms"], rag=["ttft <= 500ms"]))
    lines = [line.rstrip() for line in text.splitlines()]
    chat, rag = (next(x for x in lines if x.startswith(name)) for name in ("chat ", "rag "))
    assert chat.split()[1:3] == ["150", "7.5/s"]
    assert chat.endswith("✓ met")
    assert rag.split()[1:3] == ["50", "2.5/s"]
    assert " 1 s " in rag
    assert rag.endswith("✗ missed")
    assert not any(line.startswith("class ") for line in printed(measured_run()).splitlines())


def test_http_errors_are_counted_by_status() -> None:
    run = measured_run(n_failed=9)
    run.request_rows["http_status"][-7:] = 429
    assert summarize(run).http_statuses == {"429": 7, "503": 2}
    text = " ".join(printed(run).split())
    assert "HTTP 429 7" in text
    assert "HTTP 503 2" in text
    assert "http error" not in text


@pytest.mark.parametrize(
    ("percentile", "text"),
    [
        (Percentile(0.0978, 0.0959, 0.1, few=False), "97.8 ms [95.9, 100]"),
        (Percentile(0.98, 0.9, 1.2, few=True), "980 ms* [900, 1.2 s]"),
        (Percentile(1.0, 0.98, 1.2, few=False), "1 s [980 ms, 1.2]"),
        (Percentile(1.0, 0.98, math.inf, few=True), "1 s* [980 ms, ∞]"),
        (Percentile(1.0, None, 1.2, few=False), "1 s [≤ 1.2]"),
        (Percentile(1.0, None, None, few=False), "1 s"),
        (Percentile(math.inf, 1.0, math.inf, few=True), "∞"),
        (Percentile(math.nan, None, None, few=True), "–"),
    ],
)
def test_a_bound_repeats_no_unit(percentile: Percentile, text: str) -> None:
    assert duration_with_interval(percentile) == text


def test_the_outcomes_are_the_requests_that_came_due() -> None:
    line = next(x for x in printed(measured_run(n_failed=3)).splitlines() if "; ok " in x)
    assert line.endswith("; ok 197, HTTP 503 3")
