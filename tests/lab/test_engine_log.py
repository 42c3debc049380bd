"""The misses of a run: only requests that count in its numbers, without warm-up and preflight."""

import uuid
from dataclasses import asdict

import pytest

from loadgen.lab.engine_log import misses_in
from reference_engine.attribution.attribution import MissCause
from reference_engine.core.setup import Setup
from reference_engine.simulator import simulate
from reference_engine.state.steps import StepEvent
from reference_engine.step_log.log_replay import EngineLog
from tests.reference_engine.engine_kit import request
from tests.reference_engine.test_counterfactual import CHUNKED, COST, LIMITS
from tests.runs import measured_run

N, N_WARMUP = 30, 20


@pytest.fixture(scope="module")
def served():
    """30 requests of a run of 10 per second, 2 s of them warm-up, and one of the preflight's: each
    takes 0.5 s to read even alone."""
    run = measured_run(n_requests=N, slo=["ttft <= 100ms"])
    name = run.manifest.run
    asked = [request("preflight-1", [1] * 400, 2, ttft_slo_s=0.1)]
    namespace = uuid.uuid5(uuid.NAMESPACE_URL, name)
    sent = [str(uuid.uuid5(namespace, str(row))) for row in range(N)]
    asked += [request(sent[row], [row] * 400, 2, arrived_s=float(row)) for row in range(N)]
    found = simulate(asked, CHUNKED, COST, limits=LIMITS, n_blocks=512, level="full")
    begun = StepEvent(0.0, 0, "start", asdict(Setup.of(found.state)))
    return EngineLog(found.steps, [begun]), found.accounts, run


def test_requests_of_the_warm_up_and_of_the_preflight_missed_nothing(served):
    log, accounts, run = served
    found = misses_in(log, accounts, run, most_steps=1000)
    due = [f"{run.manifest['run']}-{row}" for row in range(N_WARMUP, N)]
    assert found.n_requests == N - N_WARMUP
    assert [miss.request_id for miss in found.missed] == due
    assert found.by_cause()[MissCause.request].total() == N - N_WARMUP
