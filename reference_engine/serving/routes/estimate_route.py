"""`POST /v1/estimate`: the price and the time of an answer, for the body that would ask for it."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from reference_engine.serving.estimate import Estimate, estimate
from reference_engine.serving.identity import ServerIdentity
from reference_engine.serving.service import Service
from reference_engine.serving.wire.call import parse_either


class EstimateRoutes:
    """The body is a chat's or a completion's; nothing is queued."""

    def __init__(self, service: Service, about: ServerIdentity) -> None:
        self._service, self._about = service, about

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/estimate", self.estimate)]

    async def estimate(self, request: web.Request) -> web.Response:
        call = parse_either(await request.read(), request.headers.get("x-tenant"))
        self._about.check_model(call)
        asked = self._service.draft(call)
        found = await self._service.ask(lambda state: estimate(state, asked))
        return web.json_response(_json(found))


def _json(found: Estimate) -> dict[str, Any]:
    output = found.output_tokens
    refusal = found.refusal
    return {
        "input_tokens": found.input_tokens,
        "cached_tokens": found.cached_tokens,
        "output_tokens": {"mean": output.mean, "p50": output.q50, "p90": output.q90},
        "price": {
            "virtual_tokens": found.virtual_tokens,
            "input_cost": found.input_cost,
            "output_cost": found.output_cost,
        },
        "tokens_ahead": found.tokens_ahead,
        "tokens_per_s": found.tokens_per_s,
        "predicted_start_ms": _ms(found.start_s),
        "predicted_ttft_ms": {"p50": _ms(found.ttft_p50_s), "p90": _ms(found.ttft_p90_s)},
        "n_errors": found.n_errors,
        "is_in_order": found.is_in_order,
        "running": found.n_running,
        "waiting": found.n_waiting,
        "refusal": None
        if refusal is None
        else {
            "message": str(refusal),
            "reason": refusal.code,
            "retry_after_ms": _ms(refusal.retry_after_s),
        },
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
