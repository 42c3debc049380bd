"""Looking into the engine and intervening: why a request waits, what the last steps did, which
policy decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from aiohttp import web

from reference_engine.core import EngineState
from reference_engine.explain import Account
from reference_engine.policies.base import POLICIES, Policy
from reference_engine.routes.about import About
from reference_engine.service import Service
from reference_engine.steps import StepRecord
from reference_engine.wire.errors import WireError

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


def _sizes(state: EngineState) -> dict[str, Any]:
    return {
        "mode": state.policy.kind,
        "running": len(state.roster.running),
        "waiting": len(state.roster.waiting),
        "held": len(state.roster.held),
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
