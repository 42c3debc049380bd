"""`slobench serve --replicas`: processes on loopback, one of them killed, all of them ended."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import pytest

BODY = {"prompt": "abc", "max_tokens": 3, "temperature": 0}


@contextmanager
def replicas(n, *words, port=0):
    """The process of the verb, and its URLs."""
    line = [sys.executable, "-m", "loadgen", "serve", "--device", "toy", "--shape", "nano"]
    line += ["--replicas", str(n), "--port", str(port), *map(str, words)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None, "a pipe"
    try:
        yield process, [process.stdout.readline().split()[1] for _ in range(n)]
    finally:
        process.terminate()
        process.communicate()


def answer(url):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(BODY).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)["choices"][0]["text"]


def pid_lines(process, n):
    """The process ids of `replica-1: http://…, process 123`, in order."""
    found: list[int] = []
    while len(found) < n:
        if match := re.match(r"replica-\d+: .*, process (\d+)$", process.stderr.readline()):
            found.append(int(match[1]))
    return found


def has_ended(pid):
    """Waits for a process that is not a child of this process, at most 10 s."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([fd], [], [], 10)
    os.close(fd)
    return bool(ready)


def test_replicas_answer_alike_and_one_signal_ends_all(tmp_path):
    with replicas(2, "--log-dir", tmp_path) as (process, urls):
        pids = pid_lines(process, 2)
        assert len({*urls}) == 2
        assert answer(urls[0]) == answer(urls[1])
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert all(has_ended(pid) for pid in pids)
    logs = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/engine_steps.*"))
    assert logs == ["replica-1/engine_steps.parquet", "replica-2/engine_steps.parquet"]


def test_a_killed_replica_is_reported_and_the_others_go_on():
    with replicas(3) as (process, urls):
        pids = pid_lines(process, 3)
        os.kill(pids[1], signal.SIGKILL)
        line = process.stderr.readline()
        assert line == f"replica-2 ({urls[1]}): ended by SIGKILL; 2 of 3 replicas go on\n"
        assert answer(urls[0]) == answer(urls[2])
        with pytest.raises(OSError, match="refused"):
            answer(urls[1])
        process.terminate()
        assert process.wait(10) == 4


def test_replicas_end_with_a_parent_that_was_killed():
    with replicas(2) as (process, _):
        pids = pid_lines(process, 2)
        process.kill()
        process.wait()
        assert all(has_ended(pid) for pid in pids)


def run_once(*words):
    line = [sys.executable, "-m", "loadgen", "serve", "--device", "toy", "--shape", "nano", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout, done.stderr


def test_an_error_is_printed_once_and_nothing_serves():
    code, stdout, stderr = run_once("--replicas", "3", "--port", "0", "--max-model-len", "9999")
    assert (code, stdout) == (2, "")
    assert stderr.count("max_model_len: 9999 is above") == 1
    assert stderr.count("\n") == 1


def test_each_port_is_taken_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        code, _, stderr = run_once("--replicas", "2", "--port", str(port - 1))
    assert code == 2
    assert re.match(rf"port ({port - 1}|{port}) on 127.0.0.1 cannot be used", stderr)
    code, _, stderr = run_once("--replicas", "9", "--port", "65530")
    assert (code, stderr) == (2, "--port 65530: 9 replicas need the ports up to 65538\n")
