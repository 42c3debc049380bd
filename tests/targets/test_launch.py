"""Launched servers: waited for, watched, reported with the last lines of their log, and ended."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import pytest

from loadgen.errors import TargetError, TargetFileError, UsageError
from targets.child import log_tail
from targets.endpoint import read_target
from targets.launch import launched
from targets.launch_plan import PRESETS, Launch
from tests.targets.processes import is_running
from tests.waits import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SERVER = """
    import http.server, os, signal, subprocess, sys, time

    class Answers(http.server.BaseHTTPRequestHandler):
        loading = 1
        def do_GET(self):
            status = 503 if self.path == "/health" and Answers.loading > 0 else 200
            Answers.loading -= 1
            if self.path == "/die":
                print("CUDA error: sk-secret")
                os._exit(9)
            self.send_response(status)
            self.end_headers()
        def log_message(self, *args):
            print("request", self.path, self.headers.get("authorization"), flush=True)

    def serve(port):
        http.server.HTTPServer(("127.0.0.1", int(port)), Answers).serve_forever()
"""


@pytest.fixture
def start(tmp_path):
    """`start(code, **launch)` launches the endpoint of a target file; `code` can use SERVER's
    names."""

    def begin(code, environ=None, lines="", waits=None, **launch):
        script = tmp_path / "server.py"
        script.write_text(textwrap.dedent(SERVER) + textwrap.dedent(code))
        block = {"command": [sys.executable, "-u", str(script), "{port}"], **launch}
        block.setdefault("ready", {"path": "/health", "timeout": "20s"})
        block.setdefault("stop", {"timeout": "5s"})
        text = f"{lines}\nlaunch: {json.dumps(block)}\n"
        everything = {**os.environ, **(environ or {})}
        endpoint = read_target(text, "t.yaml", everything, tmp_path)
        calls = [] if waits is None else waits
        return launched(endpoint, everything, tmp_path / "logs", lambda *wait: calls.append(wait))

    return begin


def logged_number(server, word):
    """The number after a word in a server's log, once the log has it."""
    assert wait_until(lambda: f"{word} " in server.log.read_text(), 10, f"no {word!r} in the log")
    return int(server.log.read_text().split(f"{word} ")[1].split()[0])


def test_a_server_is_waited_for_served_and_ended(start, tmp_path):
    waits: list[tuple[float, str]] = []
    with start("serve(sys.argv[1])", waits=waits) as server:
        assert server.ended() is None
        with urllib.request.urlopen(server.endpoint.url + "/x") as answer:
            assert answer.status == 200
        assert is_running(server.pid)
    assert not is_running(server.pid)
    assert waits, "the first answer was 503: it is loading"
    log = (tmp_path / "logs" / "server.log").read_text()
    assert "request /health" in log
    assert "request /x" in log
    assert "killed by SIGTERM" in server.ended()


def test_all_processes_that_a_server_started_end_with_it(start):
    """A child in the group, a child in a session of its own, and a child that forked twice."""
    code = """
        print("inner", subprocess.Popen(["sleep", "60"]).pid)
        print("stray", subprocess.Popen(["sleep", "60"], start_new_session=True).pid)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                print("orphan", os.getpid())
                time.sleep(60)
            os._exit(0)
        os.wait()
        serve(sys.argv[1])
    """
    with start(code) as server:
        pids = [logged_number(server, word) for word in ("inner", "stray", "orphan")]
        assert all(is_running(pid) for pid in pids)
    assert not [pid for pid in pids if is_running(pid)]


def test_a_command_that_hands_over_to_a_daemon_is_still_watched(start):
    code = """
        if os.fork():
            os._exit(0)
        os.setsid()
        print("daemon", os.getpid())
        serve(sys.argv[1])
    """
    with start(code) as server:
        daemon = logged_number(server, "daemon")
        assert server.ended() is None
        os.kill(daemon, signal.SIGKILL)
        assert wait_until(lambda: server.ended() is not None, 10, "the server did not end")
    assert not is_running(daemon)


def test_a_server_that_ignores_the_signal_is_killed(start):
    code = "signal.signal(signal.SIGINT, signal.SIG_IGN); serve(sys.argv[1])"
    with start(code, stop={"signal": "SIGINT", "timeout": "100ms"}) as server:
        pass
    assert "SIGKILL" in server.ended()


