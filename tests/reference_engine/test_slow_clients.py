"""Clients that never send the rest of a request, and bodies that any web page can send."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from reference_engine.serving.guard import Guard, running
from tests.reference_engine.engine_server import serving

pytestmark = pytest.mark.faults
HEAD = b"POST /v1/echo HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
N = 100


async def echo(request):
    return web.Response(body=await request.read())


async def answers(*sent, head_s=30.0, body_s=30.0):
    """What the server sends to each of `sent` until it closes the connection."""
    app = Guard(body_s=body_s).app([web.post("/v1/echo", echo)])
    async with running(app, head_s=head_s) as runner:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with asyncio.timeout(20):
            return await asyncio.gather(*(answer(port, data) for data in sent))


async def answer(port, data):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    received = await reader.read()
    writer.close()
    return received


def test_half_sent_heads_are_closed():
    silent, half = [b""] * N, [HEAD] * N
    assert asyncio.run(answers(*silent, *half, head_s=0.2)) == [b""] * (2 * N)


def test_the_head_of_a_second_request_must_arrive_too():
    whole = HEAD + b"Content-Length: 2\r\n\r\n{}"
    (received,) = asyncio.run(answers(whole + HEAD, head_s=0.2))
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert received.endswith(b"\r\n\r\n{}")


def test_half_sent_bodies_get_408_and_are_closed():
    half = HEAD + b"Content-Length: 3\r\n\r\n{"
    for received in asyncio.run(answers(*[half] * N, body_s=0.2)):
        assert received.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"the body did not arrive within 0.2 s" in received
        assert b"Connection: close" in received


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_only_json_is_accepted(is_split, path):
    """A browser sends the first four to any site without asking it first."""
    kinds = {
        "text/plain": 415,
        "text/plain; charset=utf-8": 415,
        "application/x-www-form-urlencoded": 415,
        "multipart/form-data; boundary=b": 415,
        "application/octet-stream": 415,
        "application/json; charset=utf-8": 200,
    }
    text = b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}'

    async def statuses():
        async with serving(is_split=is_split) as server:
            found = {}
            for kind in kinds:
                headers = {"Content-Type": kind}
                async with server.session.post(path, data=text, headers=headers) as response:
                    found[kind] = response.status
            return found

    assert asyncio.run(statuses()) == kinds
