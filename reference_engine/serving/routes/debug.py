"""Looking into the engine: why a request waits, what the last steps did, which policy decides."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from typing import Any

from aiohttp import web

from reference_engine.accounting.explain import Account
from reference_engine.attribution.attribution import Attribution
from reference_engine.attribution.attribution_process import AttributionProcess
from reference_engine.attribution.counterfactual import Case
from reference_engine.core.core import EngineState
from reference_engine.core.setup import Setup
from reference_engine.policies.base import POLICIES
from reference_engine.serving.identity import ServerIdentity
from reference_engine.serving.service import Service
from reference_engine.serving.wire.wire_errors import WireError
from reference_engine.state.steps import StepRecord

log = logging.getLogger(__name__)

_N_STEPS, _MOST_STEPS = 100, 4096
_MOST_SIMULATED = 60_000  # steps, all modes together: some ten seconds of a core


class DebugRoutes:
    """Answered by the engine thread between two steps, so that the numbers belong together."""

    def __init__(self, service: Service, about: ServerIdentity) -> None:
        self._service, self._about = service, about
        self._bench = AttributionProcess()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/debug/engine", self.engine),
            web.get("/debug/requests/{id}", self.request),
            web.get("/debug/misses", self.misses),
            web.get("/debug/tenants", self.tenants),
            web.get("/debug/steps", self.steps),
            web.get("/debug/policy", self.policy),
        ]

    async def engine(self, request: web.Request) -> web.Response:
        """Sizes and totals of this moment."""
        sizes = await self._service.ask(_sizes)
        about = {"device": self._about.device, "slow_readers": self._service.n_slow_readers}
        return web.json_response({**sizes, **about})

    async def request(self, request: web.Request) -> web.Response:
        """Where the waiting time of a live or recent request went, and whose fault it is if it was
        served later than promised."""
        request_id = request.match_info["id"]
        answer, case = await self._service.ask(lambda state: _look(state, request_id))
        if answer is None:
            raise WireError(
                f"no request '{request_id}' is live or among the recent ones",
                status=404,
                code="request_not_found",
            )
        entry, thoughts = answer
        misses = await self._bench.misses(case)
        told = {"policy": thoughts, "misses": [_miss_json(miss) for miss in misses]}
        return web.json_response({**_account_json(entry), **told})

    async def misses(self, request: web.Request) -> web.Response:
        """Every promise that recent requests were not served with, and whose fault it is."""
        misses = await self._bench.misses(await self._service.ask(_case))
        return web.json_response({"misses": [_miss_json(miss) for miss in misses]})

    async def tenants(self, request: web.Request) -> web.Response:
        """What each tenant got, waited for and cost the others."""
        return web.json_response({"tenants": await self._service.ask(_tenants_json)})

    async def steps(self, request: web.Request) -> web.Response:
        """The last `n` steps, oldest first."""
        n = _count(request.query.get("n", str(_N_STEPS)))
        records = await self._service.ask(lambda state: list(state.log.last(n)))
        return web.json_response({"steps": [_step_json(record) for record in records]})

    async def policy(self, request: web.Request) -> web.Response:
        """The mode and its knobs, in the form in which they can be put back."""
        return web.json_response(await self._service.ask(policy_json))


def _sizes(state: EngineState) -> dict[str, Any]:
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


def _look(
    state: EngineState, request_id: str
) -> tuple[tuple[Account, dict[str, Any]] | None, Case]:
    """A request's account and what the policy thinks of it, and all that its misses are judged
    by."""
    entry, case = state.explain(request_id), replace(_case(state), only=request_id)
    if entry is None:
        return None, case
    is_live = state.queues.find(request_id) is not None
    return (entry, _thoughts(state, request_id) if is_live else {}), case


def _thoughts(state: EngineState, request_id: str) -> dict[str, Any]:
    try:
        return state.policy.explain(request_id, state.view())
    except Exception as error:  # a plug-in's boundary: who only looks must not end the serving
        log.exception("mode '%s' cannot explain request %s", state.policy.kind, request_id)
        return {"error": f"{type(error).__name__}: {error}"}


def _case(state: EngineState) -> Case:
    """The requests that ended last and the last steps, for any thread."""
    return Case(
        Setup.of(state),
        list(state.accounting.accounts.values()),
        list(state.log.steps),
        _MOST_SIMULATED,
    )


def _miss_json(miss: Attribution) -> dict[str, Any]:
    return {**miss.as_json(), "culprit": miss.subject or None}


def _tenants_json(state: EngineState) -> dict[str, Any]:
    return {
        name: {**asdict(account), "is_paused": name in state.paused_tenants.names}
        for name, account in state.accounting.tenants.items()
    }


def _account_json(entry: Account) -> dict[str, Any]:
    waits = [
        {"why": cause.why.name, "blocker": cause.blocker or None, "seconds": seconds}
        for cause, seconds in entry.waits
    ]
    blockers = [blocker._asdict() for blocker in entry.blockers]
    return {**entry._asdict(), "waits": waits, "blockers": blockers, "sentence": entry.sentence()}


def _step_json(record: StepRecord) -> dict[str, Any]:
    return {**record._asdict(), "items": dict(record.items), "causes": dict(record.causes)}


def policy_json(state: EngineState) -> dict[str, Any]:
    policy = state.policy
    return {"mode": policy.kind, "knobs": policy.model_dump(mode="json"), "modes": POLICIES.names()}


def _count(text: str) -> int:
    is_number = text.isdecimal() and len(text) <= len(str(_MOST_STEPS))
    if not is_number or not 1 <= int(text) <= _MOST_STEPS:
        raise WireError(f"n must be a number from 1 to {_MOST_STEPS}, got '{text:.20}'", param="n")
    return int(text)
