"""The fast transport and the plain one against the same servers: they agree on every request."""

import asyncio
import contextlib
import os
import socket
import ssl
import struct
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from loadgen.archive.decode import Body, answer_texts, decode
from loadgen.drive.aiohttp_client import AiohttpClient, parse_request
from loadgen.drive.client import Client
from loadgen.drive.payloads import HttpHead
from loadgen.records import Status
from targets.dialer import Dialer
from targets.openai_chat import OpenAIChat
from targets.route import Proxy, Route

_STREAM = socket.SOCK_STREAM
ADAPTER = OpenAIChat(model="m")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
TOKENS = [
    b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % word
    for word in (b"one ", b"two ", b"three")
]
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
STREAM = b"".join(TOKENS) + END + DONE


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def request(before="", host="t", own=()):
    return written(HttpHead(host, before, ()), own)


def written(head, own=()):
    text = head.template("POST", "/v1/chat/completions", own)
    return text.format_map({"content-length": 2}).encode() + b"{}"


def make(kind, loop, route, lookup=None, **options):
    options = {"looks_like_token": ADAPTER.looks_like_token, **options}
    if kind == "aiohttp":
        return AiohttpClient(loop, route, lookup=lookup, **options)
    return Client(loop, Dialer(loop, route, lookup=lookup), **options)


async def send_all(client, payload, n, together=False):
    """The exchanges of n requests, in order of rows, sent one after another or all at once."""
    ended: dict[int, Any] = {}
    over = asyncio.Event()

    def on_end(exchange):
        assert exchange.row not in ended, "ended twice"
        ended[exchange.row] = exchange
        if together:
            if len(ended) == n:
                over.set()
        else:
            over.set()

    client.on_end = on_end
    for row in range(n):
        client.send(row, payload)
        if not together:
            await asyncio.wait_for(over.wait(), 10)
            over.clear()
    if together:
        await asyncio.wait_for(over.wait(), 10)
    await client.close()
    return [ended[row] for row in range(n)]


def by_both(scenario, **options):
    """What `scenario(kind)` gives with each transport, on the loop that it runs on in production;
    nothing is left open."""
    found = {}
    for kind, new_loop in (("fast", uvloop.new_event_loop), ("aiohttp", asyncio.new_event_loop)):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            found[kind] = runner.run(scenario(kind, **options))
    return found["fast"], found["aiohttp"]


@contextlib.asynccontextmanager
async def serving(answer, start=asyncio.start_server, *where, **options):
    """A server whose connections run `answer(reader, writer)`, over at the end of the block."""
    tasks: list[Any] = []

    async def tracked(reader, writer):
        tasks.append(asyncio.current_task())
        with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
            try:
                await answer(reader, writer)
            finally:
                writer.close()

    server = await start(tracked, *(where or ("127.0.0.1", 0)), **options)
    try:
        yield server.sockets[0].getsockname()
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(5):  # what was closed is let go of by the loop in its next rounds
            await asyncio.sleep(0)


