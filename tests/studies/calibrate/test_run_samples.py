"""Steps as a client sees them, from requests and chunks of known steps."""

from typing import Any, cast

import numpy as np
import pytest

from loadgen.records import CHUNKS, REQUESTS, SCHEDULE, Run, Status
from loadgen.studies.calibrate.run_samples import (
    Answers,
    answers_of_run,
    reports_cached_tokens,
    request_s,
    samples_of_run,
)

# Two requests: A (100 prompt tokens) from 1 s, alone; B (40) joins it. Steps end at these instants.
TOKENS = {0: [1.5, 1.6, 1.9, 2.1], 1: [1.9, 2.1]}


def recorded(tokens=TOKENS, sent=(1.0, 1.55), prompts=(100, 40), cached=(0, 0), per_chunk=1):
    rows, schedule = np.zeros(len(sent), REQUESTS), np.zeros(len(sent), SCHEDULE)
    schedule["request_id"] = rows["request_id"] = np.arange(len(sent))
    schedule["input_tokens"] = prompts
    rows["cached_tokens"], rows["sent_s"], rows["status"] = cached, sent, Status.ok
    rows["first_token_s"] = [times[0] for times in tokens.values()]
    rows["last_token_s"] = rows["done_s"] = [times[-1] for times in tokens.values()]
    rows["server_ttft_s"] = rows["first_token_s"] - rows["sent_s"] - [0.2, 0.3]
    chunks = [(k, at, per_chunk) for k, times in tokens.items() for at in times]
    return Run(cast(Any, None), schedule, rows, np.array(chunks, CHUNKS))


def test_gaps_between_tokens_are_steps_of_the_requests_that_answer():
    samples = samples_of_run(recorded())
    # In the order of their ends: A alone from its send, A's decode, A's decode with the prompt of
    # B, then a step of both, which both saw.
    assert samples.seconds == pytest.approx([0.5, 0.1, 0.3, 0.2])
    assert samples.requests.tolist() == [1, 0, 0, 0]
    assert samples.n_decode.tolist() == [0, 1, 1, 2]
    assert samples.n_prefill.tolist() == [1, 0, 1, 0]
    assert samples.prefill_tokens.tolist() == [100, 0, 40, 0]
    assert samples.prefill_attention.tolist() == [5000, 0, 800, 0]
    # A: prompt and tokens so far; B adds its prompt and a token
    assert samples.context_tokens.tolist() == [0, 101, 102, 144]


def test_tokens_of_a_step_may_arrive_a_millisecond_apart():
    late = {0: TOKENS[0], 1: [1.901, 2.101]}
    samples = samples_of_run(recorded(late))
    assert samples.n_prefill.tolist() == [1, 0, 1, 0]
    assert samples.prefill_tokens.tolist() == [100, 0, 40, 0]


def test_cached_tokens_are_read_by_the_attention_alone():
    samples = samples_of_run(recorded(cached=(60, 0)))
    assert samples.prefill_tokens[0] == 40
    assert samples.prefill_attention[0] == 40 * (60 + 20)


def test_chunks_of_several_tokens_give_no_gap():
    samples = samples_of_run(recorded(per_chunk=2))
    assert samples.requests.tolist() == [1]


def test_answers_without_steps_are_counted():
    run = recorded()
    run.request_rows["output_tokens"] = [4, 2]
    assert answers_of_run(run) == Answers(2, 0, 0)
    merged = recorded(per_chunk=0)
    merged.request_rows["output_tokens"] = [4, 1]
    assert answers_of_run(merged) == Answers(1, 1, 0)
    run.request_rows["status"] = [Status.stream_error, Status.cancelled]
    assert answers_of_run(run) == Answers(0, 0, 1)
    assert Answers(2, 0, 1).plus(Answers(1, 1, 0)) == Answers(3, 1, 1)


def test_a_server_may_not_report_its_cached_tokens():
    assert reports_cached_tokens(recorded(cached=(60, 0)))
    assert not reports_cached_tokens(recorded())
    run = recorded(cached=(60, 0))
    run.request_rows["status"][0] = Status.timeout
    assert not reports_cached_tokens(run)


def test_failed_requests_give_no_steps():
    run = recorded()
    run.request_rows["status"][1] = Status.timeout
    assert samples_of_run(run).n_decode.max() == 1


def test_the_time_outside_the_server_is_the_median_of_what_it_does_not_report():
    assert request_s(recorded()) == pytest.approx(0.25)
    run = recorded()
    run.request_rows["server_ttft_s"] = np.nan
    assert request_s(run) is None
