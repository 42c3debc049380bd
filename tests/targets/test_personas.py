"""The personas of the mock server: each passes the preflight, and what is measured of it is what
its own log says."""

from __future__ import annotations

import asyncio
import socket
import uuid
from typing import Any
from urllib.parse import urlsplit

import pandas as pd
import pytest

from loadgen.archive.decode import decode
from loadgen.drive.live_sample import LiveSamples
from loadgen.drive.payloads import HttpHead
from loadgen.records import FinishReason, Status, TokenSource
from targets.base import Request
from targets.embed import mock
from targets.endpoint import read_target
from targets.mock_personas import PERSONAS
from targets.mock_script import Script, apply_options
from targets.preflight import preflight
from tests.drive.test_transports import make, send_all
from tests.runs import schedule_rows

TOKENS = 12
N = 2  # requests of each
FINISH = FinishReason.length


async def measure(url, name, number):
    """The preflight of a persona, and its decoded answers."""
    endpoint = read_target(f"url: {url}\nheaders: {{x-mock: persona={name}}}\n", "t.yaml", {})
    found = await preflight(
        endpoint,
        endpoint.adapter(),
        max_input_tokens=40,
        max_output_tokens=TOKENS,
        text_of=lambda n_chars: ("words of a prompt " * 200)[:n_chars],
        temperature=0.5,
    )
    adapter, loop = found.or_raise().adapter, asyncio.get_running_loop()
    http = adapter.encode(Request("a prompt", TOKENS, temperature=0.5))
    head = HttpHead(endpoint.address.host_header, "", endpoint.request_headers())
    decoded = []
    for seq in range(N * number, N * (number + 1)):
        own = (*http.headers, ("x-seq", str(seq)), ("x-request-id", str(uuid.uuid4())))
        text = head.template(http.method, http.path, own)
        payload = text.format_map({"content-length": len(http.body)}).encode() + http.body
        client = make("fast", loop, endpoint.route, looks_like_token=adapter.looks_like_token)
        (exchange,) = await send_all(client, payload, 1)
        assert exchange.first_guess_ns, name  # else the live view and the stop rules see no token
        answer = decode(exchange, adapter)
        decoded.append((seq, answer))
        samples = LiveSamples(schedule_rows([0.0] * (exchange.row + 1)), adapter)
        samples.ended(exchange, Status.ok, exchange.sent_ns)
        (sample,) = samples.take()["ended"]
        if adapter.stream:
            ttfat_s = 1e-9 * (answer.first_answer_ns - exchange.sent_ns)
            assert sample.ttfat_s == pytest.approx(ttfat_s, abs=1e-6), name
    return found, decoded


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Name → (preflight, [(log row, decoded answer)])."""
    folder = tmp_path_factory.mktemp("personas")
    log, found = folder / "truth.csv", {}
    with mock({"ttft": "5ms", "itl": "1ms", "role": "early"}, folder, truth=log) as served:
        for number, name in enumerate(PERSONAS):
            found[name] = asyncio.run(measure(served.endpoint.url, name, number))
    rows: Any = pd.read_csv(log).query("seq >= 0").set_index("seq")
    return {
        name: (result, [(rows.loc[seq], answer) for seq, answer in decoded])
        for name, (result, decoded) in found.items()
    }


@pytest.mark.parametrize("name", PERSONAS)
def test_a_persona_is_measured_as_its_log_says(measured, name):
    result, answers = measured[name]
    wire, coalesce = PERSONAS[name].wire, int(PERSONAS[name].options.get("coalesce", 1))
    states_usage = wire.usage != "never" and (result.adapter.include_usage or wire.usage_always)
    assert len(answers) == N
    for row, answer in answers:
        assert (answer.status, answer.error) == (Status.ok, "")
        assert answer.output_tokens == row["sent_tokens"] == TOKENS
        source = TokenSource.usage if states_usage else TokenSource.chunks
        assert answer.token_source is source
        assert answer.finish_reason is (FinishReason.stop if wire.finish_word else FINISH)
        counted = answer.first_chunk_tokens or answer.chunk_tokens[0] or 1
        assert counted == coalesce
        assert len(answer.chunk_ns) == -(-TOKENS // coalesce)
        for seen_ns, written_ns in (
            (answer.first_token_ns, row["first_ns"]),
            (answer.last_token_ns, row["last_ns"]),
        ):
            # The token, not the role or a comment, which came 5 ms before; a busy machine is late.
            assert 0 <= seen_ns - written_ns < 10e9


@pytest.mark.parametrize("name", PERSONAS)
def test_the_preflight_finds_no_fault_but_those_of_the_persona(measured, name):
    result, _ = measured[name]
    wire, options = PERSONAS[name].wire, PERSONAS[name].options
    faults = {check.check for check in result.checks if check.ok is False}
    expected = {"usage"} if wire.usage == "never" else set()
    if "temperature" in options.get("reject", ""):
        expected |= {"fields"}
    assert faults == expected
    assert result.adapter.ignore_eos == ("ignore_eos" not in options.get("reject", ""))


def test_there_are_many_and_each_has_a_source():
    assert len(PERSONAS) >= 50
    assert all(len(persona.source) > 10 for persona in PERSONAS.values())
    forms = {repr((persona.wire, persona.options)) for persona in PERSONAS.values()}
    assert len(forms) > 50


def test_later_options_change_those_of_a_persona():
    script = apply_options(Script(), [("persona", "vllm-stream-interval"), ("coalesce", "2")])
    assert (script.persona, script.coalesce) == ("vllm-stream-interval", 2)


def test_a_persona_of_http_1_0_ends_its_body_with_the_connection(tmp_path):
    with mock({"persona": "mlx-lm", "model": "m"}, tmp_path) as served:
        address = urlsplit(served.endpoint.url)
        with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
            body = b'{"model":"m","stream":true,"max_tokens":2,"messages":[]}'
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n"
            connection.sendall(head % len(body) + body)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(
        b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n: keepalive"
    )
    assert answer.endswith(b"data: [DONE]\n\n")
