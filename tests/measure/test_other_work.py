"""A run that was met with another workload than planned: docs/metrics.md, "Answers in other
forms"."""

from dataclasses import replace

import msgspec
import pytest

from loadgen.manifest.sections import PreflightLine
from loadgen.measure.aggregate import summarize
from loadgen.measure.counted_prompts import REAL_ANSWERS
from loadgen.workload.dialogue import Context
from tests.runs import measured_run, with_manifest


def prompts_of(planned, counted, slo=("e2e <= 10s",), is_exact=True, fit=(10.0, 1.0), n=200):
    """200 due requests, of which n were counted with other tokens than planned."""
    run = with_manifest(measured_run(slo=slo), target={"prompt_fit": fit})
    run.schedule_rows["input_tokens"] = run.request_rows["input_tokens"] = planned
    run.request_rows["input_tokens"][20 : 20 + n] = counted
    line = PreflightLine("prompt_fit", ok=is_exact or None, detail="exact to ≤ 1 token")
    return replace(run, manifest=msgspec.structs.replace(run.manifest, preflight=(line,)))


def length_check(run):
    (check,) = [c for c in summarize(run).validity.checks if c.name == "input lengths"]
    return check


@pytest.mark.faults
def test_a_server_that_reads_a_part_of_each_prompt_is_not_met():
    summary = summarize(prompts_of(512, 64))
    assert (summary.verdict, summary.exit_code) == ("no_verdict", 3)
    assert summary.reason_kinds == ("other_prompts",)
    assert summary.reasons == (
        "The server counted 64 tokens per prompt where 512 were sent, by lengths that the "
        "preflight proved exact: the SLOs were met with less work than planned.",
    )
    assert summary.findings[0].startswith(
        "Input lengths: the server counted shorter prompts than were planned: 512 prompt tokens "
        "planned on average, 64 counted by the server"
    )


def test_such_a_run_is_not_compared_with_another():
    (reason,) = summarize(prompts_of(512, 64)).validity.why_not_comparable
    assert reason.startswith("The server counted 64 tokens per prompt where 512 were sent")
    assert summarize(prompts_of(512, 512)).validity.why_not_comparable == ()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("planned", "counted", "verdict"),
    [
        (512, 487, "met"),  # 4.9 %
        (512, 486, "no_verdict"),  # 5.1 %
        (23, 22, "met"),  # a length that is exact is so to one token
        (23, 21, "no_verdict"),
        (23, 1, "no_verdict"),
        (512, 544, "met"),  # a chat template
        (512, 545, "no_verdict"),
        (2000, 2100, "met"),
        (2000, 2101, "no_verdict"),
        (5, 11, "met"),  # the template alone has 10 tokens
        (5, 44, "no_verdict"),
        (512, 0, "met"),  # not counted
    ],
)
def test_prompts_may_differ_by_five_percent_and_by_a_template(planned, counted, verdict):
    assert summarize(prompts_of(planned, counted)).verdict == verdict
    expected = None if not counted else verdict == "met"
    assert length_check(prompts_of(planned, counted, is_exact=False)).ok is expected


def test_lengths_that_are_not_exact_are_a_note_only():
    summary = summarize(prompts_of(512, 64, is_exact=False))
    assert summary.verdict == "met"
    assert any(text.startswith("Input lengths: ") for text in summary.findings)


def test_a_few_short_prompts_are_no_other_workload():
    """11 of 200 prompts of 64 instead of 512 tokens are 4.8 % of the tokens, 12 are 5.25 %."""
    assert summarize(prompts_of(512, 64, n=11)).verdict == "met"
    assert summarize(prompts_of(512, 64, n=12)).verdict == "no_verdict"


def test_prompts_with_real_answers_have_no_exact_length():
    assert Context.real == REAL_ANSWERS
    run = prompts_of(512, 64, n=50)
    run.schedule_rows["context"][20:70] = Context.scripted
    assert summarize(run).verdict == "no_verdict"
    run.schedule_rows["context"][20:70] = Context.real
    assert summarize(run).verdict == "met"


def test_a_missed_run_stays_missed_with_other_prompts():
    summary = summarize(prompts_of(512, 64, slo=["p50(e2e) <= 1ms"]))
    assert (summary.verdict, summary.reason_kinds) == ("missed", ("missed",))


@pytest.mark.faults
def test_cached_tokens_of_short_prompts_that_should_be_new_are_found():
    """Known exactly, a template of 10 tokens and a block of 16 may be cached: 26 tokens."""
    run = prompts_of(60, 60)
    run.request_rows["cached_tokens"] = 26
    assert not any(text.startswith("Cache: ") for text in summarize(run).findings)
    run.request_rows["cached_tokens"] = 27
    (found,) = [text for text in summarize(run).findings if text.startswith("Cache: ")]
    assert "200 of 200 prompts had more cached tokens than their declared prefix plus 26" in found
    run = prompts_of(60, 60, is_exact=False)
    run.request_rows["cached_tokens"] = 60
    assert not any(text.startswith("Cache: ") for text in summarize(run).findings)
