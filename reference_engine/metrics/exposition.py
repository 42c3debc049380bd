"""The page of `/metrics` in Prometheus's text format: vLLM's series under vLLM's names, so that its
dashboards work here, and the engine's own under `ref:`.

Source: names and labels of vLLM V1's Prometheus logger (`vllm/v1/metrics/loggers.py`), and for the
GPU those of NVIDIA's DCGM exporter (`default-counters.csv`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from reference_engine.metrics.gpu import GpuReading
from reference_engine.metrics.metrics import FINISHED, EngineMetrics, Histogram, Key

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GAPS = "Time between two consecutive tokens of a request, s."
_UNVISITED = "Steps in states that were never visited when the decision table was made."


@dataclass(frozen=True, slots=True)
class Moment:
    """The values that are read when the page is requested, rather than added up. `kv_usage` is a
    share of blocks, 0 to 1; `n_refused` counts responses with status 429 by reason; `cache` and
    `policy` are settings by name."""

    model: str
    n_running: int
    n_waiting: int
    kv_usage: float
    cache: Mapping[str, str]
    policy: Mapping[str, str]
    n_slow_readers: int
    n_refused: Mapping[str, int]
    gpu: GpuReading | None = None


def page(metrics: EngineMetrics, moment: Moment) -> bytes:
    """The page as bytes. Takes some milliseconds: too long for a busy event loop."""
    registry = CollectorRegistry()
    registry.register(_Collector(metrics, moment))
    return generate_latest(registry)


class _Collector:
    """All series of a page; the registry calls `collect`."""

    def __init__(self, metrics: EngineMetrics, moment: Moment) -> None:
        self._metrics, self._moment = metrics, moment
        self._labels = {"model_name": moment.model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        yield from self._vllm_gauges()
        yield from self._vllm_counters()
        yield from self._vllm_histograms()
        yield from self._own()
        if self._moment.gpu is not None:
            yield from self._gpu(self._moment.gpu)

    def _vllm_gauges(self) -> Iterator[Metric]:
        now = self._moment
        for name, text, value in (
            ("num_requests_running", "Requests in the running batch.", now.n_running),
            ("num_requests_waiting", "Requests waiting to be scheduled.", now.n_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", now.kv_usage),
            ("gpu_cache_usage_perc", "Former name of kv_cache_usage_perc.", now.kv_usage),
        ):
            yield self._gauge(f"vllm:{name}", text, {}, value)
        text = "Settings of the KV memory, as labels."
        yield self._gauge("vllm:cache_config_info", text, now.cache, 1)

    def _vllm_counters(self) -> Iterator[Metric]:
        totals = self._metrics
        prompt, cached = totals.prompt_tokens, totals.cached_tokens
        for name, text, value in (
            ("num_preemptions", "Preemptions of running requests.", totals.preemptions),
            ("prompt_tokens", "Prompt tokens of requests that got a first token.", prompt),
            ("generation_tokens", "Generated tokens.", totals.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", prompt),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", cached),
            ("gpu_prefix_cache_queries", "Former name of prefix_cache_queries.", prompt),
            ("gpu_prefix_cache_hits", "Former name of prefix_cache_hits.", cached),
        ):
            yield self._counter(f"vllm:{name}", text, (), {(): value})
        reasons: dict[Key, float] = {
            (reason,): totals.finished[(reason,)] for reason in FINISHED.values()
        }
        text = "Requests that are over, by reason."
        yield self._counter("vllm:request_success", text, ("finished_reason",), reasons)

    def _vllm_histograms(self) -> Iterator[Metric]:
        totals = self._metrics
        longest = "Generated tokens of the longest completion of a request."
        mean = "Mean time between the tokens of a request, s."
        prefill = "Time from the first scheduling to the first token, s."
        inference = "Time from the first scheduling to the last token, s."
        for name, text, histogram in (
            ("iteration_tokens_total", "Tokens computed in a step.", totals.step_tokens),
            ("request_prompt_tokens", "Prompt tokens of a request.", totals.input_tokens),
            ("request_generation_tokens", "Generated tokens of a request.", totals.output_tokens),
            ("request_max_num_generation_tokens", longest, totals.output_tokens),
            ("request_params_n", "Completions per request (n).", totals.n_answers),
            ("request_params_max_tokens", "max_tokens of a request.", totals.max_tokens),
            ("time_to_first_token_seconds", "Arrival to first token, s.", totals.ttft_s),
            ("inter_token_latency_seconds", _GAPS, totals.itl_s),
            ("time_per_output_token_seconds", f"{_GAPS} Not a mean, as in vLLM V1.", totals.itl_s),
            ("request_time_per_output_token_seconds", mean, totals.tpot_s),
            ("e2e_request_latency_seconds", "Arrival to last token, s.", totals.e2e_s),
            ("request_queue_time_seconds", "Arrival to first scheduling, s.", totals.queue_s),
            ("request_inference_time_seconds", inference, totals.inference_s),
            ("request_prefill_time_seconds", prefill, totals.prefill_s),
            ("request_decode_time_seconds", "First to last token, s.", totals.decode_s),
        ):
            yield self._histogram(f"vllm:{name}", text, (), {(): histogram})

    def _own(self) -> Iterator[Metric]:
        totals, now = self._metrics, self._moment
        waited = "Time that requests waited in the queue, by cause, s."
        displaced = "Delay caused to other requests by requests served before their turn, s."
        refused: dict[Key, float] = {(reason,): n for reason, n in now.n_refused.items()}
        counters: tuple[tuple[str, str, Key, Mapping[Key, float]], ...] = (
            ("wait_seconds", waited, ("reason", "tenant"), totals.wait_s),
            ("displaced_seconds", displaced, ("tenant",), totals.displaced_s),
            ("interventions", "Interventions of operators.", ("kind",), totals.interventions),
            ("smdp_unvisited_state", _UNVISITED, (), {(): totals.smdp_unvisited}),
            ("refused_requests", "Requests answered with status 429.", ("reason",), refused),
            ("padding_tokens", "Tokens computed as padding.", (), {(): totals.padding_tokens}),
            ("slow_readers", "Streams of slow readers cut off.", (), {(): now.n_slow_readers}),
        )
        for name, text, keys, values in counters:
            yield self._counter(f"ref:{name}", text, keys, values)
        phases: dict[Key, Histogram] = {("plan",): totals.plan_s, ("compute",): totals.compute_s}
        text = "Time to plan and to compute a step, s."
        yield self._histogram("ref:step_seconds", text, ("phase",), phases)
        errors: dict[Key, Histogram] = {(): totals.forecast_error_s}
        text = "Distance of a request's start from the start forecast at its arrival, s."
        yield self._histogram("ref:forecast_error_seconds", text, (), errors)
        text = "The batching mode and its knobs, as labels."
        yield self._gauge("ref:policy_info", text, now.policy, 1)

    def _gpu(self, gpu: GpuReading) -> Iterator[Metric]:
        labels = {"gpu": str(gpu.index), "UUID": gpu.uuid, "modelName": gpu.name}
        for name, text, value, scale in (
            ("GPU_UTIL", "Share of time in which a kernel ran, %.", gpu.utilization, 100.0),
            ("FB_USED", "Memory in use, MiB.", gpu.memory_used_bytes, 2.0**-20),
            ("POWER_USAGE", "Power drawn, W.", gpu.power_w, 1.0),
            ("GPU_TEMP", "Temperature, °C.", gpu.temperature_c, 1.0),
            ("SM_CLOCK", "Clock of the multiprocessors, MHz.", gpu.sm_clock_hz, 1e-6),
        ):
            if value is not None:
                yield self._gauge(f"DCGM_FI_DEV_{name}", text, labels, value * scale)

    def _gauge(self, name: str, text: str, more: Mapping[str, str], value: float) -> Metric:
        labels = {**self._labels, **more}
        family = GaugeMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def _counter(
        self, name: str, text: str, keys: Sequence[str], values: Mapping[Key, float]
    ) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._labels, *keys])
        for key, value in list(values.items()):  # copied: the engine thread may add a key
            family.add_metric([*self._labels.values(), *key], value)
        return family

    def _histogram(
        self, name: str, text: str, keys: Sequence[str], values: Mapping[Key, Histogram]
    ) -> Metric:
        family = HistogramMetricFamily(name, text, labels=[*self._labels, *keys])
        for key, histogram in values.items():
            edges = [*map(floatToGoString, histogram.edges), "+Inf"]
            buckets = list(zip(edges, histogram.cumulative(), strict=True))
            family.add_metric([*self._labels.values(), *key], buckets, histogram.sum)
        return family
