"""Streams that something between the model and the load generator delivers in blocks: most reads
hold several events, so that the gaps between tokens are not the model's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.wording import format_value

_BUFFERS = (4096, 8192, 16384, 32768, 65536)  # bytes, of proxies and of C libraries
_BUFFER_ERROR = 0.15
_REGULAR = 0.25  # half of the spread of the gaps of a fixed interval, as a share of their median
_LAG_SHARE = 0.5  # of the median gap


@dataclass(frozen=True, slots=True)
class Blocks:
    """The usual block: `events` per read, `gap_s` between two reads, `n_bytes` per read.
    `is_regular`: the gaps are nearly equal."""

    events: float
    gap_s: float
    n_bytes: float
    is_regular: bool

    @property
    def reason(self) -> str:
        """The reason why there is no ITL."""
        return f"n/a: delivered in blocks of about {round(self.events)} events"

    @property
    def layer(self) -> str:
        """The layer that probably holds the stream back."""
        for size in _BUFFERS:
            if abs(self.n_bytes - size) <= _BUFFER_ERROR * size:
                return (
                    f"a proxy's buffer of {size // 1024} kB (nginx: proxy_buffering off, or the "
                    "header X-Accel-Buffering: no)"
                )
        if self.is_regular:
            every = format_value(self.gap_s, "s")
            return f"a gateway, or the server's own loop, that sends every {every}"
        return "a proxy or a gateway that buffers, or compresses, the stream"


def blocks(
    events: NDArray[np.integer],
    gap_s: NDArray[np.float64],
    n_arrivals: int,
    n_several: int,
    n_bytes: int,
    lag_s: float,
) -> Blocks | None:
    """The blocks of a run; None for a stream that is not in blocks.

    `events` are the events of each read after an answer's first, `gap_s` the gap before each.
    `n_several` of all `n_arrivals` reads with tokens held several events; the bodies had `n_bytes`.
    A load generator whose event loop was late by `lag_s` (p99) for half of a gap may itself have
    read several events at once.
    """
    if not len(gap_s) or 2 * n_several <= n_arrivals:
        return None
    low_s, median_s, high_s = np.quantile(gap_s, (0.25, 0.5, 0.75))
    if lag_s >= _LAG_SHARE * median_s:
        return None
    return Blocks(
        events=float(np.median(events)),
        gap_s=float(median_s),
        n_bytes=n_bytes / n_arrivals,
        is_regular=bool(high_s - low_s <= 2 * _REGULAR * median_s),
    )
