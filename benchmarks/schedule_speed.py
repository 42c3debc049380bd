"""Seconds and peak megabytes to make a schedule of a million requests, and to render prompts.

    python benchmarks/schedule_speed.py [--requests 1000000]

Each case runs in a process of its own, so that the peak is that case's. Input lengths are
lognormal, output lengths follow a power law; the trace, a CSV file written for this, brings its own
and is read within the time. Targets: 2 s (self-exciting arrivals 5 s) and 300 MB;
exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import platform
import resource
import sys
import tempfile
import time
from multiprocessing.context import SpawnContext
from typing import IO

import numpy as np

from loadgen.records import schedule_sha256
from loadgen.workload.prompts import PromptFit, Prompts
from loadgen.workload.scenario import scenario_from_flags
from loadgen.workload.schedule import make_schedule, merge, split

LOGNORMAL = {"kind": "lognormal", "median": 220, "sigma": 0.9, "max": 4096}
POWER_LAW = {"kind": "power_law", "alpha": 1.8, "min": 8, "max": 1024}
MMPP = "states: [{weight_rate: 1, mean_stay: 30s}, {weight_rate: 5, mean_stay: 5s}]"
OF_A_CLASS = (
    "requests: {input_tokens: {kind: lognormal, median: 220, sigma: 0.9, max: 4096}, "
    "output_tokens: {kind: power_law, alpha: 1.8, min: 8, max: 1024}}"
)
CASES = {
    "constant": ["arrivals.kind=constant"],
    "poisson": [],
    "gamma cv 1.8": ["arrivals.kind=gamma", "arrivals.cv=1.8"],
    "mmpp, 2 states": [f"arrivals={{kind: mmpp, rate: 1000/s, {MMPP}}}"],
    "hawkes, branching 0.5": ["arrivals={kind: hawkes, rate: 1000/s, branching: 0.5, decay: 1s}"],
    "hawkes, branching 0.95": ["arrivals={kind: hawkes, rate: 1000/s, branching: 0.95, decay: 1s}"],
    "diurnal": ["arrivals={kind: diurnal, rate: 1000/s, peak_to_trough: 4, period: 1000s}"],
    "poisson, 4 prefixes": ["requests.shared_prefix={tokens: 350, groups: 4}"],
    "poisson, correlation 0.6": ["requests.correlation=0.6"],
    "two classes": [
        f"classes={{chat: {{weight: 2, {OF_A_CLASS}}}, rag: {{weight: 1, {OF_A_CLASS}}}}}",
        "requests=null",
    ],
    "trace": ["arrivals={kind: trace, path: TRACE}", "requests={temperature: 0}"],
}
MOST_S, MOST_HAWKES_S, MOST_MB = 2.0, 5.0, 300.0


def measure_schedule(n: int, overrides: list[str]) -> tuple[int, float, float]:
    """(rows, seconds, peak MB above the imports) of one schedule."""
    scenario = scenario_from_flags(
        rate="1000/s",
        input_len=LOGNORMAL,
        output_len=POWER_LAW,
        duration=f"{n / 1000}s",
        overrides=overrides,
    )
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start_s = time.perf_counter()
    rows = make_schedule(scenario)
    seconds = time.perf_counter() - start_s
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    return len(rows), seconds, peak_kb / 1024


def measure_handling(n: int) -> dict[str, float]:
    """Seconds for what follows a schedule: split in four, merge, fingerprint, 10 000 prompts."""
    scenario = scenario_from_flags(
        rate="1000/s", input_len=1000, output_len=POWER_LAW, duration=f"{n / 1000}s"
    )
    rows = make_schedule(scenario)
    marks = [time.perf_counter()]
    parts = split(rows, 4)
    marks.append(time.perf_counter())
    merge(parts)
    marks.append(time.perf_counter())
    schedule_sha256(rows)
    marks.append(time.perf_counter())
    prompts, fit = Prompts(scenario.prompts, scenario.seed, b"benchmark"), PromptFit()
    for row in rows[:10_000]:
        prompts.render(row, fit)
    marks.append(time.perf_counter())
    words = ("split in 4", "merge", "sha256", "10 000 prompts of 1000 characters")
    return dict(zip(words, (b - a for a, b in itertools.pairwise(marks)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    n = parser.parse_args().requests
    print(f"{platform.machine()}, Python {platform.python_version()}, {platform.system()}")
    context = multiprocessing.get_context("spawn")
    n_missed = 0
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as trace:
        write_trace(trace, n)
        n_missed = sum(
            show_case(context, name, n, [word.replace("TRACE", trace.name) for word in overrides])
            for name, overrides in CASES.items()
        )
    for name, seconds in measure_handling(n).items():
        print(f"{name:40} {seconds:7.3f} s")
    sys.exit(n_missed > 0)


def show_case(context: SpawnContext, name: str, n: int, overrides: list[str]) -> bool:
    """Measure one case and print its line; whether it missed a target."""
    with context.Pool(1) as pool:
        rows, seconds, megabytes = pool.apply(measure_schedule, (n, overrides))
    most_s = MOST_HAWKES_S if name.startswith("hawkes") else MOST_S
    is_missed = seconds > most_s or megabytes > MOST_MB
    mark = "  over target" if is_missed else ""
    print(f"{name:24} {rows:9d} rows {seconds:7.3f} s {megabytes:7.1f} MB{mark}")
    return is_missed


def write_trace(file: IO[str], n: int) -> None:
    """n rows in the columns of the Azure 2023 traces, 1000 a second. A few at a time: the memory of
    this process would count as a peak of the ones it starts."""
    rng = np.random.default_rng(1)
    begin = np.datetime64("2023-11-16T18:15:46.000000")
    file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    for first in range(0, n, 10_000):
        size = min(10_000, n - first)
        gaps = rng.exponential(1000.0, size).astype("timedelta64[us]")
        times = begin + np.cumsum(gaps)
        begin = times[-1]
        texts = np.datetime_as_string(times).tolist()
        asked, answered = rng.integers(1, 4000, size), rng.integers(1, 1000, size)
        for text, inputs, outputs in zip(texts, asked.tolist(), answered.tolist(), strict=True):
            file.write(f"{text.replace('T', ' ')},{inputs},{outputs}\n")
    file.flush()


if __name__ == "__main__":
    main()
