"""The proxy that an environment sets, by the conventions of curl and requests, case by case."""

import pytest

from loadgen.errors import UsageError
from targets.address import parse_url
from targets.route import Proxy, chosen_proxy

SECRET = "p%40ss-do-not-show-me"


def proxy_url(target, environ):
    proxy = chosen_proxy(parse_url(target), environ)
    return None if proxy is None else proxy.url


@pytest.mark.parametrize(
    ("target", "environ", "url"),
    [
        ("http://h", {}, None),
        ("http://h", {"http_proxy": "http://p:3128"}, "http://p:3128"),
        ("http://h", {"HTTP_PROXY": "p:3128"}, "http://p:3128"),
        ("http://h", {"http_proxy": "http://low:1", "HTTP_PROXY": "http://up:1"}, "http://low:1"),
        ("http://h", {"http_proxy": "", "HTTP_PROXY": "http://up:1"}, None),
        ("http://h", {"HTTP_PROXY": "http://p:1", "REQUEST_METHOD": "GET"}, None),
        ("http://h", {"https_proxy": "http://p:1"}, None),
        ("https://h", {"http_proxy": "http://p:1"}, None),
        ("https://h", {"HTTPS_PROXY": "http://p:1"}, "http://p:1"),
        ("https://h", {"all_proxy": "http://p:1"}, "http://p:1"),
        ("http://h", {"ALL_PROXY": "http://p:1", "http_proxy": "http://q:2"}, "http://q:2"),
        ("http://h", {"http_proxy": "http://[::1]:3128/"}, "http://[::1]:3128"),
        ("unix:/a.sock", {"http_proxy": "http://p:1"}, None),
        ("http://127.0.0.1:8000", {"http_proxy": "http://p:1"}, "http://p:1"),
    ],
)
def test_the_variable_of_the_targets_scheme_decides(target, environ, url):
    assert proxy_url(target, environ) == url


@pytest.mark.parametrize(
    ("target", "no_proxy", "is_exempt"),
    [
        ("http://a.example", "*", True),
        ("http://a.example", "a.example", True),
        ("http://a.example", "example", True),
        ("http://a.example", ".example", True),
        ("http://example", ".example", True),
        ("http://a.example", "b.example, A.EXAMPLE", True),
        ("http://a.example", "x.example a.example", True),
        ("http://notexample", "example", False),
        ("http://a.example", "a.example:80", True),
        ("http://a.example:8000", "a.example:80", False),
        ("http://a.example:8000", "a.example", True),
        ("http://10.1.2.3", "10.0.0.0/8", True),
        ("http://11.1.2.3", "10.0.0.0/8", False),
        ("http://10.1.2.3", "10.1.2.3", True),
        ("http://127.0.0.1", "localhost", False),
        ("http://[::1]:8000", "::1", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://[::1]:8000", "[::1]:80", False),
        ("http://[fd00::7]", "fd00::/8", True),
        ("http://a.example", "", False),
        ("http://a.example", ",", False),
    ],
)
@pytest.mark.parametrize("variable", ["no_proxy", "NO_PROXY"])
def test_hosts_in_no_proxy_are_reached_directly(target, no_proxy, is_exempt, variable):
    environ = {"http_proxy": "http://p:1", variable: no_proxy}
    assert (chosen_proxy(parse_url(target), environ) is None) == is_exempt


def test_credentials_become_a_header_and_are_shown_nowhere():
    proxy = chosen_proxy(parse_url("http://h"), {"http_proxy": f"http://me:{SECRET}@p:1"})
    assert proxy == Proxy("p", 1, "Basic bWU6cEBzcy1kby1ub3Qtc2hvdy1tZQ==")
    assert "bWU6" not in repr(proxy)
    assert proxy.url == "http://p:1"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (f"socks5://me:{SECRET}@p:1", "http_proxy: a proxy of kind 'socks5' is not supported"),
        (f"https://me:{SECRET}@p:1", "a proxy of kind 'https'"),
        (f"http://me:{SECRET}@p", "http_proxy: has no port; write http://host:3128"),
        (f"http://me:{SECRET}@{'a' * 64}.example:3128", "http_proxy: its host is not a valid name"),
        (f"http://me:{SECRET}@a..example:3128", "http_proxy: its host is not a valid name"),
        (f"http://me:{SECRET}@:3128", "has no host"),
        (f"http://me:{SECRET}@p:x", "no proxy URL"),
        ("http://me:do-not-show/1@p:3128", "no proxy URL"),
        ("http://me:123/do-not-show@p:3128", "%2F"),
        ("http://me:do-not-show#1@p:3128", "no proxy URL"),
        ("http://[me:do-not-show@p:3128", "no proxy URL"),
    ],
)
def test_an_unusable_proxy_is_rejected_without_its_password(value, problem):
    with pytest.raises(UsageError) as caught:
        chosen_proxy(parse_url("http://h"), {"http_proxy": value})
    assert problem in str(caught.value)
    assert "do-not-show" not in str(caught.value)
