"""What an operator may do to a serving engine: another mode, a tenant held back, another priority,
an empty prefix cache. Each is an event of the log, with who did it and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from loadgen.errors import UnknownKind, UsageError
from reference_engine.core import interventions
from reference_engine.core.core import EngineState
from reference_engine.policies.base import Policy
from reference_engine.serving.routes.debug import policy_json
from reference_engine.serving.service import Service
from reference_engine.serving.wire.fields import integer, parse_object, text
from reference_engine.serving.wire.wire_errors import WireError

MakePolicy = Callable[[str, Mapping[str, Any]], Policy]


class InterventionRoutes:
    """Carried out by the engine thread between two steps."""

    def __init__(self, service: Service, make_policy: MakePolicy) -> None:
        self._service, self._make_policy = service, make_policy

    def routes(self) -> list[web.RouteDef]:
        return [
            web.put("/debug/policy", self.switch_policy),
            web.post("/debug/tenants/{name}/pause", self.pause),
            web.post("/debug/tenants/{name}/resume", self.resume),
            web.put("/debug/requests/{id}/priority", self.reprioritise),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),  # as vLLM calls it
        ]

    async def switch_policy(self, request: web.Request) -> web.Response:
        """Go on under `{"mode": …, "knobs": {…}}`; nothing drains. Only knobs of this body count,
        and the server's own `max_num_seqs` and `token_budget`."""
        body = parse_object(await request.read())
        mode, knobs = text(body, "mode"), body.get("knobs", {})
        if mode is None:
            raise WireError("mode must name a batching mode", param="mode")
        if not isinstance(knobs, dict):
            raise WireError(f"knobs must be an object, got {knobs!r}", param="knobs")
        try:
            policy = self._make_policy(mode, knobs)
        except UsageError as error:
            param = "mode" if isinstance(error, UnknownKind) else "knobs"
            raise WireError(str(error), param=param) from None
        who = _who(request, body)

        def switch(state: EngineState) -> dict[str, Any]:
            before = policy_json(state)
            interventions.switch_policy(state, policy, **who)
            return {"before": before, **policy_json(state)}

        return web.json_response(await self._service.ask(switch))

    async def pause(self, request: web.Request) -> web.Response:
        """Hold a tenant's waiting and coming requests back; its running ones go on."""
        tenant, who = request.match_info["name"], await _operator(request)

        def pause(state: EngineState) -> dict[str, Any]:
            interventions.pause(state, tenant, **who)
            return _tenant_json(state, tenant)

        return web.json_response(await self._service.ask(pause))

    async def resume(self, request: web.Request) -> web.Response:
        """Give a tenant's requests their places in the queue back."""
        tenant, who = request.match_info["name"], await _operator(request)

        def resume(state: EngineState) -> dict[str, Any]:
            interventions.resume(state, tenant, **who)
            return _tenant_json(state, tenant)

        return web.json_response(await self._service.ask(resume))

    async def reprioritise(self, request: web.Request) -> web.Response:
        """`{"priority": n}` of a live request; lower goes first."""
        request_id = request.match_info["id"]
        body = parse_object(await request.read())
        priority, who = integer(body, "priority", -(1 << 31)), _who(request, body)
        if priority is None:
            raise WireError("priority must be an integer", param="priority")
        if not await self._service.ask(
            lambda s: interventions.reprioritise(s, request_id, priority, **who)
        ):
            raise WireError(
                f"no request '{request_id}' is live", status=404, code="request_not_found"
            )
        return web.json_response({"request_id": request_id, "priority": priority})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Forget every cached prefix; what runs goes on."""
        who = await _operator(request)
        n_blocks = await self._service.ask(lambda s: interventions.reset_prefix_cache(s, **who))
        return web.json_response({"blocks": n_blocks})


async def _operator(request: web.Request) -> dict[str, str]:
    """Who intervenes and why, of a body that may be empty."""
    body = await request.read()
    return _who(request, parse_object(body) if body else {})


def _who(request: web.Request, body: Mapping[str, Any]) -> dict[str, str]:
    actor = text(body, "actor") or request.headers.get("x-actor") or "http"
    return {"actor": actor, "reason": text(body, "reason") or ""}


def _tenant_json(state: EngineState, tenant: str) -> dict[str, Any]:
    held = sum(request.tenant == tenant for request in state.queues.held.values())
    return {"tenant": tenant, "is_paused": tenant in state.paused_tenants.names, "held": held}
