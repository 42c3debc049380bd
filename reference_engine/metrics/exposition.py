"""The page of `/metrics`: vLLM's names, so that its dashboards work here, and our own under
`ref:`.

Source: names and labels of vLLM V1's Prometheus logger (`vllm/v1/metrics/loggers.py`), and for the
GPU those of NVIDIA's DCGM exporter (`default-counters.csv`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from reference_engine.metrics.metrics import FINISHED, EngineMetrics, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Key = tuple[str, ...]  # label values
_UNVISITED = "Steps in a state that the decision table was never made for."
_GAPS = "Time between two tokens of a request, s."


@dataclass(frozen=True, slots=True)
class Moment:
    """What is not added up but looked at when the page is asked for. `kv_usage` is a share of
    blocks; `n_refused` counts 429s by reason; `cache` and `policy` are settings by name."""

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
    """Prometheus's text format; takes some milliseconds, so not for a busy event loop."""
    registry = CollectorRegistry()
    registry.register(_Collector(lambda: _Families(metrics, moment).all()))
    return generate_latest(registry)


class _Collector:
    """What a registry asks for: an object with `collect`."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families()


class _Families:
    def __init__(self, metrics: EngineMetrics, moment: Moment) -> None:
        self._metrics, self._moment = metrics, moment
        self._labels = {"model_name": moment.model, "engine": "0"}

    def all(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._sizes()
        yield from self._times()
        yield from self._own()
        if self._moment.gpu is not None:
            yield from self._gpu(self._moment.gpu)

    def _gauges(self) -> Iterator[Metric]:
        now = self._moment
        for name, text, value in (
            ("num_requests_running", "Requests in the running batch.", now.n_running),
            ("num_requests_waiting", "Requests waiting to be scheduled.", now.n_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0-1.", now.kv_usage),
            ("gpu_cache_usage_perc", "Older name of kv_cache_usage_perc.", now.kv_usage),
        ):
            yield self._gauge(f"vllm:{name}", text, {}, value)
        yield self._gauge("vllm:cache_config_info", "How KV memory is set up.", now.cache, 1)

    def _counters(self) -> Iterator[Metric]:
        totals = self._metrics
        prompt, cached = totals.prompt_tokens, totals.cached_tokens
        for name, text, value in (
            ("num_preemptions", "Preemptions of running requests.", totals.preemptions),
            ("prompt_tokens", "Prompt tokens of requests that began to answer.", prompt),
            ("generation_tokens", "Generated tokens.", totals.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", prompt),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", cached),
            ("gpu_prefix_cache_queries", "Older name of prefix_cache_queries.", prompt),
            ("gpu_prefix_cache_hits", "Older name of prefix_cache_hits.", cached),
        ):
            yield self._counter(f"vllm:{name}", text, (), {(): value})
        ends: dict[Key, float] = {
            (end,): totals.finished.get((end,), 0.0) for end in FINISHED.values()
        }
        text = "Requests that are over, by reason."
        yield self._counter("vllm:request_success", text, ("finished_reason",), ends)

    def _sizes(self) -> Iterator[Metric]:
        totals = self._metrics
        longest = "Generated tokens of the longest answer of a request."
        for name, text, histogram in (
            ("iteration_tokens_total", "Tokens computed in a step.", totals.step_tokens),
            ("request_prompt_tokens", "Prompt tokens of a request.", totals.input_tokens),
            ("request_generation_tokens", "Generated tokens of a request.", totals.output_tokens),
            ("request_max_num_generation_tokens", longest, totals.output_tokens),
            ("request_params_n", "Answers asked for.", totals.n_answers),
            ("request_params_max_tokens", "max_tokens of a request.", totals.max_tokens),
        ):
            yield self._histogram(f"vllm:{name}", text, {(): histogram})

    def _times(self) -> Iterator[Metric]:
        totals = self._metrics
        mean = "Mean time between the tokens of a request, s."
        for name, text, histogram in (
            ("time_to_first_token", "Arrival to first token, s.", totals.ttft_s),
            ("inter_token_latency", _GAPS, totals.itl_s),
            ("time_per_output_token", f"{_GAPS} No mean, as in vLLM V1.", totals.itl_s),
            ("request_time_per_output_token", mean, totals.tpot_s),
            ("e2e_request_latency", "Arrival to last token, s.", totals.e2e_s),
            ("request_queue_time", "Arrival to first scheduled, s.", totals.queue_s),
            ("request_inference_time", "First scheduled to last token, s.", totals.inference_s),
            ("request_prefill_time", "First scheduled to first token, s.", totals.prefill_s),
            ("request_decode_time", "First to last token, s.", totals.decode_s),
        ):
            yield self._histogram(f"vllm:{name}_seconds", text, {(): histogram})

    def _own(self) -> Iterator[Metric]:
        totals, now = self._metrics, self._moment
        refused: dict[Key, float] = {(reason,): float(n) for reason, n in now.n_refused.items()}
        padding: dict[Key, float] = {(): totals.padding_tokens}
        slow: dict[Key, float] = {(): now.n_slow_readers}
        counters: tuple[tuple[str, str, Key, Mapping[Key, float]], ...] = (
            ("wait_seconds", "Time in the queue by cause, s.", ("reason", "tenant"), totals.wait_s),
            (
                "displaced_seconds",
                "Delay that requests before their turn caused to others, s.",
                ("tenant",),
                totals.displaced_s,
            ),
            ("interventions", "What operators did.", ("kind",), totals.interventions),
            ("smdp_unvisited_state", _UNVISITED, (), {(): totals.smdp_unvisited}),
            ("refused_requests", "Requests answered with 429.", ("reason",), refused),
            ("padding_tokens", "Computed for nobody.", (), padding),
            ("slow_readers", "Streams cut off.", (), slow),
        )
        for name, text, keys, values in counters:
            yield self._counter(f"ref:{name}", text, keys, values)
        phases: dict[Key, Histogram] = {("plan",): totals.plan_s, ("compute",): totals.compute_s}
        text = "Planning and computing of a step, s."
        yield self._histogram("ref:step_seconds", text, phases, ("phase",))
        text = "By how much requests started earlier or later than foretold at their arrival, s."
        yield self._histogram("ref:forecast_error_seconds", text, {(): totals.forecast_error_s})
        yield self._gauge("ref:policy_info", "The batching mode and its knobs.", now.policy, 1)

    def _gpu(self, gpu: GpuReading) -> Iterator[Metric]:
        labels = {"gpu": str(gpu.index), "UUID": gpu.uuid, "modelName": gpu.name}
        for name, text, value, scale in (
            ("GPU_UTIL", "Share of time a kernel ran, %.", gpu.utilization, 100.0),
            ("FB_USED", "Memory used, MiB.", gpu.memory_used_bytes, 2.0**-20),
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
        for key, value in list(values.items()):
            family.add_metric([*self._labels.values(), *key], value)
        return family

    def _histogram(
        self,
        name: str,
        text: str,
        entries: Mapping[Key, Histogram],
        keys: Iterable[str] = (),
    ) -> Metric:
        family = HistogramMetricFamily(name, text, labels=[*self._labels, *keys])
        for key, histogram in entries.items():
            edges = [*map(floatToGoString, histogram.edges), "+Inf"]
            buckets = list(zip(edges, histogram.cumulative(), strict=True))
            family.add_metric([*self._labels.values(), *key], buckets, histogram.sum)
        return family
