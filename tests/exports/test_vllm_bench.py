"""vLLM's result file, against literals and against loops written from that tool's rules."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from loadgen.exports.vllm_bench import vllm_bench
from loadgen.exports.vllm_bench_text import vllm_bench_text
from loadgen.manifest.sections import WindowSection
from loadgen.measure.attainment import due_rows
from loadgen.records import CHUNKS, Names, Run, Status, TokenSource, empty_requests
from tests.runs import MANIFEST, changed, measured_run, schedule_rows, with_manifest

SETUP = {
    "date": "20260105-100000",
    "endpoint_type": "openai-chat",
    "backend": "openai-chat",
    "label": "evening-chat-1",
    "model_id": "tiny-llama",
    "tokenizer_id": "tiny-llama",
}
KEYS = [
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "queue_times",
    "generated_texts",
    "errors",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "rtfx",
]
SHARES = {"median": 0.5, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def three_requests():
    """Two that end well, from 0.1 s after their plan on, and one that fails. By hand:

    request 0: planned 0, sent 0.1, role 0.3, tokens at 0.5 0.6 0.8; request 1: planned 1, sent 1.1,
    one chunk of one token at 1.5; request 2 planned 2, answered 503 at 2.5.
    """
    schedule = schedule_rows([0.0, 1.0, 2.0], tokens=3)
    rows = empty_requests(schedule)
    rows["released_s"], rows["sent_s"] = [0, 1, 2], [0.1, 1.1, 2.1]
    rows["first_chunk_s"] = [0.3, 1.5, np.nan]
    rows["first_token_s"] = rows["first_answer_s"] = [0.5, 1.5, np.nan]
    rows["last_token_s"], rows["done_s"] = [0.8, 1.5, np.nan], [0.9, 1.6, 2.5]
    rows["status"] = [Status.ok, Status.ok, Status.http_error]
    rows["error_id"], rows["token_source"] = [0, 0, 1], TokenSource.usage
    rows["output_tokens"], rows["chunks"], rows["input_tokens"] = [3, 1, 0], [3, 1, 0], [50, 0, 0]
    chunks = np.array([(0, 0.5, 1), (0, 0.6, 1), (0, 0.8, 1), (1, 1.5, 1)], CHUNKS)
    manifest = changed(MANIFEST, window=WindowSection(0.0, 3.0, 1.0), slo=["ttft <= 300ms"])
    return Run(manifest, schedule, rows, chunks, names=Names(errors=("", "HTTP 503: overloaded")))


def test_three_requests_by_hand():
    found = vllm_bench(three_requests())
    assert {key: found[key] for key in SETUP} == SETUP
    assert found["num_prompts"] == 3
    assert found["duration"] == 2.5
    assert (found["completed"], found["failed"]) == (2, 1)
    assert found["errors"] == ["", "", "HTTP 503: overloaded"]
    assert found["input_lens"] == [50, 100, 100]  # as planned where the server did not say
    assert found["output_lens"] == [3, 1, 0]
    assert found["ttfts"] == pytest.approx([0.2, 0.4, 0.0])
    assert found["start_times"] == [0.1, 1.1, 2.1]
    assert found["queue_times"] == pytest.approx([0.1, 0.1, 0.1])
    assert found["latencies"] == pytest.approx([0.7, 0.4, 0.0])
    assert found["itls"][0] == pytest.approx([0.2, 0.1, 0.2])
    assert found["itls"][1:] == [[], []]
    assert found["request_throughput"] == pytest.approx(0.8)
    assert found["request_goodput"] == pytest.approx(0.4)  # 1 of 2 within 300 ms, over 2.5 s
    assert found["output_throughput"] == pytest.approx(1.6)
    assert found["total_token_throughput"] == pytest.approx((150 + 4) / 2.5)
    assert found["mean_ttft_ms"] == pytest.approx(300)
    assert found["std_ttft_ms"] == pytest.approx(100)
    assert found["p99_ttft_ms"] == pytest.approx(398)  # 200 + 0.99 · 200
    assert found["mean_tpot_ms"] == pytest.approx(250)  # (0.7 − 0.2) / 2; one token has none
    assert found["median_itl_ms"] == pytest.approx(200)
    assert found["mean_e2el_ms"] == pytest.approx((700 + 400) / 2)
    assert found["max_output_tokens_per_s"] == 4.0  # the role chunk counts there
    assert found["max_concurrent_requests"] == 1


def test_it_has_that_tools_keys_and_is_strict_json():
    found = vllm_bench(measured_run(n_failed=3))
    statistics = [
        f"{kind}_{word}_ms"
        for word in ("ttft", "tpot", "itl", "e2el")
        for kind in ("mean", "median", "std", "p50", "p90", "p95", "p99")
    ]
    assert list(found) == [*KEYS, *statistics]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


BLOCK = """\
============ Serving Benchmark Result ============
Successful requests:                     2
Failed requests:                         1
Request rate configured (RPS):           12.00
Benchmark duration (s):                  2.50
Total input tokens:                      150
Total generated tokens:                  4
Request throughput (req/s):              0.80
Request goodput (req/s):                 0.40
Output token throughput (tok/s):         1.60
Peak output token throughput (tok/s):    4.00
Peak concurrent requests:                1.00
Total token throughput (tok/s):          61.60
---------------Time to First Token----------------
Mean TTFT (ms):                          300.00
Median TTFT (ms):                        300.00
P50 TTFT (ms):                           300.00
P90 TTFT (ms):                           380.00
P95 TTFT (ms):                           390.00
P99 TTFT (ms):                           398.00
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          250.00
Median TPOT (ms):                        250.00
P50 TPOT (ms):                           250.00
P90 TPOT (ms):                           250.00
P95 TPOT (ms):                           250.00
P99 TPOT (ms):                           250.00
---------------Inter-token Latency----------------
Mean ITL (ms):                           166.67
Median ITL (ms):                         200.00
P50 ITL (ms):                            200.00
P90 ITL (ms):                            200.00
P95 ITL (ms):                            200.00
P99 ITL (ms):                            200.00
----------------End-to-end Latency----------------
Mean E2EL (ms):                          550.00
Median E2EL (ms):                        550.00
P50 E2EL (ms):                           550.00
P90 E2EL (ms):                           670.00
P95 E2EL (ms):                           685.00
P99 E2EL (ms):                           697.00
==================================================
"""


def test_the_printed_block_has_that_tools_lines():
    poisson = {"arrivals": {"kind": "poisson", "rate": "12/s"}, "limits": {}}
    run = with_manifest(three_requests(), scenario={"resolved": poisson})
    lines = vllm_bench_text(run).splitlines()
    assert [line.rstrip() for line in lines] == BLOCK.splitlines()
    assert lines[1] == "Successful requests:" + 21 * " " + "2" + 9 * " "
    assert lines[4] == "Benchmark duration (s):" + 18 * " " + "2.50" + 6 * " "


def test_the_printed_block_names_the_concurrency_of_a_closed_loop_and_no_rate():
    users = {"arrivals": {"kind": "users", "users": 12}, "limits": {}}
    run = with_manifest(three_requests(), slo=[], scenario={"resolved": users})
    lines = vllm_bench_text(run).splitlines()
    assert lines[3].split(":") == ["Maximum request concurrency", 13 * " " + "12" + 8 * " "]
    assert not [line for line in lines if "RPS" in line or "goodput" in line]


def by_loops(run):
    """(samples by metric in seconds, [(send, instants of its chunks)]) of the good answers."""
    samples: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2el": []}
    answers = []
    for row, due in zip(run.request_rows, due_rows(run), strict=True):
        if not due or row["status"] != Status.ok:
            continue
        received = run.chunk_rows["received_s"][run.chunk_rows["request_id"] == row["request_id"]]
        chunk_s = [float(row["first_chunk_s"]), *received.tolist()]
        answers.append((float(row["sent_s"]), chunk_s))
        ttft, e2e = chunk_s[0] - row["sent_s"], chunk_s[-1] - row["sent_s"]
        samples["ttft"].append(ttft)
        samples["e2el"].append(e2e)
        samples["tpot"].append((e2e - ttft) / (row["output_tokens"] - 1))
        samples["itl"] += [b - a for a, b in pairwise(chunk_s)]
    return samples, answers


def interpolated(ordered, share):
    place = (len(ordered) - 1) * share
    below = ordered[math.floor(place)]
    above = ordered[min(len(ordered) - 1, math.floor(place) + 1)]
    return below + (place - math.floor(place)) * (above - below)


def test_every_number_is_that_of_loops_written_from_the_rules():
    run = measured_run(n_failed=5, slo=["ttft <= 100ms", "tpot <= 10.5ms", "e2e <= 310ms"])
    rng = np.random.default_rng(5)
    rows = run.request_rows
    rows["sent_s"] += rng.exponential(0.01, len(rows))
    rows["first_chunk_s"] = rows["first_token_s"] - rng.random(len(rows)) * 0.02
    found, (samples, answers) = vllm_bench(run), by_loops(run)
    for word, values in samples.items():
        ordered, n = sorted(values), len(values)
        mean = math.fsum(values) / n
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / n)
        assert found[f"mean_{word}_ms"] == pytest.approx(1e3 * mean, rel=1e-11)
        assert found[f"std_{word}_ms"] == pytest.approx(1e3 * spread, rel=1e-9)
        for name, share in SHARES.items():
            expected = 1e3 * interpolated(ordered, share)
            assert found[f"{name}_{word}_ms"] == pytest.approx(expected, rel=1e-11)
    triples = zip(samples["ttft"], samples["tpot"], samples["e2el"], strict=True)
    n_good = sum(ttft <= 0.1 and tpot <= 0.0105 and e2e <= 0.31 for ttft, tpot, e2e in triples)
    assert 0 < n_good < len(answers) == found["completed"]
    duration_s = max(rows["done_s"][due_rows(run)]) - 2.0
    assert found["duration"] == pytest.approx(duration_s)
    assert found["request_goodput"] == pytest.approx(n_good / duration_s)
    zero_s = min(sent_s for sent_s, _ in answers)
    chunks, under_way = dict.fromkeys(range(100), 0), dict.fromkeys(range(100), 0)
    for sent_s, chunk_s in answers:
        for at_s in chunk_s:
            chunks[int(at_s - zero_s)] += 1
        for second in range(int(sent_s - zero_s), int(chunk_s[-1] - zero_s) + 1):
            under_way[second] += 1
    assert found["max_output_tokens_per_s"] == max(chunks.values())
    assert found["max_concurrent_requests"] == max(under_way.values())


def test_warm_up_is_left_out_and_unsent_requests_count_as_failed():
    run = measured_run(n_failed=1)
    run.request_rows["status"][-1] = Status.dropped
    run.request_rows["sent_s"][-1] = run.request_rows["done_s"][-1] = np.nan
    found = vllm_bench(run)
    assert found["num_prompts"] == 200  # 220 less 20 of the warm-up
    assert (found["ttfts"][-1], found["itls"][-1], found["start_times"][-1]) == (0.0, [], 0.0)
    assert (found["latencies"][-1], found["queue_times"][-1]) == (0.0, 0.0)
    assert found["errors"][-1] != ""


@pytest.mark.parametrize(
    ("slo", "is_said"),
    [
        ([], False),
        (["p99(ttft) <= 1s"], False),
        (["max_stall <= 1s"], False),
        (["e2e <= 9s"], True),
    ],
)
def test_goodput_is_given_if_that_tool_could_compute_it(slo, is_said):
    assert (vllm_bench(measured_run(slo=slo))["request_goodput"] is not None) is is_said


def test_traffic_is_described_with_its_keys():
    gamma = {"arrivals": {"kind": "gamma", "rate": "8/s", "cv": 0.5}, "limits": {}}
    users = {"arrivals": {"kind": "users", "users": 12}, "limits": {"max_concurrency": 2000}}
    run = measured_run()
    said = [
        vllm_bench(with_manifest(run, scenario={"resolved": resolved}))
        for resolved in (gamma, users)
    ]
    traffic = [(s["request_rate"], s["burstiness"], s["max_concurrency"]) for s in said]
    assert traffic == [(8.0, 4.0, None), ("inf", None, 12)]


def test_a_run_without_a_good_answer_has_zeros():
    run = replace(measured_run(n_requests=30), chunk_rows=np.empty(0, CHUNKS))
    run.request_rows["status"] = Status.connect_error
    for name in ("first_chunk_s", "first_token_s", "last_token_s"):
        run.request_rows[name] = np.nan
    found = vllm_bench(run)
    assert (found["completed"], found["failed"]) == (0, 10)
    assert found["p99_ttft_ms"] == found["max_output_tokens_per_s"] == 0.0
