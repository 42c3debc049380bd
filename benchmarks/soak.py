"""Can the engine's server be worn out? Thousands of requests, many of them rude.

    nice -n 10 python benchmarks/soak.py [--requests 10000] [--clients 48] [--seed 1]
        [--device toy] [--http-workers 0] [--replay] [--keep]

Clients hang up before the first token or in the middle, send bodies that are none, read so slowly
that they have to be cut off, and ask properly in between; operators switch to every batching mode
in turn, pause tenants and reprioritise all the while. At the end everything must be answered, every
block free, every arrival accounted for, and the server's memory no larger than after the first
part. With `--replay` the engine keeps its log, which must then decide the same again; what is
buffered for it makes the memory not worth judging. Exit code 0 and a line `OK`, or 1 and a line for
each thing that is wrong. `--keep` writes results/soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from rig.machine import keep

SERVER = [
    *("--max-num-seqs=24", "--kv-blocks=400", "--max-model-len=4096"),
    *("--max-queue=200", "--outbox-tokens=32"),
]
SETTLE_S, PATIENCE_S, SLOW_S = 30.0, 60.0, 5.0
FIRST_PART = 1 / 3  # of the requests, after which the memory is what it will be
GROWTH, GROWTH_KIB = 0.05, 8192  # the larger of the two is forgiven
# The engine keeps its last 4 096 steps: 12 MiB, full after some 3 000 requests. As much more is
# forgiven where the first part is shorter than that.
FILLED_AFTER, FILL_KIB = 3000, 12288
# Budgets that are used up now and then, so that some wait for theirs and some are refused.
KNOBS = {"token_fair": {"budgets": {"t0": "4000/s:8000", "t1": "2000/s:4000:refuse"}}}
KINDS = {"proper": 60, "whole": 12, "hang_up": 14, "bad_body": 9, "intervene": 4, "slow": 1}
JSON = {"Content-Type": "application/json"}
BAD_BODIES = (
    (b"{", 400),
    (b"[1, 2]", 400),
    (b'{"prompt": 7}', 400),
    (b'{"prompt": "x", "max_tokens": 0}', 400),
    (b'{"prompt": "x", "n": 9}', 400),
    (b'{"prompt": "x", "max_tokens": 99999}', 400),
    (b'{"prompt": "x", "model": "none"}', 404),
    (b'{"prompt": "x", "deadline_ms": "soon"}', 400),
    (b'{"prompt": [-1]}', 400),
    (b"\xff\xfe" * 50, 400),
)


@dataclass
class Soak:
    """What was asked and what became of it. `wrong` holds the first of each kind of surprise."""

    port: int
    pid: int
    rng: Random
    counts: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)
    rss_kib: list[int] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    switches: Counter[str] = field(default_factory=Counter)
    sizes: dict[str, Any] = field(default_factory=dict)

    def expect(self, is_so: bool, what: str, found: object = "") -> None:
        if not is_so:
            self.counts["wrong"] += 1
            self.wrong.setdefault(what, str(found)[:200])

    def body(self, most_tokens: int = 60) -> dict[str, Any]:
        rng = self.rng
        return {
            "prompt": f"tenant {rng.randrange(4)}: " + "words " * rng.randrange(60),
            "max_tokens": rng.randint(1, most_tokens),
            "priority": rng.randrange(-2, 3),
            "tenant": f"t{rng.randrange(4)}",
            "temperature": rng.choice((0, 1)),
            **({"deadline_ms": rng.randint(50, 5000)} if rng.random() < 0.2 else {}),
            **({"ttft_slo_ms": rng.randint(5, 500)} if rng.random() < 0.2 else {}),
            **({"logprobs": 0} if rng.random() < 0.1 else {}),
        }


async def proper(soak: Soak, session: aiohttp.ClientSession) -> None:
    """A stream, read to its end."""
    asked = soak.body()
    body = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    async with session.post("/v1/completions", json=body) as response:
        data = await response.read()
    if response.status == 429:
        soak.counts["refused"] += 1
        return
    soak.expect(response.status == 200, "a stream is answered with 200", response.status)
    events = data.decode().split("\n\n")
    soak.expect(events[-2] == "data: [DONE]", "a stream ends with [DONE]", events[-3:])
    if len(events) > 2 and events[-3].startswith("data: {"):
        usage = json.loads(events[-3][6:])["usage"]
        is_exact = usage["completion_tokens"] == asked["max_tokens"]
        soak.expect(is_exact, "a stream is as long as asked", (usage, asked["max_tokens"]))


async def whole(soak: Soak, session: aiohttp.ClientSession) -> None:
    """An answer in one piece."""
    asked = soak.body()
    async with session.post("/v1/completions", json=asked) as response:
        answer = await response.json()
    if response.status == 429:
        soak.counts["refused"] += 1
        return
    soak.expect(response.status == 200, "an answer is a 200", (response.status, answer))
    if response.status == 200:
        n_tokens = answer["usage"]["completion_tokens"]
        soak.expect(n_tokens == asked["max_tokens"], "an answer is as long as asked", n_tokens)


async def hang_up(soak: Soak, session: aiohttp.ClientSession) -> None:
    """A client that leaves: at once, in the queue, or after some events."""
    n_events = soak.rng.choice((-1, 0, 0, 1, 5, 20))
    reader, writer = await asyncio.open_connection("127.0.0.1", soak.port)
    writer.write(_post({**soak.body(400), "stream": soak.rng.random() < 0.8}))
    with suppress(asyncio.IncompleteReadError, ConnectionError, TimeoutError):
        if n_events >= 0:
            async with asyncio.timeout(soak.rng.random()):
                for _ in range(n_events + 1):
                    await reader.readuntil(b"\n\n")
    writer.transport.abort()


async def bad_body(soak: Soak, session: aiohttp.ClientSession) -> None:
    """What cannot be served is an error in OpenAI's shape."""
    body, status = soak.rng.choice(BAD_BODIES)
    async with session.post("/v1/completions", data=body) as response:
        answer = await response.json()
    is_right = response.status in (status, 429) and set(answer) == {"error"}
    soak.expect(is_right, "a bad body is refused", (body[:40], response.status, answer))


