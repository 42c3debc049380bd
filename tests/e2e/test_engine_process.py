"""The engine's server as a process: READY, exit codes, signals, HTTP workers, one-line errors."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e
JSON = {"Content-Type": "application/json"}
ENGINE = [sys.executable, "-m", "reference_engine"]
HTTP_WORKERS = pytest.mark.parametrize("workers", ["0", "2"])


def start(*flags: str) -> tuple[subprocess.Popen[str], int]:
    """A server process that is ready, and its port."""
    process = subprocess.Popen(
        [*ENGINE, "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("READY http://127.0.0.1:"), line + process.communicate()[1]
    return process, int(line.rsplit(":", 1)[1])


def complete(port: int, client_id: str | None = "run-1", **body: object) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    text = json.dumps({"prompt": "abc", "max_tokens": 5, **body})
    headers = JSON if client_id is None else {**JSON, "x-request-id": client_id}
    connection.request("POST", "/v1/completions", text, headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, "0"), (signal.SIGTERM, "2")])
def test_a_server_answers_and_leaves_with_zero_on_a_signal(number, workers):
    process, port = start("--device", "toy", "--http-workers", workers)
    assert complete(port)["usage"]["completion_tokens"] == 5
    busy = subprocess.run(
        [*ENGINE, "--device", "toy", "--port", str(port)], capture_output=True, text=True
    )
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "request run-1 ok: 3 prompt tokens" in errors
    assert "Traceback" not in errors
    assert busy.returncode == 2
    assert busy.stdout == ""
    assert busy.stderr.count("\n") == 1
    assert f"port {port}" in busy.stderr


def children(process: subprocess.Popen[str]) -> list[int]:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


def begun(port: int, max_tokens: int = 4000) -> http.client.HTTPResponse:
    """A long answer whose first byte has arrived."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    text = json.dumps({"prompt": "a", "max_tokens": max_tokens, "stream": True})
    connection.request("POST", "/v1/completions", text, {**JSON, "Connection": "close"})
    response = connection.getresponse()
    assert response.read(1) == b"d"
    return response


def rest(answer: http.client.HTTPResponse) -> bytes:
    """The rest of a body, complete or cut off."""
    with answer:
        try:
            return answer.read()
        except http.client.IncompleteRead as error:
            return error.partial
        except ConnectionResetError:
            return b""


def test_answers_of_http_workers_carry_the_engines_ids_and_the_server_ends_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    flags = ("--device", "toy", "--http-workers", "2", "--parent-pid", str(parent.pid))
    process, port = start(*flags)
    ids = [complete(port, client_id=None)["id"] for _ in range(20)]
    assert ids == [f"cmpl-req-{n}" for n in range(1, 21)]
    assert complete(port, client_id="mine")["id"] == "cmpl-mine"
    end_with_its_parent(process, parent)


def end_with_its_parent(process: subprocess.Popen[str], parent: subprocess.Popen[bytes]) -> str:
    """Kill the parent; what the server wrote to stderr until its exit with 0."""
    parent.kill()
    _, errors = process.communicate(timeout=20)
    parent.communicate()
    assert process.returncode == 0
    return errors


def test_a_server_without_http_workers_reads_its_key_and_ends_with_its_parent(monkeypatch):
    monkeypatch.setenv("ENGINE_TEST_KEY", "secret")
    parent = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    flags = ("--api-key-env", "ENGINE_TEST_KEY", "--parent-pid", str(parent.pid))
    process, port = start("--device", "toy", *flags)
    assert complete(port)["error"]["code"] == "invalid_api_key"
    assert "secret" not in end_with_its_parent(process, parent)


