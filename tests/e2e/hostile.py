"""A server that treats each request of a run by its number, in a thread of the test's process.

The preflight's requests carry no number and are served well.
"""

import asyncio
import json
import socket
import struct
import threading
import time

from tests.e2e.threaded import ThreadedServer

TOKENS = 6
CANNED_TOKENS = 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close() sends RST
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'


def chunk(body):
    return b"%x\r\n%s\r\n" % (len(body), body)


def event(delta, finish=None, usage=None):
    said = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    if usage is not None:
        said = {"choices": [], "usage": usage}
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def token(text="word "):
    return event({"content": text})


ROLE = event({"role": "assistant", "content": ""})
END = event({}, "stop")
USAGE = event({}, usage={"prompt_tokens": 9, "completion_tokens": TOKENS})
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"


class Hostile(ThreadedServer):
    """`treat(number)` names what happens to a request: one of the methods below. Nothing here
    sleeps: what is to come later comes with the arrival of later requests, and
    `written_ns[number]` is when it did. `bodies[number]` is what was sent."""

    def __init__(self, treat):
        super().__init__()
        self._treat, self.written_ns = treat, {}
        self.bodies: dict[int, bytes] = {}
        self._n_arrived, self._arrivals, self._number = 0, threading.Condition(), -1
        self._until: dict[int, list[asyncio.Event]] = {}

    def await_arrivals(self, n):
        """Returns when so many requests of the run have arrived."""
        with self._arrivals:
            assert self._arrivals.wait_for(lambda: self._n_arrived >= n, 30)

    async def _answer(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
        fields = {name.lower(): value for name, value in fields.items()}
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        if head.startswith(b"GET"):
            kind = b"content-type: application/json\r\n"
            size = b"content-length: %d\r\n\r\n" % len(MODELS)
            writer.write(b"HTTP/1.1 200 OK\r\n" + kind + size + MODELS)
            return True
        number = int(fields.get("x-seq", -1))
        how = "well"
        if number >= 0:
            self._arrived()
            self.bodies[number] = body
            how = self._treat(number)
        self._number = number
        await getattr(self, how)(writer)
        return how not in ("cut", "reset")

    def _arrived(self):
        with self._arrivals:
            self._n_arrived += 1
            self._arrivals.notify_all()
        for place in [place for place in self._until if place <= self._n_arrived]:
            for event in self._until.pop(place):
                event.set()

    async def _later(self, n):
        """Until so many more requests have arrived; the instant, ns."""
        event = asyncio.Event()
        self._until.setdefault(self._n_arrived + n, []).append(event)
        await event.wait()
        return time.monotonic_ns()

    async def well(self, writer):
        writer.write(HEAD + chunk(ROLE))
        for _ in range(TOKENS):
            writer.write(chunk(token()))
            await writer.drain()
        writer.write(chunk(END + USAGE + DONE) + LAST)

    async def canned(self, writer):
        """The same text for every prompt, of another model than requested."""
        text = token("unavailable ").replace(b'{"choices"', b'{"model": "small", "choices"')
        usage = event({}, usage={"prompt_tokens": 9, "completion_tokens": CANNED_TOKENS})
        writer.write(HEAD + chunk(ROLE))
        for _ in range(CANNED_TOKENS):
            writer.write(chunk(text))
            await writer.drain()
        writer.write(chunk(END + usage + DONE) + LAST)

    async def spaced(self, writer):
        """Tokens in a form that a search for `"content":` misses."""
        text = token().replace(b'"content":', b'"content" :')
        writer.write(HEAD + chunk(ROLE) + TOKENS * chunk(text) + chunk(END + USAGE + DONE) + LAST)

    async def refused(self, writer):
        body = b'{"error":{"message":"this id is refused"}}'
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    async def broken(self, writer):
        """An error in the stream after some tokens."""
        error = b'data: {"error":{"message":"Unexpected token","code":500}}\n\n'
        writer.write(HEAD + chunk(ROLE) + 3 * chunk(token()) + chunk(error) + LAST)
        await writer.drain()

    async def too_long(self, writer):
        body = b'{"error":{"message":"maximum context length is 64 tokens"}}'
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    async def cut(self, writer):
        writer.write(HEAD + chunk(token()) + b"400\r\nda")
        await writer.drain()

    async def reset(self, writer):
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()

    async def bytewise(self, writer):
        whole = HEAD + b"".join(chunk(part) for part in [ROLE, token(), END + DONE]) + LAST
        for place in range(len(whole)):
            writer.write(whole[place : place + 1])
            await writer.drain()

    async def burst(self, writer):
        writer.write(HEAD + chunk(token() * TOKENS + END + USAGE + DONE) + LAST)

    async def role_first(self, writer):
        """The role four arrivals before the first token."""
        number = self._number
        writer.write(HEAD + chunk(ROLE))
        self.written_ns[number] = await self._later(4)
        writer.write(chunk(token()) + chunk(END + DONE) + LAST)

    async def role_only(self, writer):
        writer.write(HEAD + chunk(ROLE + END + DONE) + LAST)

    async def late_usage(self, writer):
        """The counts four arrivals after the last token."""
        number = self._number
        writer.write(HEAD + chunk(token() * TOKENS) + chunk(END))
        self.written_ns[number] = await self._later(4)
        writer.write(chunk(USAGE + DONE) + LAST)

    async def long_line(self, writer):
        text = "x" * (50 << 20)
        writer.write(HEAD + chunk(token(text)) + chunk(token() + END + DONE) + LAST)
        await writer.drain()