async def slow(soak: Soak, session: aiohttp.ClientSession) -> None:
    """A reader that stops after the first bytes and looks again much later."""
    stuck = socket.socket()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    stuck.setblocking(False)
    loop = asyncio.get_running_loop()
    with stuck, suppress(ConnectionError):
        await loop.sock_connect(stuck, ("127.0.0.1", soak.port))
        await loop.sock_sendall(stuck, _post({**soak.body(), "max_tokens": 3900, "stream": True}))
        await loop.sock_recv(stuck, 100)
        await asyncio.sleep(SLOW_S)


async def intervene(soak: Soak, session: aiohttp.ClientSession) -> None:
    """Another mode, a tenant held back for a moment, another priority for somebody."""
    what = soak.rng.randrange(3)
    if what == 0:
        mode = soak.modes[soak.switches.total() % len(soak.modes)]
        soak.switches[mode] += 1
        body = {"mode": mode, "knobs": KNOBS.get(mode, {}), "actor": "soak"}
        async with session.put("/debug/policy", json=body) as response:
            soak.expect(response.status == 200, "a switch is a 200", await response.text())
    elif what == 1:
        tenant = f"t{soak.rng.randrange(4)}"
        async with session.post(f"/debug/tenants/{tenant}/pause") as response:
            soak.expect(response.status == 200, "a pause is a 200", response.status)
        await asyncio.sleep(0.1 * soak.rng.random())
        async with session.post(f"/debug/tenants/{tenant}/resume") as response:
            soak.expect(response.status == 200, "a resumption is a 200", response.status)
    else:
        newest = soak.counts["proper"] + soak.counts["whole"] + soak.counts["hang_up"]
        path = f"/debug/requests/req-{soak.rng.randrange(newest, newest + 60)}/priority"
        async with session.put(path, json={"priority": 1}) as response:
            soak.expect(response.status in (200, 404), "a priority is set", response.status)


ACTIONS = {
    "proper": proper,
    "whole": whole,
    "hang_up": hang_up,
    "bad_body": bad_body,
    "slow": slow,
    "intervene": intervene,
}


async def drive(soak: Soak, n_requests: int, n_clients: int) -> None:
    """`n_clients` at a time until `n_requests` are through, then the verdict's questions."""
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    base = f"http://127.0.0.1:{soak.port}"
    connector = aiohttp.TCPConnector(limit=n_clients)
    async with aiohttp.ClientSession(
        base, timeout=timeout, connector=connector, headers=JSON
    ) as session:
        async with session.get("/debug/policy") as response:
            soak.modes = (await response.json())["modes"]
        soak.rng.shuffle(soak.modes)
        left = iter(soak.rng.choices(list(KINDS), list(KINDS.values()), k=n_requests))
        await asyncio.gather(*(_client(soak, session, left, n_requests) for _ in range(n_clients)))
        await _settle(soak, session)


