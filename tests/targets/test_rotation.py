"""The rotation over a name's addresses, in virtual time with a scripted resolver."""

import asyncio
import socket

import pytest

from loadgen.system.clock import VirtualClock
from targets.rotation import Rotation, format_address


def info(address):
    return socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)


class Resolver:
    """Returns `addresses`, or raises if there are none; waits for `may_answer`."""

    def __init__(self, *addresses):
        self.addresses, self.n_lookups, self.may_answer = addresses, 0, asyncio.Event()
        self.may_answer.set()

    async def __call__(self, host, port):
        self.n_lookups += 1
        await self.may_answer.wait()
        if not self.addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [info(address) for address in self.addresses]


async def first(rotation):
    return (await rotation.order())[0][4][0]


def rotate(*addresses, first=0):
    clock, resolver = VirtualClock(), Resolver(*addresses)
    return Rotation("pods", 80, resolver, first, clock.now_s), clock, resolver


def test_each_connection_begins_at_the_next_address_and_sees_all():
    async def play():
        rotation, _, resolver = rotate("a", "b", "c", first=1)
        orders = ["".join(i[4][0] for i in await rotation.order()) for _ in range(4)]
        assert resolver.n_lookups == 1
        assert rotation.addresses == ["a:80", "b:80", "c:80"]
        return orders

    assert asyncio.run(play()) == ["bca", "cab", "abc", "bca"]


def test_an_older_answer_is_used_during_a_new_lookup():
    async def play():
        rotation, clock, resolver = rotate("a")
        await rotation.order()
        clock.advance(1.5)
        resolver.addresses = ("b",)
        resolver.may_answer.clear()
        assert await first(rotation) == "a"  # without waiting
        assert await first(rotation) == "a"
        resolver.may_answer.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert await first(rotation) == "b"
        return resolver.n_lookups

    assert asyncio.run(play()) == 2


def test_an_answer_that_is_too_old_is_waited_for():
    async def play():
        rotation, clock, resolver = rotate("a")
        await rotation.order()
        clock.advance(11.0)
        resolver.addresses = ("b",)
        return await first(rotation)

    assert asyncio.run(play()) == "b"


def test_a_resolver_that_fails_takes_no_address_away():
    async def play():
        rotation, clock, resolver = rotate("a")
        await rotation.order()
        clock.advance(60.0)
        resolver.addresses = ()
        return await first(rotation)

    assert asyncio.run(play()) == "a"


def test_a_name_that_never_resolved_is_an_error_for_every_waiting_task():
    async def play():
        rotation, _, resolver = rotate()
        errors = await asyncio.gather(rotation.order(), rotation.order(), return_exceptions=True)
        assert resolver.n_lookups == 1
        return [type(error) for error in errors]

    assert asyncio.run(play()) == [socket.gaierror] * 2


def test_a_cancelled_wait_logs_no_error():
    async def play():
        rotation, _, resolver = rotate()
        resolver.may_answer.clear()
        contexts = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: contexts.append(context)
        )
        waiting = asyncio.ensure_future(rotation.order())
        await asyncio.sleep(0)
        waiting.cancel()
        resolver.may_answer.set()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(0)
        del waiting, rotation
        return contexts

    assert asyncio.run(play()) == []


def test_an_address_that_failed_comes_last_for_five_seconds():
    async def play():
        rotation, clock, _ = rotate("a", "b")
        rotation.put_aside(info("a"))
        assert [await first(rotation) for _ in range(4)] == ["b"] * 4
        clock.advance(5.5)
        return [await first(rotation) for _ in range(2)]

    assert asyncio.run(play()) == ["a", "b"]


def test_a_literal_address_is_looked_up_once():
    async def play():
        clock, resolver = VirtualClock(), Resolver("127.0.0.1")
        rotation = Rotation("127.0.0.1", 80, resolver, 0, clock.now_s)
        for _ in range(3):
            clock.advance(100.0)
            await rotation.order()
        return resolver.n_lookups

    assert asyncio.run(play()) == 1


@pytest.mark.parametrize(
    ("sockaddr", "text"),
    [
        (("10.0.0.1", 80), "10.0.0.1:80"),
        (("::1", 80, 0, 0), "[::1]:80"),
        ("/run/a.sock", "/run/a.sock"),
        (b"/run/a.sock", "/run/a.sock"),
        (None, ""),
    ],
)
def test_an_address_is_formatted_as_users_write_it(sockaddr, text):
    assert format_address(sockaddr) == text
