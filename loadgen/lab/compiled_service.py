"""The step core in C as the service of a client in Python: requests that wait for answers or slots,
or are cancelled on purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from loadgen.lab.prompt_ids import TextTokens
from loadgen.workload.schedule import Plan
from reference_engine.accounting.explain import Account, account
from reference_engine.accounting.ledger import S_PER_TICK
from reference_engine.core.core import EngineState
from reference_engine.executors.simulated import TOKEN
from reference_engine.simulator import PatientClient
from reference_engine.state.batch import StepTokens
from reference_engine.state.plan import AdmissionError, Cause, check_admission
from reference_engine.state.sequence import Request, State
from reference_engine.step_core.library import WHYS, Outcome, Status, StepCore, Traffic

_STEPS_A_TURN = 20_000  # some 20 ms
_TENANT_BIT = 40  # of a text's number
_FINISHES = {Outcome.length: State.finished_length, Outcome.stop: State.finished_stop}


def traffic_of(plan: Plan) -> Traffic:
    """The columns for the requests of a plan, which are filled in when they are submitted."""
    n_output = np.maximum(plan.schedule["output_tokens"], 1).astype(np.int32)
    n = len(n_output)
    nothing, rows = np.zeros(n, np.int32), np.arange(n, dtype=np.int32)
    return Traffic(np.zeros(n), nothing, n_output, n_output.copy(), account=rows)


class CompiledService:
    """Engines in the step core (`simulator.SimulatedService`). `engines` are the states of the
    replicas before the simulation, of which only the limits are read."""

    def __init__(self, core: StepCore, traffic: Traffic, engines: Sequence[EngineState]) -> None:
        self._core, self._traffic, self._engines = core, traffic, engines
        self._requests: list[Request | None] = []  # in the order of submission, until they end
        self._row: dict[str, int] = {}
        self._tenants: dict[str, int] = {}
        self._now_s = 0.0

    @property
    def now_s(self) -> float:
        return self._now_s

    def submit(self, request: Request) -> None:
        """Submit a request. Raises AdmissionError if an idle engine refuses it."""
        traffic, row = self._traffic, len(self._requests)
        n_output = request.max_tokens
        if request.oracle_output_tokens is not None:
            n_output = min(n_output, max(1, request.oracle_output_tokens))
        traffic.arrived_s[row] = request.arrived_s
        traffic.n_prompt[row], traffic.n_output[row] = request.n_prompt, n_output
        traffic.max_tokens[row] = request.max_tokens
        traffic.first_time[row + 1] = traffic.first_time[row] + n_output
        self._requests.append(request)
        self._row[request.id] = row
        if not self._core.submit(row, self._texts(request)):
            self._forget(row)
            raise self._refusal(request, row)

    def cancel(self, request_id: str) -> None:
        row = self._row.get(request_id)
        if row is None:
            return
        request = self._requests[row]
        assert request is not None, f"{request_id} has ended"
        self.settle(request)
        self._core.cancel(row)
        self._forget(row)

    def explain(self, request_id: str) -> Account | None:
        """The account of a request that ends with the present step."""
        row = self._row.get(request_id)
        request = None if row is None else self._requests[row]
        if row is None or request is None:
            return None
        waits = {
            Cause(why): ticks * S_PER_TICK
            for why, ticks in zip(WHYS, self._traffic.waits[row].tolist(), strict=True)
            if ticks
        }
        return account(request, waits, self._now_s, {}, 0.0)

    def settle(self, request: Request) -> None:
        row = self._row.get(request.id)
        if row is not None:
            self._set_tokens(request, row, self._core.n_tokens(row))

    def run(self, client: PatientClient) -> Status:
        """Run until the client will not act again and all requests have ended; `done`, or the
        reason for which the core cannot continue."""
        core, status = self._core, Status.client_acts
        core.acted(0.0, 0.0, False)  # before the first request
        while status in (Status.client_acts, Status.receive, Status.paused):
            if status is Status.receive:
                self._deliver(client)
            else:
                client.act(self)
            next_s = client.next_s()
            core.acted(
                math.inf if next_s is None else next_s, client.quiet_until_s(), client.is_closed
            )
            status = core.run(_STEPS_A_TURN)
            self._now_s = core.now_s
        return status

    def _deliver(self, client: PatientClient) -> None:
        """Pass the ends of a step, and the refusals at its end, to the client."""
        ended, refused = self._core.delivered()
        traffic, ends = self._traffic, dict[Request, State]()
        for row in ended:
            request = self._requests[row]
            assert request is not None, f"row {row} ends twice"
            self._set_tokens(request, row, int(traffic.n_received[row]))
            request.state = ends[request] = _FINISHES[Outcome(int(traffic.outcome[row]))]
            request.n_cached = int(traffic.n_cached[row])
            request.n_preemptions = int(traffic.n_preempted[row])
            request.scheduled_s = float(traffic.scheduled_s[row])
            request.first_token_s = float(traffic.first_token_s[row])
            request.finished_s = self._now_s
        client.receive(StepTokens(ends=ends), self)
        for row in refused:
            request = self._requests[row]
            if request is not None:
                client.refuse(request, self._refusal(request, row))
        for row in (*ended, *refused):
            self._forget(row)

    def _set_tokens(self, request: Request, row: int, n: int) -> None:
        traffic = self._traffic
        assert traffic.times_s is not None, "a client receives the instants of all tokens"
        first = int(traffic.first_time[row])
        request.token_times_s = traffic.times_s[first : first + n].tolist()
        del request.tokens[request.n_prompt :]
        request.tokens += [TOKEN] * n

    def _texts(self, request: Request) -> list[int]:
        """The first block and the number of each text of a prompt. Of texts that begin in the same
        block, the last has it."""
        kv = next((engine.kv for engine in self._engines if engine.kv.prefix_cache), None)
        tokens = request.tokens
        if kv is None:
            return []
        assert isinstance(tokens, TextTokens), f"{request.id}: a prompt without texts"
        tenant = self._tenants.setdefault(request.tenant, len(self._tenants)) << _TENANT_BIT
        by_block = {start // kv.block_tokens: tenant | number for start, number in tokens.texts}
        return [number for pair in by_block.items() for number in pair]

    def _refusal(self, request: Request, row: int) -> AdmissionError:
        engine = self._engines[self._traffic.served_by[row]]
        try:
            check_admission(request.n_prompt, request.max_tokens, engine.limits, engine.kv)
        except AdmissionError as error:
            return error
        raise AssertionError(f"{request.id} was refused without a reason")

    def _forget(self, row: int) -> None:
        request = self._requests[row]
        if request is not None:
            self._requests[row] = None
            del self._row[request.id]
