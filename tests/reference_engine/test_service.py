"""The bridge between event loop and engine thread."""

from __future__ import annotations

import asyncio

import pytest

from reference_engine.metrics.metrics import EngineMetrics
from reference_engine.serving.engine_thread import EngineThread
from reference_engine.serving.service import Service
from reference_engine.serving.wire.call import Call
from reference_engine.serving.wire.wire_errors import WireError
from reference_engine.state.kv import BLOCKS_PER_CHECK
from reference_engine.state.sequence import Sampling
from tests.reference_engine.engine_kit import toy_output
from tests.reference_engine.engine_server import toy_engine


def call(max_tokens: int, prompt: str = "abc") -> Call:
    return Call(model=None, prompts=(prompt,), max_tokens=max_tokens, sampling=Sampling())


async def texts(stream) -> str:
    return "".join([delta.text async for deltas in stream for delta in deltas])


async def started(max_queue: int = 100, **options) -> Service:
    service = toy_engine(**options).service(max_queue=max_queue)
    service.start()
    return service


def test_draining_lets_running_requests_finish_and_refuses_new_ones():
    async def scene():
        service = await started(executor_args={"step_s": 0.0005})
        stream = service.submit(call(50), None, service.clock.now_s())
        reading = asyncio.create_task(texts(stream))
        reading.add_done_callback(lambda _: stream.close())
        stopping = asyncio.create_task(service.stop(drain_s=30))
        await asyncio.sleep(0)
        with pytest.raises(WireError) as refused:
            service.submit(call(1), None, 0.0)
        await stopping
        return len(await reading), refused.value.status

    assert asyncio.run(scene()) == (50, 503)


def test_requests_that_do_not_finish_while_draining_fail():
    async def scene():
        service = await started(executor_args={"step_s": 0.001})
        stream = service.submit(call(4000), None, service.clock.now_s())
        reading = asyncio.create_task(texts(stream))
        await service.stop(drain_s=0.01)
        with pytest.raises(WireError, match="shutting down") as broken:
            await reading
        assert broken.value.status == 503  # for a response without a status line so far

    asyncio.run(scene())


def test_two_live_requests_with_the_same_client_id_get_different_ids():
    async def scene():
        service = await started()
        first = service.submit(call(5), "same", 0.0)
        second = service.submit(call(7), "same", 0.0)
        ids = first.request.id, second.request.id
        lengths = len(await texts(first)), len(await texts(second))
        first.close()
        second.close()
        third = service.submit(call(1), "same", 0.0)
        await service.stop()
        return ids, lengths, third.request.id

    assert asyncio.run(scene()) == (("same", "same#2"), (5, 7), "same")


def test_a_closed_stream_gets_no_more_and_frees_its_blocks():
    async def scene():
        service = await started(executor_args={"step_s": 0.0005})
        stream = service.submit(call(4000), None, 0.0)
        async for _ in stream:
            break
        stream.close()
        free = await service.between_steps(lambda state: (state.kv.n_free, state.kv.n_blocks))
        await service.stop()
        return free

    n_free, n_blocks = asyncio.run(scene())
    assert n_free == n_blocks


def test_sampling_without_a_seed_differs_from_call_to_call():
    async def scene():
        service = await started()
        sampled = Call(model=None, prompts=("abc",), max_tokens=20, sampling=Sampling(1.0))
        out = []
        for _ in range(2):
            stream = service.submit(sampled, None, 0.0)
            out.append(await texts(stream))
            stream.close()
        await service.stop()
        return out

    first, second = asyncio.run(scene())
    assert first != second


def test_hurry_ends_the_draining_at_once():
    async def scene():
        service = await started(executor_args={"step_s": 0.001})
        stream = service.submit(call(4000), None, service.clock.now_s())
        reading = asyncio.create_task(texts(stream))
        stopping = asyncio.create_task(service.stop(drain_s=1000))
        await asyncio.sleep(0)
        service.hurry()
        await asyncio.wait_for(stopping, 5)
        with pytest.raises(WireError, match="shutting down"):
            await reading

    asyncio.run(scene())


