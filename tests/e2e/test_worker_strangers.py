"""Strangers at the master's port: malformed frames, workers without the secret, recorded frames."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from threading import Thread

import msgpack  # type: ignore[import-untyped]  # has no types
import pytest
import zmq

from tests.e2e.test_distributed import MOCK, free_port, started
from tests.waits import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(240)]
SECRET = "correct horse battery staple"
MALFORMED = [
    b"hello",
    b"",
    b"\xc1",
    msgpack.dumps(5),
    msgpack.dumps(["client_ready"]),
    msgpack.dumps([["client_ready"], None, "stranger"]),
    msgpack.dumps(["heartbeat", None, "stranger"]),
    msgpack.dumps(["stats", 7, "stranger"]),
    msgpack.dumps(["client_ready", 7, "stranger"]),
    msgpack.dumps(["quit", None, "another worker"]),
    msgpack.dumps({"__ObjectId__": True, "as_str": "x"}),
    b"\xdd\xff\xff\xff\xff",
    b"\x91" * 5000,
]


@contextmanager
def stranger(port):
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.IDENTITY, b"stranger")
    peer.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield peer
    finally:
        context.destroy(linger=0)


@contextmanager
def master(cli, port, where, *words, environ=None):
    with started(
        cli, "web", "--headless", "--expect-workers=1", f"--master-port={port}", *MOCK,
        "--scenario=quickstart", "--rate=20/s", "--duration=3s", "--warmup=0s",
        "--slo=ttft<=60s", *cli.lenient, "--out=run", *words,
        cwd=where, environ=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        lines: list[str] = []
        reading = Thread(target=lambda: lines.extend(process.stderr), daemon=True)
        reading.start()
        wait_until(lambda: any("waiting for 1 workers" in line for line in lines), 120, "no master")
        yield process, lines
        process.wait(120)
        reading.join(10)


def join(cli, stack, port, where, *words, environ=None, **streams):
    return stack.enter_context(
        started(
            cli, "worker", "--master=127.0.0.1", f"--port={port}", *words,
            cwd=where, environ=environ, **streams,
        )
    )  # fmt: skip


def test_malformed_frames_of_a_peer_do_not_end_a_run(cli, tmp_path):
    port = free_port()
    with ExitStack() as stack:
        process, lines = stack.enter_context(master(cli, port, tmp_path))
        peer = stack.enter_context(stranger(port))
        for frame in MALFORMED:
            peer.send(frame)
        peer.send_multipart([b"two", b"frames"])
        peer.send_multipart([b"", *[b"x"] * 10])
        wait_until(lambda: any("refused" in line for line in lines), 30, "no refusal")
        assert process.poll() is None
        join(cli, stack, port, tmp_path)
        process.wait(120)
        assert process.returncode == 0, "".join(lines)
    assert "Traceback" not in "".join(lines)


def test_a_frame_above_the_limit_is_refused_before_memory_is_taken(cli, tmp_path):
    port = free_port()
    with ExitStack() as stack:
        process, lines = stack.enter_context(master(cli, port, tmp_path))
        peer = stack.enter_context(stranger(port))
        before = peak_bytes(process.pid)
        for _ in range(4):
            peer.send(b"\0" * (64 << 20))
        join(cli, stack, port, tmp_path)
        process_peak = before
        while process.poll() is None:
            process_peak = max(process_peak, peak_bytes(process.pid) or 0)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        assert process.returncode == 0, "".join(lines)
    assert process_peak < before + (60 << 20)


def test_a_worker_needs_the_secret_of_its_master(cli, tmp_path):
    """Without it or with another the worker ends with a message; the run goes on with the right
    worker."""
    port = free_port()
    ours = {"OURS": SECRET}
    named = ["--worker-secret-env=OURS"]
    caught = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with ExitStack() as stack:
        process, lines = stack.enter_context(master(cli, port, tmp_path, *named, environ=ours))
        without = join(cli, stack, port, tmp_path, **caught)
        other = join(cli, stack, port, tmp_path, *named, environ={"OURS": SECRET + "!"}, **caught)
        assert "the master requires the worker secret" in without.communicate(timeout=60)[1]
        assert "the master has another worker secret" in other.communicate(timeout=60)[1]
        assert (without.returncode, other.returncode) == (2, 2)
        assert process.poll() is None
        join(cli, stack, port, tmp_path, *named, environ=ours)
        process.wait(120)
        assert process.returncode == 0, "".join(lines)
    told = "".join(lines)
    # Refusals within ten seconds share a line, which has the reason of the first.
    assert "a peer has no worker secret" in told or "a peer has another worker secret" in told
    assert SECRET not in told
    assert not any(
        SECRET.encode() in path.read_bytes()
        for path in (tmp_path / "run").rglob("*")
        if path.is_file()
    )


def test_a_worker_with_a_secret_ends_at_a_master_without(cli, tmp_path):
    port = free_port()
    with ExitStack() as stack:
        process, lines = stack.enter_context(master(cli, port, tmp_path))
        other = join(
            cli, stack, port, tmp_path, "--worker-secret-env=OURS", environ={"OURS": SECRET},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert "the master has no worker secret" in other.communicate(timeout=60)[1]
        assert other.returncode == 2
        assert process.poll() is None
        process.terminate()
        process.wait(60)
    assert "this master has none" in "".join(lines)


@pytest.mark.parametrize("value", [None, "", "short"])
def test_a_secret_that_is_missing_or_short_is_a_usage_error(cli, tmp_path, value):
    environ = dict(cli.environ) | ({} if value is None else {"OURS": value})
    for words in (["worker", "--master=127.0.0.1"], ["web", "--headless", "--expect-workers=1",
                  "--scenario=quickstart", "--target=mock"]):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "loadgen", *words, "--worker-secret-env=OURS"],
            cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert "--worker-secret-env: the environment variable OURS" in done.stderr


def peak_bytes(pid):
    """The largest resident size of a process so far; None after its end."""
    try:
        with open(f"/proc/{pid}/status") as status:
            peaks = [int(line.split()[1]) for line in status if line.startswith("VmHWM")]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return 1024 * peaks[0] if peaks else None
