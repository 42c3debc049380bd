"""Memory touched ahead of a run is what reads are then kept in."""

import resource
import subprocess
import sys

import pytest

PAGE = resource.getpagesize()
KEEP = """
import resource, sys, time
from loadgen.drive.shard_loop import memory_for
n = int(sys.argv[1])
held = memory_for(n) if sys.argv[2] == "ahead" else []
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
kept = []
for _ in range(n // 64):  # requests, as the client keeps their reads
    parts, times = [], []
    for _ in range(64):
        times.append(time.monotonic_ns())
        parts.append(bytes(258))
    kept.append((parts, times))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(n, how):
    found = subprocess.run(
        [sys.executable, "-c", KEEP, str(n), how], capture_output=True, text=True, check=True
    )
    return int(found.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted as Linux does")
def test_reads_kept_in_memory_touched_ahead_cost_hardly_any_faults():
    n = 60_000
    assert faults(n, "then") > n * 250 / PAGE
    assert faults(n, "ahead") < n * 250 / PAGE / 10