async def read_request(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(2)
    return head


def answering(*pieces, keep_open=True):
    """Every request is answered with these pieces, flushed one by one."""

    async def answer(reader, writer):
        while True:
            await read_request(reader)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if not keep_open:
                return

    return answer


def meaning(exchange):
    """What a row would hold, without instants."""
    found = decode(exchange, ADAPTER)
    return {
        "status": found.status,
        "error": found.error.partition(" (")[0],
        "http_status": exchange.http_status,
        "reused": exchange.reused,
        "tokens": found.output_tokens,
        "chunks": len(found.chunk_ns),
        "text": answer_texts(exchange, ADAPTER)[0],
        "body": Body(exchange).data,
        "finish": found.finish_reason,
        "limits": exchange.limits,
    }


def pieces_of(data, size):
    return [data[i : i + size] for i in range(0, len(data), size)]


WHOLE = CHUNKED + chunk(STREAM) + b"0\r\n\r\n"
BUSY = b'{"error":{"message":"queued"}}'
SERVERS = {
    "in one write": ([WHOLE], {}),
    "a chunk per token": ([CHUNKED, *map(chunk, [*TOKENS, END, DONE]), b"0\r\n\r\n"], {}),
    "a byte at a time": (pieces_of(WHOLE, 1), {}),
    "cut at every seventh byte": (pieces_of(WHOLE, 7), {}),
    "with a content length": ([HEAD + b"content-length: %d\r\n\r\n" % len(STREAM), STREAM], {}),
    "ended by closing": ([HEAD + b"\r\n", STREAM], {"keep_open": False}),
    "CRLF": ([CHUNKED, chunk(STREAM.replace(b"\n", b"\r\n")), b"0\r\n\r\n"], {}),
    "CR": ([CHUNKED, chunk(STREAM.replace(b"\n", b"\r")), b"0\r\n\r\n"], {}),
    "comments": ([CHUNKED, chunk(b": ping\n\n" + STREAM.replace(b"data", b":x\ndata", 2)),
                  b"0\r\n\r\n"], {}),
    "an error in the stream": (
        [CHUNKED, chunk(TOKENS[0] + b'data: {"error":{"message":"out of memory"}}\n\n'),
         b"0\r\n\r\n"], {}),
    "no [DONE]": ([CHUNKED, chunk(b"".join(TOKENS) + END), b"0\r\n\r\n"], {}),
    "no finish": ([CHUNKED, chunk(b"".join(TOKENS)), b"0\r\n\r\n"], {}),
    "cut in mid-stream": ([CHUNKED, chunk(TOKENS[0])], {"keep_open": False}),
    "cut in mid-chunk": ([CHUNKED, b"400\r\n" + TOKENS[0]], {"keep_open": False}),
    "gzip though identity was asked": (
        [HEAD + b"content-encoding: gzip\r\ncontent-length: 4\r\n\r\n\x1f\x8b\x08\x00"], {}),
    "an HTTP error": ([b"HTTP/1.1 503 Busy\r\ncontent-length: %d\r\n\r\n" % len(BUSY), BUSY], {}),
    "a rate limit": (
        [b"HTTP/1.1 429 Slow\r\nRetry-After: 3\r\nX-RateLimit-Limit: 9 \r\nx-other: 1\r\n"
         b"content-length: %d\r\n\r\n" % len(BUSY), BUSY], {}),
    "a redirect": ([b"HTTP/1.1 302 Found\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n"], {}),
    "a page": ([b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 3\r\n\r\n<p>"], {}),
    "100 Continue first": ([b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE], {}),
    "no answer": ([b""], {"keep_open": False}),
    "no HTTP": ([b"SSH-2.0-OpenSSH_9.2\r\n"], {"keep_open": False}),
    "another protocol": (
        [b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"],
        {"keep_open": False}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("status", "kept"),
    [("429 Slow", "retry-after: 3\nx-ratelimit-limit: 9\n"), ("200 OK", "")],
)
def test_the_rate_limit_of_a_failed_answer_is_kept_and_of_no_other(status, kept):
    head = b"Retry-After: 3\r\nX-RateLimit-Limit: 9 \r\nx-other: 1\r\ncontent-length: 0\r\n\r\n"

    async def scenario(kind):
        answer = b"HTTP/1.1 " + status.encode() + b"\r\n" + head
        async with serving(answering(answer)) as (host, port):
            client = make(kind, asyncio.get_running_loop(), Route(host=host, port=port))
            return [exchange.limits for exchange in await send_all(client, request(), 1)]

    assert by_both(scenario) == ([kept], [kept])


def test_bytes_for_requests_in_flight_are_seen_and_silence_is_too():
    async def scenario(kind):
        async with serving(held(CHUNKED, chunk(TOKENS[0]))) as (host, port):
            client = make(kind, asyncio.get_running_loop(), Route(host, port))
            client.send(0, request())
            begin_ns = time.monotonic_ns()
            while not client.has_read_since(begin_ns):
                await asyncio.sleep(0)
            seen = client.has_read_since(time.monotonic_ns())
            await client.close()
            return seen

    assert by_both(scenario) == (False, False)


@pytest.mark.parametrize("server", SERVERS)
def test_both_transports_read_the_same_from_any_server(server):
    pieces, how = SERVERS[server]

    async def scenario(kind):
        async with serving(answering(*pieces, **how)) as (host, port):
            client = make(kind, asyncio.get_running_loop(), Route(host, port))
            return await send_all(client, request(host="t"), n=2)

    fast, plain = by_both(scenario)
    for one, other in zip(fast, plain, strict=True):
        assert comparable(one) == comparable(other)
        assert one.done_ns >= one.sent_ns > 0
        assert other.done_ns >= other.sent_ns > 0


def held(*pieces, how="hold"):
    """A server that writes these pieces and then holds, closes or resets the connection."""

    async def answer(reader, writer):
        await read_request(reader)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if how == "hold":
            await reader.read()
        elif how == "reset":
            sock = writer.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    return answer


ENDS = {
    "held": ("hold", "complete at [DONE]; then the response was held open for over 50 ms"),
    "closed": ("close", "complete at [DONE]; then connection closed in the middle of the response"),
    "reset": ("reset", "complete at [DONE]; then connection closed in the middle of the response"),
}
BODIES = {
    "at once": [CHUNKED + chunk(STREAM)],
    "a chunk per event": [CHUNKED, *map(chunk, [*TOKENS, END, DONE])],
    "by the byte": [CHUNKED, *pieces_of(chunk(STREAM), 1)],
    "without a blank": [CHUNKED, chunk(STREAM.replace(b"data: [", b"data:["))],
    "unfinished chunk": [CHUNKED, b"%x\r\n" % (len(STREAM) + 9) + STREAM],
}


@pytest.mark.faults
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("end", ENDS)
def test_an_answer_is_complete_at_done_whatever_becomes_of_its_connection(end, body):
    how, note = ENDS[end]

    async def scenario(kind):
        async with serving(held(*BODIES[body], how=how)) as (host, port):
            client = make(kind, asyncio.get_running_loop(), Route(host, port))
            return await send_all(client, request(host="t"), n=2)

    for exchanges in by_both(scenario):
        for exchange in exchanges:
            found = meaning(exchange)
            assert (found["status"], found["tokens"]) == (Status.ok, 3)
            assert found["error"] == note
            assert not exchange.reused


def test_a_connection_is_used_again_if_the_end_comes_shortly_after_done():
    async def answer(reader, writer):
        while True:
            await read_request(reader)
            writer.write(CHUNKED + chunk(STREAM))
            await writer.drain()
            await asyncio.sleep(0)
            writer.write(b"0\r\n\r\n")

    async def scenario(kind):
        async with serving(answer) as (host, port):
            client = make(kind, asyncio.get_running_loop(), Route(host, port))
            return await send_all(client, request(host="t"), n=3)

    for exchanges in by_both(scenario):
        assert [exchange.reused for exchange in exchanges] == [False, True, True]
        assert [meaning(exchange)["error"] for exchange in exchanges] == ["", "", ""]


def test_done_in_the_text_of_an_answer_is_not_its_end():
    token = b'data: {"choices":[{"index":0,"delta":{"content":"data: [DONE]"}}]}\n\n'

    async def scenario(kind):
        async with serving(held(CHUNKED, chunk(token), how="close")) as (host, port):
            client = make(kind, asyncio.get_running_loop(), Route(host, port))
            return await send_all(client, request(host="t"), n=1)

    for (exchange,) in by_both(scenario):
        assert meaning(exchange)["status"] is Status.stream_error


def comparable(exchange):
    """Of a broken answer the words differ with the parser, the verdict does not."""
    seen = meaning(exchange)
    if seen["error"].startswith("not HTTP/1.1"):
        seen["error"] = "not HTTP/1.1"
    return seen


LENGTH = HEAD + b"content-length: %d\r\n\r\n" % len(STREAM) + STREAM
CLOSING = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(STREAM) + STREAM


@pytest.mark.faults
@pytest.mark.parametrize("behind", [WHOLE, LENGTH, b"garbage\r\n\r\n"])
@pytest.mark.parametrize("first", [WHOLE, LENGTH, CLOSING])
def test_bytes_behind_a_response_are_an_error_of_its_row_and_none_of_its_tokens(first, behind):
    async def scenario(kind):
        async with serving(answering(first + behind)) as (host, port):
            client = make(kind, asyncio.get_running_loop(), Route(host, port))
            return await send_all(client, request(host="t"), n=1)

    for kind, (exchange,) in zip(("fast", "aiohttp"), by_both(scenario), strict=True):
        decoded = decode(exchange, ADAPTER)
        assert decoded.status is Status.stream_error, kind
        assert decoded.output_tokens in (0, 3)
        if kind == "fast":
            assert decoded.error == "the server sent bytes behind the end of its response"
            assert decoded.output_tokens == 3


@pytest.mark.parametrize("behind", [b"", b"\r\n"])
@pytest.mark.parametrize("first", [WHOLE, LENGTH, CLOSING])
def test_a_line_end_behind_a_response_is_none(first, behind):
    async def scenario(kind):
        async with serving(answering(first + behind * (first is WHOLE))) as (host, port):
            client = make(kind, asyncio.get_running_loop(), Route(host, port))
            return await send_all(client, request(host="t"), n=1)

    for (exchange,) in by_both(scenario):
        assert decode(exchange, ADAPTER).status is Status.ok


@pytest.mark.parametrize("connections", ["reuse", "never", "per_session"])
def test_both_count_their_connections_alike(connections):
    async def scenario(kind):
        async with serving(answering(WHOLE)) as (host, port):
            loop = asyncio.get_running_loop()
            client = make(kind, loop, Route(host, port), connections=connections)
            over, remotes = asyncio.Event(), []

            def on_end(exchange):
                remotes.append((exchange.reused, exchange.remote))
                over.set()

            client.on_end = on_end
            for row, (session, is_last) in enumerate(
                [(1, False), (2, False), (1, True), (2, True), (3, True)]
            ):
                client.send(row, request(), session, is_last)
                await asyncio.wait_for(over.wait(), 5)
                over.clear()
            await client.close()
            assert {remote for _, remote in remotes} == {f"{host}:{port}"}
            return client.n_opened, client.n_reused, [reused for reused, _ in remotes]

    fast, plain = by_both(scenario)
    expected: dict[str, Any] = {
        "reuse": (1, 4, [False, True, True, True, True]),
        "never": (5, 0, [False] * 5),
        "per_session": (3, 2, [False, False, True, True, False]),
    }
    assert fast == plain == expected[connections]


def test_a_session_s_last_request_does_not_cut_off_its_others():
    """Of two branches of one conversation the last one ends first."""

    async def scenario(kind):
        slow_may_end, begun = asyncio.Event(), asyncio.Event()

        async def answer(reader, writer):
            head = await read_request(reader)
            writer.write(CHUNKED + chunk(TOKENS[0]))
            if b"x-seq: 0" in head:
                begun.set()
                await slow_may_end.wait()
            writer.write(chunk(b"".join(TOKENS[1:]) + END + DONE) + b"0\r\n\r\n")
            await reader.read()

        async with serving(answer) as (host, port):
            loop = asyncio.get_running_loop()
            client = make(kind, loop, Route(host, port), connections="per_session")
            ended, over = list[Any](), asyncio.Event()

            def on_end(exchange):
                ended.append(exchange)
                if len(ended) == 1:
                    loop.call_later(0.0, slow_may_end.set)  # after what its end has caused
                else:
                    over.set()

            client.on_end = on_end
            client.send(0, request(own=(("x-seq", "0"),)), session=5, is_last=False)
            await asyncio.wait_for(begun.wait(), 5)
            client.send(1, request(own=(("x-seq", "1"),)), session=5, is_last=True)
            await asyncio.wait_for(over.wait(), 5)
            await client.close()
            return [(e.row, meaning(e)["status"], meaning(e)["text"]) for e in ended]

    fast, plain = by_both(scenario)
    assert fast == plain == [(row, Status.ok, "one two three") for row in (1, 0)]


def test_both_send_the_bytes_of_the_payload():
    async def scenario(kind):
        heads = []

        async def answer(reader, writer):
            heads.append(await read_request(reader))
            writer.write(WHOLE)
            await reader.read()

        async with serving(answer) as (host, port):
            client = make(kind, asyncio.get_running_loop(), Route(host, port))
            await send_all(client, request("/base", own=(("x-seq", "7"),)), n=1)
            return heads[0].lower()

    fast, plain = by_both(scenario)
    assert sorted(fast.split(b"\r\n")) == sorted(plain.split(b"\r\n"))
    assert fast.startswith(b"post /base/v1/chat/completions http/1.1\r\nhost: t\r\n")


def test_both_close_the_connection_of_a_request_that_is_given_up():
    async def scenario(kind):
        left, begun = asyncio.Event(), asyncio.Event()

        async def answer(reader, writer):
            await read_request(reader)
            writer.write(CHUNKED + chunk(TOKENS[0]))
            begun.set()
            assert await reader.read() == b""
            left.set()

        async with serving(answer) as (host, port):
            ended: list[Any] = []
            client = make(kind, asyncio.get_running_loop(), Route(host, port))
            client.on_end = ended.append
            client.send(0, request())
            await asyncio.wait_for(begun.wait(), 5)
            sent_ns = client.sent_ns(0)
            client.abort(0, Status.cancelled, "enough")
            assert [e.sent_ns for e in ended] == [sent_ns]
            assert [(e.outcome, e.error) for e in ended] == [(Status.cancelled, "enough")]
            await asyncio.wait_for(left.wait(), 5)
            client.abort(0, Status.cancelled, "again")  # over already: nothing happens
            await client.close()
            return len(ended)

    assert by_both(scenario) == (1, 1)


def test_both_tell_a_refused_connection_by_its_address():
    async def scenario(kind):
        with socket.socket() as bound:  # nobody listens on it
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
            client = make(kind, asyncio.get_running_loop(), Route("127.0.0.1", port))
            (exchange,) = await send_all(client, request(), n=1)
        assert exchange.outcome is Status.connect_error
        assert exchange.error.startswith(f"connect to 127.0.0.1:{port}: ")
        return "refused" in exchange.error.lower() or "call failed" in exchange.error

    assert by_both(scenario) == (True, True)


# Unix sockets


def test_both_reach_a_server_on_a_socket_file(tmp_path):
    path = str(tmp_path / "s.sock")

    async def scenario(kind):
        async with serving(answering(WHOLE), asyncio.start_unix_server, path):
            route = Route("localhost", 80, unix_path=path)
            client = make(kind, asyncio.get_running_loop(), route)
            return await send_all(client, request(host="localhost"), n=2)

    fast, plain = by_both(scenario)
    assert [meaning(e) for e in fast] == [meaning(e) for e in plain]
    assert [meaning(e)["text"] for e in fast] == ["one two three"] * 2
    assert {e.remote for e in [*fast, *plain]} == {path}


# Names with several addresses


def infos(*addresses):
    """A resolver's answer, each given as (host, port)."""
    found = []
    for host, port in addresses:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        rest = (0, 0) if ":" in host else ()
        found.append((family, socket.SOCK_STREAM, 6, "", (host, port, *rest)))

    async def lookup(name, port):
        return found

    return lookup


@contextlib.asynccontextmanager
async def two_servers(answer):
    """One port on two addresses of this machine; where the system has only one, the test ends."""
    async with serving(answer) as (_, port):
        try:
            async with serving(answer, asyncio.start_server, "127.0.0.2", port):
                yield port
        except OSError:
            pytest.skip("this system has no loopback address besides 127.0.0.1")


def test_new_connections_take_turns_over_the_addresses_of_a_name():
    async def scenario(kind):
        async with two_servers(answering(WHOLE)) as port:
            lookup = infos(("127.0.0.1", port), ("127.0.0.2", port))
            route = Route("pods.example", port)
            client = make(
                kind, asyncio.get_running_loop(), route, lookup=lookup, connections="never"
            )
            ended = await send_all(client, request(), n=6)
            assert client.addresses == [f"127.0.0.1:{port}", f"127.0.0.2:{port}"]
            return [e.remote.partition(":")[0] for e in ended]

    fast, plain = by_both(scenario)
    assert fast == plain == ["127.0.0.1", "127.0.0.2"] * 3


def test_an_address_that_refuses_is_passed_over():
    async def scenario(kind):
        async with serving(answering(WHOLE)) as (host, port):
            lookup = infos(("::1", port), ("127.0.0.3", port), (host, port))
            route = Route("pods.example", port)
            client = make(
                kind, asyncio.get_running_loop(), route, lookup=lookup, connections="never"
            )
            return [meaning(e)["status"] for e in await send_all(client, request(), n=4)]

    fast, plain = by_both(scenario)
    assert fast == plain == [Status.ok] * 4


def test_localhost_is_both_of_its_addresses():
    """The system's own resolver, not a scripted one."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo("localhost", 80, type=_STREAM)}
    except OSError:
        found = set()
    if found != {"127.0.0.1", "::1"}:
        pytest.skip(f"localhost is {sorted(found)} here, not both 127.0.0.1 and ::1")

    async def scenario(kind):
        async with (
            serving(answering(WHOLE)) as (_, port),
            serving(answering(WHOLE), asyncio.start_server, "::1", port),
        ):
            route = Route("localhost", port)
            client = make(kind, asyncio.get_running_loop(), route, connections="never")
            ended = await send_all(client, request(), n=4)
            assert sorted(client.addresses) == [f"127.0.0.1:{port}", f"[::1]:{port}"]
            return sorted(e.remote.rpartition(":")[0] for e in ended)

    assert by_both(scenario) == (["127.0.0.1"] * 2 + ["[::1]"] * 2,) * 2


def test_a_connection_that_is_reset_at_once_leaves_no_socket_behind():
    async def scenario(kind):
        async def reset(reader, writer):
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

        async with serving(reset) as (host, port):
            client = make(kind, asyncio.get_running_loop(), Route(host, port), connections="never")
            before = len(os.listdir("/proc/self/fd"))
            ended = await send_all(client, request(), n=40)
            for _ in range(5):
                await asyncio.sleep(0)
            assert all(e.outcome in (Status.stream_error, Status.connect_error) for e in ended)
            return len(os.listdir("/proc/self/fd")) - before

    fast, plain = by_both(scenario)
    assert max(fast, plain) <= 2


def test_reused_connections_take_turns_too():
    async def scenario():
        async with two_servers(answering(WHOLE)) as port:
            lookup = infos(("127.0.0.1", port), ("127.0.0.2", port))
            client = make("fast", asyncio.get_running_loop(), Route("x", port), lookup=lookup)
            assert await client.open(4) == 4
            return [e.remote.partition(":")[0] for e in await send_all(client, request(), n=6)]

    assert sorted(asyncio.run(scenario())) == ["127.0.0.1"] * 3 + ["127.0.0.2"] * 3


# Proxies


@dataclass
class FakeProxy:
    """Forwards requests and opens tunnels, if it is asked with `authorization`."""

    authorization: bytes
    asked: list[bytes] = field(default_factory=list)

    async def answer(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        self.asked.append(head)
        if b"proxy-authorization: %s\r\n" % self.authorization not in head.lower():
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
            return
        target = head.split(b" ")[1].removeprefix(b"http://").partition(b"/")[0].decode()
        host, _, port = target.rpartition(":")
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        if head.startswith(b"CONNECT"):
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            up_writer.write(head.replace(b"http://" + target.encode(), b""))

        async def copy(source, sink):
            while data := await source.read(65536):
                sink.write(data)
            sink.close()

        try:
            await asyncio.gather(copy(reader, up_writer), copy(up_reader, writer))
        finally:
            up_writer.close()


def test_both_forward_requests_through_a_proxy():
    async def scenario(kind):
        proxy = FakeProxy(b"basic bwu6chc=")
        async with serving(answering(WHOLE)) as (host, port), serving(proxy.answer) as (_, via):
            route = Route(host, port, proxy=Proxy("127.0.0.1", via, "Basic bWU6cHc="))
            client = make(kind, asyncio.get_running_loop(), route)
            head = HttpHead(f"{host}:{port}", f"http://{host}:{port}", route.forwarding_headers)
            payload = written(head)
            ended = await send_all(client, payload, n=2)
            where = f"http://{host}:{port}/v1/chat/completions".encode()
            assert [head.split(b" ")[1] for head in proxy.asked] == [where]  # one connection
            return [meaning(e)["text"] for e in ended]

    assert by_both(scenario) == (["one two three"] * 2,) * 2


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate of 127.0.0.1 with its key in one file."""
    folder = tmp_path_factory.mktemp("tls")
    made = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj /CN=test -addext subjectAltName=IP:127.0.0.1 "
        f"-keyout {folder}/key.pem -out {folder}/cert.pem"
    )
    try:
        subprocess.run(made.split(), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the openssl command to make a certificate")
    return folder


def server_tls(folder):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


@pytest.mark.parametrize("is_proxied", [False, True])
def test_both_speak_tls_directly_and_through_a_tunnel(certificate, is_proxied):
    async def scenario(kind):
        proxy = FakeProxy(b"basic bwu6chc=")
        tls = server_tls(certificate)
        async with (
            serving(answering(WHOLE), ssl=tls) as (host, port),
            serving(proxy.answer) as (_, via),
        ):
            way = Proxy("127.0.0.1", via, "Basic bWU6cHc=") if is_proxied else None
            route = Route(host, port, is_tls=True, ca_cert=certificate / "cert.pem", proxy=way)
            client = make(kind, asyncio.get_running_loop(), route)
            ended = await send_all(client, request(host=f"{host}:{port}"), n=2)
            first_lines = [head.partition(b"\r\n")[0] for head in proxy.asked]
            assert first_lines == [b"CONNECT %s:%d HTTP/1.1" % (host.encode(), port)] * is_proxied
            return [(meaning(e)["text"], e.reused) for e in ended]

    fast, plain = by_both(scenario)
    assert fast == plain == [("one two three", False), ("one two three", True)]


def test_both_name_a_proxy_that_refuses(certificate):
    async def scenario(kind):
        proxy = FakeProxy(b"basic other")
        async with serving(proxy.answer) as (host, via):
            route = Route("127.0.0.1", 9, is_tls=True, proxy=Proxy(host, via))
            client = make(kind, asyncio.get_running_loop(), route)
            (exchange,) = await send_all(client, request(), n=1)
            assert exchange.outcome is Status.connect_error
            return exchange.error.replace(str(via), "PORT")

    fast, plain = by_both(scenario)
    assert fast == plain
    assert "proxy http://127.0.0.1:PORT answered 407 Proxy Authentication Required" in fast


def test_a_payload_is_taken_apart_as_it_was_put_together():
    payload = request("/base", own=(("x-seq", "7"),))
    method, target, headers, body = parse_request(payload)
    assert (method, target, body) == ("POST", "/base/v1/chat/completions", b"{}")
    assert headers[0] == ("host", "t")
    assert headers[-2:] == [("x-seq", "7"), ("content-length", "2")]
