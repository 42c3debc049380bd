"""The catalogue names every metric once, and the documentation says what it says."""

from pathlib import Path
from typing import Any

import pytest

from loadgen.measure.aggregate import summarize
from loadgen.measure.catalog import BY_SLO_WORD, METRICS, PASSES_UNDEFINED, markdown_table
from loadgen.measure.slo import parse_slo
from tests.measure.agent_runs import FANNED_OUT, LINEAR, agent_run
from tests.runs import measured_run

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_documentation_holds_the_table_of_the_catalogue(check_golden: Any) -> None:
    head, start, rest = DOCS.read_text("utf-8").partition("<!-- metrics -->\n")
    _, end, tail = rest.partition("<!-- /metrics -->")
    check_golden(DOCS, f"{head}{start}{markdown_table()}{end}{tail}")


def test_summaries_hold_every_metric_that_has_samples_and_no_other() -> None:
    summary = summarize(measured_run(30))
    of_requests = {n for n, m in METRICS.items() if m.scope in ("request", "gap")}
    assert set(summary.metrics) == of_requests


@pytest.mark.parametrize("word", sorted(BY_SLO_WORD))
def test_every_word_of_the_catalogue_can_be_promised(word: str) -> None:
    metric = BY_SLO_WORD[word]
    limit = {"s": "1s", "per_s": "1/s", "share": "50%"}[metric.unit]
    operator = {"lower": "<=", "higher": ">="}[metric.direction]
    left = f"p50({word})" if metric.scope == "gap" else word
    assert parse_slo(f"{left} {operator} {limit}").metric == metric.name
    texts, run = [f"{left} {operator} {limit}", "ttft <= 1s"], measured_run(60)
    if parse_slo(texts[0]).is_about_trees:
        texts, run = [*texts, "attainment(tree) >= 50%"], agent_run(FANNED_OUT, LINEAR)
    assert summarize(run, slo=texts).slo[0].metric == metric.name


def test_names_carry_their_unit_and_words_do_not() -> None:
    for metric in METRICS.values():
        if metric.unit == "s":
            assert metric.name.endswith("_s")
            assert not metric.slo.endswith("_s")
    assert set(METRICS) >= PASSES_UNDEFINED


@pytest.mark.parametrize(
    "text", ["299", "459", "attainment >= 99%", "5 ms or 2 %", "n < 10 / (1 − p)"]
)
def test_the_documentation_states_the_rules_with_their_numbers(text: str) -> None:
    assert text in DOCS.read_text("utf-8")
