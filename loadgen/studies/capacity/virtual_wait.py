"""The virtual wait: the wait at a fluid server that is fed the schedule that was sent.

A fluid server works off its queue at a constant speed. It is no model of the real server. Its wait
shows which requests arrived behind bursts and long requests, as far as the schedule alone states
it, and its long-run law at any load follows from the scenario.
"""

from __future__ import annotations

import numpy as np

from loadgen.studies.capacity.probe import Array


def virtual_wait(at_s: Array, work: Array, per_s: float) -> Array:
    """Seconds of work that each request finds before it, [n]: V[0] = 0, V[i + 1] = max(0, V[i] +
    work[i] / per_s − (at_s[i + 1] − at_s[i])). The server starts empty at the first request.
    `at_s` ascends; `per_s` is the work done per second.

    Source: D. V. Lindley, Proc. Cambridge Philos. Soc. 48(2), 1952.
    """
    if not len(at_s):
        return np.zeros(0)
    walk = np.concatenate([[0.0], np.cumsum(work[:-1] / per_s - np.diff(at_s))])
    waits: Array = walk - np.minimum.accumulate(walk)
    return waits
