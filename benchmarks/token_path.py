"""Measures the CPU time of the engine's server per streamed token, by thread.

    python benchmarks/token_path.py [--device cpu] [--streams 32] [--rounds 5] [--quick]
        [--beside DIR] [--write]

`--streams` callers request 1 000 tokens each, with counts in every chunk as slobench requests them,
and start again after each answer. They count the chunks without decoding them. The result is the
CPU time of the server's threads, from the kernel's own account, over the tokens of a round: the
`loop` thread encodes and writes, the `engine` thread plans, computes and detokenizes. `toy`
computes nearly nothing and pauses 4 ms a step, `cpu` is the shape `tiny` in torch. With `--beside`,
the server of another checkout takes turns with this checkout's.

Against a design with a task per token, the event loop's thread takes 0.5 (toy model) to 0.6
(`tiny`) of the CPU time per token, most of it in the kernel (decision 30). Writing straight to the
file descriptor without the interpreter's lock, and switch intervals of 2 and 5 ms, made no
measurable difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop
from rig.machine import interleaved, keep, machine_line, show, spreads

ROOT = Path(__file__).parent.parent
N_TOKENS, N_PROMPT = 1000, 16
DEVICES = {"toy": ("device=toy", "shape=nano", "step_s=0.004"), "cpu": ("device=cpu", "shape=tiny")}
_BODY = json.dumps(
    {
        "prompt": "x" * N_PROMPT,
        "max_tokens": N_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
).encode()
_REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)
_END = b"0\r\n\r\n"


class Caller(asyncio.Protocol):
    """Asks again and again on one connection, and counts events by their beginnings."""

    def __init__(self) -> None:
        self.n_events = self.n_writes = 0
        self.problem = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(_REQUEST)

    def data_received(self, data: bytes) -> None:
        self.n_writes += 1
        self.n_events += data.count(b"data: {")
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            self.problem = data[:200].decode(errors="replace")
        if data.endswith(_END):
            self._transport.write(_REQUEST)

    def connection_lost(self, error: Exception | None) -> None:
        self.problem = self.problem or f"the server hung up: {error}"

    def close(self) -> None:
        self._transport.abort()


@dataclass(frozen=True)
class Server:
    """One that is up: where, and which process."""

    port: int
    pid: int

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of the event loop's thread, which is the first, and of all others."""
        spent = {"loop": 0.0, "engine": 0.0}
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            seconds = int((task / "schedstat").read_text().split()[0]) * 1e-9
            spent["loop" if int(task.name) == self.pid else "engine"] += seconds
        return spent


@contextmanager
def server(checkout: Path, words: Sequence[str]) -> Iterator[Server]:
    flags = [part for word in ("port=0", "drain_s=0", *words) for part in ("--set", word)]
    command = [sys.executable, "-m", "reference_engine", "--mode", "continuous", *flags]
    environ = {**os.environ, "PYTHONPATH": str(checkout)}
    process = subprocess.Popen(
        command, cwd=checkout, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None, "it was piped"
        line = process.stdout.readline().decode()
        if not line.startswith("READY "):
            raise SystemExit(f"{checkout}: the server did not start")
        yield Server(int(line.rpartition(":")[2]), process.pid)
    finally:
        process.terminate()
        process.wait()


async def one_round(at: Server, n_streams: int, for_s: float) -> dict[str, float]:
    """Microseconds of CPU per token of each thread, and tokens per second; begun a second before,
    so that connecting is over."""
    loop = asyncio.get_running_loop()
    callers = []
    for _ in range(n_streams):
        _, caller = await loop.create_connection(Caller, "127.0.0.1", at.port)
        callers.append(caller)
    await asyncio.sleep(1.0)
    before, cpu_s, began_s = _counts(callers), at.cpu_s(), time.monotonic()
    await asyncio.sleep(for_s)
    after, now_s, ended_s = _counts(callers), at.cpu_s(), time.monotonic()
    problems = {caller.problem for caller in callers} - {""}
    for caller in callers:
        caller.close()
    if problems:
        raise SystemExit("; ".join(sorted(problems)))
    n_tokens, n_reads = (new - old for new, old in zip(after, before, strict=True))
    # Each answer has one event more than tokens: its usage.
    n_tokens *= N_TOKENS / (N_TOKENS + 1)
    per_token = {f"{name} us": (now_s[name] - cpu_s[name]) / n_tokens * 1e6 for name in now_s}
    seconds = ended_s - began_s
    return {**per_token, "tokens/s": n_tokens / seconds, "tokens/read": n_tokens / n_reads}


def _counts(callers: Sequence[Caller]) -> tuple[float, float]:
    return float(sum(c.n_events for c in callers)), float(sum(c.n_writes for c in callers))


def rounds_of(
    device: str, sides: Mapping[str, Path], n_streams: int, n_rounds: int, for_s: float
) -> dict[str, dict[str, dict[str, float]]]:
    """The spread of each figure, side by side; the servers are up all the while."""
    rounds: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with ExitStack() as stack:
        up = {
            side: stack.enter_context(server(checkout, DEVICES[device]))
            for side, checkout in sides.items()
        }

        def run(side: str, number: int) -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                rounds[side].append(runner.run(one_round(up[side], n_streams, for_s)))

        interleaved(n_rounds, list(sides), run)
    return {side: spreads(of_side) for side, of_side in rounds.items()}


def commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=DEVICES, action="append")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--for", dest="for_s", type=float, default=4.0, metavar="S")
    parser.add_argument("--quick", action="store_true", help="two rounds of two seconds")
    parser.add_argument("--beside", type=Path, help="another checkout, to take turns with")
    parser.add_argument("--write", action="store_true", help="keep it in benchmarks/results")
    asked = parser.parse_args()
    n_rounds, for_s = (2, 2.0) if asked.quick else (asked.rounds, asked.for_s)
    load_before = round(os.getloadavg()[0], 2)
    print(machine_line())
    sides = {"this": ROOT} | ({"beside": asked.beside.resolve()} if asked.beside else {})
    found = {}
    for device in asked.device or DEVICES:
        found[device] = rounds_of(device, sides, asked.streams, n_rounds, for_s)
        title = f"{device}, {asked.streams} streams, {n_rounds} rounds: median [min, max]"
        show(title, list(sides), found[device])
    if asked.write:
        commits = {side: commit(checkout) for side, checkout in sides.items()}
        how = {"streams": asked.streams, "rounds": n_rounds, "seconds": for_s}
        keep(
            "token_path",
            {**how, "commits": commits},
            {"load_before": load_before, "devices": found},
        )


if __name__ == "__main__":
    main()
