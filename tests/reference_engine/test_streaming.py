"""Streamed answers, from the deltas of a step to the socket."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Mapping

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_engine.serving.routes.completions import ChunkWriter
from reference_engine.serving.streams import StreamDelta, TokenStream
from reference_engine.serving.wire.call import parse_completion
from reference_engine.serving.wire.response import Chosen, Encoder
from reference_engine.state.sequence import Request
from tests.reference_engine.engine_server import Serving, serving, toy_engine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = "Content-Type: application/json\r\n"
USAGE = {"include_usage": True, "continuous_usage_stats": True}

both_forms = pytest.mark.usefixtures("both_forms")


class Wire(asyncio.WriteTransport):
    """A transport that collects its data."""

    def __init__(self) -> None:
        self.data = b""
        self.is_gone, self.n_buffered = False, 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data += data

    def is_closing(self) -> bool:
        return self.is_gone

    def get_write_buffer_size(self) -> int:
        return self.n_buffered


class Bodies:
    """The bodies of the responses in HTTP/1.1 data, by an independent parser."""

    def __init__(self, data: bytes) -> None:
        self.bodies: list[bytes] = []
        self._parts: list[bytes] = []
        httptools.HttpResponseParser(self).feed_data(data)

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self.bodies.append(b"".join(self._parts))
        self._parts = []


def chunk_writer(wire: Wire) -> ChunkWriter:
    call = parse_completion(b'{"prompt": "x", "stream": true}')
    return ChunkWriter(wire, Encoder(call, "cmpl-1", "nano", 3).text_writer(1, 0, has_counts=False))


@given(st.lists(st.text(st.characters(exclude_categories=()))))
def test_every_text_becomes_an_event_in_a_chunk(texts):
    wire = Wire()
    ours = chunk_writer(wire)
    assert all(ours.accept(StreamDelta(text, n, None)) for n, text in enumerate(texts, 1))
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    (body,) = Bodies(head + wire.data + b"0\r\n\r\n").bodies
    events = body.split(b"\n\n")[:-1]
    sent = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events]
    assert sent == [text for text in texts if text]


@pytest.mark.parametrize(
    ("delta", "is_gone", "n_buffered"),
    [
        (StreamDelta("a", 3, "length"), False, 0),
        (StreamDelta("a", 3, None, Chosen("a", 2, -1.0)), False, 0),
        (StreamDelta("a", 3, None), True, 0),
        (StreamDelta("a", 3, None), False, 1 << 20),
    ],
)
def test_ends_logprobs_lost_clients_and_slow_readers_are_left_to_the_task(
    delta, is_gone, n_buffered
):
    wire = Wire()
    wire.is_gone, wire.n_buffered = is_gone, n_buffered
    assert not chunk_writer(wire).accept(delta)
    assert wire.data == b""


def test_forwarded_deltas_do_not_wake_the_reader_until_one_is_not_accepted():
    async def scene():
        stream = TokenStream(Request("a", [1], 9, 0.0), close=lambda _: None)
        taken, fetched = [], []

        def take(delta: StreamDelta) -> bool:
            if delta.text != "c":
                taken.append(delta.text)
            return delta.text != "c"

        async def read():
            async for deltas in stream:
                fetched.append([delta.text for delta in deltas])
                if fetched[-1] == ["a"]:
                    stream.forward_to(take)

        reading = asyncio.create_task(read())
        n_unread = []
        for text in "abbcdd":
            n_unread.append(stream.put(StreamDelta(text, 1, None)))
            if text != "c":  # deltas that arrive before the reader runs are read together
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        stream.put(StreamDelta("e", 7, "length"))
        await reading
        return taken, fetched, n_unread

    taken, fetched, n_unread = asyncio.run(scene())
    assert taken == ["b", "b"]
    assert fetched == [["a"], ["c", "d"], ["d"], ["e"]]
    assert n_unread == [1, 0, 0, 1, 2, 1]


def test_nothing_is_forwarded_while_deltas_are_unread():
    stream = TokenStream(Request("a", [1], 9, 0.0), close=lambda _: None)
    stream.put(StreamDelta("a", 1, None))
    stream.forward_to(lambda _: True)
    assert stream.put(StreamDelta("b", 2, None)) == 2


def request(path: str, body: Mapping[str, object], version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\n{JSON}Content-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def answers(server: Serving, data: bytes, n_answers: int = 1) -> list[bytes]:
    """Send `data` on a connection and read `n_answers` bodies, or until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    got = b""
    while part := await reader.read(1 << 16):
        got += part
        if got.endswith(b"0\r\n\r\n") and len(bodies := Bodies(got).bodies) == n_answers:
            break
    else:  # HTTP/1.0: the body ends with the connection
        bodies = [got.partition(b"\r\n\r\n")[2]]
    writer.close()
    await writer.wait_closed()
    return bodies


