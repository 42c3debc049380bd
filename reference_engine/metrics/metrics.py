"""Totals of one engine since its start, for `/metrics`: added up on the engine thread, a few
operations per step, and turned into text (`exposition`) only when somebody asks.

Edges are vLLM's, and finer ones below them because our steps may be shorter than its finest: a
dashboard made for vLLM finds all the `le` it asks for.

Source: edges of vLLM V1's Prometheus logger (`vllm/v1/metrics/loggers.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from reference_engine.accounting.explain import Account
from reference_engine.metrics.histograms import BoundedNames, Histogram, LabelledSums
from reference_engine.smdp.decision_table import UNVISITED
from reference_engine.state.sequence import Request, State
from reference_engine.state.steps import StepEvent, StepRecord

TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_ANSWERS = (1, 2, 5, 10, 20)
FINER_TTFT_S = (0.0002, 0.0005, 0.002, 0.003)
FINER_ITL_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075)
FINER_LATENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
STEP_S = (
    *(0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)

FINISHED = {
    State.finished_stop: "stop",
    State.finished_length: "length",
    State.finished_abort: "abort",
}


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to `most`."""
    edges = (step * 10**power for power in range(len(str(most))) for step in (1, 2, 5))
    return tuple(edge for edge in edges if edge <= most)


class EngineMetrics:
    """One thread writes; any may read (see `tallies`)."""

    def __init__(self, max_model_len: int) -> None:
        sizes = one_two_five(max_model_len)
        self.preemptions = self.padding_tokens = 0
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.finished = LabelledSums()
        self.wait_s, self.displaced_s = LabelledSums(), LabelledSums()
        self.interventions = LabelledSums()
        self.smdp_unvisited = 0
        self.ttft_s = Histogram((*TTFT_S, *FINER_TTFT_S))
        self.itl_s = Histogram((*ITL_S, *FINER_ITL_S))
        self.tpot_s = Histogram((*ITL_S, *FINER_ITL_S))
        self.e2e_s, self.queue_s, self.inference_s, self.prefill_s, self.decode_s = (
            Histogram((*LATENCY_S, *FINER_LATENCY_S)) for _ in range(5)
        )
        self.forecast_error_s = Histogram((*TTFT_S, *FINER_TTFT_S))
        self.input_tokens, self.output_tokens, self.max_tokens = (
            Histogram(sizes) for _ in range(3)
        )
        self.n_answers = Histogram(N_ANSWERS)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.plan_s, self.compute_s = Histogram(STEP_S), Histogram(STEP_S)
        self._tenants = BoundedNames()

    def on_step(self, record: StepRecord) -> None:
        """A step was carried out; one that only waited counts its plan."""
        self.plan_s.observe(record.plan_s)
        self.preemptions += record.n_preempted
        self.smdp_unvisited += record.action.endswith(UNVISITED)
        n_tokens = record.n_prefill_tokens + record.n_decode
        if n_tokens:
            self.step_tokens.observe(n_tokens)
            self.compute_s.observe(record.duration_s)
            self.padding_tokens += record.padding_tokens

    def on_first_token(self, request: Request) -> None:
        self.prompt_tokens += request.n_prompt
        self.cached_tokens += request.n_cached
        if request.first_token_s is not None:
            self.ttft_s.observe(request.first_token_s - request.arrived_s)

    def on_tokens(self, n_tokens: int, gaps_s: Mapping[float, int]) -> None:
        """A step's tokens; how many of them came how long after the token before."""
        self.generation_tokens += n_tokens
        for gap_s, n in gaps_s.items():
            self.itl_s.observe(gap_s, n)

    def on_finish(self, request: Request, account: Account | None) -> None:
        """A request is over. Times are those of answers that came to their end."""
        self.finished.add((FINISHED[request.state],))
        tenant = self._tenants.known(request.tenant)
        for cause, seconds in () if account is None else account.waits:
            self.wait_s.add((cause.why.name, tenant), seconds)
        if account is not None and account.start_error_s is not None:
            self.forecast_error_s.observe(abs(account.start_error_s))
        if request.state is State.finished_abort:
            return
        self.input_tokens.observe(request.n_prompt)
        self.output_tokens.observe(request.n_output)
        self.max_tokens.observe(request.max_tokens)
        self.n_answers.observe(1)
        self._observe_times(request)

    def on_event(self, event: StepEvent) -> None:
        """An entry of the event log: jumps of the queue are charged to their tenant, and what an
        operator did is counted by its kind."""
        if event.kind == "jump":
            seconds = event.detail["seconds"]
            assert isinstance(seconds, float), f"a jump costs seconds, got {seconds!r}"
            self.displaced_s.add((self._tenants.known(event.tenant),), seconds)
        elif event.actor:
            self.interventions.add((event.kind,))

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
