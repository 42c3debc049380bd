"""What ends without a connection says whose limit it was, in both transports' words alike."""

import errno
import os

import aiohttp
import pytest

from loadgen.archive.exchange import Exchange
from loadgen.drive.aiohttp_client import failure
from loadgen.drive.transport import connect_reason
from loadgen.records import CLIENT_LIMIT, Status
from targets.route import Route


def both(number):
    """The reasons of one error, by the one transport and the other."""
    route, error = Route("gpu-7", 8000), OSError(number, os.strerror(number))
    key = aiohttp.client_reqrep.ConnectionKey("gpu-7", 8000, False, True, None, None, None)
    status, told = failure(Exchange(0), aiohttp.ClientConnectorError(key, error), route)
    assert status is Status.connect_error
    return connect_reason(route, error), told


@pytest.mark.parametrize("number", [errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOBUFS])
def test_what_this_machine_has_none_left_of_is_the_clients_own_limit(number):
    one, other = both(number)
    assert one == other
    assert os.strerror(number) in one
    assert one.endswith(CLIENT_LIMIT)


@pytest.mark.parametrize("number", [errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ETIMEDOUT])
def test_what_the_other_side_does_is_not(number):
    one, other = both(number)
    assert one == other == f"connect to {Route('gpu-7', 8000)}: {os.strerror(number)}"


def test_an_error_without_a_number_is_not():
    assert (
        connect_reason("gpu-7:8000", OSError("proxy said no"))
        == "connect to gpu-7:8000: proxy said no"
    )