@HTTP_WORKERS
def test_a_second_signal_ends_the_draining_with_an_error_in_the_stream(workers):
    process, port = start(
        "--device", "toy", "--set", "step_s=0.02", "--http-workers", workers, "--operator", "open"
    )  # fmt: skip
    answer = begun(port)
    process.terminate()
    assert process.stderr is not None
    assert "draining" in process.stderr.readline()
    process.terminate()
    assert b"the server is shutting down" in rest(answer)
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_signals_to_every_process_of_a_server_let_its_answers_end():
    process, port = start("--device", "toy", "--set", "step_s=0.02", "--http-workers", "2")
    answers = [begun(port, max_tokens=60) for _ in range(4)]
    first, second = children(process)
    for pid, number in (
        (first, signal.SIGINT), (second, signal.SIGTERM), (process.pid, signal.SIGINT)
    ):  # fmt: skip
        os.kill(pid, number)
    assert [rest(answer).endswith(b"[DONE]\n\n") for answer in answers] == [True] * 4
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("patience_s", "code", "words"),
    [(30, 0, "does not end; killed"), (0.1, 4, "an HTTP worker did not start within 0.1 s")],
)
def test_an_http_worker_that_hangs_before_it_begins_does_not_keep_the_server(
    patience_s, code, words
):
    program = (
        "from reference_engine.serving.http_workers import processes\n"
        f"processes._OPEN_S = {patience_s}\n"
        "import os, signal, sys; from reference_engine import serve; build = serve.build\n"
        "def stopped(options):\n"
        "    worker = open(f'/proc/self/task/{os.getpid()}/children').read().split()[0]\n"
        "    os.kill(int(worker), signal.SIGSTOP)\n"
        "    return build(options)\n"
        "serve.build = stopped; start = serve.Service.start\n"
        "serve.Service.start = lambda self: (start(self), print('opening', flush=True))[0]\n"
        "sys.exit(serve.run(serve.ServeOptions(port=0, device='toy', http_workers=1)))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "opening\n"
        if code == 0:
            process.terminate()
        _, errors = process.communicate(timeout=20)
    finally:
        for pid in children(process) if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        process.kill()
    assert process.returncode == code
    assert words in errors


def test_a_server_freezes_its_objects_accepts_a_long_tmpdir_and_imports_nothing_from_the_cwd(
    tmp_path,
):
    """A full garbage collection in a serving process would stop every stream for as long as it
    takes."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    (tmp_path / "tempfile.py").write_text("raise SystemExit('shadowed')")
    program = (
        "import gc, sys; from reference_engine.__main__ import main; sys.argv[0] = 'engine'\n"
        "try: main()\n"
        "finally: print('frozen', gc.get_freeze_count())"
    )
    flags = ["--port", "0", "--device", "toy", "--http-workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program, *flags], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(long)},
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("READY"), line + process.communicate()[1]
    n_workers = len(children(process))
    completion_id = complete(int(line.rsplit(":", 1)[1]))["id"]
    process.terminate()
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert int(output.split()[-1]) > 10_000
    assert n_workers == 1
    assert completion_id == "cmpl-run-1"


def test_a_dead_http_worker_ends_the_server_with_a_message():
    process, port = start("--device", "toy", "--set", "step_s=0.02", "--http-workers", "2")
    answers = [begun(port) for _ in range(6)]
    first, second = children(process)
    os.kill(first, signal.SIGKILL)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 4
    assert f"HTTP worker {first} ended (signal 9)" in errors.splitlines()[-1]
    assert not Path(f"/proc/{second}").exists()
    for answer in answers:  # ended by the other HTTP worker, or cut off with this worker
        assert not rest(answer).endswith(b"[DONE]\n\n")


def test_a_dead_engine_ends_every_stream_with_an_error_and_its_http_workers_end(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        process, port = start("--device", "toy", "--set", "step_s=0.02", "--http-workers", "2")
        assert len(list(Path(directory).glob("*/engine.sock"))) == 1
        answer = begun(port)
        process.kill()
        assert b"the engine's process has ended" in rest(answer)
        _, errors = process.communicate(timeout=20)  # after the workers have closed it, too
        assert errors.count("the engine's process is gone") == 2
        assert list(Path(directory).iterdir()) == []


def test_a_signal_while_the_model_is_loading_ends_the_http_workers_too():
    program = (
        "import sys, time; from reference_engine import serve\n"
        "serve.build = lambda options: (print('loading', flush=True), time.sleep(60))\n"
        "sys.exit(serve.run(serve.ServeOptions(port=0, http_workers=1)))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.terminate()
    _, errors = process.communicate(timeout=20)  # the pipe of errors is the HTTP worker's, too
    assert (process.returncode, errors) == (0, "")


def test_without_torch_a_line_names_the_package_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from reference_engine.__main__ import main; sys.exit(main(['--port', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'slobench[engine]'" in done.stderr
