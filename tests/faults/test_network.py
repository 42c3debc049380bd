"""Faults of the network before and during a run: status, message, and an end within bounds."""

import ssl
import subprocess
import time

import pytest

from loadgen.archive.store import read_run
from loadgen.records import Status
from targets.embed import mock
from tests.faults.faulty_network import FaultyNetwork
from tests.faults.test_hangup import read_until, started

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(120)]
FLAGS = (
    "--rate=20/s", "--input-len=8", "--output-len=24", "--duration=3s",
    "--set=limits.timeout=2s", "--set=phases.drain=4s", "--out=run",
)  # fmt: skip
BEFORE = {
    ("http", "drop_syns"): "no connection within 2 s; is the host up, or a firewall between?",
    ("http", "half_open"): "GET /v1/models no answer within 2 s",
    ("http", "cut_tls"): "GET /v1/models the server disconnected",
    ("http", "cut_middle"): "POST /v1/chat/completions the connection was cut after 0 tokens",
    ("http", "reset_middle"): "POST /v1/chat/completions the connection was c",
    ("http", "stall_middle"): "POST /v1/chat/completions did not answer within 2 s",
    ("https", "drop_syns"): "no connection and TLS handshake within 2 s; is the host up",
    ("https", "half_open"): "no connection and TLS handshake within 2 s; is the host up",
    ("https", "cut_tls"): "the connection was closed in the TLS handshake (",
    ("https", "reset_middle"): "POST /v1/chat/completions the connection was c",
}
"""A reset may discard the bytes before it: cut after 0 tokens, or closed without an answer."""
DURING = {
    ("http", "drop_syns"): (
        "timeout",
        "no complete response within 2 s (limits.timeout) (while connecting)",
    ),
    ("http", "half_open"): ("timeout", "no complete response within 2 s (limits.timeout)"),
    ("http", "cut_middle"): ("stream_error", "connection closed in the middle of the response"),
    ("http", "reset_middle"): ("stream_error", "connection closed "),
    ("http", "stall_middle"): ("timeout", "no complete response within 2 s (limits.timeout)"),
    ("https", "half_open"): ("timeout", "no complete response within 2 s (limits.timeout)"),
    ("https", "cut_tls"): ("connect_error", "connect to 127.0.0.1:"),
    ("https", "reset_middle"): ("stream_error", "connection closed "),
}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out",
         "cert.pem", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder


@pytest.fixture
def network(tmp_path, certificate):
    """`network(scheme)`: a proxy to a mock server, and the target file for it."""

    def opened(scheme):
        tls = None
        if scheme == "https":
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
        proxy = FaultyNetwork(served.endpoint.address.port, tls=tls)
        trust = f"ca_cert: {certificate / 'cert.pem'}\n" if tls else ""
        url = f"url: {scheme}://127.0.0.1:{proxy.port}\n"
        (tmp_path / "t.yaml").write_text(f"{url}connections: never\n{trust}")
        return proxy

    with mock({"ttft": "20ms", "itl": "5ms"}, tmp_path / "mock") as served:
        yield opened


@pytest.mark.parametrize(("scheme", "fault"), BEFORE)
def test_a_fault_before_the_run_is_named_within_bounds(cli, tmp_path, network, scheme, fault):
    with network(scheme) as proxy:
        proxy.fault = fault
        begun_s = time.monotonic()
        ended = cli("run", *FLAGS, "--target=t.yaml", *cli.lenient, cwd=tmp_path)
        lasted_s = time.monotonic() - begun_s
    assert ended.returncode == 3, ended.stderr
    assert BEFORE[scheme, fault] in ended.stderr.splitlines()[-1]
    assert lasted_s < 10  # 2 s, and those of a busy machine
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("scheme", "fault"), DURING)
def test_a_fault_during_the_run_is_the_end_of_its_requests(cli, tmp_path, network, scheme, fault):
    with network(scheme) as proxy:
        words = ("run", *FLAGS, "--target=t.yaml", "--slo=ttft<=9s", *cli.lenient)
        with started(cli, *words, cwd=tmp_path) as process:
            read_until(process.stderr, "sending")
            proxy.fault, begun_s = fault, time.monotonic()
            _, stderr = process.communicate(timeout=60)
            lasted_s = time.monotonic() - begun_s
    run = read_run(tmp_path / "run")
    ends = [
        (Status(status).name, run.names.errors[error])
        for status, error in run.request_rows[["status", "error_id"]].tolist()
    ]
    failed = {end for end in ends if end[0] not in ("ok", "not_released")}
    status, reason = DURING[scheme, fault]
    assert failed
    assert {name for name, _ in failed} == {status}
    assert all(text.startswith(reason) for _, text in failed), failed
    assert "lost" not in {name for name, _ in ends}
    assert process.returncode in (1, 3), stderr
    assert lasted_s < 3 + 2 + 10  # the window, the timeout, and a busy machine
