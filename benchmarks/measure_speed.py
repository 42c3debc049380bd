"""How long `summarize` takes on one core: 10⁵ requests of 60 chunks should stay within a second,
10⁶ requests of 100 chunks within 20 s and 4 GB.

Run: python benchmarks/measure_speed.py [n_requests] [n_chunks] [repeats]; prints one JSON line for
benchmarks/results. The run is made up: Poisson arrivals, lognormal latencies, 1 % failures.
The memory is the most the process ever held, the run itself (14 bytes a chunk) included. CPU
seconds stand beside the wall clock's: they count where others use the machine, too.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import time

import numpy as np
from rig.made_up import made_up_manifest

from loadgen.measure.aggregate import summarize
from loadgen.records import CHUNKS, SCHEDULE, Phase, Run, Status, TokenSource, empty_requests

AT_ONCE = 10_000
SLO = ["ttft <= 500ms", "tpot <= 50ms", "p99(ttft) <= 500ms", "p99(itl) <= 50ms"]


def made_up_run(n_requests: int, n_chunks: int, rate_per_s: float = 100.0) -> Run:
    rng = np.random.default_rng(1)
    schedule = np.zeros(n_requests, SCHEDULE)
    schedule["request_id"] = np.arange(n_requests)
    schedule["scheduled_s"] = np.cumsum(rng.exponential(1 / rate_per_s, n_requests))
    schedule["input_tokens"], schedule["output_tokens"] = 200, n_chunks
    schedule["phase"] = Phase.measure
    rows = empty_requests(schedule)
    rows["released_s"], rows["sent_s"] = schedule["scheduled_s"], schedule["scheduled_s"] + 1e-4
    rows["status"] = np.where(rng.random(n_requests) < 0.01, Status.stream_error, Status.ok)
    rows["output_tokens"], rows["chunks"] = n_chunks, n_chunks
    rows["token_source"], rows["reused_connection"] = TokenSource.usage, True
    chunks = np.zeros((n_requests, n_chunks), CHUNKS)
    for start in range(0, n_requests, AT_ONCE):
        part = slice(start, start + AT_ONCE)
        own, block = rows[part], chunks[part]
        received_s = np.cumsum(rng.lognormal(-4.5, 0.3, block.shape), axis=1)
        received_s += own["sent_s"][:, None]
        own["first_token_s"] = own["first_answer_s"] = received_s[:, 0]
        own["last_token_s"], own["done_s"] = received_s[:, -1], received_s[:, -1] + 1e-4
        block["request_id"], block["received_s"] = own["request_id"][:, None], received_s
    measure_s = n_requests / rate_per_s
    manifest = made_up_manifest("speed", measure_s, n_requests, SLO, ("default",))
    return Run(manifest, schedule, rows, chunks.ravel())


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    given = [int(word) for word in sys.argv[1:]]
    n_requests, n_chunks, n_repeats = (*given, *(100_000, 60, 3)[len(given) :])
    run = made_up_run(n_requests, n_chunks)
    before_mib = peak_mib()
    elapsed_s, cpu_s = [], []
    for _ in range(n_repeats):
        started_s, cpu_before_s = time.perf_counter(), time.process_time()
        summary = summarize(run)
        elapsed_s.append(round(time.perf_counter() - started_s, 3))
        cpu_s.append(round(time.process_time() - cpu_before_s, 3))
    print(
        json.dumps(
            {
                "benchmark": "measure_speed",
                "requests": n_requests,
                "chunks": n_requests * n_chunks,
                "summarize_s": elapsed_s,
                "summarize_cpu_s": cpu_s,
                "peak_rss_mib": peak_mib(),
                "peak_rss_before_mib": before_mib,
                "verdict": summary.verdict,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, load "
                f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}, numpy "
                f"{np.__version__}",
            }
        )
    )


if __name__ == "__main__":
    main()
