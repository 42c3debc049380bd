"""Other tools' numbers, held against loops written from their formulas, to the last digit."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from loadgen.archive.decode import decode
from loadgen.archive.exchange import Exchange
from loadgen.archive.part_decoder import ExchangeColumns
from loadgen.errors import UsageError
from loadgen.exports.vllm_bench import vllm_bench
from loadgen.manifest.sections import WindowSection
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import due_rows, with_window
from loadgen.measure.definitions import DEFINITIONS, rescore
from loadgen.measure.slo import from_goodput
from loadgen.records import CHUNKS, Run, Status, TokenSource, empty_requests
from targets.openai_chat import OpenAIChat
from tests.runs import MANIFEST, changed, measured_run, schedule_rows


def recorded():
    """A run with role chunks before the first token, several tokens in chunks, and failures."""
    run = measured_run(n_requests=120, n_tokens=6, n_failed=4)
    rng = np.random.default_rng(3)
    run.chunk_rows["tokens"] = rng.integers(1, 4, len(run.chunk_rows))
    for row in run.request_rows:
        mine = run.chunk_rows[run.chunk_rows["request_id"] == row["request_id"]]
        if len(mine):
            row["output_tokens"] = mine["tokens"].sum()
            row["first_chunk_tokens"] = mine["tokens"][0]
            row["token_source"] = TokenSource.usage
            row["first_chunk_s"] = row["first_token_s"] - 0.03
            row["done_s"] = row["last_token_s"] + 0.02
    return run


EVENTS = (
    (1.00, '{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'),
    (1.10, '{"choices":[{"index":0,"delta":{"content":"a"}}]}'),
    (1.14, '{"choices":[{"index":0,"delta":{"content":"b"}}]}'),
    (1.20, '{"choices":[{"index":0,"delta":{"content":"c"}}]}'),
    (1.27, '{"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}'),
    (1.30, '{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}'),
    (1.31, "[DONE]"),
)
WITH_LAST_TOKEN = (
    *EVENTS[:3],
    (1.20, '{"choices":[{"index":0,"delta":{"content":"c"},"finish_reason":"length"}]}'),
    *EVENTS[5:],
)


def of_wire(events):
    """A run of one request, sent at 0.9 s, from the bytes of its answer and their times."""
    schedule = schedule_rows([0.9])
    rows = empty_requests(schedule)
    rows["released_s"] = 0.9
    exchange = Exchange(0, sent_ns=900_000_000, headers_ns=950_000_000, done_ns=1_310_000_000)
    exchange.http_status, exchange.content_type = 200, "text/event-stream"
    exchange.parts = [f"data: {text}\n\n".encode() for _, text in events]
    exchange.times = [round(at_s * 1e9) for at_s, _ in events]
    columns = ExchangeColumns(rows, 0)
    columns.add(0, exchange, decode(exchange, OpenAIChat(model="m")), 0, 0)
    window = WindowSection(0.0, 10.0, 10.0)
    return Run(changed(MANIFEST, window=window), schedule, rows, columns.finish())


@pytest.mark.parametrize(
    ("events", "itl_s", "tpot_s", "e2e_s"),
    [
        (EVENTS, [0.04, 0.06, 0.07, 0.10], 0.135, 0.37),
        (WITH_LAST_TOKEN, [0.04, 0.06, 0.10], 0.10, 0.30),
    ],
)
def test_vllm_counts_a_finish_in_a_chunk_of_its_own(events, itl_s, tpot_s, e2e_s):
    """Its loop takes an ITL at every event with choices after the first, and its end of the request
    from the last of them: 1.27 s, or 1.20 s with the last token."""
    run = of_wire(events)
    found = {row.metric: row for row in rescore(run, ("vllm",))}
    assert found["ttft"].mean == pytest.approx(0.1)
    assert found["itl"].n == len(itl_s)
    assert found["itl"].mean == pytest.approx(np.mean(itl_s))
    assert found["itl"].percentiles["p99"] == pytest.approx(np.quantile(itl_s, 0.99))
    assert found["tpot"].mean == pytest.approx(tpot_s)
    assert found["e2e"].mean == pytest.approx(e2e_s)
    exported = vllm_bench(run)
    assert sorted(exported["itls"][0]) == pytest.approx(itl_s)
    assert exported["mean_e2el_ms"] == pytest.approx(1e3 * e2e_s)
    (own,) = rescore(run, ("slobench",))[-1:]
    assert own.mean == pytest.approx(0.30)


def by_hand(run, tool):
    """TTFT, TPOT, ITL and E2E samples, a request at a time."""
    samples: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2e": []}
    for k, row in enumerate(run.request_rows):
        if row["status"] != 0 or not due_rows(run)[k]:
            continue
        mine = [c for c in run.chunk_rows if c["request_id"] == row["request_id"]]
        n, first, last = int(row["output_tokens"]), row["first_token_s"], row["last_token_s"]
        start = row["released_s"] if tool in ("slobench", "mlperf") else row["sent_s"]
        end = row["done_s"] if tool in ("guidellm", "inference-perf") else last
        ttft = (row["first_chunk_s"] if tool == "vllm" else first) - start
        samples["ttft"].append(ttft)
        samples["e2e"].append(end - start)
        if tool == "guidellm":
            samples["tpot"] += [(last - start) / n] * n
        elif tool in ("slobench", "aiperf"):
            rest = n - int(row["first_chunk_tokens"])
            samples["tpot"].append((last - first) / rest)
        else:
            samples["tpot"].append(((last - start) - ttft) / (n - 1))
        if tool == "aiperf":
            samples["itl"].append(samples["tpot"][-1])
        elif tool == "guidellm":
            samples["itl"] += [(last - first) / (n - 1)] * (n - 1)
        elif tool != "mlperf":
            if tool == "vllm":  # after its role chunk comes the first token
                samples["itl"].append(first - row["first_chunk_s"])
            if tool == "inference-perf":  # the first chunk's further tokens came with its first
                samples["itl"] += [0.0] * (int(mine[0]["tokens"]) - 1)
            for before, chunk in pairwise(mine):
                gap, tokens = chunk["received_s"] - before["received_s"], int(chunk["tokens"])
                if tool == "slobench":
                    samples["itl"] += [gap / tokens] * tokens
                elif tool == "inference-perf":
                    samples["itl"] += [gap] + [0.0] * (tokens - 1)
                else:
                    samples["itl"].append(gap)
    return samples


def percentile_by_hand(samples, quantile, tool):
    ordered, n = sorted(samples), len(samples)
    if tool in ("slobench", "guidellm"):
        return ordered[math.ceil(round(quantile * n, 9)) - 1]
    if tool == "mlperf":
        return ordered[min(n - 1, int(n * quantile + 1e-9))]
    position = (n - 1) * quantile
    low = math.floor(position)
    high = min(low + 1, n - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


@pytest.mark.parametrize("tool", DEFINITIONS)
def test_each_tools_numbers_are_those_of_its_formulas(tool):
    run = recorded()
    expected = by_hand(run, tool)
    for row in rescore(run, (tool,)):
        samples = expected[row.metric]
        assert row.n == len(samples)
        if not samples:
            assert math.isnan(row.mean)
            continue
        assert row.mean == pytest.approx(sum(samples) / len(samples), rel=1e-11)
        for key, value in row.percentiles.items():
            by_loop = percentile_by_hand(samples, float(key[1:]) / 100, tool)
            assert value == pytest.approx(by_loop, rel=1e-11), (tool, row.metric, key)


def two_answers():
    """Written down, in seconds. Request 0: planned 0, sent 0.25, role chunk 0.5, chunks of 2, 1 and
    3 tokens at 1.0, 1.5 and 2.5, stream closed at 3.0. Request 1: planned 4, sent 4.5, its only
    token at 5.5, closed at 5.75. All of these are exact in binary.
    """
    schedule = schedule_rows([0.0, 4.0], tokens=6)
    rows = empty_requests(schedule)
    rows["released_s"], rows["sent_s"] = [0.0, 4.0], [0.25, 4.5]
    rows["first_chunk_s"], rows["first_token_s"] = [0.5, 5.5], [1.0, 5.5]
    rows["first_answer_s"] = rows["first_token_s"]
    rows["last_token_s"], rows["done_s"] = [2.5, 5.5], [3.0, 5.75]
    rows["status"], rows["token_source"] = Status.ok, TokenSource.usage
    rows["output_tokens"], rows["chunks"], rows["first_chunk_tokens"] = [6, 1], [3, 1], [2, 1]
    chunks = np.array([(0, 1.0, 2), (0, 1.5, 1), (0, 2.5, 3), (1, 5.5, 1)], CHUNKS)
    manifest = changed(MANIFEST, window=WindowSection(0.0, 8.0, 1.0))
    return Run(manifest, schedule, rows, chunks)


BY_HAND = {
    "vllm": {
        "ttft": [0.25, 1.0],
        "tpot": [(2.25 - 0.25) / 5],
        "itl": [0.5, 0.5, 1.0],
        "e2e": [2.25, 1.0],
    },
    "guidellm": {
        "ttft": [0.75, 1.0],
        "tpot": [2.25 / 6] * 6 + [1.0],
        "itl": [1.5 / 5] * 5,
        "e2e": [2.75, 1.25],
    },
    "aiperf": {"ttft": [0.75, 1.0], "tpot": [1.5 / 4], "itl": [1.5 / 4], "e2e": [2.25, 1.0]},
    "inference-perf": {
        "ttft": [0.75],
        "tpot": [1.5 / 5],
        "itl": [0.0, 0.5, 1.0, 0.0, 0.0],
        "e2e": [2.75, 1.25],
    },
    "mlperf": {"ttft": [1.0, 1.5], "tpot": [1.5 / 5], "itl": [], "e2e": [2.5, 1.5]},
    "slobench": {
        "ttft": [1.0, 1.5],
        "tpot": [1.5 / 4],
        "itl": [0.5, 1.0 / 3, 1.0 / 3, 1.0 / 3],
        "e2e": [2.5, 1.5],
    },
}
P90 = {
    "vllm": {"ttft": 0.25 + 0.9 * 0.75, "itl": 0.5 + 0.8 * 0.5},
    "guidellm": {"ttft": 1.0, "tpot": 1.0},
    "aiperf": {"ttft": 0.75 + 0.9 * 0.25, "e2e": 1.0 + 0.9 * 1.25},
    "inference-perf": {"itl": 0.5 + 0.6 * 0.5, "e2e": 1.25 + 0.9 * 1.5},
    "mlperf": {"ttft": 1.5, "e2e": 2.5},
    "slobench": {"ttft": 1.5, "e2e": 2.5},
}


@pytest.mark.parametrize("tool", BY_HAND)
def test_two_answers_written_down_have_the_numbers_worked_out_by_hand(tool):
    for row in rescore(two_answers(), (tool,)):
        samples = BY_HAND[tool][row.metric]
        assert row.n == len(samples), row.metric
        if samples:
            assert row.mean == pytest.approx(sum(samples) / len(samples), rel=1e-15), row.metric
        if (p90 := P90[tool].get(row.metric)) is not None:
            assert row.percentiles["p90"] == pytest.approx(p90, rel=1e-15), row.metric


def test_ours_agrees_with_the_summary():
    run = recorded()
    summary = summarize(run)
    for row in rescore(run, ("slobench",)):
        found = summary.metrics[f"{row.metric}_s"]
        assert row.n == found.n
        assert row.mean == pytest.approx(found.mean)
        assert row.percentiles["p99"] == found.percentiles["p99"].value


def test_every_definition_is_in_the_docs_with_its_formulas_and_source():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for one in DEFINITIONS.values():
        cells = [one.formulas[m] for m in ("ttft", "tpot", "itl", "e2e")]
        assert f"| `{one.name}` | {' | '.join(cells)} | {one.interpolates} | {one.source} |" in page


def test_a_window_holds_the_requests_planned_in_it():
    run = measured_run()  # 10 a second for 22 s
    found = summarize(with_window(run, "5s:15s"))
    assert found.counts["due"] == 100
    assert (found.window.start_s, found.window.end_s) == (5.0, 15.0)
    assert summarize(with_window(run, "2s:22s")).to_json() == summarize(run).to_json()


def test_the_steady_window_leaves_the_warm_up_out():
    run = measured_run()
    slow = run.request_rows["released_s"] < 8.0
    for name in ("first_token_s", "last_token_s", "done_s"):
        run.request_rows[name][slow] += 0.5
    assert 7.0 <= summarize(with_window(run, "steady")).window.start_s <= 10.0


@pytest.mark.parametrize("text", ["5:9", "9s:5s", "late", "90s:99s"])
def test_a_window_that_cannot_be_meant_is_refused(text):
    with pytest.raises(UsageError, match="--window"):
        with_window(measured_run(), text)


def test_vllms_goodput_is_in_milliseconds_from_send():
    asked = from_goodput(["ttft:500 tpot:50", "e2el:2000"])
    assert asked == ["ttft_from_send <= 500ms", "tpot <= 50ms", "e2e_from_send <= 2000ms"]
    for wrong in ("itl:5", "ttft", "ttft:fast", "ttft:0"):
        with pytest.raises(ValueError, match=wrong.split(":")[0]):
            from_goodput([wrong])
