"""Routes under `/debug`: the engine's state (why a request waits, the last steps, the batching
mode), and an operator's interventions (another mode, a paused tenant, a priority, an empty prefix
cache). Each intervention is an event in the log, with its actor and reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from aiohttp import web

from loadgen.errors import UnknownKind, UsageError
from reference_engine.accounting.explain import Account
from reference_engine.attribution.attribution import Attribution
from reference_engine.attribution.attribution_process import AttributionProcess, FoundMisses
from reference_engine.attribution.counterfactual import Case
from reference_engine.core import interventions
from reference_engine.core.core import EngineState
from reference_engine.core.setup import Setup
from reference_engine.policies.base import POLICIES, Policy
from reference_engine.serving.identity import ServerIdentity, possible_ids
from reference_engine.serving.service import Service
from reference_engine.serving.wire.fields import integer, parse_object, text, wrong_value
from reference_engine.serving.wire.wire_errors import WireError
from reference_engine.state.steps import StepRecord

log = logging.getLogger(__name__)

_N_STEPS, _MOST_STEPS = 100, 4096
_MOST_SIMULATED = 60_000  # steps of all modes together: some ten seconds of a core


MakePolicy = Callable[[str, Mapping[str, Any]], Policy]


class DebugRoutes:
    """Reads and changes the state on the engine thread between two steps, so the numbers of a
    response are consistent. `make_policy` gets a mode and its knobs."""

    def __init__(self, service: Service, identity: ServerIdentity, make_policy: MakePolicy) -> None:
        self._service, self._identity, self._make_policy = service, identity, make_policy
        self._attribution = AttributionProcess()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/debug/engine", self.engine),
            web.get("/debug/requests/{id:.+}", self.request),
            web.delete("/debug/requests/{id:.+}", self.cancel),
            web.get("/debug/misses", self.misses),
            web.get("/debug/tenants", self.tenants),
            web.get("/debug/steps", self.steps),
            web.get("/debug/policy", self.policy),
            web.put("/debug/policy", self.switch_policy),
            web.post("/debug/tenants/{name}/pause", self.pause),
            web.post("/debug/tenants/{name}/resume", self.resume),
            web.put("/debug/requests/{id:.+}/priority", self.reprioritise),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),  # vLLM's path
        ]

    async def engine(self, request: web.Request) -> web.Response:
        """Current sizes, and totals since the start."""
        sizes = await self._service.between_steps(_sizes)
        sizes["device"] = self._identity.device
        sizes["slow_readers"] = self._service.n_slow_readers
        return web.json_response(sizes)

    async def request(self, request: web.Request) -> web.Response:
        """The waiting time of a live or recent request by cause, and the causes of its missed
        SLOs."""
        name = request.match_info["id"]
        inspected = await self._service.between_steps(lambda state: _inspect(state, name))
        if inspected is None:
            raise WireError(
                f"request '{name}' is neither live nor among the recent requests",
                status=404,
                code="request_not_found",
            )
        account, policy_view, case = inspected
        found = await self._attribution.misses(case)
        return web.json_response(
            {**_account_json(account), "policy": policy_view, **_found_json(found)}
        )

    async def cancel(self, request: web.Request) -> web.Response:
        """Cancel a live request; its client gets an error."""
        name, actor = request.match_info["id"], await _actor_of(request)

        def note(state: EngineState) -> str:
            request_id = _live_id(state, name)
            interventions.note_cancel(state, request_id, **actor)
            return request_id

        request_id = await self._service.between_steps(note)
        self._service.cancel(request_id)
        return web.json_response({"request_id": request_id})

    async def misses(self, request: web.Request) -> web.Response:
        """The SLOs that recent requests missed, each with its cause. A simulation may take longer
        than a client waits: the answer then has its progress, and a later call the result."""
        found = await self._attribution.misses(await self._service.between_steps(_case))
        return web.json_response(_found_json(found))

    async def tenants(self, request: web.Request) -> web.Response:
        """Per tenant: tokens received, waiting time, and the waiting time caused to others."""
        return web.json_response({"tenants": await self._service.between_steps(_tenants_json)})

    async def steps(self, request: web.Request) -> web.Response:
        """The last `n` steps, oldest first."""
        n = _n_steps(request.query.get("n", str(_N_STEPS)))
        records = await self._service.between_steps(lambda state: list(state.log.last(n)))
        return web.json_response({"steps": [_step_json(record) for record in records]})

    async def policy(self, request: web.Request) -> web.Response:
        """The mode and its knobs, in the form that `PUT /debug/policy` accepts."""
        return web.json_response(await self._service.between_steps(_policy_json))

    async def switch_policy(self, request: web.Request) -> web.Response:
        """Switch to `{"mode": …, "knobs": {…}}` without draining. The knobs are those of this body
        and the server's own `max_num_seqs` and `token_budget`."""
        body = parse_object(await request.read())
        mode, knobs = text(body, "mode"), body.get("knobs", {})
        if mode is None:
            raise WireError("mode is missing; it must name a batching mode", param="mode")
        if not isinstance(knobs, dict):
            raise wrong_value("knobs", "an object", knobs)
        try:
            policy = self._make_policy(mode, knobs)
        except UsageError as error:
            param = "mode" if isinstance(error, UnknownKind) else "knobs"
            raise WireError(str(error), param=param) from None
        actor = _actor(request, body)

        def switch(state: EngineState) -> dict[str, object]:
            before = _policy_json(state)
            interventions.switch_policy(state, policy, **actor)
            return {"before": before, **_policy_json(state)}

        return web.json_response(await self._service.between_steps(switch))

    async def pause(self, request: web.Request) -> web.Response:
        """Hold back a tenant's waiting and future requests; its running requests go on."""
        return await self._set_tenant(request, interventions.pause)

    async def resume(self, request: web.Request) -> web.Response:
        """Return a tenant's requests to their places in the queue."""
        return await self._set_tenant(request, interventions.resume)

    async def reprioritise(self, request: web.Request) -> web.Response:
        """Set the priority of a live request to `{"priority": n}`; lower runs first."""
        name = request.match_info["id"]
        body = parse_object(await request.read())
        priority, actor = integer(body, "priority", -(1 << 31)), _actor(request, body)
        if priority is None:
            raise WireError("priority is missing; it must be an integer", param="priority")

        def change(state: EngineState) -> str:
            request_id = _live_id(state, name)
            interventions.reprioritise(state, request_id, priority, **actor)
            return request_id

        request_id = await self._service.between_steps(change)
        return web.json_response({"request_id": request_id, "priority": priority})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Drop all cached prefixes; running requests go on."""
        actor = await _actor_of(request)
        n_blocks = await self._service.between_steps(
            lambda state: interventions.reset_prefix_cache(state, **actor)
        )
        return web.json_response({"blocks": n_blocks})

    async def _set_tenant(
        self, request: web.Request, intervene: Callable[..., int]
    ) -> web.Response:
        tenant, actor = request.match_info["name"], await _actor_of(request)

        def change(state: EngineState) -> dict[str, object]:
            intervene(state, tenant, **actor)
            n_held = sum(held.tenant == tenant for held in state.queues.held.values())
            return {
                "tenant": tenant,
                "is_paused": tenant in state.paused_tenants.names,
                "held": n_held,
            }

        return web.json_response(await self._service.between_steps(change))


def _sizes(state: EngineState) -> dict[str, object]:
    return {
        "mode": state.policy.kind,
        "running": len(state.queues.running),
        "waiting": len(state.queues.waiting),
        "held": len(state.queues.held),
        "paused_tenants": sorted(state.paused_tenants.names),
        "kv_blocks": state.kv.n_blocks,
        "kv_blocks_free": state.kv.n_free,
        **asdict(state.counters),
    }


def _inspect(state: EngineState, name: str) -> tuple[Account, dict[str, object], Case] | None:
    """The account of a request, the policy's explanation of it, and the input for attribution. None
    if there is no such request."""
    for request_id in possible_ids(name):
        account = state.explain(request_id)
        if account is not None:
            is_live = state.queues.find(request_id) is not None
            policy_view = _policy_view(state, request_id) if is_live else {}
            return account, policy_view, replace(_case(state), only=request_id)
    return None


def _live_id(state: EngineState, name: str) -> str:
    """The id of a live request. Raises WireError (404) if there is none."""
    for request_id in possible_ids(name):
        if state.find(request_id) is not None:
            return request_id
    raise WireError(f"request '{name}' is not live", status=404, code="request_not_found")


def _policy_view(state: EngineState, request_id: str) -> dict[str, object]:
    try:
        return state.policy.explain(request_id, state.view())
    except Exception as error:  # a plug-in's boundary: inspecting must not end the engine thread
        log.exception("mode '%s' cannot explain request %s", state.policy.kind, request_id)
        return {"error": f"{type(error).__name__}: {error}"}


def _case(state: EngineState) -> Case:
    """Copies of the last requests and steps, usable in any thread."""
    return Case(
        Setup.of(state),
        list(state.accounting.accounts.values()),
        list(state.log.steps),
        _MOST_SIMULATED,
    )


def _found_json(found: FoundMisses) -> dict[str, object]:
    return {
        "misses": [_miss_json(miss) for miss in found.misses],
        "is_complete": found.is_complete,
        "n_simulated_steps": found.n_simulated_steps,
        "most_simulated_steps": _MOST_SIMULATED,
    }


def _miss_json(miss: Attribution) -> dict[str, object]:
    return {**miss.as_json(), "culprit": miss.subject or None}


def _tenants_json(state: EngineState) -> dict[str, object]:
    return {
        name: {**asdict(account), "is_paused": name in state.paused_tenants.names}
        for name, account in state.accounting.tenants.items()
    }


def _account_json(account: Account) -> dict[str, object]:
    waits = [
        {"why": cause.why.name, "blocker": cause.blocker or None, "seconds": seconds}
        for cause, seconds in account.waits
    ]
    blockers = [blocker._asdict() for blocker in account.blockers]
    sentence = account.sentence()
    return {**account._asdict(), "waits": waits, "blockers": blockers, "sentence": sentence}


def _step_json(record: StepRecord) -> dict[str, object]:
    return {**record._asdict(), "items": dict(record.items), "causes": dict(record.causes)}


def _policy_json(state: EngineState) -> dict[str, object]:
    """The mode, its knobs, and the names of all modes."""
    policy = state.policy
    return {"mode": policy.kind, "knobs": policy.model_dump(mode="json"), "modes": POLICIES.names()}


def _n_steps(text: str) -> int:
    is_number = text.isdecimal() and len(text) <= len(str(_MOST_STEPS))
    if not is_number or not 1 <= int(text) <= _MOST_STEPS:
        raise WireError(f"n must be an integer in [1, {_MOST_STEPS}], got '{text:.20}'", param="n")
    return int(text)


async def _actor_of(request: web.Request) -> dict[str, str]:
    """`_actor` of a request whose body may be empty."""
    body = await request.read()
    return _actor(request, parse_object(body) if body else {})


def _actor(request: web.Request, body: Mapping[str, Any]) -> dict[str, str]:
    """Actor and reason for the event log; the actor may be in the header `x-actor` instead."""
    actor = text(body, "actor") or request.headers.get("x-actor") or "http"
    return {"actor": actor, "reason": text(body, "reason") or ""}