def test_a_full_queue_refuses_with_a_retry_time():
    async def scene():
        service = await started(max_queue=2, max_num_seqs=1, executor_args={"step_s": 0.001})
        for _ in range(2):
            first = service.submit(call(1), None, service.clock.now_s())
            await texts(first)
            first.close()
        streams = [service.submit(call(50), None, service.clock.now_s()) for _ in range(2)]
        with pytest.raises(WireError) as refused:
            service.submit(call(50), None, service.clock.now_s())
        for stream in streams:
            stream.close()
        again = service.submit(call(1), None, service.clock.now_s())
        assert len(await texts(again)) == 1
        again.close()
        await service.stop()
        return refused.value, service.n_refused

    error, n_refused = asyncio.run(scene())
    assert (error.status, error.code, error.more["reason"]) == (429, "queue_full", "queue_full")
    assert error.more["predicted_wait_ms"] >= 0
    assert error.retry_after_s == 1
    assert n_refused == {"queue_full": 1}


def test_an_error_between_steps_fails_only_its_caller():
    def mistake(state):
        raise WireError("no such tenant")

    async def scene():
        service = await started()
        with pytest.raises(WireError, match="no such tenant"):
            await service.between_steps(mistake)
        n_steps = await service.between_steps(lambda state: state.counters.steps)
        await service.stop()
        return n_steps

    assert asyncio.run(scene()) == 0


def test_a_client_may_use_generated_and_derived_ids():
    """`req-2` is the generated id of a second request, `a#3` the derived id of a third `a`."""

    async def scene():
        service = await started(executor_args={"step_s": 0.0005})
        client_ids = ["req-2", None, "a", "a#5", "a", "req-2", None]
        streams = [service.submit(call(5), name, service.clock.now_s()) for name in client_ids]
        answers = await asyncio.gather(*map(texts, streams))
        for stream in streams:
            stream.close()
        await service.stop()
        return [stream.request.id for stream in streams], answers, service.failure

    ids, answers, failure = asyncio.run(scene())
    assert failure is None
    assert len(set(ids)) == len(ids)
    assert (ids[0], ids[2], ids[3]) == ("req-2", "a", "a#5")
    assert [len(text) for text in answers] == [5] * 7


def test_an_unread_complete_answer_does_not_count_as_waiting():
    """It does not fill the queue either."""

    async def scene():
        service = await started(max_queue=2)
        unread = [service.submit(call(3), None, service.clock.now_s()) for _ in range(2)]
        for stream in unread:
            await stream.admitted()
            while not stream.is_over:
                await asyncio.sleep(0)
        n_waiting = service.n_waiting
        other = service.submit(call(3), None, service.clock.now_s())
        text = await texts(other)
        for stream in (*unread, other):
            stream.close()
        after = service.n_waiting
        await service.stop()
        return n_waiting, text, after, service._n_over

    assert asyncio.run(scene()) == (0, printable_toy(3), 0, 0)


def printable_toy(n: int) -> str:
    tokens = toy_output(b"abc", n)
    return "".join(chr(t if 32 <= t < 127 else 32 + t % 95) for t in tokens)


def test_a_job_does_not_wait_for_the_engines_self_check():
    engine = toy_engine(kv_blocks=20_000)
    thread = EngineThread(engine.state, engine.executor, engine.clock, EngineMetrics(4096))
    assert thread.check()
    thread.post(lambda: None)
    assert not thread.check()
    checked = []

    class Watched(list[int]):
        def __getitem__(self, part):
            found = super().__getitem__(part)
            checked.extend(found)
            return found

    engine.state.kv._blank = Watched(engine.state.kv._blank)
    before, most = 0, 0
    for _ in engine.state.checks():
        before, most = len(checked), max(most, len(checked) - before)
    assert len(checked) == 20_000
    assert most <= BLOCKS_PER_CHECK


