"""Replicas of the bundled engine behind a router that is installed on this machine: LiteLLM,
vLLM's router or HAProxy, each started for the length of a block."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_READY_S = 120.0
_END_S = 15.0
KEY = "SLOBENCH_ROUTER_KEY"  # the variable with LiteLLM's key, drawn at random
COSTS = """\
name: known
model: tiny
kv_tokens: 65536
source: made up
costs: {step: 20ms, sequence: 3ms, prefill_sequence: 1ms, token: 50us, context_token: 1us}
"""


@dataclass(frozen=True)
class Router:
    """An existing router with a policy. `simulated` is the `--router` of `slobench simulate` that
    selects replicas in the same way. `command` has the words that start it on `port` for backends
    `urls`; it may write files to a directory."""

    name: str
    program: str
    simulated: str
    command: Callable[[Path, int, Sequence[str]], list[str]]


def _litellm(policy: str) -> Callable[[Path, int, Sequence[str]], list[str]]:
    def command(directory: Path, port: int, urls: Sequence[str]) -> list[str]:
        models = [
            {
                "model_name": "tiny",
                "litellm_params": {
                    "model": "openai/tiny",
                    "api_base": f"{url}/v1",
                    "api_key": "none",
                },
            }
            for url in urls
        ]
        config = {
            "model_list": models,
            "router_settings": {"routing_strategy": policy, "num_retries": 0},
            "general_settings": {"master_key": f"os.environ/{KEY}"},
        }
        path = directory / "litellm.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        return ["--config", str(path), "--host", "127.0.0.1", "--port", str(port)]

    return command


def _vllm(policy: str) -> Callable[[Path, int, Sequence[str]], list[str]]:
    def command(directory: Path, port: int, urls: Sequence[str]) -> list[str]:
        words = ["--policy", policy, "--port", str(port), "--prometheus-port", str(free_port())]
        return [*words, "--worker-urls", *urls]

    return command


def _haproxy(balance: str) -> Callable[[Path, int, Sequence[str]], list[str]]:
    def command(directory: Path, port: int, urls: Sequence[str]) -> list[str]:
        servers = [
            f"  server r{number} {url.removeprefix('http://')}"
            for number, url in enumerate(urls, start=1)
        ]
        lines = [
            "defaults",
            "  mode http",
            "  option http-no-delay",  # else the first tokens wait for up to 200 ms
            "  timeout connect 5s",
            "  timeout client 10m",
            "  timeout server 10m",
            "frontend http",
            f"  bind 127.0.0.1:{port}",
            "  default_backend replicas",
            "backend replicas",
            f"  balance {balance}",
            *servers,
        ]
        path = directory / "haproxy.cfg"
        path.write_text("\n".join(lines) + "\n")
        return ["-db", "-f", str(path)]

    return command


ROUTERS: Mapping[str, Router] = {
    router.name: router
    for router in (
        Router("litellm simple-shuffle", "litellm", "random", _litellm("simple-shuffle")),
        Router("litellm least-busy", "litellm", "join_shortest_queue", _litellm("least-busy")),
        Router("vllm-router random", "vllm-router", "random", _vllm("random")),
        Router("vllm-router round_robin", "vllm-router", "round_robin", _vllm("round_robin")),
        Router("vllm-router power_of_two", "vllm-router", "power_of_two", _vllm("power_of_two")),
        Router("haproxy random(1)", "haproxy", "random", _haproxy("random(1)")),
        Router("haproxy roundrobin", "haproxy", "round_robin", _haproxy("roundrobin")),
        Router("haproxy leastconn", "haproxy", "join_shortest_queue", _haproxy("leastconn")),
    )
}


def installed(programs: Mapping[str, Path]) -> dict[str, Path]:
    """The routers' programs by name: those of `programs`, else those on the PATH."""
    names = dict.fromkeys(router.program for router in ROUTERS.values())
    located = {name: programs.get(name) or shutil.which(name) for name in names}
    return {name: Path(path) for name, path in located.items() if path}


@contextmanager
def replicas(
    n: int, hardware: Path, directory: Path, knobs: Sequence[str] = ()
) -> Iterator[list[str]]:
    """`n` servers of the shape `tiny`, simulated in real time with the costs of a file; their
    URLs. Their step logs are in `directory` after the block."""
    words = ["serve", "--replicas", str(n), "--device", "sim", "--shape", "tiny", "--port", "0"]
    words += ["--set", f"hardware={hardware}", "--log-dir", str(directory)]
    words += [part for knob in knobs for part in ("--set", knob)]
    command = [sys.executable, "-m", "loadgen", *words]
    with _program(command, directory / "serve.log", subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().decode() for _ in range(n)]
        if not all(line.startswith("READY ") for line in lines):
            raise RuntimeError(f"the replicas did not start; see {directory / 'serve.log'}")
        yield [line.split()[1] for line in lines]


@contextmanager
def in_front(
    router: Router, program: Path, urls: Sequence[str], directory: Path
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """A router in front of servers: its URL, and the environment that a client needs."""
    port = free_port()
    environ = {KEY: f"sk-{secrets.token_urlsafe(24)}"}
    command = [str(program), *router.command(directory, port, urls)]
    with _program(command, directory / "router.log", environ=environ) as process:
        _wait_listening(process, port, directory / "router.log")
        yield f"http://127.0.0.1:{port}", environ


def measured_on(runs: Sequence[Path]) -> dict[str, str]:
    """The start (UTC) of the first and the last of some recorded runs."""
    starts = sorted(
        json.loads((run / "manifest.json").read_text())["started_utc"][:19] for run in runs
    )
    return {"first_run_utc": starts[0], "last_run_utc": starts[-1]} if starts else {}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def _program(
    command: Sequence[str],
    log: Path,
    stdout: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdout=stdout if stdout is not None else sink,
            stderr=sink,
            env={**os.environ, **(environ or {})},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _wait_listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end_s = time.monotonic() + _READY_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise RuntimeError(f"the router ended with code {process.returncode}; see {log}")
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the router does not listen after {_READY_S:g} s; see {log}")
