"""Waiting for a server that is still starting."""

from __future__ import annotations

import asyncio
import socket

import pytest

from loadgen.errors import TargetError
from targets.embed import mock
from targets.endpoint import read_target
from targets.readiness import await_ready, not_ready


def waited_for(url, limit_s, lines=""):
    """The reasons seen while waiting, without repetitions."""
    reasons = []
    endpoint = read_target(f"url: {url}\n{lines}", "t.yaml", {})
    waiting = await_ready(endpoint, "", limit_s, lambda waited_s, reason: reasons.append(reason))
    asyncio.run(waiting)
    return list(dict.fromkeys(reasons))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("503", "GET /v1/models: answered 503: Loading model"),
        ("empty", "GET /v1/models lists no model"),
        ("listed", "answered 503: Loading model"),
    ],
)
def test_a_server_that_loads_its_model_is_awaited(tmp_path, kind, reason):
    options = {"loading": f"900ms@{kind}", "ttft": "1ms", "itl": "0ms"}
    with mock(options, tmp_path) as served:
        assert waited_for(served.endpoint.url, 30.0) == [reason]
        assert waited_for(served.endpoint.url, 30.0) == []


def test_a_server_that_refuses_connections_is_awaited_until_the_limit():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(TargetError, match=r"not ready after 200 ms .*: connection refused"):
        waited_for(url, 0.2)


def test_waiting_does_not_cure_a_wrong_key_or_a_refused_request(tmp_path):
    with mock({"api_key": "right", "ttft": "1ms", "itl": "0ms"}, tmp_path) as served:
        assert waited_for(served.endpoint.url, 30.0) == []


def test_an_empty_list_does_not_matter_where_the_model_is_named(tmp_path):
    with mock({"loading": "60s@empty"}, tmp_path) as served:
        endpoint = read_target(f"url: {served.endpoint.url}\nmodel: m", "t.yaml", {})
        assert asyncio.run(not_ready(endpoint, "")) == "answered 503: Loading model"
