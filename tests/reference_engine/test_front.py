"""The engine and a front as two ends of a channel: what only the split form has."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reference_engine.serving.http_workers.channel import Channel
from reference_engine.serving.http_workers.engine_link import EngineLink
from reference_engine.serving.http_workers.engine_messages import (
    Admitted,
    Broken,
    Closed,
    CutOff,
    FromEngine,
    FromWorker,
    Listening,
    Open,
    RequestRefused,
    StepOutput,
    Submit,
)
from reference_engine.serving.http_workers.front_link import WorkerLink
from reference_engine.serving.identity import ServerIdentity
from reference_engine.serving.streams import StreamBroken, StreamDelta, StreamProgress
from reference_engine.serving.wire.call import Call, parse_chat, parse_completion
from reference_engine.serving.wire.response import Chosen
from reference_engine.serving.wire.wire_errors import WireError
from reference_engine.state.sequence import Sampling
from tests.reference_engine.engine_kit import toy_output
from tests.reference_engine.engine_server import serving, toy_engine

CALL = Call(model=None, prompt="abc", max_tokens=5, sampling=Sampling())
OPEN = Open(ServerIdentity("nano", 64, "1", "toy"), 1, 0, "/nowhere", 8, 1024, None)
MESSAGES = [
    Listening(),
    Submit(1, CALL, None, 0.5),
    Submit(2, Call(model="m", messages=(("user", "é" * 70_000),), stop=("a",)), "run-1", 1.5),
    Closed(1),
    CutOff(2),
]


class End:
    """One end of a channel, with what came."""

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
def test_messages_are_the_same_however_the_socket_cuts_them(sizes):
    end, data = End(FromWorker), frames(MESSAGES)
    at = 0
    for size in sizes:
        end.channel.data_received(data[at : at + size])
        at += size
    end.channel.data_received(data[at:])
    assert end.came == MESSAGES


def test_what_was_sent_before_closing_arrives_and_then_the_end():
    async def scene():
        ours, theirs = End(FromWorker), End(FromEngine)
        for end, one in zip((ours, theirs), socket.socketpair(), strict=True):
            await end.channel.open(one)
        told = [
            OPEN,
            Admitted(1, StreamProgress("a", 3)),
            StepOutput(
                [(1, StreamProgress("a", 3, 1, 2))],
                [(1, StreamDelta("é", 1, None, Chosen("é", 0, -0.5)))],
            ),
            RequestRefused(1, "no", "prompt", None, 400, "x", {"reason": "full", "n": None}, 3),
            Broken(1, "why", 500),
        ]
        for message in told:
            ours.channel.send(message)
        ours.channel.close()
        ours.channel.send(Listening())  # too late, and nothing
        await until(lambda: theirs.is_over)
        return theirs.came == told, ours.is_over

    assert asyncio.run(scene()) == (True, True)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompt=st.text(st.characters(exclude_categories=()))
    | st.lists(st.integers(-(1 << 70), 1 << 70), min_size=1, max_size=3),
    stop=st.lists(st.text(st.characters(exclude_categories=()), min_size=1), max_size=2),
    seed=st.none() | st.integers(-(1 << 70), 1 << 70),
)
def test_every_call_that_is_read_can_be_sent(prompt, stop, seed):
    """JSON holds lone surrogates and endless integers; MessagePack holds neither."""
    bodies = [{"prompt": prompt, "stop": stop, "seed": seed}]
    if isinstance(prompt, str):
        bodies.append({"messages": [{"role": "user", "content": prompt}], "stop": stop})
    for body in bodies:
        parse = parse_chat if "messages" in body else parse_completion
        with suppress(WireError):
            call = parse(json.dumps(body).encode())
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=Call) == call


class Linked:
    """A service with a front that only the test plays."""

    def __init__(self, most_unsent: int = 1 << 20, **options):
        self.service = toy_engine(**options).service()
        self.service.start()
        self.n_lost = 0
        self.link = WorkerLink(self.service, self._lose, most_unsent)
        self.front = End(FromEngine)

    def _lose(self):
        self.n_lost += 1

    async def open(self, is_reading: bool = True):
        ours, self.theirs = socket.socketpair()
        opening = asyncio.create_task(self.link.open(ours, OPEN))
        if is_reading:
            await self.front.channel.open(self.theirs)
            self.front.channel.send(Listening())
        else:
            self.theirs.sendall(frames([Listening()]))
        await opening

    async def n_blocks_used(self):
        return await self.service.ask(lambda state: state.kv.n_blocks - state.kv.n_free)


def test_a_request_is_admitted_then_stepped_through_and_counted_until_it_is_closed():
    async def scene():
        linked = Linked()
        await linked.open()
        came = linked.front.came
        linked.front.channel.send(Submit(7, CALL, "run-1", linked.service.clock.now_s()))
        await until(lambda: came and isinstance(came[-1], StepOutput) and came[-1].deltas[-1][1][2])
        stopping = asyncio.create_task(linked.service.stop(drain_s=30))
        await asyncio.sleep(0)
        was_waiting = not stopping.done()
        linked.front.channel.send(Closed(7))
        await stopping
        linked.link.close()
        await until(lambda: linked.front.is_over)
        return came, was_waiting, linked.n_lost

    came, was_waiting, n_lost = asyncio.run(scene())
    opened, admitted, *steps, _bye = came
    assert opened == OPEN
    assert (admitted.number, admitted.told.id, admitted.told.n_prompt) == (7, "run-1", 3)
    deltas = [delta for step in steps for _, delta in step.deltas]
    assert "".join(delta.text for delta in deltas) == printable(toy_output(b"abc", 5))
    assert [delta.n_output for delta in deltas] == [1, 2, 3, 4, 5]
    assert [delta.finish_reason for delta in deltas] == [None] * 4 + ["length"]
    told = [facts for step in steps for _, facts in step.told]
    assert len(told) == 2
    assert told[-1].finished_s > told[-1].first_token_s > told[-1].arrived_s
    assert was_waiting, "an answer counts until its reader has it"
    assert n_lost == 0


def printable(tokens):
    return "".join(chr(t if 32 <= t < 127 else 32 + t % 95) for t in tokens)


def test_a_front_that_does_not_read_is_cut_off_and_the_engine_goes_on():
    async def scene():
        # Steps that take time: else all tokens may be on their way before anybody looks.
        linked = Linked(most_unsent=1 << 12, max_num_seqs=64, executor_args={"step_s": 0.0005})
        await linked.open(is_reading=False)
        linked.theirs.setblocking(True)
        long = Call(model=None, prompt="abc", max_tokens=4000, sampling=Sampling())
        linked.theirs.sendall(frames([Submit(n, long, None, 0.0) for n in range(64)]))
        await until(lambda: linked.service.n_slow_readers == 64)
        used = await linked.n_blocks_used()
        # It wakes up: the answers are broken off, and a new one is whole.
        came = linked.front.came
        await linked.front.channel.open(linked.theirs)
        await until(lambda: sum(isinstance(message, Broken) for message in came) == 64)
        linked.front.channel.send(Submit(99, CALL, None, 0.0))
        await until(
            lambda: came and isinstance(came[-1], StepOutput) and came[-1].deltas[-1][0] == 99
        )
        await until(lambda: came[-1].deltas[-1][1].finish_reason)
        broken = {message.number for message in came if isinstance(message, Broken)}
        await linked.service.stop()
        linked.link.close()
        return used, broken, linked.n_lost

    used, broken, n_lost = asyncio.run(scene())
    assert used == 0
    assert broken == set(range(64))
    assert n_lost == 0


def test_a_front_that_is_gone_is_told_once_and_its_blocks_are_free():
    async def scene():
        linked = Linked(executor_args={"step_s": 0.0005})
        await linked.open()
        long = Call(model=None, prompt="abc", max_tokens=4000, sampling=Sampling())
        linked.front.channel.send(Submit(1, long, None, 0.0))
        await until(lambda: linked.front.came and isinstance(linked.front.came[-1], StepOutput))
        linked.front.channel.close()
        await until(lambda: linked.n_lost)
        used = await linked.n_blocks_used()
        await linked.service.stop()
        linked.link.close()
        return used, linked.n_lost, linked.link.is_lost

    assert asyncio.run(scene()) == (0, 1, True)


def test_an_engine_that_is_gone_is_told_to_every_reader_and_every_later_caller():
    async def scene():
        link = EngineLink(lambda _: None, toy_engine().clock, outbox=8)
        begun, unbegun = (link.submit(CALL, None, 0.0) for _ in range(2))
        link.take(Admitted(1, StreamProgress("a", 3)))
        await begun.admitted()
        link.lose()
        with pytest.raises(StreamBroken, match="process has ended"):
            async for _ in begun:
                pass
        with pytest.raises(StreamBroken, match="process has ended"):
            await unbegun.admitted()
        with pytest.raises(WireError, match="process has ended") as refused:
            link.submit(CALL, None, 0.0)
        return refused.value.status

    assert asyncio.run(scene()) == 500


def test_a_reader_who_is_blocked_and_behind_is_cut_off_and_the_engine_told():
    async def scene():
        sent: list[Any] = []
        link = EngineLink(sent.append, toy_engine().clock, outbox=3)
        stream = link.submit(CALL, None, 0.0)
        stream.is_blocked = True
        link.take(StepOutput([], [(1, StreamDelta("x", n, None)) for n in range(1, 5)]))
        stream.close()  # as its handler does in any case
        link.take(StepOutput([], [(1, StreamDelta("x", 5, None))]))
        return sent[1:], stream.outcome

    assert asyncio.run(scene()) == ([CutOff(1)], "failed")


@pytest.mark.parametrize(("method", "status"), [("GET", 200), ("HEAD", 200), ("DELETE", 405)])
def test_what_a_front_forwards_is_answered_like_by_the_engine(method, status):
    async def scene():
        answers = []
        for is_split in (False, True):
            async with (
                serving(is_split=is_split) as server,
                server.session.request(method, "/debug/policy?x=%2F%C3%A9") as response,
            ):
                headers = response.headers
                kept = headers["Content-Type"], headers["Content-Length"]
                answers.append((response.status, kept, await response.read()))
        return answers

    whole, split = asyncio.run(scene())
    assert whole == split
    assert whole[0] == status


def test_a_header_that_is_no_text_is_refused_where_it_is_forwarded():
    async def scene():
        async with serving(is_split=True) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            head = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nx-actor: \xff\r\n\r\n"
            writer.write(head)
            answer = await reader.read()
            writer.close()
            return answer

    assert asyncio.run(scene()).startswith(b"HTTP/1.1 400 ")


def test_a_call_that_trips_the_engine_is_an_internal_error_of_that_call_alone(caplog, monkeypatch):
    """A chat template may raise whatever its author wrote."""

    async def scene():
        linked = Linked()
        await linked.open()
        monkeypatch.setattr(linked.service._intake, "_tokenizer", Tripping())
        linked.front.channel.send(Submit(1, CALL, None, 0.0))
        came = linked.front.came
        await until(lambda: isinstance(came[-1], RequestRefused))
        linked.front.channel.send(Closed(1))
        n_waiting = await linked.service.ask(lambda state: len(state.queues.waiting))
        await linked.service.stop()
        linked.link.close()
        return came[-1], n_waiting, linked.n_lost

    refused, n_waiting, n_lost = asyncio.run(scene())
    assert (refused.status, refused.message) == (500, "internal error")
    assert (n_waiting, n_lost) == (0, 0)
    assert "roles must alternate" in caplog.text


class Tripping:
    def encode(self, text):
        raise LookupError("roles must alternate")
