"""The names in Host and Origin under which a server may be addressed."""

from __future__ import annotations

import pytest

from loadgen.system.host_names import host_names
from loadgen.web.login_throttle import LoginThrottle

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("localhost:8000", True),
        ("LOCALHOST", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("gpu.example.org:1", True),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("10.0.0.5", False),
        ("localhost@evil.example", False),
        ("localhost:port", False),
        ("[::1", False),
        ("", False),
        (None, False),
    ],
)
def test_a_server_on_loopback_has_its_own_and_its_allowed_names(host, is_own):
    assert host_names("127.0.0.1", ["gpu.example.org"]).accepts(host) is is_own


def test_a_server_on_every_interface_has_every_address_and_its_machines_name():
    names = host_names("0.0.0.0", machine="Node-1")
    assert [
        names.accepts(host) for host in ("10.0.0.5:80", "[fe80::1]", "node-1:8000", "evil.example")
    ] == [True, True, True, False]


def test_an_origin_of_another_port_or_scheme_is_another_site():
    names = host_names("127.0.0.1")
    host = "localhost:8000"
    origins = ("http://localhost:8000", None, "http://localhost:9", "http://evil.example", "null")
    assert [names.is_other_site(origin, host) for origin in origins] == [
        False, False, True, True, True
    ]  # fmt: skip


def test_failed_logins_wait_longer_and_longer():
    now = [100.0]
    throttle = LoginThrottle(lambda: now[0])
    waits = []
    for _ in range(12):
        throttle.failed("a")
        waits.append(throttle.wait_s("a"))
    assert waits == [0, 0, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert throttle.wait_s("b") == 0
    now[0] += 299
    assert throttle.wait_s("a") == 1
    throttle.passed("a")
    assert throttle.wait_s("a") == 0


def test_of_more_than_1000_callers_the_one_with_the_oldest_failure_is_dropped():
    throttle = LoginThrottle(lambda: 100.0)
    for caller in range(1001):
        for _ in range(3):
            throttle.failed(f"{caller}")
    assert [throttle.wait_s(caller) for caller in ("0", "1", "1000")] == [0, 2, 2]
