"""Looking into the engine and intervening: why a request waits, what the last steps did, which
policy decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from aiohttp import web

from loadgen.errors import UnknownKind, UsageError
from reference_engine.core import EngineState
from reference_engine.explain import Account
from reference_engine.policies.base import POLICIES, Policy
from reference_engine.routes.about import About
from reference_engine.service import Service
from reference_engine.steps import StepRecord
from reference_engine.wire.errors import WireError
from reference_engine.wire.fields import integer, parse_object, text

MakePolicy = Callable[[str, Mapping[str, Any]], Policy]

_N_STEPS, _MOST_STEPS = 100, 4096


class DebugRoutes:
    """Answered by the engine thread between two steps, so that the numbers belong together."""

    def __init__(self, service: Service, about: About, make_policy: MakePolicy) -> None:
        self._service, self._about, self._make_policy = service, about, make_policy

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/debug/engine", self.engine),
            web.get("/debug/requests/{id}", self.request),
            web.get("/debug/steps", self.steps),
            web.get("/debug/policy", self.policy),
            web.put("/debug/policy", self.switch_policy),
            web.post("/debug/tenants/{name}/pause", self.pause),
            web.post("/debug/tenants/{name}/resume", self.resume),
            web.put("/debug/requests/{id}/priority", self.reprioritise),
        ]

    async def engine(self, request: web.Request) -> web.Response:
        """Sizes and totals of this moment."""
        sizes = await self._service.ask(_sizes)
        about = {"device": self._about.device, "slow_readers": self._service.n_slow_readers}
        return web.json_response({**sizes, **about})

    async def request(self, request: web.Request) -> web.Response:
        """Where the waiting time of a live or recent request went."""
        request_id = request.match_info["id"]
        answer = await self._service.ask(lambda state: _explain(state, request_id))
        if answer is None:
            raise WireError(
                f"no request '{request_id}' is live or among the recent ones",
                status=404,
                code="request_not_found",
            )
        return web.json_response(answer)

    async def steps(self, request: web.Request) -> web.Response:
        """The last `n` steps, oldest first."""
        n = _count(request.query.get("n", str(_N_STEPS)))
        records = await self._service.ask(lambda state: list(state.log.last(n)))
        return web.json_response({"steps": [_step_json(record) for record in records]})

    async def policy(self, request: web.Request) -> web.Response:
        """The mode and its knobs, in the form in which they can be put back."""
        return web.json_response(await self._service.ask(_policy_json))

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
            before = _policy_json(state)
            state.switch_policy(policy, **who)
            return {"before": before, **_policy_json(state)}

        return web.json_response(await self._service.ask(switch))

    async def pause(self, request: web.Request) -> web.Response:
        """Hold a tenant's waiting and coming requests back; its running ones go on."""
        tenant, who = request.match_info["name"], await _operator(request)

        def pause(state: EngineState) -> dict[str, Any]:
            state.pause(tenant, **who)
            return _tenant_json(state, tenant)

        return web.json_response(await self._service.ask(pause))

    async def resume(self, request: web.Request) -> web.Response:
        """Give a tenant's requests their places in the queue back."""
        tenant, who = request.match_info["name"], await _operator(request)

        def resume(state: EngineState) -> dict[str, Any]:
            state.resume(tenant, **who)
            return _tenant_json(state, tenant)

        return web.json_response(await self._service.ask(resume))

    async def reprioritise(self, request: web.Request) -> web.Response:
        """`{"priority": n}` of a live request; lower goes first."""
        request_id = request.match_info["id"]
        body = parse_object(await request.read())
        priority, who = integer(body, "priority", -(1 << 31)), _who(request, body)
        if priority is None:
            raise WireError("priority must be an integer", param="priority")
        if not await self._service.ask(lambda s: s.reprioritise(request_id, priority, **who)):
            raise WireError(
                f"no request '{request_id}' is live", status=404, code="request_not_found"
            )
        return web.json_response({"request_id": request_id, "priority": priority})


async def _operator(request: web.Request) -> dict[str, str]:
    """Who intervenes and why, of a body that may be empty."""
    body = await request.read()
    return _who(request, parse_object(body) if body else {})


def _who(request: web.Request, body: Mapping[str, Any]) -> dict[str, str]:
    actor = text(body, "actor") or request.headers.get("x-actor") or "http"
    return {"actor": actor, "reason": text(body, "reason") or ""}


def _tenant_json(state: EngineState, tenant: str) -> dict[str, Any]:
    held = sum(request.tenant == tenant for request in state.roster.held.values())
    return {"tenant": tenant, "is_paused": tenant in state.paused, "held": held}


def _sizes(state: EngineState) -> dict[str, Any]:
    return {
        "mode": state.policy.kind,
        "running": len(state.roster.running),
        "waiting": len(state.roster.waiting),
        "held": len(state.roster.held),
        "paused_tenants": sorted(state.paused),
        "kv_blocks": state.kv.n_blocks,
        "kv_blocks_free": state.kv.n_free,
        **asdict(state.counters),
    }


def _explain(state: EngineState, request_id: str) -> dict[str, Any] | None:
    entry = state.explain(request_id)
    if entry is None:
        return None
    is_live = state.roster.find(request_id) is not None
    thoughts = state.policy.explain(request_id, state.view()) if is_live else {}
    return {**_account_json(entry), "policy": thoughts}


def _account_json(entry: Account) -> dict[str, Any]:
    waits = [
        {"why": cause.why.name, "blocker": cause.blocker or None, "seconds": seconds}
        for cause, seconds in entry.waits
    ]
    return {**asdict(entry), "waits": waits, "sentence": entry.sentence()}


def _step_json(record: StepRecord) -> dict[str, Any]:
    return {**record._asdict(), "items": dict(record.items), "causes": dict(record.causes)}


def _policy_json(state: EngineState) -> dict[str, Any]:
    policy = state.policy
    return {"mode": policy.kind, "knobs": policy.model_dump(mode="json"), "modes": POLICIES.names()}


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_STEPS:
        raise WireError(f"n must be a number from 1 to {_MOST_STEPS}, got '{text}'", param="n")
    return int(text)
