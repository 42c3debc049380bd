"""Totals of an engine since its start, for `/metrics`.

The engine thread adds to them, at a few operations per step; `exposition` turns them into text when
the page is requested. Bucket edges are vLLM's, so a dashboard made for vLLM finds every `le` it
uses, and finer edges below, because steps of small models are shorter than vLLM's finest.

Source: bucket edges of vLLM V1's Prometheus logger (`vllm/v1/metrics/loggers.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from math import exp

from reference_engine.accounting.explain import Account
from reference_engine.smdp.decision_table import UNVISITED
from reference_engine.state.sequence import Request, State
from reference_engine.state.steps import StepEvent, StepRecord

Key = tuple[str, ...]  # label values

TTFT_S = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_S = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0),
    *(10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_ANSWERS = (1, 2, 5, 10, 20)
STEP_S = (
    *(0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)

FINISHED = {
    State.finished_stop: "stop",
    State.finished_length: "length",
    State.finished_abort: "abort",
}
_MEMORY_S = 30.0


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to `most`."""
    edges = (step * 10**power for power in range(len(str(most))) for step in (1, 2, 5))
    return tuple(edge for edge in edges if edge <= most)


class Histogram:
    """Observations by upper bucket edge (≤ edge), as Prometheus counts them.

    One thread writes without a lock. Other threads may read at any time: copying a list is a single
    operation of the interpreter, and `cumulative` counts from that copy, so a reader sees
    consistent buckets; only `sum` may be of a slightly different moment.
    """

    __slots__ = ("_counts", "edges", "sum")

    def __init__(self, edges: Iterable[float]) -> None:
        self.edges = tuple(sorted(set(edges)))
        self._counts = [0] * (len(self.edges) + 1)
        self.sum = 0.0

    def observe(self, value: float, n: int = 1) -> None:
        """Count `value` `n` times."""
        self._counts[bisect_left(self.edges, value)] += n
        self.sum += value * n

    def cumulative(self) -> list[int]:
        """Observations at or below each edge, then all observations."""
        total, sums = 0, []
        for count in list(self._counts):
            total += count
            sums.append(total)
        return sums


