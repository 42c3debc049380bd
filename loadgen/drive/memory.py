"""Memory that is there before it is needed.

A page that is touched for the first time costs a fault, 2.4 µs on the machine where this was
measured and more where the host of a virtual one has to find it, too. Reads that are kept touch one
in a dozen of them.
"""

from __future__ import annotations

import sys

# With the stamp, the lists' entries and a little for each request: with 320, that was used up after
# 0.6 of a run at 400 requests per second, and 2 700 pages a second were touched from there on.
_SIZE = 480  # below 512: of a pool of Python's own for small objects
_ARENA = 1 << 20  # Python's allocator gives back what is free as a whole
_MOST_BYTES = 256 << 20


def memory_for(n_reads: int) -> list[bytes]:
    """Have memory for so many reads of one event touched, 256 MiB at most; it is free for use, and
    stays so as long as the result is held."""
    n_bytes = min(n_reads * _SIZE, _MOST_BYTES)
    blocks = [bytes(_SIZE - sys.getsizeof(b"")) for _ in range(n_bytes // _SIZE)]
    return blocks[:: _ARENA // 2 // _SIZE]
