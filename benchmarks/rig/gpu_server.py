"""The engine behind HTTP in its own process, and modes compared on it under one schedule."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rig.gpu_ceilings import Place

CLIENT = Path(__file__).parent / "gpu_client.py"
CLIENTS = 8
_LEAD_S = 0.5
MODES = ("static", "continuous", "prefill_first", "chunked")
Scheduled = tuple[float, int, int]  # send time, prompt tokens, output tokens
Timing = list[float]  # scheduled, sent, first token, last token (s), tokens
Clients = Sequence[subprocess.Popen[str]]


@contextmanager
def server(shape: str, place: Place, log_dir: Path, max_num_seqs: int = 256) -> Iterator[str]:
    """Start an engine, yield its URL, stop it."""
    knobs = ["async_depth=1", f"max_num_seqs={max_num_seqs}", f"on={place.device}"]
    if not place.is_gpu:
        knobs += ["kernels=plain", "dtype=float32", "kv_blocks=2048"]
    command = [
        *(sys.executable, "-m", "reference_engine", "--device", "cuda", "--shape", shape),
        *("--port", "0", "--log-dir", str(log_dir), "--max-model-len", "4096"),
        *("--no-prefix-cache", "--operator", "open"),
        *(word for knob in knobs for word in ("--set", knob)),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("READY "):
            raise RuntimeError(f"the server did not start: exit code {process.wait()}")
        yield line.split()[1]
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@contextmanager
def clients(n: int = CLIENTS) -> Iterator[Clients]:
    """Start `n` client processes, which then serve any number of `send_requests`; end them."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(CLIENT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(n)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # `ready`: its imports are done
        yield processes
    finally:
        for process in processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.kill()
            process.wait()
            process.stdout.close()
            with suppress(BrokenPipeError):  # a plan that a failed client did not read
                process.stdin.close()


def send_requests(clients: Clients, url: str, requests: Sequence[Scheduled]) -> list[Timing]:
    """Send requests from the client processes, dealt out in turn; the timing of each, client by
    client. Raises RuntimeError if a client fails."""
    model = json.load(urllib.request.urlopen(url + "/v1/models"))["data"][0]["id"]
    epoch_s = time.monotonic() + _LEAD_S
    for k, client in enumerate(clients):
        assert client.stdin is not None
        plan = {
            "url": url,
            "model": model,
            "epoch_s": epoch_s,
            "requests": list(requests[k :: len(clients)]),
        }
        client.stdin.write(json.dumps(plan) + "\n")
        client.stdin.flush()
    out: list[Timing] = []
    for client in clients:
        assert client.stdout is not None
        line = client.stdout.readline()
        if not line:
            raise RuntimeError(f"a client failed with exit code {client.wait()}")
        out += json.loads(line)
    return out


def tokens_per_s(timings: Sequence[Timing]) -> float:
    """All tokens over the time from the first scheduled send to the last token."""
    return sum(t[4] for t in timings) / (max(t[3] for t in timings) - min(t[0] for t in timings))


class Mix(NamedTuple):
    """Lengths in tokens: nine tenths of the prompts are uniform in `short`, the others have
    `longest`; outputs are uniform in `outputs`. Both ranges contain their ends."""

    short: tuple[int, int] = (50, 349)
    longest: int = 3500
    outputs: tuple[int, int] = (50, 250)


def mixed_requests(n: int, mix: Mix, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of `n` requests."""
    rng = np.random.default_rng(seed)
    is_long = rng.random(n) < 0.1
    prompts = np.where(is_long, mix.longest, rng.integers(*mix.short, n, endpoint=True))
    outputs = rng.integers(*mix.outputs, n, endpoint=True)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def capacity_per_s(clients: Clients, url: str, n: int, mix: Mix) -> float:
    """Requests/s of the server in its present mode when `n` requests of the mix arrive at once."""
    requests = [(0.0, *sizes) for sizes in mixed_requests(n, mix, seed=1)]
    timings = send_requests(clients, url, requests)
    return n / (max(t[3] for t in timings) - min(t[0] for t in timings))


def set_mode(url: str, mode: str) -> None:
    body = json.dumps({"mode": mode, "actor": "gpu_suite"}).encode()
    change = urllib.request.Request(
        url + "/debug/policy", body, {"content-type": "application/json"}, method="PUT"
    )
    urllib.request.urlopen(change).read()


def mode_latencies(
    clients: Clients,
    url: str,
    mode: str,
    rate_per_s: float,
    duration_s: float,
    mix: Mix,
    seed: int = 0,
) -> dict[str, Any]:
    """Latencies of a mode under a Poisson schedule that depends on the arguments alone, so that it
    is the same for each mode."""
    n = max(2, round(rate_per_s * duration_s))
    send_times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate_per_s, n)).tolist()
    sizes = mixed_requests(n, mix, seed)
    set_mode(url, mode)
    requests = [(at_s, *size) for at_s, size in zip(send_times, sizes, strict=True)]
    return _latencies(send_requests(clients, url, requests))


def _latencies(timings: Sequence[Timing]) -> dict[str, Any]:
    ttft = np.array([first - at for at, _, first, _, _ in timings])
    tpot = np.array([(last - first) / (n - 1) for _, _, first, last, n in timings if n > 1])
    return {
        "tokens_per_s": tokens_per_s(timings),
        "ttft_p50_s": float(np.quantile(ttft, 0.5)),
        "ttft_p99_s": float(np.quantile(ttft, 0.99)),
        "tpot_p50_s": float(np.quantile(tpot, 0.5)),
        "tpot_p99_s": float(np.quantile(tpot, 0.99)),
        "late_max_s": max(sent - at for at, sent, _, _, _ in timings),
        "n": len(timings),
    }
