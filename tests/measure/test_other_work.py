"""A run that was met with another workload than planned: docs/metrics.md, "Answers in other
forms"."""

from dataclasses import replace

import msgspec
import numpy as np
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
        (12, 11, "met"),  # a length that is exact is so to one token: 8 %
        (14, 12, "no_verdict"),
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


def noted(n, model="small"):
    """A run whose first n of 200 answers state another model."""
    run = measured_run()
    errors = (*run.names.errors, f"answered by model {model}")
    run.request_rows["error_id"][20 : 20 + n] = len(errors) - 1
    return replace(run, names=replace(run.names, errors=errors))


def findings_of(run, words):
    return [text for text in summarize(run).findings if words in text]


@pytest.mark.faults
def test_answers_of_another_model_are_a_finding_with_its_name():
    assert findings_of(noted(150), "model") == [
        "150 of 200 answers state the model 'small', not 'tiny-llama', which was requested. Unless "
        "it is another name of the same model, the numbers are of that model."
    ]
    assert findings_of(noted(0), "state the model") == []
    assert summarize(noted(150)).counts["failed"] == 0


def texts(crcs, n_requested=20, **target):
    """200 due answers with these CRCs."""
    run = with_manifest(measured_run(n_tokens=n_requested), target=target)
    run.request_rows["answer_crc32"][20:] = crcs
    return run


EACH = np.arange(1, 201)


@pytest.mark.faults
def test_the_same_text_for_every_prompt_is_a_finding():
    assert findings_of(texts(7), "same text") == [
        "200 of 200 answers have the same text, although their prompts differ: perhaps the server "
        "does not compute them (a canned answer, an error as text, a cache of answers). Check the "
        "text of an answer."
    ]


@pytest.mark.parametrize(
    ("crcs", "is_found"),
    [
        (np.where(EACH <= 190, 7, EACH), True),  # 95 %
        (np.where(EACH <= 189, 7, EACH), False),
        (EACH, False),
        (0, False),  # unknown
        (np.where(EACH <= 10, 7, 0), True),  # at least ten are compared
        (np.where(EACH <= 9, 7, 0), False),
    ],
)
def test_nearly_all_answers_must_have_the_same_text(crcs, is_found):
    assert bool(findings_of(texts(crcs), "same text")) is is_found


def test_answers_shorter_than_eight_tokens_are_not_compared():
    assert findings_of(texts(7, n_requested=7), "same text") == []
    assert findings_of(texts(7, n_requested=8), "same text") != []


@pytest.mark.faults
def test_a_server_with_one_text_for_all_is_never_met():
    def judged(run):
        summary = summarize(run, ["ttft <= 60s"])
        return summary.verdict, summary.reason_kinds

    assert judged(texts(7)) == ("no_verdict", ("wrong_answers",))
    assert judged(texts(EACH)) == ("met", ("met",))
    assert summarize(texts(7), ["ttft <= 1ms"]).verdict == "missed"
    bundled = texts(7, is_bundled=True)
    assert judged(bundled) == ("met", ("met",))  # its simulated steps compute no text
    assert findings_of(bundled, "same text") != []


def test_short_answers_may_be_the_same_and_right():
    run = texts(7, n_requested=20)
    run.request_rows["output_tokens"] = 7
    assert summarize(run, ["ttft <= 60s"]).verdict == "met"
    run.request_rows["output_tokens"] = 8
    assert summarize(run, ["ttft <= 60s"]).reason_kinds == ("wrong_answers",)


def test_short_texts_are_compared_with_those_of_equal_length():
    run = texts(0)
    lengths = 10 + np.arange(200) % 50
    run.request_rows["output_tokens"][20:] = lengths
    run.request_rows["answer_crc32"][20:] = lengths  # a text for each length
    assert findings_of(run, "200 of 200 answers have the same text") != []
    run.request_rows["answer_crc32"][20:] = EACH
    assert findings_of(run, "same text") == []


@pytest.mark.faults
def test_recorded_prompts_that_are_sent_again_are_a_finding_and_excuse_equal_answers():
    same = texts(7, recorded_prompts=1)
    assert findings_of(same, "prompts.salt") == [
        "The 200 requests sent the same prompt (prompts.salt: none), so that a prefix cache can "
        "answer most of them. The default, salt: run, makes each prompt new."
    ]
    assert findings_of(same, "same text") == []
    (found,) = findings_of(texts(7, recorded_prompts=199), "prompts.salt")
    assert found.startswith("The 200 requests sent only 199 different prompts (prompts.salt: none)")
    assert findings_of(texts(7, recorded_prompts=200), "prompts.salt") == []
    assert findings_of(texts(7, recorded_prompts=200), "same text") != []