class EngineMetrics:
    """Counters and histograms of an engine. One thread writes, any thread may read.

    The first `most_tenants` tenants have time series of their own, later tenants share `other`: the
    names come from clients, and the number of series must stay bounded.
    """

    def __init__(self, max_model_len: int, most_tenants: int = 64) -> None:
        sizes = one_two_five(max_model_len)
        self.preemptions = self.padding_tokens = self.smdp_unvisited = 0
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.finished, self.interventions = Counter[Key](), Counter[Key]()
        self.wait_s, self.displaced_s = (
            defaultdict[Key, float](float),
            defaultdict[Key, float](float),
        )
        self.ttft_s, self.forecast_error_s = Histogram(TTFT_S), Histogram(TTFT_S)
        self.itl_s, self.tpot_s = Histogram(ITL_S), Histogram(ITL_S)
        self.e2e_s, self.queue_s, self.inference_s, self.prefill_s, self.decode_s = (
            Histogram(LATENCY_S) for _ in range(5)
        )
        self.input_tokens, self.output_tokens, self.max_tokens = (
            Histogram(sizes) for _ in range(3)
        )
        self.n_answers = Histogram(N_ANSWERS)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.plan_s, self.compute_s = Histogram(STEP_S), Histogram(STEP_S)
        self._most_tenants, self._tenants = most_tenants, set[str]()

    def on_step(self, record: StepRecord) -> None:
        """Count a step. A step without tokens (the policy chose to wait) counts its plan only."""
        self.plan_s.observe(record.plan_s)
        self.preemptions += record.n_preempted
        self.smdp_unvisited += record.action.endswith(UNVISITED)
        n_tokens = record.n_prefill_tokens + record.n_decode
        if n_tokens:
            self.step_tokens.observe(n_tokens)
            self.compute_s.observe(record.duration_s)
            self.padding_tokens += record.padding_tokens

    def on_first_token(self, request: Request) -> None:
        """Count the prompt and the TTFT of a request."""
        self.prompt_tokens += request.n_prompt
        self.cached_tokens += request.n_cached
        if request.first_token_s is not None:
            self.ttft_s.observe(request.first_token_s - request.arrived_s)

    def on_tokens(self, n_tokens: int, gaps_s: Mapping[float, int]) -> None:
        """Count the tokens of a step. `gaps_s` maps the time since a request's previous token to
        the number of tokens with that gap."""
        self.generation_tokens += n_tokens
        for gap_s, n in gaps_s.items():
            self.itl_s.observe(gap_s, n)

    def on_finish(self, request: Request, account: Account | None) -> None:
        """Count a request that is over. Sizes and times are those of requests that were not
        aborted."""
        self.finished[(FINISHED[request.state],)] += 1
        if account is not None:
            tenant = self._tenant_label(request.tenant)
            for cause, seconds in account.waits:
                self.wait_s[cause.why.name, tenant] += seconds
            if account.start_error_s is not None:
                self.forecast_error_s.observe(abs(account.start_error_s))
        if request.state is State.finished_abort:
            return
        self.input_tokens.observe(request.n_prompt)
        self.output_tokens.observe(request.n_output)
        self.max_tokens.observe(request.max_tokens)
        self.n_answers.observe(1)
        self._observe_times(request)

    def on_event(self, event: StepEvent) -> None:
        """Count an entry of the event log: the delay that a jump in the queue caused to others,
        by the tenant that jumped, and interventions of operators, by kind."""
        if event.kind == "jump":
            seconds = event.detail["seconds"]
            assert isinstance(seconds, float), f"a jump costs seconds, got {seconds!r}"
            self.displaced_s[(self._tenant_label(event.tenant),)] += seconds
        elif event.actor:
            self.interventions[(event.kind,)] += 1

    def _observe_times(self, request: Request) -> None:
        start_s, first_s, end_s = request.scheduled_s, request.first_token_s, request.finished_s
        if start_s is None or first_s is None or end_s is None:
            return
        self.queue_s.observe(start_s - request.arrived_s)
        self.prefill_s.observe(first_s - start_s)
        self.decode_s.observe(end_s - first_s)
        self.inference_s.observe(end_s - start_s)
        self.e2e_s.observe(end_s - request.arrived_s)
        if request.n_output > 1:
            self.tpot_s.observe((end_s - first_s) / (request.n_output - 1))

    def _tenant_label(self, tenant: str) -> str:
        if tenant not in self._tenants:
            if len(self._tenants) >= self._most_tenants:
                return "other"
            self._tenants.add(tenant)
        return tenant


class DepartureRate:
    """The rate at which requests leave the engine; a departure t seconds ago has weight
    e^(-t/30 s)."""

    def __init__(self) -> None:
        self._weight, self._at_s = 0.0, 0.0  # sum of the weights at the last departure
        self._since_s: float | None = None

    def add(self, now_s: float) -> None:
        """Count a departure. The first only starts the observed period."""
        if self._since_s is None:
            self._since_s = self._at_s = now_s
            return
        self._weight = self._faded(now_s) + 1.0
        self._at_s = now_s

    def wait_s(self, n_ahead: int, now_s: float) -> float | None:
        """Time until `n_ahead` requests have left, at the recent rate; None before the second
        departure.

        Source: Little (1961), with the departure rate in place of the arrival rate.
        """
        if self._since_s is None or not self._weight:
            return None
        # The weights' integral over the observed period: 30 s after a long history.
        observed_s = _MEMORY_S * (1.0 - exp(-(now_s - self._since_s) / _MEMORY_S))
        return n_ahead * observed_s / self._faded(now_s)

    def _faded(self, now_s: float) -> float:
        return self._weight * exp((self._at_s - now_s) / _MEMORY_S)
