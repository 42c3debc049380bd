"""An engine keeps nothing of a request that is over, beyond its logs of the latest: objects are
counted, not bytes, which depend on allocators."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter

import pytest

from reference_engine.core.core import step
from reference_engine.policies.base import POLICIES
from tests.reference_engine.engine_kit import request, rig
from tests.reference_engine.engine_server import serving

pytestmark = pytest.mark.faults
NOT_COUNTED = {
    "StepRecord", "StepEvent", "Account", "Blocker", "Cause", "list", "tuple", "dict", "set",
    "ReferenceType", "builtin_function_or_method",
}  # fmt: skip
"""Logs with a fixed length, the containers that they hold, and Python's caches of classes."""
_MOST_MORE = 80  # objects of a type: 64 ends of quanta, some cached blocks


def census():
    gc.collect()
    names = (type(thing).__name__ for thing in gc.get_objects())
    return Counter(name for name in names if name not in NOT_COUNTED)


def growth(before, after):
    return {name: n for name, n in (after - before).items() if n > _MOST_MORE}


@pytest.mark.parametrize("mode", POLICIES.names())
def test_an_engine_of_each_mode_forgets_the_requests_that_are_over(mode):
    engine, rng = rig(policy=mode), random.Random(5)

    def serve(names):
        for name in names:
            prompt = [rng.randrange(200) for _ in range(rng.randrange(4, 60))]
            arrived_s, tenant = engine.clock.now_s(), f"t{rng.randrange(3)}"
            engine.state.admit(
                request(name, prompt, rng.randrange(1, 6), arrived_s=arrived_s, tenant=tenant)
            )
            run(2)
        run(10_000)

    def run(most_steps):
        for _ in range(most_steps):
            if not engine.state.has_work:
                return
            list(step(engine.state, engine.executor))
            engine.clock.advance(0.001)

    serve(f"a{i}" for i in range(400))
    before = census()
    serve(f"b{i}" for i in range(800))
    assert not engine.state.has_work
    assert growth(before, census()) == {}


@pytest.mark.parametrize("is_split", [False, True])
def test_a_server_forgets_the_requests_that_are_over(is_split):
    async def counted():
        async with serving(is_split=is_split) as server:
            await served(server, 240)
            before = census()
            await served(server, 480)
            return growth(before, census())

    assert asyncio.run(counted()) == {}


async def served(server, n):
    async def client(k):
        for i in range(n // 8):
            body = {"prompt": f"{k} {i}", "max_tokens": 3, "stream": True}
            assert (await server.events("/v1/completions", body))[-1] == "[DONE]"

    await asyncio.gather(*(client(k) for k in range(8)))
