"""`POST /v1/estimate`: the predicted price and times of a request, which is not queued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from aiohttp import web

from reference_engine.core.core import EngineState
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.serving.identity import ServerIdentity
from reference_engine.serving.service import Service
from reference_engine.serving.wire.call import parse_either
from reference_engine.serving.wire.wire_errors import WireError
from reference_engine.state.cost_model import StepShape
from reference_engine.state.plan import AdmissionError
from reference_engine.state.predictor import LengthDist
from reference_engine.state.sequence import Request

_INPUT_COST, _OUTPUT_COST = 1.0, 2.0  # virtual tokens; source: VTC (OSDI'24, arXiv 2401.00588)
_FEWEST_ERRORS = 8


@dataclass(frozen=True, slots=True)
class Estimate:
    """The price and times of a request that would arrive now.

    `virtual_tokens` is the price: `input_cost` per prompt token to be computed plus `output_cost`
    per expected output token. `tokens_ahead` prompt tokens are computed first, at `tokens_per_s`.
    Times are in seconds from now, None without data; they are corrected by the errors of
    `n_errors` earlier forecasts. They assume that the queue is served in order; `is_in_order` is
    false if the mode does not do so. `refusal` is the error with which the mode would refuse the
    request now.
    """

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

    def as_json(self) -> dict[str, object]:
        output, refusal = self.output_tokens, self.refusal
        return {
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": {"mean": output.mean, "p50": output.q50, "p90": output.q90},
            "price": {
                "virtual_tokens": self.virtual_tokens,
                "input_cost": self.input_cost,
                "output_cost": self.output_cost,
            },
            "tokens_ahead": self.tokens_ahead,
            "tokens_per_s": self.tokens_per_s,
            "predicted_start_ms": _ms(self.start_s),
            "predicted_ttft_ms": {"p50": _ms(self.ttft_p50_s), "p90": _ms(self.ttft_p90_s)},
            "n_errors": self.n_errors,
            "is_in_order": self.is_in_order,
            "running": self.n_running,
            "waiting": self.n_waiting,
            "refusal": refusal
            and {
                "message": str(refusal),
                "reason": refusal.code,
                "retry_after_ms": _ms(refusal.retry_after_s),
            },
        }


class EstimateRoutes:
    """The body is that of a chat or of a completion."""

    def __init__(self, service: Service, identity: ServerIdentity) -> None:
        self._service, self._identity = service, identity

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/estimate", self.estimate)]

    async def estimate(self, request: web.Request) -> web.Response:
        call = parse_either(await request.read(), request.headers.get("x-tenant"))
        if len(call.choices()) > 1:
            field = "prompt" if len(call.prompts) > 1 else "n"
            raise WireError(f"{field}: an estimate is for a single choice", param=field)
        self._identity.check_model(call.model)
        draft = self._service.draft(call)
        found = await self._service.between_steps(lambda state: estimate(state, draft))
        return web.json_response(found.as_json())


def estimate(state: EngineState, request: Request) -> Estimate:
    """The estimate for a request that is not queued. Leaves the engine unchanged: an estimate must
    not influence later decisions."""
    view = state.view()
    predictor = view.predictor
    if isinstance(predictor, QuantilePredictor):
        view.predictor = predictor.read_only()
    try:
        return _estimate(state, request)
    finally:
        view.predictor = predictor


def _estimate(state: EngineState, request: Request) -> Estimate:
    forecast = state.forecast(request.n_prompt)
    # Read after the forecast: a start forecast for "at once" is then not in the future.
    view = state.view()
    n_cached = state.kv.cached_tokens(request)
    output = view.predictor.predict(request)
    start_s = None if forecast.start_s is None else max(0.0, forecast.start_s - view.now_s)
    prefill_s = _prefill_s(state, request.n_prompt, n_cached, forecast.tokens_per_s)
    # The errors are those of forecasts made with a queue; without a queue there is none to correct.
    errors_s = sorted(state.accounting.prompt_rate.errors) if start_s else []
    input_cost = float(getattr(state.policy, "input_cost", _INPUT_COST))
    output_cost = float(getattr(state.policy, "output_cost", _OUTPUT_COST))
    p50_s, p90_s = (_ttft_s(start_s, prefill_s, errors_s, p) for p in (0.5, 0.9))
    return Estimate(
        input_tokens=request.n_prompt,
        cached_tokens=n_cached,
        output_tokens=output,
        input_cost=input_cost,
        output_cost=output_cost,
        virtual_tokens=input_cost * (request.n_prompt - n_cached) + output_cost * output.mean,
        tokens_ahead=forecast.tokens_ahead,
        tokens_per_s=forecast.tokens_per_s,
        start_s=start_s,
        ttft_p50_s=p50_s,
        ttft_p90_s=p90_s,
        n_errors=len(errors_s) if len(errors_s) >= _FEWEST_ERRORS else 0,
        is_in_order=state.policy.keeps_order,
        n_running=len(state.queues.running),
        n_waiting=len(state.queues.waiting) + len(state.queues.held),
        refusal=_refusal(state, request),
    )


def _prefill_s(
    state: EngineState, n_prompt: int, n_cached: int, tokens_per_s: float | None
) -> float | None:
    """Time to compute a prompt in the same steps as the requests that decode now: by the cost
    model, or, if that has no costs, at the recent rate."""
    view = state.view()
    budget = getattr(state.policy, "token_budget", None)
    budget = budget if isinstance(budget, int) else view.limits.max_step_tokens
    n_decode = len(view.decoding)
    budget = max(1, budget - n_decode)
    seconds, n_done = 0.0, n_cached
    while n_done < n_prompt:
        n = min(budget, n_prompt - n_done)
        seconds += view.cost.estimate(
            StepShape(n_decode + 1, n, n * (n_done + n / 2), n_decode, view.decode_context_tokens)
        )
        n_done += n
    if seconds > 0:
        return seconds
    return (n_prompt - n_cached) / tokens_per_s if tokens_per_s else None


def _ttft_s(
    start_s: float | None, prefill_s: float | None, errors_s: Sequence[float], p: float
) -> float | None:
    """The start, corrected by the p-quantile of earlier forecast errors (sorted), plus prefill."""
    if start_s is None or prefill_s is None:
        return None
    if len(errors_s) < _FEWEST_ERRORS:
        return start_s + prefill_s
    error_s = errors_s[ceil(p * len(errors_s)) - 1]
    return max(0.0, start_s + error_s) + prefill_s


def _refusal(state: EngineState, request: Request) -> AdmissionError | None:
    try:
        state.policy.check_arrival(request, state.view())
    except AdmissionError as error:
        return error
    return None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
