"""Durations counted while a run is under way, for percentiles that need not be exact."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np
from hdrh.histogram import HdrHistogram

_LOWEST_US, _HIGHEST_US, _DIGITS = 1, 600_000_000, 3
_ENVELOPE_BYTES = 8  # before what is compressed
_HEADER = struct.Struct(">iiiiqqd")  # cookie, length, offset, digits, lowest, highest, ratio
_MOST_BYTES = 1 << 18  # unpacked: 21 504 counts of at most nine bytes, and the header


class LiveCounts:
    """An HdrHistogram from 1 µs to 600 s, three digits; what lies outside is at the nearest end.

    The library walks through its buckets in Python, milliseconds for each percentile, so the walk
    is numpy's here, over the library's own counts: `benchmarks/live_view.py`.
    """

    def __init__(self) -> None:
        self._histogram = HdrHistogram(_LOWEST_US, _HIGHEST_US, _DIGITS)
        self._counts = np.ctypeslib.as_array(self._histogram.counts)  # its memory, not a copy

    @property
    def n(self) -> int:
        return int(self._histogram.get_total_count())

    def add(self, seconds: Sequence[float]) -> None:
        for one in seconds:
            self._histogram.record_value(_microseconds(one))

    def add_many(self, seconds: float, n: int) -> None:
        """The same value `n` times."""
        self._histogram.record_value(_microseconds(seconds), n)

    def rounded(self, seconds: float) -> float:
        """A value as it would be counted, seconds."""
        us = self._histogram.get_highest_equivalent_value(_microseconds(seconds))
        return float(us) * 1e-6

    def encode(self) -> bytes:
        """The counts as HdrHistogram's compressed V2 format, in base64."""
        data: bytes = self._histogram.encode()
        return data

    def add_encoded(self, data: bytes) -> None:
        """Add what another one's `encode` gave; merging is exact. Raises ValueError for bytes that
        are no such histogram, without unpacking more than such a one can be."""
        try:
            _look_inside(data)
            other = HdrHistogram.decode(data)
            if other.get_total_count():
                self._histogram.add(other)
        except Exception as error:  # of that library: zlib's, struct's, ctypes', its own, …
            raise ValueError(f"no HdrHistogram: {error}") from error

    def more_than(self, before: LiveCounts) -> LiveCounts:
        """What was added since `before` was this one's state."""
        later = LiveCounts()
        grown = np.maximum(self._counts.astype(np.int64) - before._counts.astype(np.int64), 0)
        for place in np.nonzero(grown)[0]:
            us = self._histogram.get_value_from_index(int(place))
            later._histogram.record_value(us, int(grown[place]))
        return later

    def seconds(self) -> list[float]:
        """Every value counted, seconds, as exact as a bucket is wide."""
        places = np.nonzero(self._counts)[0]
        values = [self._histogram.get_value_from_index(int(place)) * 1e-6 for place in places]
        return [float(one) for one in np.repeat(values, self._counts[places].astype(np.int64))]

    def quantile(self, q: float) -> float:
        """The nearest-rank q-quantile, seconds; NaN where nothing was counted."""
        if not self.n:
            return math.nan
        rank = min(self.n, max(1, math.ceil(q * self.n)))
        place = int(np.searchsorted(np.cumsum(self._counts), rank))
        return float(self._histogram.get_value_from_index(place)) * 1e-6


def _look_inside(data: bytes) -> None:
    """Raises where a histogram is larger than ours, or counts between other bounds."""
    packed = base64.b64decode(data, validate=True)[_ENVELOPE_BYTES:]
    unpacker = zlib.decompressobj()
    unpacked = unpacker.decompress(packed, _MOST_BYTES)
    if unpacker.unconsumed_tail:
        raise ValueError(f"more than {_MOST_BYTES} bytes unpacked")
    _, _, _, digits, lowest_us, highest_us, _ = _HEADER.unpack_from(unpacked)
    if (lowest_us, highest_us, digits) != (_LOWEST_US, _HIGHEST_US, _DIGITS):
        raise ValueError(f"{lowest_us} to {highest_us} µs with {digits} digits")


def _microseconds(seconds: float) -> int:
    return min(_HIGHEST_US, max(_LOWEST_US, round(seconds * 1e6)))
