"""`async_depth` 1 on an executor that is `LaunchingAhead`: the next step is launched before the
tokens of the present step are read, and changes no token, record or event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from reference_engine.core.core import step
from reference_engine.policies.base import POLICIES
from reference_engine.state.batch import UNKNOWN, Row, StepBatch, StepResult
from reference_engine.state.plan import How
from reference_engine.state.sequence import Sampling, State
from tests.reference_engine.engine_kit import Rig, request, rig

torch = pytest.importorskip("torch", reason="torch is not installed")

from reference_engine.executors.torch_memory import SIDES, Arena  # noqa: E402 - only with torch

MODES = sorted({POLICIES.get(name).kind for name in POLICIES.names()})  # aliases left out
ON_CPU = {"on": "cpu", "dtype": "float32", "kernels": "plain"}
PENALISED = Sampling(presence_penalty=1.5, frequency_penalty=1.0)


@dataclass
class Watched:
    """An executor that notes which of its launches came before the tokens of the step before."""

    inner: Any
    is_ahead: list[bool] = field(default_factory=list)
    n_unread: int = 0

    @property
    def caps(self):
        return self.inner.caps

    def execute(self, batch: StepBatch) -> StepResult:
        return self.launch(batch)()

    def can_launch_ahead(self, batch):
        return self.inner.can_launch_ahead(batch)

    def launch(self, batch: StepBatch) -> Callable[[], StepResult]:
        self.is_ahead.append(self.n_unread > 0)
        self.n_unread += 1
        wait: Callable[[], StepResult] = self.inner.launch(batch)

        def read() -> StepResult:
            self.n_unread -= 1
            return wait()

        return read


def engine(is_ahead: bool, mode: str = "chunked", **options: Any) -> Rig:
    arguments = ON_CPU | {"ahead": is_ahead} | options.pop("arguments", {})
    options = {"max_num_seqs": 6, "max_model_len": 144, "n_blocks": 24} | options
    built = rig(
        executor="torch_cuda", policy=mode, async_depth=1, executor_args=arguments, **options
    )
    built.executor = Watched(built.executor)
    return built


def launches(built: Rig) -> list[bool]:
    assert isinstance(built.executor, Watched)
    return built.executor.is_ahead


def story(built: Rig, cancels: int = 0) -> tuple[Any, ...]:
    """Ten requests, of which one arrives in each step, and the first `cancels` odd ones are aborted
    three steps later. Returns all that is recorded of them."""
    requests = [
        request(
            f"r{i}", [(5 * i + 3 * j) % 256 for j in range(1 + 7 * i)], 14 - i % 3,
            stop_ids=range(0, 320, 9), min_tokens=4 * (i % 2),
            sampling=Sampling() if i % 3 else Sampling(0.8, seed=i, logprobs=i == 6),
        )
        for i in range(10)
    ]  # fmt: skip
    told = []
    for i, req in enumerate(requests):
        built.admit(req)
        told += built.step()
        if i >= 3 and i % 2 == 0 and i // 2 - 1 <= cancels:
            built.state.end(f"r{i - 3}", State.finished_abort)
    built.state.is_source_closed = True
    told += built.drain()
    steps = [record._replace(plan_s=0.0) for record in built.state.log.steps]
    events = [(e.t_s, e.kind, e.request_id) for e in built.state.log.events]
    tokens = [(e.request.id, e.token, e.finish, e.logprob) for e in told]
    return [req.output for req in requests], [req.state for req in requests], tokens, steps, events


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_the_same_records_with_and_without(mode):
    """Greedy and drawn tokens, stop tokens, bans, aborts."""
    built = engine(True, mode)
    plain = engine(False, mode)
    ahead = story(built, cancels=2)
    assert ahead == story(plain, cancels=2)
    assert State.finished_stop in ahead[1]
    assert State.finished_abort in ahead[1]
    assert not any(launches(plain))
    assert sum(launches(built)) > len(launches(built)) / 2


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("how", [How.recompute, How.swap])
def test_preempted_requests_have_the_same_records(how, graphs):
    def told(is_ahead: bool) -> tuple[Rig, tuple[Any, ...]]:
        built = engine(
            is_ahead, n_blocks=9, token_budget=48, n_host_blocks=40, how=how,
            arguments={"graphs": graphs},
        )  # fmt: skip
        return built, story(built)

    (built, ahead), (_, plain) = told(True), told(False)
    assert ahead == plain
    assert built.state.counters.preemptions > 0
    assert (built.state.counters.swaps > 0) is (how is How.swap)
    assert any(launches(built))


def test_decode_steps_follow_each_other_without_a_read_in_between():
    built = engine(True)
    built.admit(request("a", [1, 2], 9), request("b", [3, 4], 9))
    built.drain()
    assert launches(built) == [False, *[True] * 8]


def test_steps_with_penalties_wait_for_the_tokens_that_they_depend_on():
    def outputs(built: Rig) -> list[list[int]]:
        pair = [request("a", b"abc", 12, sampling=PENALISED), request("b", b"abc", 20)]
        built.admit(*pair)
        built.drain()
        return [req.output for req in pair]

    built = engine(True)
    answers = outputs(built)
    assert answers == outputs(engine(False))
    # Those of b alone, and the first of them: planned when a's last token was expected.
    assert launches(built) == [False] * 12 + [True] * 8
    alone = engine(False)
    alone.admit(unpenalised := request("c", b"abc", 12))
    alone.drain()
    assert answers[0] != unpenalised.output


@pytest.mark.parametrize("n_tokens", [1, 2])
def test_an_unknown_token_may_be_a_row_of_its_own_but_no_part_of_a_prompt(n_tokens):
    executor: Any = engine(False).executor
    req = request("a", range(5), 9)
    req.blocks = [3]
    first = executor.launch(StepBatch(rows=(Row(req, 0, 5, True),)))
    req.n_computed = 6 - n_tokens
    req.tokens.append(UNKNOWN)
    batch = StepBatch(rows=(Row(req, 6 - n_tokens, n_tokens, True),))
    if n_tokens == 2:
        with pytest.raises(AssertionError, match="an unknown token in a prompt"):
            executor.launch(batch)
        return
    second = executor.launch(batch)
    tokens = [*first().tokens, *second().tokens]
    alone = engine(False)
    alone.admit(expected := request("a", range(5), 2))
    alone.drain()
    assert tokens == expected.output


def test_an_abort_of_all_requests_leaves_a_launched_step_that_the_next_request_waits_for():
    built = engine(True)
    built.admit(request("a", range(1, 20), 9), request("b", range(40), 9))
    for _ in range(3):
        step(built.state, built.executor)
    assert built.state.launched is not None
    for name in "ab":
        built.state.end(name, State.finished_abort)
    assert not built.state.has_work
    built.admit(late := request("late", range(1, 20), 9))
    built.drain()
    alone = engine(False)
    alone.admit(expected := request("late", range(1, 20), 9))
    alone.drain()
    assert late.output == expected.output


def test_numbers_of_a_step_are_kept_while_the_next_step_is_written():
    """Asynchronous copies read the host's memory later; the device's addresses stay the same."""
    arena = Arena(8, torch.device("cpu"), is_pinned=False)
    on_device, hosts = [], []
    for value in range(3):
        arena.reset(8)
        on_device.append(arena.put(torch.full((8,), value, dtype=torch.int32).numpy()))
        hosts.append(arena._hosts[arena._side])
    assert len({place.data_ptr() for place in on_device}) == 1
    assert [host[0].item() for host in hosts] == [2, 1, 2]
    assert len({host.data_ptr() for host in hosts}) == SIDES == 2
