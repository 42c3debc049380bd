"""Requests of a plan for the preflight, encoded as the run encodes them; only prompt and id
differ."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import numpy as np

from loadgen.drive.payloads import HttpHead, Payloads
from loadgen.workload.classes import DEFAULT_TENANT
from loadgen.workload.dialogue import Dialogue
from loadgen.workload.pieces import OTHER_TEXT
from loadgen.workload.prompts import PromptFit, Prompts
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import Plan
from targets.base import Adapter
from targets.endpoint import Endpoint
from targets.preflight_result import RunRequest

_OTHER_SEED = 1 << 63  # of the prompts of a run that are not salted


def example_requests(
    endpoint: Endpoint,
    scenario: Scenario,
    plan: Plan,
    prompts: Prompts,
    fit: Callable[[], PromptFit],
    adapter: Adapter,
) -> tuple[RunRequest, ...]:
    """The request of median length (prompt and answer together), and the longest if it is longer.
    `prompts` have a salt of their own, so that neither prompt is in a prefix cache when the run
    begins. Empty for recorded prompts without a salt, which would be in the cache."""
    is_salted = scenario.prompts.salt == "run"
    if prompts.is_recorded and not is_salted:
        return ()
    lengths = plan.schedule["input_tokens"].astype(np.uint64) + plan.schedule["output_tokens"]
    order = np.argsort(lengths, kind="stable")
    chosen = order[[len(order) // 2, -1]]
    if lengths[chosen[0]] == lengths[chosen[1]]:
        chosen = chosen[:1]
    in_sessions = np.isin(plan.schedule["session_id"], plan.schedule["session_id"][chosen])
    rows = plan.schedule[in_sessions]  # a copy
    if not is_salted:
        rows["prompt_seed"] ^= np.uint64(_OTHER_SEED)
        rows["prefix_id"] ^= np.uint32(OTHER_TEXT)
    edges = plan.edges[np.isin(plan.edges["request_id"], rows["request_id"])]
    payloads = Payloads(
        rows,
        Dialogue(rows, edges, prompts, fit()).prompt,
        adapter,
        head_of(endpoint),
        f"preflight-{uuid.uuid4()}",
        sent_tenants(scenario),
        slo_limits_s=scenario.limits_by_class(),
        is_numbered=False,
    )
    row_of = {int(request_id): row for row, request_id in enumerate(rows["request_id"])}
    found = []
    for index in dict.fromkeys(chosen.tolist()):
        planned = plan.schedule[index]
        words = f"{planned['input_tokens']} + {planned['output_tokens']} tokens"
        found.append(RunRequest(words, payloads.take(row_of[int(planned["request_id"])])))
    return tuple(found)


def head_of(endpoint: Endpoint) -> HttpHead:
    """The request line holds the whole URL for a proxy that forwards (RFC 9112 section 3.2.2)."""
    address, route = endpoint.address, endpoint.route
    is_forwarded = route.proxy is not None and not route.is_tunnelled
    before = address.http_url if is_forwarded else address.base_path
    headers, secrets = endpoint.request_headers(), endpoint.secrets()
    sessions, is_traced = endpoint.session_header, endpoint.trace_context
    return HttpHead(
        address.host_header, before, headers, secrets, address.query, sessions, is_traced
    )


def sent_tenants(scenario: Scenario) -> tuple[str, ...]:
    """The tenants by tenant_id, "" for the default, which is not sent."""
    return tuple("" if t == DEFAULT_TENANT else t for t in scenario.names().tenants)