class Launched:
    """Computes at once, and records when a step is launched and when it is waited for."""

    def __init__(self, inner, calls):
        self.inner, self.said, self.caps = inner, calls, inner.caps

    def execute(self, batch):
        return self.launch(batch)()

    def launch(self, batch):
        self.said.append("launch")
        result = self.inner.execute(batch)

        def wait():
            self.said.append("wait")
            return result

        return wait


class Recording(EngineMetrics):
    """Records when tokens are published."""

    def __init__(self, calls):
        super().__init__(4096)
        self.said = calls

    def on_tokens(self, n_tokens, gaps_s):
        self.said.append(f"publish {n_tokens}")


BEHIND = [
    "launch",
    "wait",
    "launch",
    "publish 1",
    "wait",
    "launch",
    "publish 1",
    "wait",
    "publish 1",
]
AT_ONCE = ["launch", "wait", "publish 1"] * 3


@pytest.mark.parametrize(
    ("async_depth", "stop", "order"),
    [(1, (), BEHIND), (1, ("no such text",), AT_ONCE), (0, (), AT_ONCE)],
)
def test_tokens_are_published_while_the_next_step_runs(async_depth, stop, order):
    """Unless a stop string may end the answer, because that would change the next plan, or nothing
    is planned ahead."""

    async def scene():
        calls: list[str] = []
        engine = toy_engine(async_depth=async_depth)
        executor = Launched(engine.executor, calls)
        service = Service(
            engine.state, executor, engine.tokenizer, engine.clock, metrics=Recording(calls)
        )
        service.start()
        stopped = Call(model=None, prompts=("abc",), max_tokens=3, sampling=Sampling(), stop=stop)
        stream = service.submit(stopped, None, service.clock.now_s())
        text = await texts(stream)
        stream.close()
        await service.stop()
        return calls, text

    assert asyncio.run(scene()) == (order, printable_toy(3))


def test_closing_streams_early_loses_no_finished_request():
    """A finished request whose end is not published yet is not cancelled."""

    async def scene():
        engine = toy_engine(async_depth=1)
        executor = Launched(engine.executor, [])
        metrics = EngineMetrics(4096)
        service = Service(engine.state, executor, engine.tokenizer, engine.clock, metrics=metrics)
        service.start()
        streams = [service.submit(call(n), None, 0.0) for n in range(1, 40)]
        for stream in streams:
            await stream.admitted()
            stream.close()
        counters = await service.between_steps(lambda state: state.counters)
        await service.stop()
        return counters, sum(metrics.finished.values())

    counters, n_counted = asyncio.run(scene())
    assert counters.finished == n_counted == 39


def test_tokens_computed_before_a_failing_launch_are_delivered(caplog):
    """The answer of three tokens is over, and its last token unpublished, when the next launch
    fails."""

    async def scene():
        class Breaking(Launched):
            def launch(self, batch):
                if engine.state.counters.finished:
                    raise ArithmeticError("a broken kernel")
                return super().launch(batch)

        engine = toy_engine(async_depth=1)
        executor = Breaking(engine.executor, [])
        service = Service(engine.state, executor, engine.tokenizer, engine.clock)
        streams = [service.submit(call(n), None, 0.0) for n in (100, 3)]
        short = streams[1]
        service.start()
        text = await texts(short)
        with pytest.raises(WireError, match="a broken kernel"):
            await texts(streams[0])
        await service.stop()
        return text

    assert asyncio.run(scene()) == printable_toy(3)
    assert "the engine thread failed" in caplog.text


def test_closing_a_cut_off_stream_does_not_end_a_later_request_with_its_id():
    async def scene():
        service = await started(executor_args={"step_s": 0.0005})
        slow = service.submit(call(50), "same", 0.0)
        await slow.admitted()
        service.cut_off(slow)
        again = service.submit(call(50), "same", 0.0)
        slow.close()
        text = await asyncio.wait_for(texts(again), 30)
        again.close()
        await service.stop()
        return len(text)

    assert asyncio.run(scene()) == 50
