"""The HTTP client: responses in any cut, reused and closed connections, and failures."""

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from targets.http_session import Disconnected, HttpSession, NoConnection, NotHttp, ProbeConnection
from targets.route import Proxy, Route

CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n6;x=1\r\n world\r\n0\r\ntrailer: late\r\n\r\n"
)
STATED = b"HTTP/1.1 404 No\r\ncontent-length: 3\r\n\r\nwhy"


class Wire(asyncio.Transport):
    """Records the bytes written; ends at once if it is aborted."""

    def __init__(self):
        super().__init__()
        self.written, self.is_over = b"", False

    def write(self, data):
        self.written += data

    def abort(self):
        self.is_over = True

    def is_closing(self):
        return self.is_over

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


def response_of(pieces, *, closes=False):
    """(status, headers, body, is_reusable) of a response that arrives in these pieces."""

    async def run():
        connection = ProbeConnection()
        connection.connection_made(Wire())
        connection.send(b"GET / HTTP/1.1\r\n\r\n")
        for piece in pieces:
            connection.data_received(piece)
        if closes:
            connection.connection_lost(None)
        await connection.head()
        body = await connection.read(1 << 20)
        return connection.status, dict(connection.headers), body, connection.is_reusable

    return asyncio.run(run())


def cut(data, places):
    edges = [0, *sorted(places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


@settings(max_examples=60)
@given(st.sets(st.integers(1, len(CHUNKED) - 1), max_size=len(CHUNKED)))
def test_a_response_does_not_depend_on_the_cuts_between_reads(places):
    status, headers, body, is_reusable = response_of(cut(CHUNKED, places))
    assert (status, body, is_reusable) == (200, b"hello world", True)
    assert headers["content-type"] == b"text/event-stream; charset=utf-8"
    assert "trailer" not in headers


def test_a_body_of_no_stated_length_ends_with_the_connection():
    head = b"HTTP/1.0 200 OK\r\n\r\n"
    assert response_of([head, b"some", b" text"], closes=True) == (200, {}, b"some text", False)


@pytest.mark.parametrize("answer", [CHUNKED[:-3], STATED[:-1], b"HTTP/1.1 200 OK\r\n", b""])
def test_a_cut_response_raises_disconnected(answer):
    with pytest.raises(Disconnected):
        response_of([answer] if answer else [], closes=True)


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\na\x01: b\r\n\r\n"])
def test_a_response_that_is_not_http_is_quoted(answer):
    with pytest.raises(NotHttp, match=answer[:8].decode()):
        response_of([answer])


def test_bytes_without_a_request_are_no_part_of_a_response():
    assert response_of([STATED + STATED]) == (404, {"content-length": b"3"}, b"why", False)
    assert response_of([STATED, STATED]) == (404, {"content-length": b"3"}, b"why", False)


class Server:
    """Answers each connection in order, closes it after the last answer, and records the heads of
    the requests."""

    def __init__(self, *connections):
        self.answers, self.requests = list(connections), []

    async def serve(self, reader, writer):
        for answer in self.answers.pop(0):
            try:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            except asyncio.IncompleteReadError:
                break
            writer.write(answer)
        await writer.drain()
        writer.close()

    def run(self, talk, **route):
        async def run():
            async with await asyncio.start_server(self.serve, "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                way = Route("127.0.0.1", port, **route)
                async with HttpSession(way) as session:
                    return await talk(session, f"http://127.0.0.1:{port}")

        return asyncio.run(run())


async def send(session, url, method="GET"):
    async with session.request(method, f"{url}/a b?c=d", [("x-y", "z")], b"", 5.0) as answer:
        return answer.status, await answer.read(100)


def test_a_connection_is_reused_and_sends_the_whole_request():
    server = Server([STATED, CHUNKED])

    async def talk(session, url):
        responses = [await send(session, url), await send(session, url, "POST")]
        return responses, session.n_opened

    responses, n_opened = server.run(talk)
    assert responses == [(404, b"why"), (200, b"hello world")]
    assert n_opened == 1
    get, post = server.requests
    assert get.startswith(b"GET /a%20b?c=d HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"accept-encoding: identity\r\nx-y: z\r\n" in get
    assert b"content-length: 0\r\n" in post


@pytest.mark.parametrize(("method", "n_opened"), [("GET", 2), ("POST", None)])
def test_only_an_idempotent_request_is_sent_again(method, n_opened):
    """The second request is sent on a connection that the server has closed."""
    server = Server([STATED, b""], [STATED])

    async def talk(session, url):
        await send(session, url)
        assert await send(session, url, method) == (404, b"why")
        return session.n_opened

    if n_opened is None:
        with pytest.raises(Disconnected):
            server.run(talk)
    else:
        assert server.run(talk) == n_opened


def test_an_unread_response_closes_its_connection():
    server = Server([STATED], [STATED])

    async def talk(session, url):
        async with session.request("GET", url, [], b"", 5.0) as answer:
            assert answer.status == 404
        await send(session, url)
        return session.n_opened

    assert server.run(talk) == 2


def test_a_silent_server_raises_a_timeout():
    async def talk(session, url):
        async with session.request("POST", url, [], b"", 0.01):
            pass

    with pytest.raises(TimeoutError):
        Silent().run(talk)


class Silent(Server):
    async def serve(self, reader, writer):
        try:
            await reader.read()
        finally:
            writer.close()


def test_a_failed_connection_is_reported_with_the_address():
    async def talk():
        async with HttpSession(Route("127.0.0.1", 9)) as session:
            await send(session, "http://127.0.0.1:9")

    with pytest.raises(NoConnection, match=r"cannot connect to 127\.0\.0\.1:9: "):
        asyncio.run(talk())


def test_a_forwarding_proxy_receives_the_whole_url():
    server = Server([STATED])

    async def talk(session, url):
        port = int(url.rpartition(":")[2])
        proxied = Route("far.example", 80, proxy=Proxy("127.0.0.1", port))
        async with HttpSession(proxied) as through:
            return await send(through, "http://far.example/v1")

    assert server.run(talk) == (404, b"why")
    assert server.requests[0].startswith(b"GET http://far.example/v1/a%20b?c=d HTTP/1.1\r\n")
    assert b"host: far.example\r\n" in server.requests[0]
