"""A client process of the GPU suite: streams over HTTP at scheduled send times.

    python gpu_client.py        # prints `ready`; reads plans and prints the timings of each

A plan is a line on stdin: `{"url", "model", "epoch_s", "requests": [[at_s, prompt_tokens,
output_tokens], …]}`, with `epoch_s` on CLOCK_MONOTONIC and `at_s` since then. Its timings are a
line on stdout: `[[at_s, sent_s, first_s, last_s, tokens], …]`. Ends with stdin. Streams are not
decoded, so that the client's own work is not part of the measurement; the tokens are those of the
last `usage`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import aiohttp


async def _send(
    session: aiohttp.ClientSession, plan: dict[str, Any], request: list[float]
) -> list[float | None]:
    at_s, n_prompt, n_output = request
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
    async with session.post(plan["url"] + "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for piece in response.content.iter_any():
            now_s = time.monotonic() - epoch_s
            first_s = now_s if first_s is None else first_s
            last_s, tail = now_s, (tail + piece)[-4096:]
    for line in tail.split(b"\n"):
        if line.startswith(b"data: {"):
            usage = json.loads(line[6:]).get("usage")
            n_tokens = usage["completion_tokens"] if usage else n_tokens
    return [at_s, sent_s, first_s, last_s, n_tokens]


async def _send_all(plan: dict[str, Any]) -> Sequence[list[float | None]]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        return await asyncio.gather(*(_send(session, plan, r) for r in plan["requests"]))


if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(asyncio.run(_send_all(json.loads(line)))), flush=True)