def test_a_server_that_dies_is_reported_with_its_last_line(start):
    environ = {"OPENAI_API_KEY": "sk-secret"}
    with start("serve(sys.argv[1])", environ) as server:
        with pytest.raises(http.client.RemoteDisconnected):
            urllib.request.urlopen(server.endpoint.url + "/die")
        assert wait_until(lambda: server.ended() is not None, 10, "the server did not end")
        assert server.ended() == (
            "the server under test ended with code 9; its last line: CUDA error: [redacted]"
        )


def test_an_error_in_the_block_ends_the_server(start):
    with pytest.raises(KeyboardInterrupt), start("serve(sys.argv[1])") as server:
        raise KeyboardInterrupt
    assert not is_running(server.pid)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("print('no such model'); sys.exit(3)", "ended with code 3 before it was ready"),
        ("raise ValueError('bad flag')", "ended with code 1 before it was ready"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL before it was ready"),
        ("print('loading'); time.sleep(60)", "was not ready after 300 ms (GET /health"),
        ("Answers.loading = 10**9; serve(sys.argv[1])", "(GET /health 503)"),
    ],
)
def test_a_server_that_is_never_ready_is_reported_with_its_last_lines(start, tmp_path, code, why):
    is_slow = "ended" not in why and "killed" not in why
    timeout = "3s" if "503" in why else "300ms" if is_slow else "20s"  # 503 needs a started server
    ready = {"path": "/health", "timeout": timeout}
    with pytest.raises(TargetError) as caught, start(code, ready=ready):
        pytest.fail("it was called ready")
    assert why in str(caught.value)
    if is_slow:  # what it writes while it is being stopped is in the log alone
        return
    shown = log_tail(tmp_path / "logs" / "server.log")
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        line.strip() for line in shown or ["(it wrote nothing)"]
    ]


def test_a_missing_program_is_a_usage_error(start):
    with pytest.raises(UsageError, match="cannot start 'nosuchserver") as caught:
        start("", command="nosuchserver --port {port}").__enter__()
    assert caught.value.exit_code == 2


def test_a_taken_port_is_rejected_before_another_server_answers(start):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"launch.port: {port} on 127.0.0.1 is taken"):
            start("serve(sys.argv[1])", port=port).__enter__()


def test_secrets_reach_only_the_server(start):
    code = """
        print("got", os.environ["HF_TOKEN"], sys.argv[2])
        serve(sys.argv[1])
    """
    environ = {"MY_TOKEN": "hf-very-secret", "SRV_KEY": "sk-very-secret"}
    with start(
        code, environ, "api_key_env: SRV_KEY", env={"HF_TOKEN": "${MY_TOKEN}"},
        args=["--api-key=${SRV_KEY}", "--hf-token", "written-very-secret"],
    ) as server:  # fmt: skip
        log = server.log.read_text()
        assert "got hf-very-secret --api-key=sk-very-secret" in log
        assert "Bearer sk-very-secret" in log, "the readiness request carries the key"
        assert "very-secret" not in repr(server)
        assert "very-secret" not in json.dumps(server.endpoint.to_manifest().to_json())
        assert "\"--api-key=${SRV_KEY}\" --hf-token '[redacted]'" in server.command
        assert not [line for line in log_tail(server.log, server._secrets) if "very-secret" in line]
        ours = Path(f"/proc/{server._supervisor._process.pid}/cmdline").read_text()
    assert "very-secret" not in ours


PARENT = """
import json, os, sys, time
from pathlib import Path
from targets.endpoint import read_target
from targets.launch import launched
endpoint = read_target(sys.argv[1], "t.yaml", dict(os.environ))
with launched(endpoint, dict(os.environ), Path(sys.argv[2]), lambda *w: None) as server:
    print(server.pid, flush=True)
    time.sleep(60)
"""


def test_a_server_ends_when_slobench_is_killed_outright(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(SERVER) + "\nserve(sys.argv[1])\n")
    launch = {"command": [sys.executable, str(script), "{port}"], "ready": "/health"}
    text = f"launch: {json.dumps(launch)}"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, text, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    assert wait_until(lambda: not is_running(pid), 10, "the server did not end")


