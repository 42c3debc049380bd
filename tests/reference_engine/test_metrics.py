"""The page of `/metrics`, read by Prometheus's own parser."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from reference_engine.metrics.exposition import Moment, page
from reference_engine.metrics.metrics import DepartureRate, EngineMetrics, Histogram, one_two_five
from reference_engine.smdp.decision_table import load_table
from reference_engine.smdp.states import N_STATES
from reference_engine.state.sequence import State
from reference_engine.state.steps import StepEvent, StepLog
from tests.reference_engine.engine_kit import request, rig
from tests.reference_engine.engine_server import serving, toy_engine

# vLLM V1's series and the upper edges that dashboards and alerts name.
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 7680)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
HISTOGRAMS = {
    "time_to_first_token_seconds": TTFT,
    "inter_token_latency_seconds": ITL,
    "time_per_output_token_seconds": ITL,
    "request_time_per_output_token_seconds": ITL,
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "request_prompt_tokens": SIZES,
    "request_generation_tokens": SIZES,
    "request_max_num_generation_tokens": SIZES,
    "request_params_max_tokens": SIZES,
    "request_params_n": (1, 2, 5, 10, 20),
    "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
}
COUNTERS = (
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "prefix_cache_queries",
    "prefix_cache_hits",
)
GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
)


def read(text: str):
    return {family.name: family for family in text_string_to_metric_families(text)}


@pytest.fixture(scope="module")
def families():
    """The page after three answers to prompts of 3 tokens (too short for the prefix cache) with 4,
    5 and 6 generated tokens, and a client that disconnected long before the end."""

    async def scene():
        async with serving(max_model_len=1024, executor_args={"step_s": 0.002}) as server:
            for n in (4, 5, 6):
                body = {"prompt": "abc", "max_tokens": n, "tenant": "blue"}
                assert (await server.post("/v1/completions", body))[0] == 200
            body = {"prompt": "abc", "max_tokens": 1000, "stream": True}
            async with server.session.post("/v1/completions", json=body) as response:
                await response.content.readuntil(b"\n\n")
            await server.idle()
            return await server.text("/metrics")

    return read(asyncio.run(scene()))


def value(families, name, **labels):
    """The value of the only sample with this name and these labels."""
    family = next(f for n, f in families.items() if name.startswith(n))
    values = [
        sample.value
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(values) == 1, (name, labels, values)
    return values[0]


def test_names_and_types_are_those_of_vllm(families):
    for name in HISTOGRAMS:
        assert families[f"vllm:{name}"].type == "histogram"
    for name in COUNTERS:
        assert families[f"vllm:{name}"].type == "counter"
        assert all(s.name == f"vllm:{name}_total" for s in families[f"vllm:{name}"].samples)
    for name in GAUGES:
        assert families[f"vllm:{name}"].type == "gauge"
    assert families["vllm:cache_config_info"].samples[0].labels["block_size"] == "16"


def test_every_series_has_the_model_and_the_engine_as_labels(families):
    for family in families.values():
        for sample in family.samples:
            assert sample.labels["model_name"] == "nano"
            assert sample.labels["engine"] == "0"


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_buckets_are_a_superset_and_count_upwards(families, name):
    samples = families[f"vllm:{name}"].samples
    buckets = {s.labels["le"]: s.value for s in samples if s.name.endswith("_bucket")}
    count = next(s.value for s in samples if s.name.endswith("_count"))
    assert {float(edge) for edge in HISTOGRAMS[name]} <= {float(edge) for edge in buckets}
    edges = [float(edge) for edge in buckets]
    assert edges == sorted(edges)
    assert all(low <= high for low, high in pairwise(buckets.values()))
    assert buckets["+Inf"] == count


def test_a_known_workload_is_counted(families):
    assert value(families, "vllm:prompt_tokens_total") == 12
    assert value(families, "vllm:request_success_total", finished_reason="length") == 3
    assert value(families, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(families, "vllm:request_success_total", finished_reason="stop") == 0
    assert value(families, "vllm:time_to_first_token_seconds_count") == 4
    assert value(families, "vllm:e2e_request_latency_seconds_count") == 3
    assert value(families, "vllm:request_generation_tokens_sum") == 15
    assert value(families, "vllm:request_generation_tokens_bucket", le="5.0") == 2
    assert value(families, "vllm:request_prompt_tokens_sum") == 9
    n_tokens = value(families, "vllm:generation_tokens_total")
    assert n_tokens > 15
    # Every token except the first of each answer has a gap before it.
    assert value(families, "vllm:inter_token_latency_seconds_count") == n_tokens - 4
    assert value(families, "vllm:kv_cache_usage_perc") == 0
    assert value(families, "vllm:num_requests_running") == 0
    assert value(families, "ref:step_seconds_count", phase="compute") >= n_tokens
    waits = {(s.labels["reason"], s.labels["tenant"]) for s in families["ref:wait_seconds"].samples}
    assert ("step_in_flight", "blue") in waits
    assert families["ref:policy_info"].samples[0].labels["mode"] == "chunked"


def test_cached_prompts_are_hits():
    async def scene():
        async with serving() as server:
            for _ in range(2):
                await server.post("/v1/completions", {"prompt": "x" * 50, "max_tokens": 1})
            return read(await server.text("/metrics"))

    families = asyncio.run(scene())
    assert value(families, "vllm:prefix_cache_queries_total") == 100
    assert value(families, "vllm:prefix_cache_hits_total") == 48


def test_preemptions_are_counted():
    async def scene():
        async with serving(kv_blocks=8, max_model_len=100, prefix_cache=False) as server:
            body = {"prompt": "x" * 30, "max_tokens": 60}
            posts = [server.post("/v1/completions", body) for _ in range(3)]
            assert {status for status, _ in await asyncio.gather(*posts)} == {200}
            sizes = await server.idle()
            return sizes["preemptions"], read(await server.text("/metrics"))

    n, families = asyncio.run(scene())
    assert value(families, "vllm:num_preemptions_total") == n > 0


def test_a_failed_engine_still_serves_metrics():
    class Broken:
        caps = toy_engine().executor.caps

        def execute(self, batch):
            raise ArithmeticError("no")

    async def scene():
        from dataclasses import replace

        async with serving(replace(toy_engine(), executor=Broken())) as server:
            await server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
            return read(await server.text("/metrics"))

    assert value(asyncio.run(scene()), "vllm:generation_tokens_total") == 0


def test_times_are_those_of_the_request():
    entry = request("r", [1] * 10, 5, arrived_s=1.0)
    entry.tokens += [2] * 5
    entry.state = State.finished_length
    entry.scheduled_s, entry.first_token_s, entry.finished_s = 1.25, 1.5, 3.5
    metrics = EngineMetrics(1000)
    metrics.on_first_token(entry)
    metrics.on_finish(entry, None)
    moment = Moment("m", 0, 0, 0.0, {}, {}, 0, {})
    families = read(page(metrics, moment).decode())
    assert value(families, "vllm:time_to_first_token_seconds_sum") == 0.5
    assert value(families, "vllm:request_queue_time_seconds_sum") == 0.25
    assert value(families, "vllm:request_prefill_time_seconds_sum") == 0.25
    assert value(families, "vllm:request_decode_time_seconds_sum") == 2.0
    assert value(families, "vllm:request_inference_time_seconds_sum") == 2.25
    assert value(families, "vllm:e2e_request_latency_seconds_sum") == 2.5
    assert value(families, "vllm:request_time_per_output_token_seconds_sum") == 0.5


def test_an_observation_on_an_edge_belongs_to_its_bucket():
    histogram = Histogram((1.0, 0.5, 2.0))
    for number in (0.5, 0.6, 2.0, 3.0):
        histogram.observe(number)
    histogram.observe(1.0, 2)
    assert (histogram.edges, histogram.cumulative()) == ((0.5, 1.0, 2.0), [1, 4, 5, 6])
    assert histogram.sum == pytest.approx(8.1)


def test_sizes_go_up_to_the_context():
    assert one_two_five(4096) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
    assert one_two_five(1000)[-1] == 1000


def test_tenants_beyond_the_first_few_are_counted_as_other():
    metrics = EngineMetrics(1000, most_tenants=2)
    for tenant, seconds in zip("abcabd", (1.0, 2.0, 4.0, 8.0, 16.0, 32.0), strict=True):
        metrics.on_event(StepEvent(0.0, 0, "jump", {"seconds": seconds}, "r", tenant))
    assert metrics.displaced_s == {("a",): 9.0, ("b",): 18.0, ("other",): 36.0}


def test_a_jump_is_charged_to_its_tenant_and_an_operator_is_counted():
    metrics = EngineMetrics(1000)
    metrics.on_event(StepEvent(0.0, 0, "jump", {"seconds": 1.5}, "r", "red"))
    metrics.on_event(StepEvent(0.0, 0, "jump", {"seconds": 0.5}, "s", "red"))
    metrics.on_event(StepEvent(0.0, 0, "arrival", {}, "s", "red"))
    metrics.on_event(StepEvent(0.0, 0, "pause_tenant", {}, tenant="red", actor="me"))
    families = read(page(metrics, Moment("m", 0, 0, 0.0, {}, {}, 0, {})).decode())
    assert value(families, "ref:displaced_seconds_total", tenant="red") == 2.0
    assert value(families, "ref:interventions_total", kind="pause_tenant") == 1


def test_unvisited_states_and_forecast_errors_are_counted(tmp_path):
    """A table without visits: every step that it decides is in an unvisited state. Starving
    requests use the same fallback but do not count."""
    table = load_table("hand_made").model_dump(mode="json", by_alias=True)
    sheet = {"actions": [0] * N_STATES, "visits": [0] * N_STATES}
    path = tmp_path / "blind.json"
    path.write_text(json.dumps({**table, "tables": [sheet]}))
    metrics = EngineMetrics(1000)
    engine = rig(
        policy="smdp_table", table=str(path), starvation="1ms", executor_args={"step_s": 0.5},
        log=StepLog(on_step=metrics.on_step),
    )  # fmt: skip
    engine.admit(*(request(name, [1] * 400, 3) for name in "abc"))
    n_steps = 0
    while engine.state.has_work:
        engine.step()
        n_steps += 1
    metrics.on_step(engine.state.log.steps[-1]._replace(action="prefill_fcfs: starvation"))
    for entry in engine.state.accounting.accounts.values():
        request_ = request(entry.request_id, [1], 1)
        request_.state = State.finished_length
        metrics.on_finish(request_, entry._replace(start_error_s=-0.25))
    families = read(page(metrics, Moment("m", 0, 0, 0.0, {}, {}, 0, {})).decode())
    assert value(families, "ref:smdp_unvisited_state_total") == n_steps > 3
    assert value(families, "ref:forecast_error_seconds_sum") == 0.75
    assert value(families, "ref:forecast_error_seconds_count") == 3


def test_a_steady_rate_gives_the_wait():
    departures = DepartureRate()
    for i in range(1, 2001):
        departures.add(i * 0.1)
    assert departures.wait_s(40, 200.0) == pytest.approx(4.0, rel=0.01)


def test_a_short_history_gives_the_rate_of_its_own_period():
    departures = DepartureRate()
    for i in range(6):
        departures.add(100.0 + i)
    assert departures.wait_s(10, 105.0) == pytest.approx(10.0, rel=0.1)


def test_without_departures_there_is_no_prediction():
    departures = DepartureRate()
    assert departures.wait_s(3, 1.0) is None
    departures.add(1.0)
    assert departures.wait_s(3, 2.0) is None
