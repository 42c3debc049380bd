"""Streams through the real HTTP path, at instants that were drawn before: one of several processes.

    python gpu_client.py        # prints `ready`, reads the plan, prints the answers

The plan: `{"url", "epoch_s", "calls": [[at_s, prompt_tokens, output_tokens], …]}`, with instants on
CLOCK_MONOTONIC since `epoch_s`. The answers: `[[at_s, sent_s, first_s, last_s, tokens], …]`.
A stream is only counted, not decoded, so that this is not what is measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import aiohttp


async def _call(
    session: aiohttp.ClientSession, plan: dict[str, Any], call: list[float]
) -> list[float | None]:
    at_s, n_prompt, n_output = call
    body = {
        "model": plan["model"],
        "prompt": "x" * int(n_prompt),
        "max_tokens": int(n_output),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    epoch_s = plan["epoch_s"]
    await asyncio.sleep(epoch_s + at_s - time.monotonic())
    sent_s, first_s, last_s = time.monotonic() - epoch_s, None, None
    n_tokens, tail = 0, b""
    async with session.post(plan["url"] + "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for piece in answer.content.iter_any():
            now_s = time.monotonic() - epoch_s
            first_s = now_s if first_s is None else first_s
            last_s, tail = now_s, (tail + piece)[-4096:]
    for line in tail.split(b"\n"):
        if line.startswith(b"data: {"):
            usage = json.loads(line[6:]).get("usage")
            n_tokens = usage["completion_tokens"] if usage else n_tokens
    return [at_s, sent_s, first_s, last_s, n_tokens]


async def _all(plan: dict[str, Any]) -> Sequence[list[float | None]]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        return await asyncio.gather(*(_call(session, plan, call) for call in plan["calls"]))


if __name__ == "__main__":
    print("ready", flush=True)
    json.dump(asyncio.run(_all(json.load(sys.stdin))), sys.stdout)
