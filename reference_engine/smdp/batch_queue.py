"""The batch-service queue as a semi-Markov decision process: exact values of policies, the optimum.

Requests arrive as a Poisson process of rate λ and are served in batches; a batch of b takes l(b)
seconds, during which no other begins. The state is the number of waiting requests s at the end of a
batch, or at an arrival while the server idles. The action is the size of the next batch, or 0: wait
for the next arrival.

Symbols in comments: λ rate, l(b) service time, s state, a action, y sojourn time of an epoch, h
relative values, g gain (average cost per second).

Source: Xu, Sun, Zhou & Niu, SMDP-based dynamic batching for efficient inference on GPU-based
platforms (arXiv 2301.12865). It has no LLM; its states and costs are those of one-shot inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, exp, log
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Policy: TypeAlias = NDArray[np.int64]  # [states] the batch size in each state, 0 = wait

_TAIL = 1e-10  # of the queue length, beyond the largest state
_SPAN = 1e-9  # relative to the gain, at which value iteration ends
_MOST_SWEEPS = 200_000


class UnstableQueueError(ValueError):
    """More requests arrive than the largest batches can serve."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Weights of the averages in `Value`: `latency` and `late` per second, `power` per watt. `late`
    counts from a response time of `slo_s` on."""

    latency: float = 1.0
    power: float = 0.0
    late: float = 0.0
    slo_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Value:
    """Long-run averages under a policy, exact up to `overflow`, the share of epochs in the overflow
    state.

    `latency_s` is the mean response time, and `late_s` the mean number of requests in the system
    above λ·slo_s, divided by λ. By Little's law no more than λ·slo_s are there while all meet the
    SLO. The number stands for the misses, which depend on ages that the state does not have.
    """

    cost: float
    latency_s: float
    power_w: float
    late_s: float
    mean_batch: float
    overflow: float


@dataclass(frozen=True, slots=True)
class Solution:
    """An optimal policy with its value. `action_gap` is, per state, by how much the cost of the
    action is below that of the second best over an epoch (inf where there is no other)."""

    policy: Policy
    value: Value
    action_gap: Floats
    n_sweeps: int


class BatchQueue:
    """A queue with arrivals of `rate_per_s`, where a batch of b = 1, 2, … takes `service_s[b - 1]`
    seconds and `energy_j[b - 1]` joules (default: none).

    States are 0 … n_states - 2 waiting requests; the last state stands for all longer queues. There
    the largest batch is served, and each second costs as if another `b_max` requests waited: the
    abstract cost, which keeps policies away from the edge. Without `n_states` there are enough
    that the probability of the last is about 1e-10 under good policies.

    Raises UnstableQueueError where λ·l(b) ≥ b for every batch size b.
    """

    def __init__(
        self,
        rate_per_s: float,
        service_s: Sequence[float] | Floats,
        energy_j: Sequence[float] | Floats | None = None,
        *,
        n_states: int | None = None,
    ) -> None:
        service = np.asarray(service_s, dtype=np.float64)
        assert rate_per_s > 0, "requests arrive"
        assert bool((service > 0).all()), "service takes time"
        self.rate_per_s, self.service_s = rate_per_s, service
        self.energy_j = np.zeros_like(service) if energy_j is None else np.asarray(energy_j, float)
        assert self.energy_j.shape == service.shape, "an energy for each batch size"
        self.b_max = len(service)
        loads = rate_per_s * service / np.arange(1, self.b_max + 1)
        self.load = float(loads.min())
        if self.load >= 1:
            raise UnstableQueueError(
                f"{rate_per_s:g} arrivals per second, and at most "
                f"{rate_per_s / self.load:g} can be served"
            )
        self.n_states = n_states or _enough_states(self.load, int(loads.argmin()) + 1, self.b_max)

    def greedy(self) -> Policy:
        """Serve whatever waits, up to the largest batch."""
        return self.control_limit(1)

    def control_limit(self, q: int) -> Policy:
        """Wait for `q` requests, then serve as many as wait, up to the largest batch."""
        states = np.arange(self.n_states)
        return np.where(states < q, 0, np.minimum(states, self.b_max))

    def best_control_limit(self, objective: Objective) -> tuple[int, Value]:
        """The limit of 1 … b_max with the lowest cost, and its value."""
        values = {
            q: self.evaluate(self.control_limit(q), objective) for q in range(1, self.b_max + 1)
        }
        q = min(values, key=lambda q: values[q].cost)
        return q, values[q]

    def evaluate(self, policy: Policy, objective: Objective) -> Value:
        """The averages under a policy, from the stationary distribution of its embedded chain.

        Raises ValueError for a policy that waits in the last state or serves more than wait.
        """
        states = np.arange(self.n_states)
        if len(policy) != self.n_states or (policy > np.minimum(states, self.b_max)).any():
            raise ValueError("a policy has a batch of at most the waiting requests in every state")
        if policy[-1] != self.b_max:
            raise ValueError("a policy serves the largest batch in the last state")
        share = _stationary(self._transitions(states, policy))
        epoch_s = float(share @ self._sojourns_s[policy])
        parts = self._epoch_costs(states, policy, objective)
        request_s, joules, excess_s = (float(share @ part) / epoch_s for part in parts)
        return Value(
            cost=float(share @ self._weighted(parts, objective)) / epoch_s,
            latency_s=request_s / self.rate_per_s,
            power_w=joules,
            late_s=excess_s / self.rate_per_s,
            mean_batch=float(share @ policy / (share @ (policy > 0))),
            overflow=float(share[-1]),
        )

    def solve(self, objective: Objective) -> Solution:
        """The policy of least cost, by relative value iteration on the discrete-time process of
        Schweitzer's data transformation, from the relative values of the greedy policy.

        c̃ = c/y and m̃ = 1 + η(m - 1)/y with η below every y/(1 - m(s|s)). The iteration ends
        when the span of its change is 1e-9 of the gain.

        Source: Puterman, Markov Decision Processes, sections 8.5.5 and 11.4; Schweitzer 1971.
        """
        states, actions = self._pairs
        rows = self._transitions(states, actions)
        sojourns_s = self._sojourns_s[actions]
        costs = self._weighted(self._epoch_costs(states, actions, objective), objective)
        stays = rows[np.arange(len(states)), states]
        eta = 0.99 * float((sojourns_s / (1 - stays)).min())
        # A row per pair, in the order of the states, so that `reduceat` takes each state's minimum.
        first = np.flatnonzero(np.r_[True, np.diff(states) > 0])
        weights, per_s = (eta / sojourns_s)[:, None] * rows, costs / sojourns_s
        weights[np.arange(len(states)), states] += 1 - eta / sojourns_s
        values = self._relative_values(self.greedy(), objective)
        n_sweeps = 0
        while True:
            n_sweeps += 1
            new = np.minimum.reduceat(eta * per_s + weights @ values, first)
            change = new - values
            values = new - new[0]
            span = float(change.max() - change.min())
            if span <= _SPAN * abs(float(change.max())):
                break
            assert n_sweeps < _MOST_SWEEPS, f"value iteration: span {span} after {n_sweeps} sweeps"
        gain = float(change.mean()) / eta
        q_values = costs - gain * sojourns_s + rows @ values
        policy, gap = np.zeros(self.n_states, dtype=np.int64), np.full(self.n_states, np.inf)
        for state, (start, end) in enumerate(zip(first, [*first[1:], len(states)], strict=True)):
            order = np.argsort(q_values[start:end], kind="stable")
            policy[state] = actions[start + order[0]]
            if len(order) > 1:
                gap[state] = float(np.diff(q_values[start:end][order[:2]])[0])
        return Solution(policy, self.evaluate(policy, objective), gap, n_sweeps)

    @cached_property
    def _sojourns_s(self) -> Floats:
        """By action: the wait for an arrival, then the service times."""
        return np.concatenate([[1 / self.rate_per_s], self.service_s])

    @cached_property
    def _arrivals(self) -> Floats:
        """[b_max + 1, n_states] the probability of k arrivals during a batch of b."""
        return _poisson(self.rate_per_s * np.r_[0.0, self.service_s], self.n_states)

    @cached_property
    def _pairs(self) -> tuple[NDArray[np.int64], Policy]:
        """The states and actions of all pairs, in the order of the states."""
        last = self.n_states - 1
        pairs = [(s, a) for s in range(last) for a in range(min(s, self.b_max) + 1)]
        states, actions = np.array([*pairs, (last, self.b_max)], dtype=np.int64).T
        return states, actions

    def _transitions(self, states: NDArray[np.int64], actions: Policy) -> Floats:
        """[pairs, n_states] the distributions of the next states."""
        k = np.arange(self.n_states) - (states - actions)[:, None]
        rows = np.where(k >= 0, self._arrivals[actions[:, None], np.maximum(k, 0)], 0.0)
        waits = np.flatnonzero(actions == 0)
        rows[waits] = 0.0
        rows[waits, states[waits] + 1] = 1.0
        rows[:, -1] = np.maximum(1 - rows[:, :-1].sum(axis=1), 0.0)
        return rows

    def _epoch_costs(
        self, states: NDArray[np.int64], actions: Policy, objective: Objective
    ) -> tuple[Floats, Floats, Floats]:
        """By pair, of an epoch: request-seconds in the system, joules, and request-seconds above
        λ·slo_s."""
        n_shown = np.arange(self.n_states)
        n_shown[-1] += self.b_max  # the abstract cost
        joules = np.r_[0.0, self.energy_j][actions]
        # The mean over t of P(Poisson(λt) = k) for t up to l is P(Poisson(λl) > k) / (λl).
        means = self.rate_per_s * self.service_s[:, None]
        during = np.maximum(1 - np.cumsum(self._arrivals[1:], axis=1), 0.0) / means
        during = np.vstack([np.eye(1, self.n_states), during])  # none arrives while waiting
        most = self.rate_per_s * objective.slo_s
        above = np.maximum(n_shown[:, None] + np.arange(self.n_states) - most, 0.0) @ during.T
        sojourns_s = self._sojourns_s[actions]
        request_s = (n_shown[states] + np.r_[0.0, means[:, 0] / 2][actions]) * sojourns_s
        return request_s, joules, above[states, actions] * sojourns_s

    def _weighted(self, parts: tuple[Floats, Floats, Floats], objective: Objective) -> Floats:
        """The cost of an epoch. A mean over requests is a rate per second divided by λ (Little)."""
        request_s, joules, excess_s = parts
        per_request = objective.latency * request_s + objective.late * excess_s
        return per_request / self.rate_per_s + objective.power * joules

    def _relative_values(self, policy: Policy, objective: Objective) -> Floats:
        """h of a policy, with h(0) = 0: the solution of h + g·y = c + P·h."""
        states = np.arange(self.n_states)
        system = np.eye(self.n_states) - self._transitions(states, policy)
        system[:, 0] = self._sojourns_s[policy]  # g takes the place of h(0)
        costs = self._weighted(self._epoch_costs(states, policy, objective), objective)
        values = np.asarray(np.linalg.solve(system, costs), np.float64)
        values[0] = 0.0
        return values


def _enough_states(load: float, batch: int, b_max: int) -> int:
    """The number of states beyond which the queue has a probability of about 1e-10, if batches of
    the size that serves most are served: P(queue > n) ~ z⁻ⁿ with λ·l·(z - 1) = b·ln z, z > 1."""
    low, high = 1e-12, 1.0
    while load * (exp(high) - 1) < high:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if load * (exp(middle) - 1) < middle else (low, middle)
    return b_max + batch + 2 + ceil(-log(_TAIL) / low)


def _poisson(means: Floats, n: int) -> Floats:
    """[len(means), n] the probabilities of 0 … n - 1 for each mean."""
    k = np.arange(n)
    log_factorial = np.r_[0.0, np.cumsum(np.log(np.arange(1, n)))]
    logs = np.log(np.maximum(means, 1e-300))[:, None]
    return np.asarray(np.exp(k * logs - means[:, None] - log_factorial))


def _stationary(transitions: Floats) -> Floats:
    """The stationary distribution of a chain with a single recurrent class."""
    n = len(transitions)
    system = transitions.T - np.eye(n)
    system[-1] = 1.0
    share = np.asarray(np.linalg.solve(system, np.r_[np.zeros(n - 1), 1.0]), np.float64)
    return np.maximum(share, 0.0)