async def _client(
    soak: Soak, session: aiohttp.ClientSession, left: Iterator[str], n_requests: int
) -> None:
    for kind in left:
        try:
            await ACTIONS[kind](soak, session)
        except TimeoutError:
            soak.expect(False, f"{kind}: answered within {PATIENCE_S:g} s")
        except aiohttp.ClientError as error:
            soak.expect(False, f"{kind}: the connection holds", repr(error))
        soak.counts[kind] += 1
        n_done = sum(soak.counts[kind] for kind in KINDS)
        if n_done % max(1, n_requests // 30) == 0:
            soak.rss_kib.append(_rss_kib(soak.pid))


async def _settle(soak: Soak, session: aiohttp.ClientSession) -> None:
    """Everybody is gone: the engine must come to rest with all its memory."""
    until_s = time.monotonic() + SETTLE_S
    while True:
        async with session.get("/debug/engine") as response:
            sizes = await response.json()
        n_left = sum(sizes.get(key, 0) for key in ("running", "waiting", "held"))
        if n_left == 0 or "error" in sizes or time.monotonic() > until_s:
            break
        await asyncio.sleep(0.05)
    soak.expect("error" not in sizes, "the engine is well", sizes)
    soak.expect(n_left == 0, "no request is stuck", sizes)
    free, blocks = sizes.get("kv_blocks_free"), sizes.get("kv_blocks")
    soak.expect(free == blocks, "no block leaked", f"{free} of {blocks} are free")
    over = sizes.get("finished")
    soak.expect(over == sizes.get("admitted"), "every arrival has its end", sizes)
    soak.expect(sizes.get("rejected_plans", 0) == 0, "no policy planned the impossible", sizes)
    soak.sizes = sizes
    soak.counts["cut_off"] = sizes.get("slow_readers", 0)
    soak.counts["cancelled"] = sizes.get("cancelled", 0)
    soak.counts["admitted"] = sizes.get("admitted", 0)
    # Longer than the engine waits before it checks its books; a wrong book ends it.
    await asyncio.sleep(1.2)
    async with session.get("/health") as response:
        soak.expect(response.status == 200, "the books are right", await response.text())


def judge_memory(soak: Soak) -> None:
    """The last fifth's largest against the largest after the first part."""
    samples = soak.rss_kib
    n_early = FIRST_PART * sum(soak.counts[kind] for kind in KINDS)
    fill_kib = FILL_KIB if n_early < FILLED_AFTER else 0
    early = max(samples[: max(1, round(len(samples) * FIRST_PART))])
    late = max(samples[-max(1, len(samples) // 5) :])
    most = early + fill_kib + max(GROWTH * early, GROWTH_KIB)
    soak.expect(late <= most, "memory is flat", f"{early} KiB, later {late} KiB")


@contextmanager
def served(device: str, log: Path, more: Sequence[str]) -> Iterator[tuple[int, int]]:
    """A server process; yields its port and process id."""
    command = [
        sys.executable,
        "-m",
        "reference_engine",
        "--operator=open",
        "--port=0",
        f"--device={device}",
        *more,
    ]
    shape = "--shape=nano"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*command, shape, *SERVER, "--drain-s=1"], stdout=subprocess.PIPE, stderr=sink
        )
        try:
            assert process.stdout is not None, "the pipe was asked for"
            line = process.stdout.readline().decode()
            if not line.startswith("READY"):
                raise SystemExit(f"no server: {log.read_text()}")
            yield int(line.rsplit(":", 1)[1]), process.pid
        finally:
            process.terminate()
            process.communicate(timeout=60)


def _post(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: soak", *(f"{k}: {v}" for k, v in JSON.items())]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


def _rss_kib(pid: int) -> int:
    """Of a process and its children."""
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    own = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return own + sum(map(_rss_kib, children))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="toy")
    parser.add_argument("--http-workers", type=int, default=0, help="processes that speak HTTP")
    parser.add_argument("--replay", action="store_true", help="decide all of it again")
    parser.add_argument("--keep", action="store_true", help="write results/soak.json")
    given = parser.parse_args()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        more = ["--log-level=full", f"--log-dir={directory}"] if given.replay else []
        more.append(f"--http-workers={given.http_workers}")
        with served(given.device, log, more) as (port, pid):
            soak = Soak(port, pid, Random(given.seed))
            asyncio.run(drive(soak, given.requests, given.clients))
        text, took_s = log.read_text(), time.monotonic() - started_s
        replayed = _replayed(soak, Path(directory)) if given.replay else None
    if not given.replay:
        judge_memory(soak)
    soak.expect("Traceback" not in text, "the log holds no traceback", text[text.find("Trace") :])
    print(f"{given.requests} requests, seed {given.seed}, {took_s:.0f} s")
    print(", ".join(f"{name} {n}" for name, n in sorted(soak.counts.items())))
    print(f"memory {soak.rss_kib[0]} … {soak.rss_kib[-1]} KiB, modes {', '.join(soak.modes)}")
    if replayed is not None:
        print(f"replayed: {replayed}")
    if given.keep:
        print(f"kept in {keep('soak', vars(given), _found(soak, took_s, replayed))}")
    for what, found in soak.wrong.items():
        print(f"WRONG: not so that {what}: {found}")
    print("OK" if not soak.wrong else "FAILED")
    return int(bool(soak.wrong))


def _replayed(soak: Soak, directory: Path) -> str:
    from loadgen.lab.engine_log import replay

    found = replay(directory)
    soak.expect(found.is_identical, "the log decides the same again", found.sentence())
    return found.sentence()


def _found(soak: Soak, took_s: float, replayed: str | None) -> dict[str, Any]:
    sizes = soak.sizes
    return {
        "took_s": took_s,
        "leaked_blocks": sizes["kv_blocks"] - sizes["kv_blocks_free"],
        "stuck_requests": sizes["running"] + sizes["waiting"] + sizes["held"],
        "wrong": soak.wrong,
        "counts": dict(sorted(soak.counts.items())),
        "switches": dict(sorted(soak.switches.items())),
        "engine": sizes,
        "rss_kib": soak.rss_kib,
        "replayed": replayed,
    }


if __name__ == "__main__":
    sys.exit(main())
