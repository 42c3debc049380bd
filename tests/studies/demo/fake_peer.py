"""A load generator of a few lines that writes the result file of `vllm bench serve`. With `--late
S` it reports each TTFT as so much longer."""

import argparse
import http.client
import itertools
import json
import re
import shlex
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit


def request(url, tokens, due_s):
    """(start, TTFT, gaps, latency), seconds."""
    threading.Event().wait(max(0.0, due_s - time.monotonic()))
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    body = {"model": "mock", "messages": [{"role": "user", "content": "w1 w2"}], "stream": True,
            "max_tokens": tokens}  # fmt: skip
    start_s = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    is_token = re.compile(rb'"content": *"[^"]')
    times_s = [time.monotonic() for line in connection.getresponse() if is_token.search(line)]
    connection.close()
    gaps_s = [after - before for before, after in itertools.pairwise(times_s)]
    return start_s, times_s[0] - start_s, gaps_s, times_s[-1] - start_s


def fake_command(*more):
    """The command of this program in a settings file, with further words."""
    script = shlex.join([sys.executable, __file__, *more])
    return (
        f"{script} --url {{url}} --rate {{rate}} --n {{requests}} --tokens {{output_tokens}} "
        "--out {out}/result.json"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--n", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--late", type=float, default=0.0)
    told = parser.parse_args()
    begin_s = time.monotonic() + 0.05
    with ThreadPoolExecutor(64) as pool:
        jobs = [
            pool.submit(request, told.url, told.tokens, begin_s + k / told.rate)
            for k in range(told.n)
        ]
        rows = [job.result() for job in jobs]
    starts_s, ttfts_s, gaps_s, latencies_s = zip(*rows, strict=True)
    content = {
        "date": "20260105-100000", "backend": "openai-chat", "model_id": "mock",
        "num_prompts": told.n, "request_rate": told.rate, "burstiness": 1.0,
        "max_concurrency": None, "duration": max(starts_s) - min(starts_s) + 1, "completed": told.n,
        "input_lens": [2] * told.n, "output_lens": [told.tokens] * told.n,
        "ttfts": [ttft_s + told.late for ttft_s in ttfts_s], "itls": gaps_s,
        "latencies": [latency_s + told.late for latency_s in latencies_s],
        "start_times": starts_s, "errors": [""] * told.n,
    }  # fmt: skip
    told.out.write_text(json.dumps(content))


if __name__ == "__main__":
    main()
