"""Calibration of servers whose costs are known: right costs accepted, wrong costs refused?

    python benchmarks/calibration_known.py [--servers 20] [--only KIND ...] [--write]

A server is a cost per step with random coefficients, simulated in virtual time; jitter, spells,
pauses and drift are applied to the times of its steps. It is measured twice: by the log of a server
under load (`log`: Poisson arrivals, chunked prefill of 2048 tokens, prompts of 16 to 32768 tokens),
and by the runs of `calibrate --target` (`grid`: up to 32768 tokens and 32 requests at once).

The true error of a kind of step is defined as the stated one: the mean |fitted / true - 1| over the
octaves of a size, the largest of prompt tokens, batch, context and time; `worst` is the largest of
a single octave. Expected: accepted where the true error of every kind is at most 5 %, refused where
that of any kind is at least 12 %; of errors between, the stated interval holds 95 %. An error above
8 % of a single octave refuses a file by itself, whatever the mean of its kind.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rig.machine import machine

from loadgen.studies.calibrate.cost_fit import FittedCost, fit_cost
from loadgen.studies.calibrate.cost_forms import rounded_up
from loadgen.studies.calibrate.grid import Load, loads
from loadgen.studies.calibrate.lack_of_fit import bins_of, rows_by_kind
from loadgen.studies.calibrate.step_samples import StepSamples, samples_of_steps
from loadgen.system.clock import VirtualClock
from reference_engine.core.core import EngineState
from reference_engine.executors.simulated import Simulated
from reference_engine.policies.base import Policy
from reference_engine.policies.chunked import Chunked
from reference_engine.policies.continuous import Continuous
from reference_engine.simulator import Replica, SimulatedService, Simulator
from reference_engine.state.batch import StepTokens
from reference_engine.state.cost_model import CostModel, StepShape
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import AdmissionError, Limits
from reference_engine.state.sequence import Request
from reference_engine.state.steps import StepLog, StepRecord

RESULTS = Path(__file__).parent / "results" / "calibration_known.json"
Column = NDArray[np.float64]
RIGHT, WRONG = 0.05, 0.12
LONGEST, MOST_REQUESTS, BUDGET = 32_768, 32, 2048
_N_LOGGED = 400  # requests of a log
_REQUEST_S = 3e-3  # outside the steps, seen from outside alone


@dataclass(frozen=True)
class Counts:
    """The counts of steps that a cost depends on, each a number or [n]: sequences with a prompt,
    prompt tokens, attention of prompts, decodes, tokens of context."""

    n_prefill: Any
    prompt: Any
    attention: Any
    n_decode: Any
    context: Any


@dataclass(frozen=True)
class Server:
    """A true cost (s) of steps, and what happens to the times of consecutive steps [n]."""

    cost: Callable[[Counts], Any]
    jitter: float = 0.02
    spells: bool = False
    pausing: float = 0.0
    drift: float = 0.0

    def estimate(self, shape: StepShape) -> float:
        n_seqs, prompt, attention, n_decode, context, _ = shape
        if not prompt + n_decode:
            return 0.0
        return float(self.cost(Counts(n_seqs - n_decode, prompt, attention, n_decode, context)))

    def true_s(self, samples: StepSamples) -> Column:
        """The costs of steps at their time, [n]."""
        cost_s: Column = self.cost(
            Counts(
                samples.n_prefill,
                samples.prefill_tokens,
                samples.prefill_attention,
                samples.n_decode,
                samples.context_tokens,
            )
        )
        return cost_s * (1 + self.drift * (np.arange(len(samples)) / len(samples) - 0.5))

    def disturbed(self, samples: StepSamples, rng: np.random.Generator) -> StepSamples:
        n = len(samples)
        seconds = self.true_s(samples)
        scores = rng.standard_normal(n)
        if self.spells:  # half of the variance fades to 1/e in 32 steps
            kept = math.exp(-1 / 32)
            slow, new = 0.0, rng.standard_normal(n) * math.sqrt(1 - kept**2)
            for k in range(n):
                slow = kept * slow + new[k]
                scores[k] = math.sqrt(0.5) * (slow + scores[k])
        seconds = seconds * np.exp(self.jitter * scores)
        is_pausing = rng.random(n) < self.pausing
        seconds = seconds * np.where(is_pausing, rng.uniform(2, 20, n), 1.0)
        return replace(samples, seconds=seconds + _REQUEST_S * samples.requests)


def linear(rng: np.random.Generator) -> Callable[[Counts], Any]:
    step_s, seq_s = rng.uniform(2e-3, 10e-3), rng.uniform(10e-6, 100e-6)
    prefill_seq_s, token_s = rng.uniform(0, 1e-3), rng.uniform(5e-6, 40e-6)
    context_s = rng.uniform(10e-9, 60e-9)
    attention_s = rng.uniform(0.2, 1) * 2 * token_s / LONGEST

    def cost(c: Counts) -> Any:
        return (
            step_s
            + seq_s * (c.n_prefill + c.n_decode)
            + prefill_seq_s * c.n_prefill
            + token_s * (c.prompt + c.n_decode)
            + context_s * c.context
            + attention_s * c.attention
        )

    return cost


def with_knee(sharpness: float) -> Callable[[np.random.Generator], Callable[[Counts], Any]]:
    def server(rng: np.random.Generator) -> Callable[[Counts], Any]:
        base, knee, token_s = linear(rng), rng.uniform(40, 1000), rng.uniform(10e-6, 40e-6)
        p = sharpness

        def cost(c: Counts) -> Any:
            n_tokens = c.prompt + c.n_decode
            return base(c) + token_s * (knee**p + n_tokens**p) ** (1 / p)

        return cost

    return server


def concave(rng: np.random.Generator) -> Callable[[Counts], Any]:
    base, root_s = linear(rng), rng.uniform(1e-3, 5e-3)
    return lambda c: base(c) + root_s * (c.n_prefill + c.n_decode) ** 0.5


def bucketed(rng: np.random.Generator) -> Callable[[Counts], Any]:
    base, row_s = linear(rng), rng.uniform(0.2e-3, 1e-3)
    sizes = tuple(2**k for k in range(8))

    def cost(c: Counts) -> Any:
        padded = rounded_up(np.asarray(c.n_decode, dtype=float), sizes)
        return base(c) + row_s * np.where(np.asarray(c.prompt) > 0, c.n_decode, padded)

    return cost


# Costs that no form describes.


def quadratic_batch(rng: np.random.Generator) -> Callable[[Counts], Any]:
    base, s = linear(rng), rng.uniform(0, 60e-6)
    return lambda c: base(c) + s * c.n_decode**2


def long_cliff(rng: np.random.Generator) -> Callable[[Counts], Any]:
    base, factor = linear(rng), rng.uniform(1.0, 1.8)
    return lambda c: base(c) * np.where(np.asarray(c.attention) > 2048 * 8192, factor, 1.0)


def batch_cliff(rng: np.random.Generator) -> Callable[[Counts], Any]:
    base, factor, at = linear(rng), rng.uniform(1.0, 1.8), rng.integers(6, 20)
    return lambda c: base(c) * np.where(np.asarray(c.n_decode) > at, factor, 1.0)


def mixed_penalty(rng: np.random.Generator) -> Callable[[Counts], Any]:
    base, factor = linear(rng), rng.uniform(1.0, 1.8)
    return lambda c: (
        base(c) * np.where((np.asarray(c.prompt) > 0) & (np.asarray(c.n_decode) > 0), factor, 1.0)
    )


def context_power(rng: np.random.Generator) -> Callable[[Counts], Any]:
    base, s = linear(rng), rng.uniform(0, 2e-3)
    return lambda c: base(c) + s * (np.asarray(c.context) / 20_000) ** 2


Make = Callable[[np.random.Generator], Server]
SERVERS: dict[str, Make] = {
    "linear": lambda rng: Server(linear(rng)),
    "knee": lambda rng: Server(with_knee(4)(rng)),
    "sharp knee": lambda rng: Server(with_knee(40)(rng)),
    "concave": lambda rng: Server(concave(rng)),
    "buckets": lambda rng: Server(bucketed(rng)),
    "jitter 15 %": lambda rng: Server(linear(rng), 0.15),
    "knee, jitter 15 %": lambda rng: Server(with_knee(4)(rng), 0.15),
    "buckets, jitter 15 %": lambda rng: Server(bucketed(rng), 0.15),
    "concave, jitter 15 %": lambda rng: Server(concave(rng), 0.15),
    "spells 20 %": lambda rng: Server(linear(rng), 0.2, spells=True),
    "pauses": lambda rng: Server(linear(rng), 0.05, pausing=0.05),
    "drift": lambda rng: Server(linear(rng), 0.05, drift=rng.uniform(0, 0.8)),
    "quadratic batch": lambda rng: Server(quadratic_batch(rng), 0.05),
    "cliff of prompts": lambda rng: Server(long_cliff(rng), 0.05),
    "cliff of batches": lambda rng: Server(batch_cliff(rng), 0.05),
    "cliff of batches, jitter 15 %": lambda rng: Server(batch_cliff(rng), 0.15),
    "dearer mixed steps": lambda rng: Server(mixed_penalty(rng), 0.05),
    "dearer mixed steps, jitter 15 %": lambda rng: Server(mixed_penalty(rng), 0.15),
    "context squared": lambda rng: Server(context_power(rng), 0.05),
}


class Users:
    """A client that keeps at most `n_users` requests in flight, each sent at its arrival or when a
    user is free."""

    def __init__(self, requests: Sequence[Request], n_users: int) -> None:
        self._requests, self._free, self._next = requests, n_users, 0

    @property
    def is_closed(self) -> bool:
        return self._next >= len(self._requests)

    def next_s(self) -> float | None:
        if self.is_closed or not self._free:
            return None
        return self._requests[self._next].arrived_s

    def quiet_until_s(self) -> float:
        return self.next_s() or math.inf

    def act(self, engine: SimulatedService) -> None:
        while self._free and not self.is_closed:
            request = self._requests[self._next]
            if request.arrived_s > engine.now_s:
                return
            engine.submit(request)
            self._next += 1
            self._free -= 1

    def receive(self, events: StepTokens, engine: SimulatedService) -> None:
        self._free += len(events.ends)

    def refuse(self, request: Request, error: AdmissionError) -> None:
        raise AssertionError(f"{request.id} was refused: {error}")


def steps_of(cost: CostModel, policy: Policy, client: Users) -> StepSamples:
    """The steps of an engine, undisturbed."""
    steps: list[StepRecord] = []
    clock = VirtualClock()
    state = EngineState(
        Limits(4 * MOST_REQUESTS, 1 << 20, 1 << 17, 1 << 17),
        KvPool(1 << 17, 16, prefix_cache=True),
        clock,
        policy,
        cost=cost,
        log=StepLog(level="full", on_step=steps.append),
    )
    Simulator([Replica(state, Simulated(cost))], clock).run(client)
    return samples_of_steps(steps)


def logged(server: Server, rng: np.random.Generator) -> StepSamples:
    """Steps under a load of half of what the server can take."""
    prompts = np.clip(rng.lognormal(math.log(800), 1.3, _N_LOGGED), 16, LONGEST).astype(int)
    prompts[rng.integers(0, _N_LOGGED, 6)] = LONGEST
    answers = np.clip(rng.lognormal(math.log(80), 0.8, _N_LOGGED), 2, 600).astype(int)
    alone_s = [server.estimate(StepShape(1, int(n), n * n / 2, 0, 0)) for n in prompts]
    decode_s = server.estimate(StepShape(8, 0, 0.0, 8, 8 * 1500)) / 8
    work_s = float(np.mean(alone_s)) + float(answers.mean()) * decode_s
    arrivals_s = np.cumsum(rng.exponential(work_s / 0.5, _N_LOGGED))
    requests = [
        Request(f"r{k}", [k + 2] * n_prompt, n_answer, float(at_s))
        for k, (n_prompt, n_answer, at_s) in enumerate(
            zip(prompts.tolist(), answers.tolist(), arrivals_s, strict=True)
        )
    ]
    return steps_of(server, Chunked(token_budget=BUDGET), Users(requests, 4 * MOST_REQUESTS))


def gridded(server: Server, rng: np.random.Generator) -> StepSamples:
    """Steps of the runs of `calibrate --target`, prompts whole."""
    parts = []
    for load in loads(LONGEST, MOST_REQUESTS):
        requests = [_request(load, k, rng) for k in range(load.n_requests)]
        part = steps_of(server, Continuous(), Users(requests, load.n_users))
        is_alone = (part.n_decode == 0) & (load.n_users == 1)
        parts.append(replace(part, requests=is_alone.astype(float)))
    return StepSamples.joined(parts)


def _request(load: Load, number: int, rng: np.random.Generator) -> Request:
    n_prompt, n_answer = (
        length if isinstance(length, int) else int(rng.integers(length[0], length[1] + 1))
        for length in (load.prompt, load.answer)
    )
    tokens = [1] * load.shared + [number + 2] * n_prompt
    return Request(f"{load.name}{number}", tokens, n_answer, 0.0)


SOURCES = {"log": logged, "grid": gridded}


@dataclass(frozen=True)
class Outcome:
    """A calibration: the largest true and stated errors of a kind, whether it was accepted, and of
    the kinds whose true error is between 5 and 12 %, how many intervals hold it."""

    true: float
    true_worst: float
    stated: float
    stated_worst: float
    accepted: bool
    n_between: int
    n_held: int
    form: str


def outcome(server: Server, fitted: FittedCost, samples: StepSamples) -> Outcome:
    true_s = server.true_s(samples) + _REQUEST_S * samples.requests
    errors, worsts, n_between, n_held = [], [], 0, 0
    for kind, rows in rows_by_kind(samples).items():
        part, stated = samples.at(rows), fitted.by_kind[kind]
        predicted = fitted.predicted_s(part)
        error = predicted / true_s[rows] - 1
        means = [
            [abs(float(error[members].mean())) for members in parts]
            for _, _, parts in bins_of(part)
        ]
        true = max(float(np.mean(sizes)) for sizes in means)
        errors.append(true)
        worsts.append(max(max(sizes) for sizes in means))
        if RIGHT < true < WRONG:
            n_between += 1
            n_held += stated.low <= true <= stated.high
    return Outcome(
        max(errors),
        max(worsts),
        max(kind.error for kind in fitted.by_kind.values()),
        max(abs(kind.worst.error) for kind in fitted.by_kind.values()),
        fitted.is_right,
        n_between,
        n_held,
        fitted.form.sentence(),
    )


def row(name: str, source: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    right = [o for o in outcomes if o.true <= RIGHT]
    wrong = [o for o in outcomes if o.true >= WRONG]
    return {
        "server": name,
        "source": source,
        "right": len(right),
        "right_accepted": sum(o.accepted for o in right),
        "wrong": len(wrong),
        "wrong_refused": sum(not o.accepted for o in wrong),
        "between": sum(o.n_between for o in outcomes),
        "between_held": sum(o.n_held for o in outcomes),
        "true_error": float(np.median([o.true for o in outcomes])),
        "true_error_max": max(o.true for o in outcomes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--source", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"keep the result in {RESULTS.name}")
    options = parser.parse_args()
    rows = []
    print(
        f"{'server':32} source  right: accepted  wrong: refused  between: held  "
        "true error: median, max   s"
    )
    for name in options.only:
        for source in options.source:
            began_s, outcomes = time.process_time(), []
            for seed in range(options.servers):
                rng = np.random.default_rng((sum(map(ord, name)), seed))
                server = SERVERS[name](rng)
                samples = server.disturbed(SOURCES[source](server, rng), rng)
                outcomes.append(outcome(server, fit_cost(samples), samples))
                if options.verbose:
                    print("   ", len(samples), outcomes[-1])
            rows.append(row(name, source, outcomes))
            r = rows[-1]
            print(
                f"{name:32} {source:6} {r['right']:6}: {r['right_accepted']:3} "
                f"{r['wrong']:14}: {r['wrong_refused']:3} {r['between']:12}: "
                f"{r['between_held']:3} {r['true_error']:15.1%} {r['true_error_max']:6.1%} "
                f"{time.process_time() - began_s:6.0f}",
                flush=True,
            )
            if options.write:
                result = {"machine": machine(), "servers": options.servers, "rows": rows}
                RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
