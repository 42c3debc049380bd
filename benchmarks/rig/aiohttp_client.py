"""The baseline: how most benchmark clients in Python read a stream.

    python aiohttp_client.py --port P --rows OUT.csv --tokens N --due FILE
    python aiohttp_client.py --port P --rows OUT.csv --tokens N --users N --for S

A task per request, `asyncio.sleep` to its instant, aiohttp's line iterator, one `json.loads` and
one clock reading per chunk; the habits of vLLM's `bench serve`. Same files as c_client.c.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

_LEAD_S = 0.2
_FIELDS = ("seq", "due_ns", "sent_ns", "first_ns", "last_ns", "done_ns", "events")


@dataclass
class Row:
    seq: int
    due_ns: int
    sent_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    done_ns: int = 0
    events: int = 0


class Baseline:
    def __init__(self, session: aiohttp.ClientSession, port: int, tokens: int) -> None:
        self._session, self._tokens = session, tokens
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self.rows: list[Row] = []

    def _payload(self) -> dict[str, Any]:
        return {
            "model": "mock",
            "messages": [{"role": "user", "content": "one two three four five six seven eight"}],
            "max_tokens": self._tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def ask(self, due_ns: int) -> None:
        row = Row(len(self.rows), due_ns)
        self.rows.append(row)
        row.sent_ns = time.monotonic_ns()
        async with self._session.post(
            self._url, json=self._payload(), headers={"x-seq": str(row.seq)}
        ) as response:
            async for line in response.content:
                line = line.strip()
                if not line:
                    continue
                row.events += 1
                word = line.decode().removeprefix("data: ")
                if word == "[DONE]":
                    continue
                now_ns = time.monotonic_ns()
                choices = json.loads(word)["choices"]
                if choices and choices[0]["delta"].get("content"):
                    row.first_ns = row.first_ns or now_ns
                    row.last_ns = now_ns
        row.done_ns = time.monotonic_ns()


async def open_loop(client: Baseline, due_s: list[float]) -> None:
    epoch_ns = time.monotonic_ns() + round(_LEAD_S * 1e9)
    tasks = []
    for at_s in due_s:
        due_ns = epoch_ns + round(at_s * 1e9)
        left_s = (due_ns - time.monotonic_ns()) * 1e-9
        if left_s > 0:
            await asyncio.sleep(left_s)
        tasks.append(asyncio.create_task(client.ask(due_ns)))
    await asyncio.gather(*tasks)


async def closed_loop(client: Baseline, users: int, for_s: float) -> None:
    end_s = time.monotonic() + for_s

    async def user() -> None:
        while time.monotonic() < end_s:
            await client.ask(time.monotonic_ns())

    await asyncio.gather(*(user() for _ in range(users)))


async def measure(asked: argparse.Namespace) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Baseline(session, asked.port, asked.tokens)
        before_s = time.process_time()
        if asked.due is not None:
            await open_loop(client, np.fromfile(asked.due).tolist())
        else:
            await closed_loop(client, asked.users, asked.for_s)
        used_s = time.process_time() - before_s
    with asked.rows.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(_FIELDS)
        lines.writerows([getattr(row, name) for name in _FIELDS] for row in client.rows)
    print(json.dumps({"cpu_s": used_s}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--due", type=Path)
    parser.add_argument("--users", type=int, default=0)
    parser.add_argument("--for", dest="for_s", type=float, default=0.0)
    asyncio.run(measure(parser.parse_args()))
