"""Autoscaling: replicas are started and stopped by the number of requests.

The rule is that of the Kubernetes Horizontal Pod Autoscaler for an average value per pod
(https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/): every 15 s,
desired = ceil(requests / target), unchanged while the requests are within 10 % of the target of the
present replicas; fewer replicas only as far as all results of the last 300 s agree.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from reference_engine.cluster.conductors import Part
from reference_engine.cluster.membership import Membership
from reference_engine.simulator import Replica, Simulator
from reference_engine.state.batch import StepTokens

_OFF = "switched off"
_TOLERANCE = 0.1
_ROUNDING = 1e-9


class ScalingRule(NamedTuple):
    """`target` requests per replica, waiting and running, on `least` replicas or more. A replica
    receives requests `startup_s` after its start. Times are in seconds."""

    least: int
    target: float
    every_s: float = 15.0
    startup_s: float = 60.0
    stabilization_s: float = 300.0


class Autoscaling(Part):
    """Starts and stops `replicas` (None: all) by the number of requests that `count` returns
    (None: all in the system); the first `rule.least` are on at the beginning. A replica that stops
    receives no more requests, and is off when its last has ended or left with its KV. `on_s` are
    the seconds that replicas were on, their starts included; a replica that fails stays on."""

    def __init__(
        self,
        members: Membership,
        rule: ScalingRule,
        replicas: Sequence[Replica] | None = None,
        count: Callable[[Simulator], int] | None = None,
    ) -> None:
        self._replicas = members.replicas if replicas is None else tuple(replicas)
        assert 1 <= rule.least <= len(self._replicas), f"{rule.least} replicas at least"
        self._members, self._rule = members, rule
        self._count = count or _in_system
        self.on_s = dict.fromkeys(self._replicas, 0.0)
        self.n_starts = 0
        self._since_s: dict[Replica, float] = {}  # of the replicas that are on
        self._ready_s: dict[Replica, float] = {}  # of those that start
        self._stopping: list[Replica] = []
        self._results: deque[tuple[float, int]] = deque()  # instant, desired replicas
        self._next = 1
        for number, replica in enumerate(self._replicas):
            if number < rule.least:
                self._since_s[replica] = 0.0
            else:
                members.close(replica, _OFF)

    @property
    def n_on(self) -> int:
        """Replicas that receive requests or will, as soon as they have started."""
        return len(self._since_s) - len(self._stopping)

    def next_s(self, simulator: Simulator) -> float:
        return min([self._next * self._rule.every_s, *self._ready_s.values()])

    def act(self, simulator: Simulator) -> None:
        now_s = simulator.now_s
        for replica in list(self._stopping):  # a copy of KV may have ended
            self._switch_off_empty(replica, now_s)
        for replica, ready_s in list(self._ready_s.items()):
            if ready_s <= now_s:
                del self._ready_s[replica]
                self._members.open(replica, _OFF)
                simulator.empty_router()
        n_due = math.floor(now_s / self._rule.every_s + _ROUNDING)
        if n_due >= self._next:
            self._next = n_due + 1
            self._scale(simulator)

    def stepped(self, replica: Replica, events: StepTokens, simulator: Simulator) -> None:
        self._switch_off_empty(replica, simulator.now_s)

    def freed(self, replica: Replica, simulator: Simulator) -> None:
        self._switch_off_empty(replica, simulator.now_s)

    def totals_s(self, now_s: float) -> dict[Replica, float]:
        """The seconds that each replica was on until now."""
        open_s = {replica: now_s - since_s for replica, since_s in self._since_s.items()}
        return {replica: on_s + open_s.get(replica, 0.0) for replica, on_s in self.on_s.items()}

    def _scale(self, simulator: Simulator) -> None:
        now_s, rule = simulator.now_s, self._rule
        for replica in list(self._stopping):  # a failure may have emptied it
            self._switch_off_empty(replica, now_s)
        n_requests = self._count(simulator)
        desired = self.n_on
        if abs(n_requests / (rule.target * self.n_on) - 1) > _TOLERANCE:
            desired = math.ceil(n_requests / rule.target - _ROUNDING)
        desired = min(max(desired, rule.least), len(self._replicas))
        self._results.append((now_s, desired))
        while self._results[0][0] < now_s - rule.stabilization_s:
            self._results.popleft()
        highest = max(result for _, result in self._results)
        while self.n_on < desired:
            self._start(now_s)
        while self.n_on > highest:
            self._stop(now_s)

    def _start(self, now_s: float) -> None:
        if self._stopping:  # it has its model loaded
            self._members.open(self._stopping.pop(), _OFF)
            return
        replica = next(r for r in self._replicas if r not in self._since_s)
        self._since_s[replica] = now_s
        self._ready_s[replica] = now_s + self._rule.startup_s
        self.n_starts += 1

    def _stop(self, now_s: float) -> None:
        """Stop a replica that still starts, else the replica with the fewest requests; of several
        the youngest."""
        on = [replica for replica in self._since_s if replica not in self._stopping]
        age = self._since_s
        replica = min(on, key=lambda r: (r not in self._ready_s, len(r.population), -age[r]))
        self._ready_s.pop(replica, None)
        self._members.close(replica, _OFF)
        self._stopping.append(replica)
        self._switch_off_empty(replica, now_s)

    def _switch_off_empty(self, replica: Replica, now_s: float) -> None:
        is_empty = not (len(replica.population) or replica.coming or replica.copying)
        if replica in self._stopping and is_empty and not replica.state.lent:
            self._stopping.remove(replica)
            self.on_s[replica] += now_s - self._since_s.pop(replica)


def _in_system(simulator: Simulator) -> int:
    return len(simulator.population)
