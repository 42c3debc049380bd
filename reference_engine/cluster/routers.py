"""Routers of a simulated cluster: each selects the replica of a request at its arrival.

A router that compares loads may read them late: with `stale`, it reads all replicas at once and
keeps the numbers for that time. Ties are broken at random.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import cycle, takewhile
from typing import Annotated, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from pydantic import Field, ValidationError

from loadgen.errors import UsageError, nearest
from loadgen.fields import Seconds
from loadgen.registry import Plugin, Registry
from reference_engine.simulator import Replica, Route
from reference_engine.state.cost_model import StepShape
from reference_engine.state.sequence import Request

Clock = Callable[[], float]
T = TypeVar("T")


class Site(NamedTuple):
    """The replicas of a router, the clock (s) and the random numbers of the simulation."""

    replicas: Sequence[Replica]
    now_s: Clock
    rng: np.random.Generator


class Router(Plugin, ABC):
    """A kind of router; its fields are its parameters."""

    @abstractmethod
    def route(self, site: Site) -> Route:
        """A function that selects replicas, with the state of one simulation."""


ROUTERS: Registry[Router] = Registry("slobench.routers", "router")
SHORT_NAMES = {
    "rr": "round_robin",
    "jsq": "join_shortest_queue",
    "p2c": "power_of_two",
}


@ROUTERS.register
class RoundRobin(Router):
    """Each replica in turn."""

    kind: ClassVar[str] = "round_robin"

    def route(self, site: Site) -> Route:
        numbers = cycle(range(len(site.replicas)))
        return lambda request: next(numbers)


@ROUTERS.register
class RandomReplica(Router):
    """Any replica, each with the same probability."""

    kind: ClassVar[str] = "random"

    def route(self, site: Site) -> Route:
        return lambda request: int(site.rng.integers(len(site.replicas)))


@ROUTERS.register
class CentralQueue(Router):
    """Requests wait at the router, first come first served, until a replica has fewer than
    `most_requests`; of several, the replica with the fewest."""

    kind: ClassVar[str] = "central_queue"
    most_requests: int = Field(default=64, ge=1)

    def route(self, site: Site) -> Route:
        def select(request: Request) -> int | None:
            sizes = [sum(len(e.population) for e in engines(r)) for r in site.replicas]
            least = min(sizes)
            return sizes.index(least) if least < self.most_requests else None

        return select


class LoadRouter(Router, ABC):
    """Compares the loads of the replicas, or of `choices` replicas drawn at random, and selects the
    least. The loads are up to `stale` old."""

    stale: Annotated[Seconds, Field(ge=0)] = 0.0
    choices: int | None = Field(default=None, ge=1)

    @abstractmethod
    def load(self, replica: Replica) -> float:
        """The load of a replica at present."""

    def route(self, site: Site) -> Route:
        loads = Periodic(lambda replica: self.load(replica), site, self.stale)
        n, rng = len(site.replicas), site.rng
        n_drawn = min(self.choices or n, n)

        def select(request: Request) -> int:
            numbers = range(n) if n_drawn == n else rng.choice(n, n_drawn, replace=False).tolist()
            return least(numbers, [loads.of(number) for number in numbers], rng)

        return select


@ROUTERS.register
class JoinShortestQueue(LoadRouter):
    """The replica with the fewest requests: waiting, running, and on their way to it."""

    kind: ClassVar[str] = "join_shortest_queue"

    def load(self, replica: Replica) -> float:
        if replica.partner is None:
            return len(replica.population) + len(replica.coming) + len(replica.copying)
        return sum(len(e.population) + len(e.coming) for e in engines(replica))


@ROUTERS.register
class PowerOfTwo(JoinShortestQueue):
    """The shorter queue of two replicas drawn at random (Mitzenmacher, IEEE TPDS 12(10), 2001)."""

    kind: ClassVar[str] = "power_of_two"
    choices: int | None = Field(default=2, ge=1)


@ROUTERS.register
class LeastKv(LoadRouter):
    """The replica with the least of its KV memory owned or needed by waiting prompts, as a
    share."""

    kind: ClassVar[str] = "least_kv"

    def load(self, replica: Replica) -> float:
        kv = replica.state.kv
        coming = [*replica.unread, *replica.coming.values()]
        n_waiting = replica.state.queues.queued_tokens + sum(len(r.tokens) for r in coming)
        return kv.pressure + n_waiting / (kv.n_blocks * kv.block_tokens)


@ROUTERS.register
class PredictedLoad(LoadRouter):
    """The replica with the least work left, in seconds by its own cost model: all prompts still to
    compute, and for each request the output that the length predictor expects."""

    kind: ClassVar[str] = "predicted_load"

    def load(self, replica: Replica) -> float:
        view, requests = replica.state.view(), list[Request]()
        for engine in engines(replica):
            queues = engine.state.queues
            queues.settle()  # the predictor reads the output so far
            requests += [*queues, *engine.unread, *engine.coming.values(), *engine.copying.values()]
        n_prompt = n_output = n_context = 0.0
        for request in requests:
            n_left = max(0, request.n_remaining - request.n_swapped - 1)
            n_prompt += n_left
            n_output += view.predictor.predict(request).mean
            n_context += len(request.tokens)
        if not requests:
            return 0.0
        n = len(requests)
        prompts = StepShape(n, int(n_prompt), n_prompt**2 / (2 * n))
        decoding = StepShape(n, 0, 0.0, n, int(n_context))
        cost = view.cost
        reading_s = cost.estimate(prompts) if n_prompt else 0.0
        return reading_s + n_output / n * cost.estimate(decoding)


@ROUTERS.register
class PrefixAware(Router):
    """The replica with the least tokens to read: the prompt tokens that its prefix cache lacks,
    times `overlap_weight`, plus the tokens of all its requests.

    The content of the caches is up to `stale` old; the requests are counted by the router and so
    are never old. The sum is the cost of the KV router of NVIDIA Dynamo.
    """

    kind: ClassVar[str] = "prefix_aware"
    stale: Annotated[Seconds, Field(ge=0)] = 0.0
    overlap_weight: float = Field(default=1.0, ge=0)

    def route(self, site: Site) -> Route:
        def cache(replica: Replica) -> Callable[[Sequence[bytes]], int]:
            kv = replica.state.kv
            if not self.stale:
                return kv.n_leading
            known = frozenset(kv.cached_keys())
            return lambda keys: sum(1 for _ in takewhile(known.__contains__, keys))

        caches = Periodic(cache, site, self.stale)

        def select(request: Request) -> int:
            chain: Sequence[bytes] = ()
            costs: list[float] = []
            for number, replica in enumerate(site.replicas):
                kv = replica.state.kv
                chain = chain or kv.prefix_keys(request)
                n_hits = caches.of(number)(chain)
                n_missing = len(request.tokens) - n_hits * kv.block_tokens
                n_active = sum(map(_active_tokens, engines(replica)))
                costs.append(self.overlap_weight * n_missing + n_active)
            return least(range(len(costs)), costs, site.rng)

        return select


def engines(replica: Replica) -> tuple[Replica, ...]:
    """The replica, or both halves of a divided GPU."""
    return (replica,) if replica.partner is None else (replica, replica.partner)


def _active_tokens(replica: Replica) -> int:
    queues = replica.state.queues
    n_active = queues.context_tokens + queues.queued_tokens
    n_active += sum(len(r.tokens) for r in queues.prefilling.values())
    n_active += sum(len(r.tokens) for r in queues.in_flight.values())
    n_active += sum(len(r.tokens) for r in replica.unread)
    on_way = (*replica.coming.values(), *replica.copying.values())
    return n_active + sum(len(r.tokens) for r in on_way)


class Periodic(Generic[T]):
    """A reading of every replica, repeated when it is older than `period_s`; at 0, read at each
    use."""

    def __init__(self, read: Callable[[Replica], T], site: Site, period_s: float) -> None:
        self._read, self._site, self._period_s = read, site, period_s
        self._values: list[T] = []
        self._read_s = -np.inf

    def of(self, number: int) -> T:
        if not self._period_s:
            return self._read(self._site.replicas[number])
        now_s = self._site.now_s()
        if now_s - self._read_s >= self._period_s:
            self._values = [self._read(replica) for replica in self._site.replicas]
            self._read_s = now_s
        return self._values[number]


def least(numbers: Sequence[int], loads: Sequence[float], rng: np.random.Generator) -> int:
    """The number with the least load; any of several with equal probability."""
    smallest = min(loads)
    ties = [number for number, load in zip(numbers, loads, strict=True) if load == smallest]
    return ties[0] if len(ties) == 1 else ties[int(rng.integers(len(ties)))]


def read_router(text: str, setting: str = "router") -> Router:
    """`jsq`, or `power_of_two:choices=3:stale=1s`. Raises UsageError naming the key, or the nearest
    router."""
    name, *pairs = text.split(":")
    spec: dict[str, object] = {"kind": SHORT_NAMES.get(name, name)}
    names = [*ROUTERS.names(), *SHORT_NAMES]
    if name not in names:
        raise UsageError(f"{setting}: unknown router '{name}'; {nearest(name, names)}")
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"{setting}: expected key=value after '{name}:', got '{pair}'")
        spec[key] = value
    try:
        return ROUTERS.build(spec)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{setting}: {first['loc'][0]}: {first['msg']}") from None