def alike(body: bytes) -> bytes:
    """`body` without the parts that differ between equal answers."""
    return re.sub(rb'cmpl-req-\d+|"created": \d+|"\w+_s": [\d.e-]+', b"", body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "abc", "max_tokens": 60}),
        (COMPLETIONS, {"prompt": "abc", "max_tokens": 60, "stream_options": USAGE}),
        (COMPLETIONS, {"prompt": "abc", "max_tokens": 60, "logprobs": 0}),
        (CHAT, {"messages": [{"role": "user", "content": "é"}], "max_tokens": 60}),
    ],
)
@pytest.mark.parametrize("printable", [True, False])
@both_forms
def test_a_body_is_the_same_whether_its_tokens_wake_the_task_or_not(path, body, printable):
    """HTTP/1.0 has no chunks, so all its tokens go through the task and aiohttp."""

    async def scene():
        # Steps take a while, so that each token comes alone.
        engine = toy_engine(
            printable=printable, prefix_cache=False, executor_args={"step_s": 0.0005}
        )
        async with serving(engine) as server:
            streamed = {**body, "stream": True, "temperature": 0}
            plain = (await answers(server, request(path, streamed)))[0]
            if printable and "logprobs" not in body and path == COMPLETIONS:
                text = "".join(re.findall(r'"text":"(.)"', plain.decode()))
                streamed["stop"] = text[20:23]
            return [
                (await answers(server, request(path, streamed, version)))[0]
                for version in ("1.1", "1.0")
            ]

    chunked, unchunked = asyncio.run(scene())
    assert alike(chunked) == alike(unchunked)
    assert chunked.count(b"data: ") > 15
    assert chunked.endswith(b"data: [DONE]\n\n")


@both_forms
def test_pipelined_requests_are_answered_whole_and_in_order():
    async def scene():
        async with serving(toy_engine(executor_args={"step_s": 0.0005})) as server:
            bodies = [{"prompt": "abc", "max_tokens": n, "stream": True} for n in (40, 7, 25)]
            together = b"".join(request(COMPLETIONS, body) for body in bodies)
            return await answers(server, together, n_answers=3)

    bodies = asyncio.run(scene())
    assert [body.count(b'"text":') for body in bodies] == [40, 7, 25]
    assert all(body.endswith(b"data: [DONE]\n\n") for body in bodies)


@both_forms
def test_a_reader_that_pauses_gets_every_token_in_order_afterwards():
    """Half a megabyte is buffered in the socket, in the transport and in the outbox."""

    async def scene():
        async with serving(outbox_tokens=5000) as server:
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.connect(("127.0.0.1", server.port))
            body = {"prompt": "abc", "max_tokens": 2500, "stream": True, "stream_options": USAGE}
            slow.sendall(request(COMPLETIONS, body))
            await server.idle()  # everything is computed, nothing is read
            reader, writer = await asyncio.open_connection(sock=slow)
            got = b""
            while not got.endswith(b"0\r\n\r\n"):
                part = await reader.read(1 << 16)
                assert part, "cut off"
                got += part
            writer.close()
            return Bodies(got).bodies, await server.idle()

    (body,), sizes = asyncio.run(scene())
    assert len(body) > 500_000
    counts = re.findall(rb'"text":.*"completion_tokens": (\d+)', body)
    assert [int(count) for count in counts] == list(range(1, 2501))
    assert sizes["slow_readers"] == 0
