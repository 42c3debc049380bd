"""Preempted KV goes to host memory and comes back, where that is allowed and cheaper."""

from __future__ import annotations

import pytest

from reference_engine.executors.base import Executor
from reference_engine.state.batch import StepBatch, StepResult
from reference_engine.state.cost_model import StepCost
from reference_engine.state.plan import How
from reference_engine.state.sequence import State
from tests.reference_engine.engine_kit import Rig, request, rig, toy_output

# 48 tokens in KV are 3 blocks; to compute them again takes 48 · 10 ms = 0.48 s.
COST = StepCost(token_s=0.01)


def crowded(copy_s: float = 0.0, prefix_cache: bool = False, **options) -> Rig:
    """Three requests of 40 + 50 tokens, in memory for one and a half."""
    engine = rig(
        n_blocks=9,
        max_model_len=96,
        prefix_cache=prefix_cache,
        cost=COST,
        executor_args={"copy_s": copy_s},
        watermark=0,
        **options,
    )
    engine.admit(*(request(f"r{i}", [i] * 40, 50) for i in range(3)))
    return engine


def until_preempted(engine: Rig) -> None:
    while not engine.state.counters.preemptions:
        engine.step()


class Watched:
    """Keeps the batches it is given."""

    def __init__(self, inner: Executor) -> None:
        self.inner, self.caps = inner, inner.caps
        self.batches: list[StepBatch] = []

    def execute(self, batch: StepBatch) -> StepResult:
        self.batches.append(batch)
        return self.inner.execute(batch)


def test_a_swapped_request_goes_on_where_it_was_without_computing_anything_again():
    engine = crowded(n_host_blocks=20, how=How.swap)
    until_preempted(engine)
    victim = next(iter(engine.state.queues.waiting.values()))
    assert victim.state is State.swapped
    assert (victim.n_swapped, len(victim.host_blocks), victim.blocks) == (48, 3, [])
    assert engine.state.view().to_compute(victim) == 1
    engine.drain()
    assert engine.state.counters.swaps == engine.state.counters.preemptions > 0
    assert engine.state.counters.prompt_tokens == 3 * 40
    assert victim.output == toy_output([2] * 40, 50)


def test_without_swapping_the_same_work_is_done_again():
    engine = crowded(how=How.swap)  # no host memory
    engine.drain()
    assert engine.state.counters.swaps == 0
    assert engine.state.counters.prompt_tokens > 3 * 40


@pytest.mark.parametrize(("copy_s", "is_swapped"), [(0.079, True), (0.081, False)])
def test_auto_swaps_where_copying_twice_is_cheaper_than_computing_again(copy_s, is_swapped):
    engine = crowded(copy_s, n_host_blocks=20)
    until_preempted(engine)
    victim = next(iter(engine.state.queues.waiting.values()))
    assert victim.n_swapped == (48 if is_swapped else 0)
    assert victim.state is (State.swapped if is_swapped else State.preempted)


def test_a_full_host_memory_means_computing_again():
    engine = crowded(n_host_blocks=2, how=How.swap)
    engine.drain()
    assert engine.state.counters.swaps == 0


def test_what_the_prefix_cache_still_has_is_not_copied_back():
    engine = crowded(prefix_cache=True, n_host_blocks=20, how=How.swap, max_num_seqs=3)
    until_preempted(engine)
    victim = next(iter(engine.state.queues.waiting.values()))
    engine.state.end("r0", State.finished_abort)
    _, n_hits = engine.state.kv._hits(victim)
    assert n_hits > 0
    watched = engine.executor = Watched(engine.executor)
    engine.step()
    assert [copy.is_out for copy in watched.batches[0].copies] == [False] * (3 - n_hits)
    engine.drain()
    assert victim.output == toy_output([2] * 40, 50)


def test_a_cancelled_swapped_request_leaves_nothing_behind():
    engine = crowded(n_host_blocks=20, how=How.swap)
    until_preempted(engine)
    victim = next(iter(engine.state.queues.waiting))
    assert engine.state.host.n_free == 17
    engine.state.end(victim, State.finished_abort)
    engine.state.check()
    assert engine.state.host.n_free == 20
    engine.drain()
