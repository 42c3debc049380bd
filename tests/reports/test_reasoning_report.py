"""TTFT and TTFAT side by side, and the share of reasoning, where answers have reasoning."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from loadgen.measure.aggregate import summarize
from reports.run.console import table
from reports.run.ending import ending
from reports.run.page import render
from reports.run.tables import class_table, main_metrics, more_metrics, tiles
from tests.runs import measured_run, two_classes, with_reasoning

RUN = with_reasoning(measured_run(slo=("ttft <= 400ms", "ttfat <= 900ms", "attainment >= 95%")))


def printed(run):
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(table(summarize(run)))
    return console.export_text()


def reasoning_of(run):
    found = summarize(run).reasoning
    assert found is not None
    return found


def test_the_share_is_that_of_the_output_tokens():
    """8 of 20 tokens of each of the 200 due answers."""
    found = reasoning_of(RUN)
    assert (found.answers, found.of, found.without_answer) == (200, 200, 0)
    assert found.share == pytest.approx(0.4)
    assert summarize(RUN).to_json()["reasoning"]["share"] == pytest.approx(0.4)
    half = RUN.request_rows.copy()
    half["reasoning_tokens"][::2] = 0
    found = reasoning_of(replace(RUN, request_rows=half))
    assert (found.answers, found.of) == (100, 200)
    assert found.share == pytest.approx(0.2)


def test_both_slos_are_judged():
    summary = summarize(RUN)
    assert summary.verdict == "met"
    late = with_reasoning(measured_run(slo=("ttfat <= 500ms", "attainment >= 95%")))
    assert summarize(late).verdict == "missed"
    only = with_reasoning(measured_run(slo=("ttft <= 400ms", "attainment >= 95%")))
    assert summarize(only).verdict == "met"


def test_ttfat_stands_beside_ttft_in_every_table(cache):
    summary = summarize(RUN)
    metrics = main_metrics(summary)
    assert metrics.index("ttfat_s") == 2
    assert "ttfat_s" not in more_metrics(summary)
    assert [name.split()[-1] for name, _ in tiles(summary)][:3] == ["TTFT", "TTFAT", "TPOT"]
    text = printed(RUN)
    assert re.search(r"^TTFAT +200 ", text, re.MULTILINE)
    assert "40 % of them reasoning" in text
    assert "40 % of them reasoning" in dict(ending(summary).facts)["traffic"]
    page = re.sub(r"<(script|style)[^>]*>.*?</\1>|<[^>]+>", " ", render(RUN, summary, cache),
                  flags=re.DOTALL)  # fmt: skip
    assert re.search(r"p99 TTFAT", page)
    assert "40 % of them reasoning; " in page
    assert re.search(r"output\s+TTFT\s+TTFAT\s+TPOT\s+longest gap", page)


def test_an_ending_without_slo_has_the_time_to_the_answer():
    rows = ending(summarize(with_reasoning(measured_run()))).rows
    names = [row.name for row in rows]
    assert names == ["TTFT", "TTFAT", "TPOT", "E2E"]


def test_classes_have_the_time_to_the_answer():
    head, rows = class_table(summarize(with_reasoning(two_classes())))
    assert head[5:] == ["TTFT p99", "TTFAT p50", "TTFAT p99", "TPOT p99", "verdict"]
    assert all(len(row) == len(head) for row in rows)


def test_answers_that_end_in_their_reasoning_are_a_finding_and_miss_the_slo():
    run = with_reasoning(measured_run(slo=("ttfat <= 900ms",)), n_unanswered=10)
    summary = summarize(run)
    assert reasoning_of(run).without_answer == 10
    assert any(text.startswith("10 of 200 answers ended in their reasoning, without a token")
               for text in summary.findings)  # fmt: skip
    assert summary.attainment.met == 190


def test_runs_without_reasoning_keep_their_tables(cache):
    run = measured_run(slo=("ttft <= 400ms",))
    summary = summarize(run)
    assert summary.reasoning is None
    assert "ttfat_s" not in main_metrics(summary)
    assert "ttfat_s" in more_metrics(summary)
    assert "TTFAT" not in printed(run)
    assert "reasoning" not in dict(ending(summary).facts)["traffic"]
