"""What a request would cost and when it would answer, said before it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from reference_engine.core.core import EngineState
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.state.cost_model import StepShape
from reference_engine.state.plan import AdmissionError
from reference_engine.state.predictor import LengthDist
from reference_engine.state.sequence import Request

_INPUT_COST, _OUTPUT_COST = 1.0, 2.0  # virtual tokens; source: VTC (OSDI'24, arXiv 2401.00588)
_FEWEST_ERRORS = 8


@dataclass(frozen=True, slots=True)
class Estimate:
    """`virtual_tokens` is the price: `input_cost` per prompt token to be computed and `output_cost`
    per token expected. `tokens_ahead` are computed first, at `tokens_per_s`. Times in seconds from
    now, None where there is nothing to go by; `n_errors` earlier forecasts went into them. They
    assume the order of the queue; `is_in_order` says whether the mode keeps to it."""

    input_tokens: int
    cached_tokens: int
    output_tokens: LengthDist
    input_cost: float
    output_cost: float
    virtual_tokens: float
    tokens_ahead: int
    tokens_per_s: float | None
    start_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    n_errors: int
    is_in_order: bool
    n_running: int
    n_waiting: int
    refusal: AdmissionError | None


def estimate(state: EngineState, request: Request) -> Estimate:
    """The estimate for a request that is not sent (yet); leaves no trace in the engine: whoever
    asks changes no later decision."""
    view = state.view()
    predictor = view.predictor
    if isinstance(predictor, QuantilePredictor):
        view.predictor = predictor.aside()
    try:
        return _estimate(state, request)
    finally:
        view.predictor = predictor


def _estimate(state: EngineState, request: Request) -> Estimate:
    foretold = state.forecast(request.n_prompt)
    view = state.view()  # later than the forecast, so that "at once" is no wait
    cached = state.kv.cached_tokens(request)
    output = view.predictor.predict(request)
    start_s = None if foretold.start_s is None else max(0.0, foretold.start_s - view.now_s)
    read_s = _read_s(state, request.n_prompt, cached, foretold.tokens_per_s)
    # A forecast of "at once" is not made wrong by a queue.
    errors = sorted(state.accounting.prompt_rate.errors) if start_s else []
    input_cost = float(getattr(state.policy, "input_cost", _INPUT_COST))
    output_cost = float(getattr(state.policy, "output_cost", _OUTPUT_COST))
    p50_s, p90_s = (_ttft_s(start_s, read_s, errors, p) for p in (0.5, 0.9))
    return Estimate(
        input_tokens=request.n_prompt,
        cached_tokens=cached,
        output_tokens=output,
        input_cost=input_cost,
        output_cost=output_cost,
        virtual_tokens=input_cost * (request.n_prompt - cached) + output_cost * output.mean,
        tokens_ahead=foretold.tokens_ahead,
        tokens_per_s=foretold.tokens_per_s,
        start_s=start_s,
        ttft_p50_s=p50_s,
        ttft_p90_s=p90_s,
        n_errors=len(errors) if len(errors) >= _FEWEST_ERRORS else 0,
        is_in_order=state.policy.is_in_order,
        n_running=len(state.queues.running),
        n_waiting=len(state.queues.waiting) + len(state.queues.held),
        refusal=_refusal(state, request),
    )


def _read_s(
    state: EngineState, n_prompt: int, cached: int, tokens_per_s: float | None
) -> float | None:
    """Time to compute a prompt: by the cost model, beside the requests that decode now, or at the
    rate of late."""
    view = state.view()
    most = getattr(state.policy, "token_budget", None)
    most = most if isinstance(most, int) else view.limits.max_step_tokens
    n_decode = len(view.decoding)
    most = max(1, most - n_decode)
    seconds, done = 0.0, cached
    while done < n_prompt:
        n = min(most, n_prompt - done)
        seconds += view.cost.estimate(
            StepShape(n_decode + 1, n, n * (done + n / 2), n_decode, view.decode_context_tokens)
        )
        done += n
    if seconds > 0:
        return seconds
    return (n_prompt - cached) / tokens_per_s if tokens_per_s else None


def _ttft_s(
    start_s: float | None, read_s: float | None, errors: Sequence[float], p: float
) -> float | None:
    """Start, corrected by the p-quantile of what earlier forecasts missed, and reading."""
    if start_s is None or read_s is None:
        return None
    if len(errors) < _FEWEST_ERRORS:
        return start_s + read_s
    late_s = errors[ceil(p * len(errors)) - 1]
    return max(0.0, start_s + late_s) + read_s


def _refusal(state: EngineState, request: Request) -> AdmissionError | None:
    try:
        state.policy.check_arrival(request, state.view())
    except AdmissionError as error:
        return error
    return None
