"""The channel between the engine and an HTTP worker, and both of its ends."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reference_engine.serving.http_workers.channel import (
    Admitted,
    Channel,
    Closed,
    CutOff,
    Failed,
    FromEngine,
    FromWorker,
    Listening,
    Open,
    StepOutput,
    Submit,
)
from reference_engine.serving.http_workers.http_worker import EngineLink
from reference_engine.serving.http_workers.worker_link import WorkerLink
from reference_engine.serving.identity import ServerIdentity
from reference_engine.serving.streams import StreamDelta, StreamProgress
from reference_engine.serving.wire.call import Call, parse_chat, parse_completion
from reference_engine.serving.wire.response import Chosen
from reference_engine.serving.wire.wire_errors import WireError
from reference_engine.state.sequence import Sampling
from reference_engine.state.tokenizer import ByteTokenizer
from tests.reference_engine.engine_kit import toy_output
from tests.reference_engine.engine_server import serving, toy_engine

CALL = Call(model=None, prompts=("abc",), max_tokens=5, sampling=Sampling())
OPEN = Open(ServerIdentity("nano", 64, "1", "toy"), 1, 0, "/nowhere", 8, 1024, None, None)
MESSAGES = [
    Listening(),
    Submit(1, CALL, None, 0.5),
    Submit(2, Call(model="m", messages=(("user", "é" * 70_000),), stop=("a",)), "run-1", 1.5),
    Closed(1),
    CutOff(2),
]


class End:
    """An end of a channel that collects its messages."""

    def __init__(self, kinds):
        self.came: list[Any] = []
        self.is_over = False
        self.channel = Channel(kinds, self.came.append, self._end)

    def _end(self):
        self.is_over = True


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


def frames(messages) -> bytes:
    bodies = map(msgspec.msgpack.encode, messages)
    return b"".join(struct.pack(">I", len(body)) + body for body in bodies)


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_messages_do_not_depend_on_how_the_socket_splits_them(sizes):
    end, data = End(FromWorker), frames(MESSAGES)
    at = 0
    for size in sizes:
        end.channel.data_received(data[at : at + size])
        at += size
    end.channel.data_received(data[at:])
    assert end.came == MESSAGES


def test_messages_sent_before_closing_arrive_before_the_end():
    async def scene():
        ours, theirs = End(FromWorker), End(FromEngine)
        for end, pair_end in zip((ours, theirs), socket.socketpair(), strict=True):
            await end.channel.open(pair_end)
        sent = [
            OPEN,
            Admitted(1, StreamProgress("a", 3)),
            StepOutput(
                [(1, StreamProgress("a", 3, 1, 2))],
                [(1, StreamDelta("é", 1, None, Chosen("é", 0, -0.5)))],
            ),
            Failed(1, "no", "prompt", None, 400, {"reason": "full", "n": None}, 3),
        ]
        for message in sent:
            ours.channel.send(message)
        ours.channel.close()
        ours.channel.send(Listening())  # too late: ignored
        await until(lambda: theirs.is_over)
        return theirs.came == sent, ours.is_over

    assert asyncio.run(scene()) == (True, True)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompt=st.text(st.characters(exclude_categories=()))
    | st.lists(st.integers(-(1 << 70), 1 << 70), min_size=1, max_size=3),
    stop=st.lists(st.text(st.characters(exclude_categories=()), min_size=1), max_size=2),
    seed=st.none() | st.integers(-(1 << 70), 1 << 70),
)
def test_every_parsed_call_can_be_encoded(prompt, stop, seed):
    """JSON may hold lone surrogates and unlimited integers; MessagePack holds neither."""
    bodies = [{"prompt": prompt, "stop": stop, "seed": seed}]
    if isinstance(prompt, str):
        bodies.append({"messages": [{"role": "user", "content": prompt}], "stop": stop})
    for body in bodies:
        parse = parse_chat if "messages" in body else parse_completion
        with suppress(WireError):
            call = parse(json.dumps(body).encode())
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=Call) == call


class Linked:
    """A service linked to an HTTP worker that the test plays."""

    def __init__(self, most_unsent: int = 1 << 20, engine=None, **options):
        self.service = (engine or toy_engine(**options)).service()
        self.service.start()
        self.n_lost = 0
        self.link = WorkerLink(self.service, self._lose, most_unsent)
        self.worker = End(FromEngine)

    def _lose(self):
        self.n_lost += 1

    async def open(self, is_reading: bool = True):
        ours, self.theirs = socket.socketpair()
        opening = asyncio.create_task(self.link.open(ours, OPEN))
        if is_reading:
            await self.worker.channel.open(self.theirs)
            self.worker.channel.send(Listening())
        else:
            self.theirs.sendall(frames([Listening()]))
        await opening

    async def n_blocks_used(self):
        return await self.service.between_steps(lambda state: state.kv.n_blocks - state.kv.n_free)


def test_a_request_counts_from_its_admission_until_it_is_closed():
    async def scene():
        linked = Linked()
        await linked.open()
        came = linked.worker.came
        linked.worker.channel.send(Submit(7, CALL, "run-1", linked.service.clock.now_s()))
        await until(lambda: came and isinstance(came[-1], StepOutput) and came[-1].deltas[-1][1][2])
        stopping = asyncio.create_task(linked.service.stop(drain_s=30))
        await asyncio.sleep(0)
        was_waiting = not stopping.done()
        linked.worker.channel.send(Closed(7))
        await stopping
        linked.link.close()
        await until(lambda: linked.worker.is_over)
        return came, was_waiting, linked.n_lost

    came, was_waiting, n_lost = asyncio.run(scene())
    opened, admitted, *steps, _bye = came
    assert opened == OPEN
    assert (admitted.number, admitted.progress.id, admitted.progress.n_prompt) == (7, "run-1", 3)
    deltas = [delta for step in steps for _, delta in step.deltas]
    assert "".join(delta.text for delta in deltas) == printable(toy_output(b"abc", 5))
    assert [delta.n_output for delta in deltas] == [1, 2, 3, 4, 5]
    assert [delta.finish_reason for delta in deltas] == [None] * 4 + ["length"]
    first, last = [progress for step in steps for _, progress in step.progress]
    assert first.id == last.id == "run-1"
    assert last.finished_s > last.first_token_s > last.arrived_s
    assert was_waiting, "an answer counts until its reader has it"
    assert n_lost == 0


def printable(tokens):
    return "".join(chr(t if 32 <= t < 127 else 32 + t % 95) for t in tokens)


def test_an_http_worker_that_does_not_read_is_cut_off_and_the_engine_goes_on():
    async def scene():
        # With instant steps all tokens might be sent before the backlog is checked.
        linked = Linked(most_unsent=1 << 12, max_num_seqs=64, executor_args={"step_s": 0.0005})
        await linked.open(is_reading=False)
        linked.theirs.setblocking(True)
        long = Call(model=None, prompts=("abc",), max_tokens=4000, sampling=Sampling())
        linked.theirs.sendall(frames([Submit(n, long, None, 0.0) for n in range(64)]))
        await until(lambda: linked.service.n_slow_readers == 64)
        used = await linked.n_blocks_used()
        # It reads again: the answers are broken off, and a new request is answered whole.
        came = linked.worker.came
        await linked.worker.channel.open(linked.theirs)
        await until(lambda: sum(isinstance(message, Failed) for message in came) == 64)
        linked.worker.channel.send(Submit(99, CALL, None, 0.0))
        await until(
            lambda: came and isinstance(came[-1], StepOutput) and came[-1].deltas[-1][0] == 99
        )
        await until(lambda: came[-1].deltas[-1][1].finish_reason)
        broken = {message.number for message in came if isinstance(message, Failed)}
        await linked.service.stop()
        linked.link.close()
        return used, broken, linked.n_lost

    used, broken, n_lost = asyncio.run(scene())
    assert used == 0
    assert broken == set(range(64))
    assert n_lost == 0


def test_a_lost_http_worker_is_reported_once_and_its_blocks_are_free():
    async def scene():
        linked = Linked(executor_args={"step_s": 0.0005})
        await linked.open()
        long = Call(model=None, prompts=("abc",), max_tokens=4000, sampling=Sampling())
        linked.worker.channel.send(Submit(1, long, None, 0.0))
        await until(lambda: linked.worker.came and isinstance(linked.worker.came[-1], StepOutput))
        linked.worker.channel.close()
        await until(lambda: linked.n_lost)
        used = await linked.n_blocks_used()
        await linked.service.stop()
        linked.link.close()
        return used, linked.n_lost, linked.link.is_lost

    assert asyncio.run(scene()) == (0, 1, True)


def test_a_lost_engine_fails_every_stream_and_every_later_call():
    async def scene():
        link = EngineLink(lambda _: None, toy_engine().clock, outbox=8)
        begun, unbegun = (link.submit(CALL, None, 0.0) for _ in range(2))
        link.receive(Admitted(1, StreamProgress("a", 3)))
        await begun.admitted()
        link.lose()
        with pytest.raises(WireError, match="process has ended"):
            async for _ in begun:
                pass
        with pytest.raises(WireError, match="process has ended"):
            await unbegun.admitted()
        with pytest.raises(WireError, match="process has ended") as refused:
            link.submit(CALL, None, 0.0)
        return refused.value.status

    assert asyncio.run(scene()) == 500


def test_a_blocked_reader_that_falls_behind_is_cut_off_with_a_message_to_the_engine():
    async def scene():
        sent: list[Any] = []
        link = EngineLink(sent.append, toy_engine().clock, outbox=3)
        stream = link.submit(CALL, None, 0.0)
        stream.is_blocked = True
        link.receive(StepOutput([], [(1, StreamDelta("x", n, None)) for n in range(1, 5)]))
        stream.close()  # as its handler does in any case
        link.receive(StepOutput([], [(1, StreamDelta("x", 5, None))]))
        return sent[1:], stream.is_broken

    assert asyncio.run(scene()) == ([CutOff(1)], True)


@pytest.mark.parametrize(("method", "status"), [("GET", 200), ("HEAD", 200), ("DELETE", 405)])
def test_a_forwarded_request_gets_the_engines_own_response(method, status):
    async def scene():
        answers = []
        for is_split in (False, True):
            async with (
                serving(is_split=is_split) as server,
                server.session.request(method, "/debug/policy?x=%2F%C3%A9") as response,
            ):
                headers = response.headers
                shown = headers["Content-Type"], headers["Content-Length"]
                answers.append((response.status, shown, await response.read()))
        return answers

    whole, split = asyncio.run(scene())
    assert whole == split
    assert whole[0] == status


def test_a_forwarded_header_that_is_not_text_is_refused():
    async def scene():
        async with serving(is_split=True) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            head = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nx-actor: \xff\r\n\r\n"
            writer.write(head)
            answer = await reader.read()
            writer.close()
            return answer

    assert asyncio.run(scene()).startswith(b"HTTP/1.1 400 ")


def test_a_call_that_raises_is_an_internal_error_of_that_call_alone(caplog):
    """A chat template may raise any exception."""

    async def scene():
        linked = Linked(engine=replace(toy_engine(), tokenizer=Tripping(printable=True)))
        await linked.open()
        linked.worker.channel.send(Submit(1, CALL, None, 0.0))
        came = linked.worker.came
        await until(lambda: isinstance(came[-1], Failed))
        linked.worker.channel.send(Closed(1))
        n_waiting = await linked.service.between_steps(lambda state: len(state.queues.waiting))
        await linked.service.stop()
        linked.link.close()
        return came[-1], n_waiting, linked.n_lost

    refused, n_waiting, n_lost = asyncio.run(scene())
    assert (refused.status, refused.message) == (500, "internal error")
    assert (n_waiting, n_lost) == (0, 0)
    assert "roles must alternate" in caplog.text


class Tripping(ByteTokenizer):
    def encode(self, text):
        raise LookupError("roles must alternate")
