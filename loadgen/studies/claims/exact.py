"""Numbers of the table that follow from formulas, from exact averages or from drawn lengths."""

from __future__ import annotations

from math import ceil
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from loadgen.studies.claims.workloads import scenario_of
from loadgen.workload.schedule import make_plan
from reference_engine.model.zoo import resolve
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.smdp.batch_queue import BatchQueue, Objective
from reference_engine.state.cost_model import find_hardware, step_cost
from reference_engine.state.kv import BLOCK_TOKENS
from reference_engine.state.sequence import Request, State

Tokens: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

_RESERVED_TOKENS = 2048
# GoogLeNet on a Tesla P4, batches of 1 … 32: ms and mJ (arXiv 2301.12865).
_B_MAX = 32
_SIZES: Floats = np.arange(1, _B_MAX + 1, dtype=np.float64)
_AFFINE_MS: Floats = 0.3051 * _SIZES + 1.0524
_ENERGY_MJ: Floats = 19.899 * _SIZES + 19.603
_STAIRS_MS: Floats = 0.3051 * 2.0 ** np.ceil(np.log2(_SIZES)) + 1.0524
_LEARNED, _ASKED_EVERY = 2000, 32


def idle_slots(lengths: tuple[int, ...]) -> float:
    """The share of the slots of a batch that are padding: each row is as long as the longest."""
    return 1 - sum(lengths) / (len(lengths) * max(lengths))


def _lengths(workload: str, seed: int) -> tuple[Tokens, Tokens]:
    """Prompt and output tokens of the requests of a workload."""
    schedule = make_plan(scenario_of(workload, seed)).schedule
    prompts, outputs = (np.maximum(schedule[f"{k}_tokens"], 1) for k in ("input", "output"))
    return prompts.astype(np.int64), outputs.astype(np.int64)


def memory_use(seed: int, reserved_tokens: int = 0) -> float:
    """The share of the KV memory given to requests that holds tokens, over all decode steps of
    "uneven answers": memory in blocks as tokens come, or `reserved_tokens` for every request."""
    pairs = zip(*_lengths("uneven answers", seed), strict=True)
    used, given = np.sum([_slots(*pair, reserved_tokens) for pair in pairs], axis=0)
    return float(used / given)


def _slots(n_prompt: int, n_output: int, reserved_tokens: int) -> tuple[int, int]:
    """Tokens held by a request and slots given to it, summed over its decode steps."""
    held = np.arange(n_prompt, n_prompt + n_output)
    blocks = -(-held // BLOCK_TOKENS) * BLOCK_TOKENS
    return int(held.sum()), reserved_tokens * n_output or int(blocks.sum())


def reserved_memory_use(seed: int) -> float:
    return memory_use(seed, _RESERVED_TOKENS)


def requests_on_a6000() -> float:
    """Requests of 1 024 tokens whose KV fits next to the weights of a 13B model in 90 % of 48 GB,
    with 2 GiB for activations: 40 layers, width 5 120, 2 bytes a number."""
    weights_bytes, kv_bytes = 2 * 13.016e9, 2 * 40 * 5120 * 2 * 1024
    return float(int((0.9 * 48e9 - weights_bytes - 2 * 2**30) // kv_bytes))


def compute_bound_rows() -> float:
    """The rows of a decode step of 8B on an H200 from which its matrix products take longer than
    the reading of the weights, by the cost model of the simulator."""
    cost = step_cost(resolve("8b").config, find_hardware("h200"))
    return float(ceil(cost.weights_s / cost.token_s))


def context_share_at_256() -> float:
    """The share of such a step with 256 rows of 1 024 tokens that reads the KV: it grows with the
    rows and is bound by memory."""
    cost = step_cost(resolve("8b").config, find_hardware("h200"))
    context_s = cost.context_token_s * 256 * 1024
    p = cost.sharpness
    products_s = float((cost.weights_s**p + (cost.token_s * 256) ** p) ** (1 / p))
    return context_s / (context_s + products_s)


def faster_than_memory() -> float:
    """How many times faster than reading 70B of weights per token the claimed 0.4 s for 525 output
    tokens are: 141 GB over 4 × 4.8 TB/s, without any other work."""
    return 525 * 141e9 / (4 * 4.8e12) / 0.4


def in_flight(tokens_per_s: float, latency_s: float) -> float:
    """Requests in flight by Little's law, at 525 output tokens a request."""
    return tokens_per_s / 525 * latency_s


def _queue(load: float, times_ms: Floats) -> BatchQueue:
    return BatchQueue(load * _B_MAX / float(times_ms[-1]), times_ms, _ENERGY_MJ)


def affine_latency(load: float) -> float:
    """Mean response time under the optimum over that under greedy batches."""
    return _over_greedy(_queue(load, _AFFINE_MS), Objective())


def stairs_latency(load: float) -> float:
    """The same where batches are padded to powers of two."""
    return _over_greedy(_queue(load, _STAIRS_MS), Objective())


def stairs_over_limit(load: float) -> float:
    """With such batches, the optimum over the best control limit."""
    queue, objective = _queue(load, _STAIRS_MS), Objective()
    return queue.solve(objective).value.cost / queue.best_control_limit(objective)[1].cost


def power_cost(load: float, weight: float) -> float:
    """Latency plus weighted power under the optimum over that under greedy batches."""
    return _over_greedy(_queue(load, _AFFINE_MS), Objective(power=weight))


def power_over_limit(load: float, weight: float) -> float:
    queue, objective = _queue(load, _AFFINE_MS), Objective(power=weight)
    return queue.solve(objective).value.cost / queue.best_control_limit(objective)[1].cost


def _over_greedy(queue: BatchQueue, objective: Objective) -> float:
    greedy = queue.evaluate(queue.greedy(), objective).cost
    return queue.solve(objective).value.cost / greedy


def refreshed_error(seed: int) -> float:
    """Mean absolute error of the predicted remaining tokens, refreshed every 32 tokens, over that
    of the prediction at arrival less the tokens written since. The predictor has learned from
    2 000 earlier answers of "heavy tail"."""
    prompts, outputs = _lengths("heavy tail", seed)
    predictor = QuantilePredictor()
    refreshed = kept = 0.0
    for k, (n_prompt, n_output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True)):
        request = Request(str(k), [0] * n_prompt, 1 << 14, 0.0, n_prompt=n_prompt)
        if k >= _LEARNED:
            at_arrival = predictor.predict(request).q50
            for n_done in range(0, n_output, _ASKED_EVERY):
                request.tokens = [0] * (n_prompt + n_done)
                left = n_output - n_done
                refreshed += abs(predictor.predict(request).q50 - left)
                kept += abs(max(at_arrival - n_done, 1) - left)
        request.tokens = [0] * (n_prompt + n_output)
        request.state = State.finished_stop
        predictor.observe(request)
    return refreshed / kept
