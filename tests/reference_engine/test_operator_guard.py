"""Operator and debug routes: their own names, no pages of other sites, and a token for changes."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys

import pytest

from loadgen.system.host_names import host_names
from targets.embed import engine
from targets.quiesce import quiesce
from tests.reference_engine.engine_server import serving

pytestmark = pytest.mark.faults
TOKEN = "a-token-of-this-test"
OWN = {"operator_token": TOKEN, "names": host_names("127.0.0.1", ["gpu.example.org"])}
CHANGES = [
    ("POST", "/debug/tenants/default/pause"),
    ("PUT", "/debug/policy"),
    ("DELETE", "/debug/requests/x"),
    ("PUT", "/debug/requests/x/priority"),
    ("POST", "/reset_prefix_cache"),
]


@pytest.mark.parametrize("is_split", [False, True])
def test_changes_need_the_token_and_reads_do_not(is_split):
    async def scene():
        async with serving(is_split=is_split, guard=OWN) as server:
            without = [await status(server, *change) for change in CHANGES]
            wrong = await status(server, *CHANGES[0], **{"x-operator-token": "wrong"})
            right = await status(server, *CHANGES[0], **{"x-operator-token": TOKEN})
            return without, wrong, right, await status(server, "GET", "/debug/engine")

    without, wrong, right, read = asyncio.run(scene())
    assert without == [403] * len(CHANGES)
    assert (wrong, right, read) == (403, 200, 200)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_rebound_name_and_a_page_of_another_site_reach_no_operator_route(is_split):
    token = {"x-operator-token": TOKEN}

    async def scene():
        async with serving(is_split=is_split, guard=OWN) as server:
            return [
                await status(server, "GET", "/debug/engine", host="evil.example"),
                await status(server, *CHANGES[0], host="evil.example", **token),
                await status(server, *CHANGES[0], origin="http://evil.example", **token),
                await status(server, *CHANGES[0], origin="null", **token),
                await status(server, "GET", "/debug/engine", host="gpu.example.org:1"),
                await status(server, "GET", "/v1/models", host="evil.example"),
                await status(server, "GET", "/health", host="evil.example"),
            ]

    assert asyncio.run(scene()) == [421, 421, 403, 403, 200, 200, 200]


async def status(server, method, path, **headers):
    async with server.session.request(method, path, headers=headers) as response:
        if response.status == 421:
            assert "--allowed-host" in (await response.json())["error"]["message"]
        return response.status


@pytest.mark.e2e
def test_an_embedded_engine_accepts_its_own_reset_and_no_other(tmp_path):
    with engine({"device": "toy", "shape": "nano"}, tmp_path) as served:
        ours = asyncio.run(quiesce(served.endpoint, drain_s=5, resets_cache=True))
        stranger = type(served.endpoint)(url=served.endpoint.url)
        theirs = asyncio.run(quiesce(stranger, drain_s=5, resets_cache=True))
    assert ours[-1].ok is True
    assert theirs[-1].ok is False
    assert "SLOBENCH_OPERATOR_TOKEN" in theirs[-1].detail
    assert "token" not in (tmp_path / "engine.log").read_text()


@pytest.mark.e2e
@pytest.mark.parametrize("words", [[], ["--operator=open"]])
def test_the_server_prints_its_token_unless_it_is_open(words):
    command = [sys.executable, "-m", "reference_engine", "--port=0", "--device=toy", "--shape=nano"]
    environ = {k: v for k, v in os.environ.items() if k != "SLOBENCH_OPERATOR_TOKEN"}
    process = subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("READY ")
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=30)
    found = re.search(r"operator token \(header x-operator-token\): (\S{32})\n", errors)
    assert bool(found) is not bool(words)
