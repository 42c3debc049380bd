"""The engine behind HTTP in its own process, and modes compared on it under one schedule."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rig.gpu_ceilings import Place

CLIENT = Path(__file__).parent / "gpu_client.py"
CLIENTS = 8
_LEAD_S = 0.5
MODES = ("static", "continuous", "prefill_first", "chunked")
Scheduled = tuple[float, int, int]  # send time, prompt tokens, output tokens
Timing = list[float]  # scheduled, sent, first token, last token (s), tokens


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


def send_requests(url: str, requests: Sequence[Scheduled]) -> list[Timing]:
    """Send requests from several client processes, dealt out in turn; the timing of each, client by
    client."""
    model = json.load(urllib.request.urlopen(url + "/v1/models"))["data"][0]["id"]
    clients = [
        subprocess.Popen(
            [sys.executable, str(CLIENT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(min(CLIENTS, len(requests)))
    ]
    out: list[Timing] = []
    try:
        for client in clients:
            assert client.stdout is not None
            client.stdout.readline()  # `ready`: its imports are done
        epoch_s = time.monotonic() + _LEAD_S
        for k, client in enumerate(clients):
            assert client.stdin is not None
            plan = {
                "url": url,
                "model": model,
                "epoch_s": epoch_s,
                "requests": list(requests[k::CLIENTS]),
            }
            client.stdin.write(json.dumps(plan))
            client.stdin.close()
        for client in clients:
            assert client.stdout is not None
            text = client.stdout.read()
            client.stdout.close()
            if client.wait():
                raise RuntimeError(f"a client failed with exit code {client.returncode}")
            out += json.loads(text)
    finally:
        for client in clients:
            client.kill()  # after an error; otherwise it has exited
            client.wait()
    return out


def tokens_per_s(timings: Sequence[Timing]) -> float:
    """All tokens over the time from the first scheduled send to the last token."""
    return sum(t[4] for t in timings) / (max(t[3] for t in timings) - min(t[0] for t in timings))


def mixed_requests(n: int, longest: int, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of `n` requests; a tenth of the prompts has `longest`
    tokens."""
    rng = np.random.default_rng(seed)
    prompts = np.where(rng.random(n) < 0.1, longest, rng.integers(50, 350, n))
    outputs = rng.integers(50, 250, n, endpoint=True)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def capacity_per_s(url: str, n: int, longest: int) -> float:
    """Requests/s of the server in its present mode when `n` requests of the mix arrive at once."""
    timings = send_requests(url, [(0.0, *sizes) for sizes in mixed_requests(n, longest, seed=1)])
    return n / (max(t[3] for t in timings) - min(t[0] for t in timings))


def set_mode(url: str, mode: str) -> None:
    body = json.dumps({"mode": mode, "actor": "gpu_suite"}).encode()
    change = urllib.request.Request(
        url + "/debug/policy", body, {"content-type": "application/json"}, method="PUT"
    )
    urllib.request.urlopen(change).read()


def mode_latencies(
    url: str, mode: str, rate_per_s: float, duration_s: float, longest: int, seed: int = 0
) -> dict[str, Any]:
    """Latencies of a mode under a Poisson schedule that depends on the arguments alone, so that it
    is the same for each mode."""
    n = max(2, round(rate_per_s * duration_s))
    send_times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate_per_s, n)).tolist()
    sizes = mixed_requests(n, longest, seed)
    set_mode(url, mode)
    return _latencies(
        send_requests(url, [(at_s, *size) for at_s, size in zip(send_times, sizes, strict=True)])
    )


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
