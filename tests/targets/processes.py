"""The state of processes, for tests of child processes."""

import os
import time
from pathlib import Path


def is_running(pid):
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition, within_s=10.0):
    """Whether the condition became true in time; polls without sleeping."""
    end = time.monotonic() + within_s
    while not condition() and time.monotonic() < end:
        os.sched_yield()
    return condition()
