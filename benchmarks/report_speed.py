"""How long the page of a large run takes, and how large it gets.

    python benchmarks/report_speed.py [N_REQUESTS …]

Told are CPU seconds of this process, which a busy machine does not change much: of the summary and
of the page, each of a run in memory with `TOKENS` tokens an answer. The plotting bundle is made
once before. Asked are 5 s for 10⁵ and 30 s for 10⁶ requests, and 6 MB for 10⁵.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rig.made_up import made_up_manifest

from loadgen.measure.aggregate import summarize
from loadgen.records import CHUNKS, Names, Phase, Run, Status, TokenSource, empty_requests
from loadgen.records import SCHEDULE as SCHEDULE_TYPE
from reports.page import vega_bundle
from reports.run.page import render

TOKENS = 8
RATE_PER_S = 1000.0
ASKED_S = {100_000: 5.0, 1_000_000: 30.0}
SLO = ["ttft <= 150ms", "attainment >= 95%", "p99(ttft) <= 300ms"]


def large_run(n: int) -> Run:
    """Lognormal latencies at a steady rate, two classes, one request in 500 failed."""
    rng = np.random.default_rng(1)
    schedule = np.zeros(n, SCHEDULE_TYPE)
    schedule["request_id"] = schedule["session_id"] = np.arange(n)
    schedule["scheduled_s"] = np.arange(n) / RATE_PER_S
    schedule["input_tokens"] = rng.lognormal(5, 1, n)
    schedule["output_tokens"], schedule["phase"] = TOKENS, Phase.measure
    schedule["class_id"] = rng.integers(0, 2, n)
    rows = empty_requests(schedule)
    released_s = schedule["scheduled_s"]
    rows["released_s"], rows["sent_s"] = released_s, released_s + 2e-4
    rows["connected_s"], rows["headers_s"] = released_s + 3e-4, released_s + 2e-3
    first_s = released_s + 0.1 * rng.lognormal(0, 0.3, n)
    gaps_s = 0.01 * rng.lognormal(0, 0.3, (n, TOKENS - 1))
    received_s = np.c_[first_s, first_s[:, None] + np.cumsum(gaps_s, axis=1)]
    for name in ("first_chunk_s", "first_token_s", "first_answer_s"):
        rows[name] = first_s
    rows["last_token_s"], rows["done_s"] = received_s[:, -1], received_s[:, -1] + 1e-4
    rows["reused_connection"], rows["status"], rows["http_status"] = True, Status.ok, 200
    rows["output_tokens"] = rows["chunks"] = TOKENS
    rows["input_tokens"], rows["token_source"] = schedule["input_tokens"], TokenSource.usage
    chunks = np.zeros(n * TOKENS, CHUNKS)
    chunks["request_id"] = np.repeat(schedule["request_id"], TOKENS)
    chunks["received_s"] = received_s.ravel()
    rows["status"][::500], rows["error_id"][::500] = Status.timeout, 1
    names = Names(classes=("chat", "rag"), errors=("", "no answer within 60 s"))
    manifest = made_up_manifest("large", n / RATE_PER_S, n, SLO, names.classes)
    return Run(manifest, schedule, rows, chunks, names=names)


def main(sizes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        vega_bundle(cache)
        for n in sizes:
            run = large_run(n)
            begun_s = time.process_time()
            summary = summarize(run)
            summed_s = time.process_time()
            page = render(run, summary, cache)
            drawn_s = time.process_time()
            print(  # a script's answer
                f"{n} requests: summary {summed_s - begun_s:.2f} s, page {drawn_s - summed_s:.2f} s"
                f" (asked: {ASKED_S.get(n, float('nan')):g} s), {len(page.encode()) / 1e6:.2f} MB"
            )


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or list(ASKED_S))
