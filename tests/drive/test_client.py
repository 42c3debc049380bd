"""The socket file against servers that misbehave in every way a server can. Each server here is a
few lines of scripted bytes on a loopback port of the test's own event loop."""

import asyncio
import contextlib
import socket
from itertools import combinations, pairwise
from typing import Any

import pytest
import uvloop

from loadgen.archive.decode import Body
from loadgen.archive.exchange import Exchange
from loadgen.drive.client import Client, Connection
from loadgen.drive.transport import BYTES_BEHIND
from loadgen.records import Status
from loadgen.system.timer import NoAlarm
from targets.dialer import Dialer
from targets.route import Route

REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\n\r\n{}"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def ends(client, ended):
    """An event that is set, and a list that grows, when an exchange is over."""
    over = asyncio.Event()

    def on_end(exchange):
        ended.append(exchange)
        over.set()

    client.on_end = on_end
    return over


async def exchange_with(server, n=1, act=None, **options):
    """Runs `n` requests one after another against `server(reader, writer)`; their exchanges."""
    served: list[Any] = []

    async def tracked(reader, writer):
        served.append(asyncio.current_task())
        try:
            await server(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    listener = await asyncio.start_server(tracked, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    loop = asyncio.get_running_loop()
    dialer = Dialer(loop, Route("127.0.0.1", port))
    client = Client(loop, dialer, looks_like_token=lambda data: b"token" in data, **options)
    ended: list[Any] = []
    try:
        for row in range(n):
            over = ends(client, ended)
            client.send(row, REQUEST)
            if act is not None:
                await act(client)
            await asyncio.wait_for(over.wait(), 5)
    finally:
        await client.close()
        listener.close()
        await asyncio.gather(*served, return_exceptions=True)
    return ended, client


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Runs `exchange_with` on either event loop."""
    loop_factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run_on_loop(server, **options):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(exchange_with(server, **options))

    return run_on_loop


def answering(*pieces, keep_open=True):
    """A server that answers every request with these pieces, flushed one by one."""

    async def serve(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                await reader.readexactly(len(REQUEST))
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if not keep_open:
                    break

    return serve


def test_a_chunked_stream_is_kept_as_it_came_with_ordered_stamps(run):
    body = [b"data: token 1\n\n", b"data: token 2\n\n"]
    (exchange,), _ = run(answering(HEAD, chunk(body[0]), chunk(body[1]), b"0\r\n\r\n"))
    assert exchange.outcome is None
    assert Body(exchange).data == b"".join(body)
    assert exchange.http_status == 200
    assert exchange.content_type == "text/event-stream"
    stamps = [exchange.sent_ns, exchange.connected_ns, exchange.headers_ns, *exchange.times]
    assert stamps == sorted(stamps)
    assert exchange.done_ns >= exchange.times[-1]
    assert exchange.first_guess_ns == exchange.times[0]


def test_a_response_cut_at_every_byte_is_the_same_response(run):
    wire = HEAD + chunk(b"data: token\n\n") + b"0\r\n\r\n"
    (exchange,), _ = run(answering(*(wire[i : i + 1] for i in range(len(wire)))))
    assert exchange.outcome is None
    assert Body(exchange).data == b"data: token\n\n"


class Wire(asyncio.Transport):
    """A transport and the pool of its connection: what is sent goes nowhere."""

    alarm = NoAlarm()

    def __init__(self):
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.ended_rows = []

    def set_write_buffer_limits(self, high=None, low=None): ...

    def write(self, data): ...

    def is_closing(self):
        return False

    def looks_like_token(self, data):
        return b"token" in data

    def ended(self, connection, exchange, *, reusable):
        self.ended_rows.append((exchange.row, reusable))


@pytest.mark.parametrize("informational", [b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"])
def test_a_response_in_three_reads_is_the_same_wherever_they_were_cut(informational):
    """On one kept connection, as a server that writes odd pieces leads to."""
    response = informational + HEAD + chunk(b"data: token\n\n") + b"0\r\n\r\n"
    wire: Any = Wire()
    connection = Connection(wire)
    connection.connection_made(wire)
    cuts = list(combinations(range(1, len(response)), 2))
    for row, (first, second) in enumerate(cuts):
        exchange = Exchange(row)
        connection.start(exchange, REQUEST)
        for begin, end in pairwise((0, first, second, len(response))):
            connection.data_received(response[begin:end])
        assert wire.ended_rows[row:] == [(row, True)], (first, second)
        assert Body(exchange).data == b"data: token\n\n", (first, second)


def test_connections_are_reused_and_say_so(run):
    (first, second), client = run(answering(HEAD, chunk(b"x"), b"0\r\n\r\n"), n=2)
    assert (first.reused, second.reused) == (False, True)
    assert (client.n_opened, client.n_reused) == (1, 1)
    assert first.connected_ns > 0
    assert second.connected_ns == 0


def test_connections_never_reused_are_opened_for_each_request(run):
    exchanges, client = run(answering(HEAD, chunk(b"x"), b"0\r\n\r\n"), n=3, connections="never")
    assert not any(exchange.reused for exchange in exchanges)
    assert client.n_opened == 3


def test_a_body_with_content_length_ends_by_its_length(run):
    wire = b'HTTP/1.1 401 Unauthorized\r\ncontent-length: 9\r\n\r\n{"no": 1}'
    (exchange, _), client = run(answering(wire), n=2)
    assert exchange.http_status == 401
    assert Body(exchange).data == b'{"no": 1}'
    assert client.n_opened == 1


def test_a_body_without_length_ends_with_the_connection(run):
    wire = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: token\n\n"
    (exchange,), _ = run(answering(wire, keep_open=False))
    assert exchange.outcome is None
    assert Body(exchange).data == b"data: token\n\n"


def test_informational_responses_are_skipped(run):
    wire = b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + chunk(b"data: token\n\n") + b"0\r\n\r\n"
    (exchange,), _ = run(answering(wire))
    assert exchange.http_status == 200
    assert Body(exchange).data == b"data: token\n\n"


def test_a_trailer_changes_nothing(run):
    wire = HEAD + chunk(b"data: token\n\n") + b"0\r\ncontent-type: text/html\r\n\r\n"
    (exchange,), _ = run(answering(wire))
    assert exchange.outcome is None
    assert exchange.content_type == "text/event-stream"


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ((HEAD, chunk(b"data: tok")), "in the middle of the response"),
        ((HEAD, b"40\r\nshort"), "in the middle of the response"),
        ((b"",), "without a response"),
        ((b"SSH-2.0-OpenSSH_9.2\r\n",), "not HTTP/1.1"),
        ((HEAD, b"zz\r\n"), "not HTTP/1.1"),
        ((b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",), "protocols"),
    ],
)
def test_a_broken_response_is_a_stream_error_with_its_reason(run, pieces, reason):
    (exchange,), _ = run(answering(*pieces, keep_open=False))
    assert exchange.outcome is Status.stream_error
    assert reason in exchange.error
    assert exchange.done_ns > 0


def test_a_server_that_closes_a_kept_connection_is_named_as_such(run):
    async def once(reader, writer):
        await reader.readexactly(len(REQUEST))
        writer.write(HEAD + chunk(b"x") + b"0\r\n\r\n")
        await reader.readexactly(len(REQUEST))
        writer.transport.abort()

    (_, second), _ = run(once, n=2)
    assert second.outcome is Status.stream_error
    assert "kept-alive connection" in second.error


def test_refused_connections_are_connect_errors_naming_the_address(run):
    async def refused():
        listener = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        listener.close()
        await listener.wait_closed()
        ended: list[Any] = []
        loop = asyncio.get_running_loop()
        client = Client(
            loop, Dialer(loop, Route("127.0.0.1", port)), looks_like_token=lambda data: False
        )
        over = ends(client, ended)
        client.send(0, REQUEST)
        await asyncio.wait_for(over.wait(), 5)
        return ended, port

    (exchange,), port = asyncio.run(refused())
    assert exchange.outcome is Status.connect_error
    assert f"127.0.0.1:{port}" in exchange.error


def test_a_silent_server_is_given_up_when_told_to(run):
    async def silent(reader, writer):
        await reader.read()

    async def give_up(client):
        while not client._busy:
            await asyncio.sleep(0)
        client.abort(0, Status.timeout, "no answer")

    (exchange,), _ = run(silent, act=give_up)
    assert (exchange.outcome, exchange.error) == (Status.timeout, "no answer")


def test_giving_up_while_connecting_is_recorded_too(run):
    async def abort(client):
        client.abort(0, Status.cancelled, "stopped")

    (exchange,), _ = run(answering(HEAD), act=abort)
    assert exchange.outcome is Status.cancelled
    assert "while connecting" in exchange.error


def test_bytes_nobody_asked_for_close_the_connection(run):
    async def chatty(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readexactly(len(REQUEST))
            writer.write(HEAD + chunk(b"x") + b"0\r\n\r\n" + b"HTTP/1.1 200 OK\r\n\r\n")
            await reader.readexactly(len(REQUEST))
            writer.write(HEAD + chunk(b"y") + b"0\r\n\r\n")
            await writer.drain()
            await reader.read()

    (first,), _ = run(chatty)
    assert (first.outcome, first.error) == (Status.stream_error, BYTES_BEHIND)
    assert Body(first).data == b"x"


def test_bytes_behind_an_answer_are_no_part_of_the_next_one(run):
    """Here the next request goes out from inside the end of the one before it, as in a closed
    loop without think time."""
    asked: list[int] = []

    async def again(client):
        told = client.on_end

        def on_end(exchange):
            if not asked:
                asked.append(1)
                client.send(1, REQUEST)
            else:
                told(exchange)

        client.on_end = on_end

    async def rude(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readexactly(len(REQUEST))
            writer.write(HEAD + chunk(b"x") + b"0\r\n\r\n" + b"garbage\r\n\r\n" * (1 - len(asked)))
            await writer.drain()
            await reader.read()

    (second,), client = run(rude, act=again)
    assert (second.outcome, Body(second).data, second.reused) == (None, b"x", False)
    assert client.n_opened == 2


def test_an_error_of_whoever_is_told_reaches_the_loop(run):
    """Swallowed, it would leave a row that nobody ever accounts for."""
    seen: list[Any] = []

    async def stumble(client):
        loop, told = asyncio.get_running_loop(), client.on_end
        loop.set_exception_handler(lambda loop, context: seen.append(context.get("exception")))

        def on_end(exchange):
            told(exchange)
            raise RuntimeError("no space left on the device")

        client.on_end = on_end

    run(answering(HEAD, chunk(b"x"), b"0\r\n\r\n"), act=stumble)
    assert [str(error) for error in seen] == ["no space left on the device"]


def test_a_request_is_on_the_wire_when_send_returns():
    """Here the loop gets no turn between `send` and the look at the server's end."""

    async def look():
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            dialer = Dialer(loop, Route("127.0.0.1", listener.getsockname()[1]))
            client = Client(loop, dialer, looks_like_token=lambda data: True)
            assert await client.open(1) == 1
            peer, _ = listener.accept()
            with peer:
                peer.settimeout(5.0)
                client.send(0, REQUEST)
                seen = peer.recv(65536)
                await client.close()
        return seen

    for new_loop in (uvloop.new_event_loop, asyncio.new_event_loop):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            assert runner.run(look()) == REQUEST


class Bell:
    """An alarm that is due at once, and breaks if told to."""

    due_ns = 0

    def __init__(self, breaks=False):
        self.n_rung, self._breaks = 0, breaks

    def ring(self):
        self.n_rung += 1
        if self._breaks:
            raise OSError("no")


def test_what_is_due_goes_out_before_the_next_socket_is_read(run):
    bell = Bell()

    async def arm(client):
        client.alarm = bell

    (exchange,), _ = run(answering(HEAD, chunk(b"x"), b"0\r\n\r\n"), act=arm)
    assert exchange.outcome is None
    assert bell.n_rung >= 1


def test_an_alarm_that_is_not_due_does_not_ring(run):
    bell = Bell()
    bell.due_ns = 2**63 - 1

    async def arm(client):
        client.alarm = bell

    run(answering(HEAD, chunk(b"x"), b"0\r\n\r\n"), act=arm)
    assert bell.n_rung == 0


def test_an_error_of_the_alarm_reaches_the_loop_and_no_exchange(run):
    seen: list[Any] = []

    async def arm(client):
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: seen.append(context.get("exception")))
        client.alarm = Bell(breaks=True)

    (exchange,), _ = run(answering(HEAD, chunk(b"x"), b"0\r\n\r\n"), act=arm)
    assert exchange.outcome is None
    assert {str(error) for error in seen} == {"no"}


def test_connections_opened_ahead_are_as_many_as_asked():
    async def count(n):
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
            dialer = Dialer(loop, Route("127.0.0.1", listener.getsockname()[1]))
            client = Client(loop, dialer, looks_like_token=lambda data: True)
            opened = await client.open(n)
            await client.close()
        return opened, client.n_opened

    assert asyncio.run(count(150)) == (150, 150)


def test_nobody_there_is_no_error_before_the_first_request():
    async def count():
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        dialer = Dialer(loop, Route("127.0.0.1", port))
        return await Client(loop, dialer, looks_like_token=lambda data: True).open(100)

    assert asyncio.run(count()) == 0
