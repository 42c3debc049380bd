"""Bytes that wait in the sockets to be read, seen from outside the hot path.

What has come and is not read yet will be stamped late. The probe of the event loop asks the kernel
about some of the connections in flight each time; no read is any slower for it. The mean time that
bytes wait follows from how many connections were seen waiting: by Little's law it is their mean
number, over the reads per second. The probe takes its turn among the sockets, and whoever leaves a
queue in order sees it as it is on average.
"""

from __future__ import annotations

import fcntl
import sys
import termios
from collections.abc import Callable, Sequence

from loadgen.self_report import BacklogReport

MOST_LOOKS = 16  # at a time: 10 µs, a hundred times a second
Sockets = Callable[[int], tuple[int, Sequence[int]]]
"""How many connections are in flight, and the file descriptors of so many of them at most."""


class ReceiveBacklog:
    """What was seen waiting in the receive queues of `sockets`."""

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._n_probes = self._n_looks = self._n_waiting = self._bytes_max = 0
        self._waiting_sum = 0.0

    def look(self) -> None:
        self._n_probes += 1
        n, descriptors = self._sockets(MOST_LOOKS)
        if not descriptors:
            return
        waiting = 0
        for descriptor in descriptors:
            size = unread_bytes(descriptor)
            waiting += size > 0
            self._bytes_max = max(self._bytes_max, size)
        self._n_looks += len(descriptors)
        self._n_waiting += waiting
        self._waiting_sum += waiting * n / len(descriptors)

    def summary(self, n_reads: int, window_s: float) -> BacklogReport | None:
        """None where no connection could be looked at, or nothing was read."""
        if not self._n_looks or not n_reads:
            return None
        return BacklogReport(
            looks=self._n_looks,
            waiting=self._n_waiting,
            bytes_max=self._bytes_max,
            reads=n_reads,
            wait_mean_s=self._waiting_sum / self._n_probes * window_s / n_reads,
        )


def unread_bytes(descriptor: int) -> int:
    """Bytes in a socket's receive queue. Source: ioctl(FIONREAD), tcp(7)."""
    try:
        told = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
    except (OSError, ValueError):  # closed since it was named
        return 0
    return int.from_bytes(told, sys.byteorder)