@pytest.mark.parametrize(
    ("launch", "line"),
    [
        (
            {"preset": "vllm", "model": "m/7b", "args": "--max-model-len 4096"},
            "vllm serve m/7b --host 127.0.0.1 --port 7 --max-model-len 4096",
        ),
        (
            {"preset": "sglang", "model": "m", "args": ["--tp", 2]},
            "py -m sglang.launch_server --model-path m --host 127.0.0.1 --port 7"
            " --enable-metrics --tp 2",
        ),
        (
            {"preset": "llama_cpp", "model": "a b.gguf", "host": "0.0.0.0"},
            "llama-server -m 'a b.gguf' --host 0.0.0.0 --port 7 --metrics",
        ),
        (
            {"preset": "llama_cpp", "args": "-hf org/model"},
            "llama-server --host 127.0.0.1 --port 7 --metrics -hf org/model",
        ),
        (
            {"preset": "transformers", "model": "m"},
            "transformers serve m --host 127.0.0.1 --port 7",
        ),
        (
            {"preset": "reference", "model": "nano", "python": "/opt/py"},
            "/opt/py -P -u -m reference_engine --shape nano --host 127.0.0.1 --port 7",
        ),
        (
            {"preset": "vllm", "command": "docker run -p {port}:80 img '{\"a\": 1}'"},
            "docker run -p 7:80 img '{\"a\": 1}'",
        ),
    ],
)
def test_presets_start_the_commands_of_their_projects(launch, line):
    assert Launch.model_validate(launch).plan(7, "py", {}).shown == line


def test_each_preset_has_the_readiness_path_of_its_project():
    paths = {name: Launch(preset=name, model="m").plan(7, "py", {}).ready_path for name in PRESETS}
    assert paths.pop("reference") == "/ready", "its /health is 200 while the model loads"
    assert set(paths.values()) == {"/health"}
    bare = Launch(command=("serve", "{port}"))
    assert bare.plan(7, "py", {}).ready_path == "/v1/models"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("launch: {}", "t.yaml:1: launch: name a preset (vllm, sglang"),
        ("launch: {preset: vlm}", "t.yaml:1: launch.preset: unknown preset 'vlm'; did you mean"),
        ("launch: {preset: vllm}", "t.yaml:1: launch: preset vllm needs the model to load"),
        ("launch: {command: 'a {prot}'}", "t.yaml:1: launch: unknown placeholder {prot}; did you"),
        ("launch: {command: a}", "t.yaml:1: launch: the server does not receive its port"),
        ("launch: {comand: a}", "t.yaml:1: launch.comand: unknown key 'comand'; did you mean"),
        ("launch: {command: a, port: 1, ready: {pth: /}}", "t.yaml:1: launch.ready.pth: unknown"),
        ("launch: {command: a, port: 1, ready: {timeout: 3}}", "t.yaml:1: launch.ready.timeout: a"),
        ("launch: {command: a, port: 1, stop: {signal: KILL}}", "t.yaml:1: launch.stop.signal: no"),
        ("launch: {command: a, port: 1, cwd: nowhere}", "t.yaml:1: launch.cwd: no such directory"),
        ("url: http://h\nlaunch: {command: a, port: 1}", "t.yaml:1: url: a launched server's URL"),
        (
            "launch: {command: 'a {port} --api-key sk-1'}",
            "t.yaml:1: launch: a file holds no key: export",
        ),
    ],
)
def test_a_mistake_in_launch_is_one_line_with_its_key(text, line):
    with pytest.raises(TargetFileError) as caught:
        read_target(text, "t.yaml", {})
    assert str(caught.value).startswith(line)
    assert "sk-1" not in str(caught.value)


def test_a_variable_that_is_not_set_is_named():
    launch = Launch(command=("a", "{port}"), env={"A": "x${NOPE}"})
    with pytest.raises(TargetFileError, match="environment variable NOPE is not set"):
        launch.plan(1, "py", {})


def test_a_server_that_listens_on_all_addresses_is_reached_on_loopback():
    assert Launch(command=("x", "{port}"), host="0.0.0.0").connect_host == "127.0.0.1"
    assert Launch(command=("x", "{port}"), host="10.0.0.7").connect_host == "10.0.0.7"
